package simhca_test

import (
	"errors"
	"os"
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
			}, &devicetest.Options{Simulated: true})
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
		d := dev.(*simhca.Device)
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

// Over the process's memory everything is real but the adapter: stale
// registrations keep their pages, updates reach the new ones.
func TestConformsProcessMemory(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		return processDevice(t, nil)
	}, &devicetest.Options{Write: mover(simhca.OpRead), Read: mover(simhca.OpWrite)})
}
