package bench

import (
	"context"
	"sync/atomic"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// noop is a device that registers nothing. It rounds to pages, like a real one.
type noop struct {
	page uintptr
	_    [56]byte
	made atomic.Uint64
	_    [56]byte
	gone atomic.Uint64
	_    [56]byte
}

var _ device.Device = (*noop)(nil)

func (d *noop) Name() string { return "noop" }

func (d *noop) Limits() device.Limits { return device.Limits{PageSize: d.page} }

func (d *noop) Register(_ context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	key := d.made.Add(1)
	return device.Registration{Range: r, LocalKey: uint32(key), Access: access, Handle: key}, nil
}

func (d *noop) Deregister(device.Registration) error {
	d.gone.Add(1)
	return nil
}

// live returns the registrations that exist.
func (d *noop) live() int {
	gone := d.gone.Load() // first, so that the difference isn't negative
	return int(d.made.Load() - gone)
}
