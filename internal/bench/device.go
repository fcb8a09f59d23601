package bench

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// Device is a device that registers nothing and counts. It rounds to pages, like
// a real one. Create it with [NewDevice].
type Device struct {
	page     uintptr
	populate bool // registering puts pages behind the range; set before use
	_        [56]byte
	made     atomic.Uint64
	_        [56]byte
	gone     atomic.Uint64
	_        [56]byte
}

// NewDevice returns a device without registrations.
func NewDevice() *Device { return &Device{page: uintptr(os.Getpagesize())} }

var _ device.Device = (*Device)(nil)

// Name returns "noop".
func (d *Device) Name() string { return "noop" }

// Limits returns no limits, and the page size.
func (d *Device) Limits() device.Limits { return device.Limits{PageSize: d.page} }

// Register counts. If asked to it puts pages behind r, as pinning does: a monitor
// that watches the kernel sees what happens to pages, and to nothing else.
func (d *Device) Register(_ context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	if d.populate {
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, r.Start, r.Len(), unix.MADV_POPULATE_WRITE)
		if errno != 0 {
			return device.Registration{}, fmt.Errorf("register %v: %w: %w", r, device.ErrFault, os.NewSyscallError("madvise", errno))
		}
	}
	key := d.made.Add(1)
	return device.Registration{Range: r, LocalKey: uint32(key), Access: access, Handle: key}, nil
}

// Deregister counts.
func (d *Device) Deregister(device.Registration) error {
	d.gone.Add(1)
	return nil
}

// Registrations returns how many were made, and how many exist.
func (d *Device) Registrations() (made uint64, live int) {
	gone := d.gone.Load() // first, so that the difference isn't negative
	made = d.made.Load()
	return made, int(made - gone)
}
