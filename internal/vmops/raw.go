package vmops

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// The system calls, by number: nothing that a library could have wrapped or
// patched lies between. They tell the Go scheduler that they may block, which
// a monitor's event makes them do.

func call(name string, trap, a, b, c, d, e, f uintptr) (uintptr, error) {
	r, _, errno := unix.Syscall6(trap, a, b, c, d, e, f)
	if errno != 0 {
		return 0, os.NewSyscallError(name, errno)
	}
	return r, nil
}

func mmap(addr, size uintptr, prot, flags, fd int, off int64) (uintptr, error) {
	return call("mmap", unix.SYS_MMAP, addr, size, uintptr(prot), uintptr(flags), uintptr(fd), uintptr(off))
}

func munmap(r vm.Range) error {
	_, err := call("munmap", unix.SYS_MUNMAP, r.Start, r.Len(), 0, 0, 0, 0)
	return err
}

func mremap(old vm.Range, size uintptr, flags int, dst uintptr) (uintptr, error) {
	return call("mremap", unix.SYS_MREMAP, old.Start, old.Len(), size, uintptr(flags), dst, 0)
}

func madvise(r vm.Range, advice int) error {
	_, err := call("madvise", unix.SYS_MADVISE, r.Start, r.Len(), uintptr(advice), 0, 0, 0)
	return err
}

func remapFilePages(r vm.Range, page uintptr) error {
	_, err := call("remap_file_pages", unix.SYS_REMAP_FILE_PAGES, r.Start, r.Len(), 0, page, 0, 0)
	return err
}

// brk moves the program break and returns where it is now. brk(0) asks.
func brk(addr uintptr) uintptr {
	r, _, _ := unix.Syscall(unix.SYS_BRK, addr, 0, 0)
	return r
}

// shmRemap is SHM_REMAP of <sys/shm.h>.
const shmRemap = 0o40000

func shmget(size uintptr) (int, error) {
	id, err := call("shmget", unix.SYS_SHMGET, unix.IPC_PRIVATE, size, unix.IPC_CREAT|0o600, 0, 0, 0)
	return int(id), err
}

func shmat(id int, addr uintptr, flags int) (uintptr, error) {
	return call("shmat", unix.SYS_SHMAT, uintptr(id), addr, uintptr(flags), 0, 0, 0)
}

func shmdt(addr uintptr) error {
	_, err := call("shmdt", unix.SYS_SHMDT, addr, 0, 0, 0, 0, 0)
	return err
}

func shmrm(id int) error {
	_, err := call("shmctl", unix.SYS_SHMCTL, uintptr(id), unix.IPC_RMID, 0, 0, 0, 0)
	return err
}

// Unavailable reports whether err, from New or Perform, says that the machine
// doesn't offer the mapping or the operation, rather than that it went wrong.
func Unavailable(err error) bool {
	for _, e := range []error{
		ErrUnavailable,
		unix.ENOSYS, unix.EPERM, unix.EACCES, unix.EOPNOTSUPP, unix.EINVAL, unix.ENODEV, unix.ENOMEM, unix.ENOSPC,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func unavailable(what string, err error) error {
	if Unavailable(err) {
		return fmt.Errorf("%s: %w: %w", what, ErrUnavailable, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
