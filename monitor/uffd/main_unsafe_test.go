package uffd

import (
	"runtime/debug"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/vm"
)

// fill writes to each page of r.
func fill(r vm.Range) {
	for a := r.Start; a < r.End; a += pageSize {
		*(*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&a))) = 1
	}
}

func newWatch(m *Monitor, r vm.Range) *epoch.Watch {
	w := new(epoch.Watch)
	if err := m.table.Watch(w, r); err != nil {
		panic(err)
	}
	return w
}

// present reports whether any page of r is.
func present(tb testing.TB, r vm.Range) bool {
	tb.Helper()
	entries, err := oracle.Frames(r)
	must(tb, err)
	n := 0
	for _, e := range entries {
		if e.Present() {
			n++
		}
	}
	return n > len(entries)/2
}

func freeOSMemory() { debug.FreeOSMemory() }

// forkAndUnmap forks a child that unmaps r and exits with 0 if the table's word
// isn't the given one there. The child runs no Go but this function.
//
//go:nosplit
//go:norace
func forkAndUnmap(r vm.Range, t *epoch.Table, word uint64) int {
	var set, old [1]uint64
	set[0] = ^uint64(0)
	syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, 2, uintptr(unsafe.Pointer(&set)), uintptr(unsafe.Pointer(&old)), 8, 0, 0)
	pid, _, _ := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if pid == 0 {
		code := uintptr(0)
		if uint64(t.Word()) == word {
			code = 1
		}
		if _, _, errno := syscall.RawSyscall(unix.SYS_MUNMAP, r.Start, r.Len(), 0); errno != 0 {
			code = 2
		}
		for {
			syscall.RawSyscall(unix.SYS_EXIT_GROUP, code, 0, 0)
		}
	}
	syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, 2, uintptr(unsafe.Pointer(&old)), 0, 8, 0, 0)
	return int(pid)
}
