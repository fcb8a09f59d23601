package verbs_test

import (
	"context"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

func conformance() *devicetest.Options {
	o := &devicetest.Options{
		// The fake works on memory by address, and so do adapters that follow
		// the page tables.
		Simulated:        !realAdapter(),
		MaxRegistrations: 2048,
		Write: func(dev device.Device, reg device.Registration, off int, b []byte) error {
			return move(dev.(*verbs.Device), reg, off, b, true)
		},
		Read: func(dev device.Device, reg device.Registration, off int, b []byte) error {
			return move(dev.(*verbs.Device), reg, off, b, false)
		},
	}
	if realAdapter() {
		o.Pinned = pinned
	}
	remote := func(store bool) func(device.Device, uintptr, uint32, []byte) error {
		return func(dev device.Device, at uintptr, key uint32, b []byte) (err error) {
			d := dev.(*verbs.Device)
			p, err := newPair(d)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, p.close()) }()
			return carry(d, p.a, at, key, b, store)
		}
	}
	o.RemoteRead, o.RemoteWrite = remote(false), remote(true)
	o.NewQueue = func(t *testing.T, dev device.Device) devicetest.Queue {
		t.Helper()
		d := dev.(*verbs.Device)
		p := connected(t, d)
		return devicetest.Queue{
			WorkQueue: p.b,
			Do: func() error {
				if err := p.b.Do(t.Context()); !errors.Is(err, verbs.ErrCompletion) {
					return err
				}
				return nil
			},
			Read: func(at uintptr, key uint32, b []byte) error { return carry(d, p.a, at, key, b, false) },
		}
	}
	return o
}

// carry has the peer of a queue of d's, which is another, store or fetch bytes at an
// address under a remote key.
func carry(d *verbs.Device, q *verbs.Queue, at uintptr, key uint32, b []byte, store bool) (err error) {
	mem, err := unix.Mmap(-1, 0, len(b), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Munmap(mem)) }()
	ctx := context.Background()
	near, err := d.Register(ctx, vm.RangeOf(mem), device.LocalWrite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Deregister(near)) }()
	if store {
		copy(mem, b)
		err = q.Write(1, vm.RangeOf(mem), near.LocalKey, uint64(at), key)
	} else {
		err = q.Read(1, vm.RangeOf(mem), near.LocalKey, uint64(at), key)
	}
	if err == nil {
		err = q.Do(ctx)
	}
	if err == nil && !store {
		copy(b, mem)
	}
	return err
}

func TestConforms(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		return open(t, nil)
	}, conformance())
}

// A device on the protection domain of somebody else.
func TestConformsCallersDomain(t *testing.T) {
	owner := open(t, nil)
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		d, err := verbs.New(owner.PD(), options(t, &verbs.Options{Exact: true}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		return d
	}, conformance())
}
