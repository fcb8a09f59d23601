// Package seccomptest denies system calls to the calling process, for tests of
// what happens in a sandbox. There is no way back: call it in a process made
// for the purpose, such as the test binary executed again.
package seccomptest

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	setModeFilter = 1 // SECCOMP_SET_MODE_FILTER
	filterTsync   = 1 // SECCOMP_FILTER_FLAG_TSYNC

	retAllow = 0x7fff0000 // SECCOMP_RET_ALLOW
	retErrno = 0x00050000 // SECCOMP_RET_ERRNO
)

// Deny makes the given system calls fail with errno in all threads of this
// process, now and later, and in its children. It needs no privilege: it also
// sets no_new_privs. See seccomp(2).
func Deny(errno unix.Errno, calls ...uint32) error {
	// The number is the first word of struct seccomp_data. Only the native
	// architecture makes calls in tests, so that isn't checked.
	prog := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}}
	for _, nr := range calls {
		prog = append(prog,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: nr},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: retErrno | uint32(errno)})
	}
	prog = append(prog, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: retAllow})

	// no_new_privs is an attribute of the thread; TSYNC spreads it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("deny system calls: %w", os.NewSyscallError("prctl", err))
	}
	// The filter's address goes inside a structure: it must not be on a stack
	// that can move.
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&prog[0])
	fprog := &unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	r, _, errno2 := unix.Syscall(unix.SYS_SECCOMP, setModeFilter, filterTsync, uintptr(unsafe.Pointer(fprog)))
	runtime.KeepAlive(prog)
	if errno2 != 0 {
		return fmt.Errorf("deny system calls: %w", os.NewSyscallError("seccomp", errno2))
	}
	if r != 0 {
		return fmt.Errorf("deny system calls: thread %d can't take the filter: %w", r, unix.EBUSY)
	}
	return nil
}
