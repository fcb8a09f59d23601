package sys

import (
	"os"

	"golang.org/x/sys/unix"
)

// initUserNS is what the link /proc/self/ns/user reads in the first user
// namespace (PROC_USER_INIT_INO). Capabilities of other namespaces don't exempt
// from RLIMIT_MEMLOCK.
const initUserNS = "user:[4026531837]"

// Memlock returns how many bytes the process may pin, in whole pages; limited
// is false if nothing limits it. Of whom the kernel counts them is the
// subsystem's choice: the user (io_uring) or the address space (RDMA).
func Memlock() (limit uint64, limited bool) {
	if ipcLock() {
		return 0, false
	}
	var rl unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &rl) != nil || rl.Cur == unix.RLIM_INFINITY {
		return 0, false
	}
	return rl.Cur &^ uint64(os.Getpagesize()-1), true
}

// ipcLock reports whether CAP_IPC_LOCK is effective in the calling thread.
func ipcLock() bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(&hdr, &data[0]) != nil || data[0].Effective&(1<<unix.CAP_IPC_LOCK) == 0 {
		return false
	}
	ns, err := os.Readlink("/proc/self/ns/user")
	return err != nil || ns == initUserNS
}
