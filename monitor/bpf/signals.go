package bpf

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// withoutSignals calls f on a thread that takes no signals. The verifier gives
// up at a signal (bpf_check in kernel/bpf/verifier.c returns EAGAIN) and has to
// be started anew: where signals come faster than it finishes, that would go on
// for ever.
func withoutSignals(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var block, old unix.Sigset_t
	for i := range block.Val {
		block.Val[i] = ^block.Val[i]
	}
	const bits = 64
	for _, s := range []unix.Signal{unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL, unix.SIGTRAP} {
		// Raised by an instruction: the process would die of them without a word.
		block.Val[(s-1)/bits] &^= 1 << ((s - 1) % bits)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &block, &old); err != nil {
		return fmt.Errorf("block signals: %w", os.NewSyscallError("rt_sigprocmask", err))
	}
	err := f()
	if e := unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil); e != nil {
		// The thread is of no use to others: it ends with its goroutine.
		runtime.LockOSThread()
		return fmt.Errorf("unblock signals: %w", os.NewSyscallError("rt_sigprocmask", e))
	}
	return err
}
