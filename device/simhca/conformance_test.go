package simhca_test

import (
	"errors"
	"os"
	"sync"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/simhca"
)

func TestConformsSimulatedMemory(t *testing.T) {
	for _, c := range []struct {
		name string
		opts simhca.Options
	}{
		{"default", simhca.Options{}},
		{"limited", simhca.Options{Limits: device.Limits{MaxRegistrations: 100, MaxPinnedBytes: 64 * page, MaxRange: 1 << 20}}},
		{"one entry", simhca.Options{Limits: device.Limits{MaxRegistrations: 8}}},
		{"keeps pages", simhca.Options{KeepPages: true}},
		{"holds revoked", simhca.Options{HoldRevoked: true}},
		{"plain", simhca.Options{Without: simhca.CanUpdate | simhca.CanRevoke | simhca.CanFlush | simhca.CanExpose | simhca.CanFastRegister}},
	} {
		if (testing.Short() || raceEnabled) && c.name != "limited" {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			devicetest.Run(t, func(t *testing.T) device.Device {
				t.Helper()
				space := simhca.NewSpace(&simhca.SpaceOptions{Everywhere: true})
				d := simhca.Open(space, &c.opts)
				t.Cleanup(func() {
					if err := errors.Join(d.Close(), space.Check()); err != nil {
						t.Error(err)
					}
					if s := space.Stats(); s.Pinned != 0 {
						t.Errorf("%d pages pinned after close", s.Pinned)
					}
				})
				return d
			}, remotely(&devicetest.Options{Simulated: true, HoldsRevoked: c.opts.HoldRevoked}))
		})
	}
}

