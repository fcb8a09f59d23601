package bpf

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// Raw system calls on memory that Go doesn't know.

func mmap(addr, length uintptr, flags int) (uintptr, error) {
	p, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, length, unix.PROT_READ|unix.PROT_WRITE,
		uintptr(unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags), ^uintptr(0), 0)
	if errno != 0 {
		return 0, os.NewSyscallError("mmap", errno)
	}
	return p, nil
}

func munmap(r vm.Range) error {
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, r.Start, r.Len(), 0); errno != 0 {
		return os.NewSyscallError("munmap", errno)
	}
	return nil
}

func madvise(r vm.Range, advice int) error {
	if _, _, errno := unix.Syscall(unix.SYS_MADVISE, r.Start, r.Len(), uintptr(advice)); errno != 0 {
		return os.NewSyscallError("madvise", errno)
	}
	return nil
}

// mremap moves the pages of r to another mapping of the same size and leaves r
// mapped.
func mremap(r vm.Range, to uintptr) error {
	_, _, errno := unix.Syscall6(unix.SYS_MREMAP, r.Start, r.Len(), r.Len(),
		unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED|unix.MREMAP_DONTUNMAP, to, 0)
	if errno != 0 {
		return os.NewSyscallError("mremap", errno)
	}
	return nil
}

// poke writes to the page at addr, which is mapped memory that Go doesn't
// know.
func poke(addr uintptr) {
	p := *(*unsafe.Pointer)(unsafe.Pointer(&addr))
	*(*byte)(p) = 1
}
