package devicetest

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/vm"
)

// PageFrames is a FakeOptions.Frames for real memory: it faults r's pages in
// for writing, as pinning does, and returns their frame numbers. It returns a
// wrapped [device.ErrFault] for memory that can't be pinned. Frame numbers need
// CAP_SYS_ADMIN; without it they are all zero. Requires Linux 5.14.
func PageFrames(r vm.Range) ([]uint64, error) {
	out := r.RoundOut(uintptr(os.Getpagesize()))
	if _, _, errno := unix.Syscall(unix.SYS_MADVISE, out.Start, out.Len(), unix.MADV_POPULATE_WRITE); errno != 0 {
		return nil, errors.Join(device.ErrFault, os.NewSyscallError("madvise", errno))
	}
	entries, err := oracle.Frames(out)
	if err != nil {
		return nil, err
	}
	frames := make([]uint64, len(entries))
	for i, e := range entries {
		frames[i] = e.PFN()
	}
	return frames, nil
}