// processDevice opens a device over this process's memory, or skips the test.
func processDevice(t *testing.T, opts *simhca.Options) *simhca.Device {
	t.Helper()
	mem, err := simhca.OpenProcess()
	if errors.Is(err, device.ErrNotSupported) && os.Getenv("CI") != "true" {
		t.Skipf("needs io_uring: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	d := simhca.Open(mem, opts)
	t.Cleanup(func() {
		if err := errors.Join(d.Close(), mem.Close()); err != nil {
			t.Error(err)
		}
	})
	return d
}

// mover moves bytes between a buffer of the test and a registration, by a
// queue.
func mover(op simhca.Opcode) func(device.Device, device.Registration, int, []byte) error {
	return func(dev device.Device, reg device.Registration, off int, b []byte) error {
		// A registration for local use only is the local end; its peer is
		// another device, over simulated memory.
		d := under(dev)
		space := simhca.NewSpace(nil)
		peer := simhca.Open(space, nil)
		defer peer.Close()
		r, err := space.Map(len(b)/page+1, rw)
		if err != nil {
			return err
		}
		far, err := peer.Register(ctx, r, allAcc)
		if err != nil {
			return err
		}
		if op == simhca.OpRead {
			if err := space.Store(r.Start, b); err != nil {
				return err
			}
		}
		q, err := d.ProtectionDomain().NewQueue(nil)
		if err != nil {
			return err
		}
		defer q.Close()
		p, err := peer.ProtectionDomain().NewQueue(nil)
		if err != nil {
			return err
		}
		if err := simhca.Connect(q, p); err != nil {
			return err
		}
		if err := q.Post(simhca.WorkRequest{
			Op: op, RemoteAddr: r.Start, RemoteKey: far.RemoteKey,
			Local: []simhca.Segment{{Addr: reg.Range.Start + uintptr(off), Length: uintptr(len(b)), Key: reg.LocalKey}},
		}); err != nil {
			return err
		}
		c, err := q.CompletionQueue().Wait(ctx)
		if err == nil {
			err = c.Status.Err()
		}
		if err == nil && op == simhca.OpWrite {
			err = space.Load(r.Start, b)
		}
		return err
	}
}

// peer is another device over memory of its own, connected to one that is tested.
type peer struct {
	space *simhca.Space
	dev   *simhca.Device
	queue *simhca.Queue
	near  *simhca.Queue // the tested device's end
}

func newPeer(d *simhca.Device) (*peer, error) {
	p := &peer{space: simhca.NewSpace(nil)}
	p.dev = simhca.Open(p.space, nil)
	var err error
	if p.near, err = d.ProtectionDomain().NewQueue(nil); err != nil {
		return nil, err
	}
	if p.queue, err = p.dev.ProtectionDomain().NewQueue(nil); err != nil {
		return nil, err
	}
	return p, simhca.Connect(p.near, p.queue)
}

func (p *peer) close() { _ = errors.Join(p.near.Close(), p.dev.Close()) }

// move has the peer carry out op at an address of the device under a remote key.
func (p *peer) move(op simhca.Opcode, at uintptr, key uint32, b []byte) error {
	r, err := p.space.Map(len(b)/page+1, rw)
	if err != nil {
		return err
	}
	reg, err := p.dev.Register(ctx, r, device.LocalWrite)
	if err != nil {
		return err
	}
	if op == simhca.OpWrite {
		if err := p.space.Store(r.Start, b); err != nil {
			return err
		}
	}
	if err := p.queue.Post(simhca.WorkRequest{
		Op: op, RemoteAddr: at, RemoteKey: key,
		Local: []simhca.Segment{{Addr: r.Start, Length: uintptr(len(b)), Key: reg.LocalKey}},
	}); err != nil {
		return err
	}
	c, err := p.queue.CompletionQueue().Wait(ctx)
	if err == nil {
		err = c.Status.Err()
	}
	if err == nil && op == simhca.OpRead {
		err = p.space.Load(r.Start, b)
	}
	return err
}

// countingQueue counts the outcomes that haven't been told.
type countingQueue struct {
	q    *simhca.Queue
	told sync.WaitGroup
}

func (w *countingQueue) count(done func(error)) func(error) {
	w.told.Add(1)
	return func(err error) {
		defer w.told.Done()
		if done != nil {
			done(err)
		}
	}
}

func (w *countingQueue) posted(err error) error {
	if err != nil {
		w.told.Done()
	}
	return err
}

func (w *countingQueue) PostFastRegister(wr device.FastRegister) error {
	wr.Done = w.count(wr.Done)
	return w.posted(w.q.PostFastRegister(wr))
}

func (w *countingQueue) PostLocalInvalidate(wr device.LocalInvalidate) error {
	wr.Done = w.count(wr.Done)
	return w.posted(w.q.PostLocalInvalidate(wr))
}

// remotely completes o with peers and queues.
func remotely(o *devicetest.Options) *devicetest.Options {
	by := func(op simhca.Opcode) func(device.Device, uintptr, uint32, []byte) error {
		return func(dev device.Device, at uintptr, key uint32, b []byte) error {
			p, err := newPeer(under(dev))
			if err != nil {
				return err
			}
			defer p.close()
			return p.move(op, at, key, b)
		}
	}
	o.RemoteRead, o.RemoteWrite = by(simhca.OpRead), by(simhca.OpWrite)
	o.NewQueue = func(t *testing.T, dev device.Device) devicetest.Queue {
		t.Helper()
		p, err := newPeer(under(dev))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.close)
		w := &countingQueue{q: p.near}
		return devicetest.Queue{
			WorkQueue: w,
			Do: func() error {
				w.told.Wait()
				return nil
			},
			Read: func(at uintptr, key uint32, b []byte) error { return p.move(simhca.OpRead, at, key, b) },
		}
	}
	return o
}

// Over the process's memory everything is real but the adapter: stale
// registrations keep their pages, updates reach the new ones.
func TestConformsProcessMemory(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		return processDevice(t, nil)
	}, remotely(&devicetest.Options{Write: mover(simhca.OpRead), Read: mover(simhca.OpWrite)}))
}
