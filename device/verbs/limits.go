package verbs

import (
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
)

// initUserNS is what the link /proc/self/ns/user reads in the first user
// namespace (PROC_USER_INIT_INO). Capabilities of other namespaces don't exempt
// from RLIMIT_MEMLOCK.
const initUserNS = "user:[4026531837]"

// memlock returns how many bytes the process may pin, in whole pages; limited
// is false if nothing limits it. The kernel counts by address space
// (ib_umem_get).
func memlock() (limit uint64, limited bool) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0 {
		if ns, err := os.Readlink("/proc/self/ns/user"); err != nil || ns == initUserNS {
			return 0, false
		}
	}
	var rl unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &rl) != nil || rl.Cur == unix.RLIM_INFINITY {
		return 0, false
	}
	return rl.Cur &^ uint64(os.Getpagesize()-1), true
}

// limitsOf derives the device's limits from the adapter's and the process's.
func limitsOf(a *ibv.DeviceAttr, o *Options) device.Limits {
	l := device.Limits{PageSize: uintptr(os.Getpagesize()), MaxPinnedBytes: o.MaxPinnedBytes}
	if o.Exact {
		l.PageSize = 0
	}
	if a.MaxMR > 0 && a.MaxMR < math.MaxInt32 {
		l.MaxRegistrations = int(a.MaxMR)
	}
	if o.MaxRegistrations != 0 && (l.MaxRegistrations == 0 || o.MaxRegistrations < l.MaxRegistrations) {
		l.MaxRegistrations = o.MaxRegistrations
	}
	// Nobody has an address space of 2^56 bytes: that is "no limit".
	if a.MaxMRSize < 1<<56 {
		l.MaxRange = a.MaxMRSize
	}
	if n, limited := memlock(); limited && l.MaxPinnedBytes == 0 && !o.OnDemand {
		// Zero would read as "no limit", and Register says what is wrong.
		l.MaxPinnedBytes = max(n, uint64(os.Getpagesize()))
	}
	return l
}
