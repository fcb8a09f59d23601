package verbs_test

import (
	"context"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

// pair is two connected queues of one device.
type pair struct{ a, b *verbs.Queue }

func newPair(d *verbs.Device) (*pair, error) {
	p := &pair{}
	var err error
	if p.a, err = d.NewQueue(nil); err != nil {
		return nil, err
	}
	if p.b, err = d.NewQueue(nil); err != nil {
		return nil, errors.Join(err, p.a.Close())
	}
	if err := errors.Join(p.a.Connect(p.b.Endpoint()), p.b.Connect(p.a.Endpoint())); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *pair) close() error { return errors.Join(p.a.Close(), p.b.Close()) }

// connected returns a pair for the test's time.
func connected(t *testing.T, d *verbs.Device) *pair {
	t.Helper()
	p, err := newPair(d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// move carries bytes through a registration's local key, to or from memory of
// the other end: the adapter reads what it is to store, and writes what it is to
// fetch.
func move(dev *verbs.Device, reg device.Registration, off int, b []byte, store bool) (err error) {
	p, err := newPair(dev)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	mem, err := unix.Mmap(-1, 0, len(b), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Munmap(mem)) }()
	ctx := context.Background()
	far, err := dev.Register(ctx, vm.RangeOf(mem), device.LocalWrite|device.RemoteRead|device.RemoteWrite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Deregister(far)) }()
	near := vm.Range{Start: reg.Range.Start + uintptr(off), End: reg.Range.Start + uintptr(off+len(b))}
	if store {
		copy(mem, b)
		err = p.a.Read(1, near, reg.LocalKey, uint64(far.Range.Start), far.RemoteKey)
	} else {
		err = p.a.Write(1, near, reg.LocalKey, uint64(far.Range.Start), far.RemoteKey)
	}
	if err == nil {
		err = p.a.Do(ctx)
	}
	if err == nil && !store {
		copy(b, mem)
	}
	return err
}
