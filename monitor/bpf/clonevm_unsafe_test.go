//go:build amd64

package bpf

import (
	"encoding/binary"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// callInChild makes a system call in a child that shares the address space but
// isn't a thread of this process: clone(2) with CLONE_VM and without
// CLONE_THREAD. Go knows nothing of it, so it runs a few instructions of its
// own, on a stack of its own.
func callInChild(t *testing.T, nr int, a, b, c uintptr) {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, 2*4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	code := append(mem[:0:4096], 0x48, 0xbf) // mov rdi, a
	code = binary.LittleEndian.AppendUint64(code, uint64(a))
	code = append(code, 0x48, 0xbe) // mov rsi, b
	code = binary.LittleEndian.AppendUint64(code, uint64(b))
	code = append(code, 0x48, 0xba) // mov rdx, c
	code = binary.LittleEndian.AppendUint64(code, uint64(c))
	code = append(code, 0xb8) // mov eax, nr
	code = binary.LittleEndian.AppendUint32(code, uint32(nr))
	code = append(code, 0x0f, 0x05, // syscall
		0x89, 0xc7, // mov edi, eax
		0xb8, unix.SYS_EXIT, 0, 0, 0, // mov eax, SYS_exit
		0x0f, 0x05) // syscall
	// Where the child returns to from clone.
	stack := mem[4096:]
	top := len(stack) - 64
	binary.LittleEndian.PutUint64(stack[top:], uint64(uintptr(unsafe.Pointer(unsafe.SliceData(code)))))
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_VM|uintptr(unix.SIGCHLD),
		uintptr(unsafe.Pointer(&stack[top])), 0, 0, 0, 0)
	if errno != 0 {
		t.Fatalf("clone: %v", errno)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(int(pid), &status, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
	if !status.Exited() || status.ExitStatus() != 0 {
		t.Fatalf("child: system call %d: status %#x", nr, int(status))
	}
}

// A child that shares the address space changes it like a thread does.
func TestCloneVMChild(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := mustOpen(t, Options{Mode: mode, Heartbeat: -1})
		r := mapPages(t, 4<<12)
		to := mapPages(t, 4<<12)
		w, wTo, beside := watch(t, m, r), watch(t, m, to), watch(t, m, mapPages(t, 4<<12))
		for _, op := range []struct {
			name    string
			nr      int
			a, b, c uintptr
			remap   bool
		}{
			{"madvise", unix.SYS_MADVISE, r.Start, r.Len(), unix.MADV_DONTNEED, false},
			{"munmap", unix.SYS_MUNMAP, r.Start, r.Len(), 0, true},
			{"munmap of a part", unix.SYS_MUNMAP, r.Start + 4096, 4096, 0, true},
			{"munmap of another", unix.SYS_MUNMAP, to.Start, to.Len(), 0, true},
		} {
			poke(r.Start)
			poke(to.Start)
			own, changed := r, w
			if op.a == to.Start {
				own, changed = to, wTo
			}
			before, other := m.Table().Stamp(changed), m.Table().Stamp(beside)
			callInChild(t, op.nr, op.a, op.b, op.c)
			if m.Table().Stamp(changed) == before {
				t.Errorf("%s in a CLONE_VM child: not seen", op.name)
			}
			if m.Table().Stamp(beside) != other {
				t.Errorf("%s in a CLONE_VM child: recorded elsewhere too", op.name)
			}
			if op.remap {
				gap := vm.Range{Start: op.a, End: op.a + op.b}
				if _, err := mmap(gap.Start, gap.Len(), unix.MAP_FIXED_NOREPLACE); err != nil {
					t.Fatalf("map %v of %v again: %v", gap, own, err)
				}
			}
		}
	})
}
