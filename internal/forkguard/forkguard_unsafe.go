// Package forkguard tells whether this process is the one that made the guard
// or a fork of it, by one load from memory.
//
// The guard is a word on a page of its own that the kernel wipes in a forked
// child (MADV_WIPEONFORK, madvise(2), Linux 4.14). A process id comparison
// would cost a system call, and a cached one would be wrong in the child.
package forkguard

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Alive is the bit of a guard's word that is set in the process that made it.
const Alive = 1

// Guard is one guard page. Forked may be called from many goroutines.
type Guard struct {
	mem  []byte
	word *atomic.Uint32
}

// New maps a guard page. It fails with the error of mmap(2) or madvise(2).
func New() (*Guard, error) {
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map fork guard: %w", os.NewSyscallError("mmap", err))
	}
	if err := unix.Madvise(mem, unix.MADV_WIPEONFORK); err != nil {
		_ = unix.Munmap(mem)
		return nil, fmt.Errorf("guard against fork: %w", os.NewSyscallError("madvise", err))
	}
	g := &Guard{mem: mem, word: (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(mem)))}
	g.word.Store(Alive)
	return g, nil
}

// Forked reports whether this process is a child of the one that called New.
func (g *Guard) Forked() bool { return g.word.Load() == 0 }

// Word returns the guard's word: Alive in the process that made the guard, zero
// in a fork. The other bits are the caller's to use, who so learns two things by
// one load.
func (g *Guard) Word() *atomic.Uint32 { return g.word }

// Close unmaps the page. The guard must not be used afterwards.
func (g *Guard) Close() error {
	if err := unix.Munmap(g.mem); err != nil {
		return fmt.Errorf("unmap fork guard: %w", os.NewSyscallError("munmap", err))
	}
	return nil
}
