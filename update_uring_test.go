package pindown_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// TestUpdateUring: on an io_uring an atomic update needs no drain: a read in flight
// goes on into the old page, later ones under the same index into the new. A strict one
// fails, with nothing changed, as long as it is in flight, and then does the same.
func TestUpdateUring(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy.String(), func(t *testing.T) {
			dev := openUring(t)
			mon, err := manual.New(nil)
			if err != nil {
				t.Fatal(err)
			}
			cache, err := pindown.New(dev, &pindown.Options{Monitor: mon, RegisterTimeout: 5 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := errors.Join(cache.Close(), dev.Close(), mon.Close()); err != nil {
					t.Error(err)
				}
			}()
			var p [2]int
			if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			defer func() { _, _ = unix.Close(p[0]), unix.Close(p[1]) }()
			mem := mapMem(t, page)
			reg, err := cache.Acquire(t.Context(), mem, pindown.LocalWrite)
			if err != nil {
				t.Fatal(err)
			}
			key := reg.LocalKey()
			at := vm.Range{Start: vm.RangeOf(mem).Start, End: vm.RangeOf(mem).Start + 5}
			read := func(id uint64) {
				if err := dev.Ring().ReadFixed(p[0], at, -1, key, id); err != nil {
					t.Fatal(err)
				}
				if n, err := dev.Ring().Submit(); n != 1 || err != nil {
					t.Fatal(n, err)
				}
			}
			write := func(text string) {
				if _, err := unix.Write(p[1], []byte(text)); err != nil {
					t.Fatal(err)
				}
				var done [1]iouring.Completion
				if n, err := dev.Ring().Wait(done[:]); n != 1 || err != nil || done[0].Res != 5 {
					t.Fatalf("%d, %v: %+v", n, err, done[0])
				}
			}
			read(1) // waits for the pipe
			err = mon.Do(vm.RangeOf(mem), func() error { return unix.Madvise(mem, unix.MADV_DONTNEED) })
			if err != nil {
				t.Fatal(err)
			}
			if policy == pindown.UpdateStrict {
				u, err := reg.Update(t.Context(), policy)
				if u.Outcome != pindown.UpdateFailed || !errors.Is(err, device.ErrBusy) || u.LocalKey != key {
					t.Fatalf("with a read in flight: %+v, %v", u, err)
				}
				write("first")
				read(2)
				write("again")
				check(t, "in the new page", string(mem[:5]), "\x00\x00\x00\x00\x00")
			}
			u, err := reg.Update(t.Context(), policy)
			if err != nil || u.Outcome != pindown.UpdateDone || u.LocalKey != key {
				t.Fatalf("%+v, %v", u, err)
			}
			if policy == pindown.UpdateAtomic {
				write("first")
			}
			check(t, "in the new page", string(mem[:5]), "\x00\x00\x00\x00\x00")
			read(3)
			write("later")
			check(t, "in the new page", string(mem[:5]), "later")
			release(t, &reg)
			check(t, "registrations made", cache.Stats().Register.Count, 1)
		})
	}
}

func openUring(tb testing.TB) *iouring.Device {
	tb.Helper()
	dev, err := iouring.Open(nil)
	if errors.Is(err, device.ErrNotSupported) && os.Getenv("CI") != "true" {
		tb.Skipf("needs io_uring: %v", err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return dev
}

// TestUpdateUringDrains: a strict update waits for somebody else to take the completions.
func TestUpdateUringDrains(t *testing.T) {
	dev := openUring(t)
	mon, err := manual.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	flushing := make(chan struct{})
	var once sync.Once
	cache, err := pindown.New(&flushes{dev, func() { once.Do(func() { close(flushing) }) }},
		&pindown.Options{Monitor: mon, RegisterTimeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	mem := mapMem(t, page)
	reg, err := cache.Acquire(t.Context(), mem, pindown.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	ring := dev.Ring()
	file, err := unix.MemfdCreate("pindown", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(file) }()
	if err := ring.WriteFixed(file, vm.RangeOf(mem), 0, reg.LocalKey(), 1); err != nil {
		t.Fatal(err)
	}
	mon.Invalidate(vm.RangeOf(mem))
	done := make(chan error)
	go func() {
		_, err := reg.Update(t.Context(), pindown.UpdateStrict)
		done <- err
	}()
	<-flushing
	var c [1]iouring.Completion
	if err := ring.Do(c[:]); err != nil || c[0].Res != page || c[0].UserData != 1 {
		t.Errorf("%+v, %v", c[0], err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	release(t, &reg)
	if err := errors.Join(cache.Close(), dev.Close(), mon.Close()); err != nil {
		t.Error(err)
	}
}

// flushes is a device that tells of calls of Flush, after they have failed.
type flushes struct {
	*iouring.Device
	busy func()
}

func (d *flushes) Flush(ctx context.Context, reg device.Registration) error {
	err := d.Device.Flush(ctx, reg)
	if err != nil {
		d.busy()
	}
	return err
}
