package verbs_test

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

const bindable = device.LocalWrite | device.WindowBind

func TestExpose(t *testing.T) {
	d := open(t, nil)
	ctx := t.Context()
	src, dst := mapMemory(t, 1), mapMemory(t, 3)
	page := len(src)
	mid := dst[page : 2*page]
	bounded, err := d.WindowsBounded(ctx)
	must(t, err)
	t.Logf("the adapter holds windows to their range: %t", bounded)
	from, to := register(t, d, src, device.LocalWrite), register(t, d, dst, bindable)
	if !bounded {
		if _, err := d.Expose(ctx, to, vm.RangeOf(mid), device.RemoteWrite); !errors.Is(err, device.ErrNotSupported) {
			t.Errorf("a window that would reach too far: %v", err)
		}
		must(t, d.Deregister(to))
		to = register(t, d, mid, bindable)
	}
	// write is what a peer does with a key.
	write := func(t *testing.T, key uint32, at uint64) error {
		t.Helper()
		p := connected(t, d)
		must(t, p.a.Write(1, vm.RangeOf(src), from.LocalKey, at, key))
		return p.a.Do(t.Context())
	}
	fill(src, 'x')
	if err := write(t, to.RemoteKey, addr(mid)); !errors.Is(err, verbs.ErrCompletion) {
		t.Errorf("through the registration's own key: %v", err)
	}
	x, err := d.Expose(ctx, to, vm.RangeOf(mid), device.RemoteWrite)
	must(t, err)
	if x.Range != vm.RangeOf(mid) || x.Access != device.RemoteWrite {
		t.Errorf("%+v", x)
	}
	if err := d.Deregister(to); !errors.Is(err, device.ErrBusy) {
		t.Errorf("deregister what is exposed: %v", err)
	}
	for _, at := range []uint64{addr(mid) - 1, addr(mid) + 1, addr(dst)} {
		if err := write(t, x.RemoteKey, at); !errors.Is(err, verbs.ErrCompletion) {
			t.Errorf("%d bytes off the window: %v", int64(at-addr(mid)), err)
		}
	}
	if bytes.ContainsRune(dst, 'x') {
		t.Fatal("something was written")
	}
	if err := write(t, x.RemoteKey, addr(mid)); err != nil || !bytes.Equal(mid, src) {
		t.Errorf("write through the window: %v, or other bytes", err)
	}
	p := connected(t, d)
	must(t, p.a.Read(1, vm.RangeOf(src), from.LocalKey, addr(mid), x.RemoteKey))
	if err := p.a.Do(ctx); !errors.Is(err, verbs.ErrCompletion) {
		t.Errorf("read through a window for writing: %v", err)
	}
	must(t, d.Withdraw(ctx, x))
	fill(src, 'y')
	if err := write(t, x.RemoteKey, addr(mid)); !errors.Is(err, verbs.ErrCompletion) || bytes.ContainsRune(dst, 'y') {
		t.Errorf("write through a closed window: %v", err)
	}
	if err := d.Withdraw(ctx, x); !errors.Is(err, device.ErrNotExposed) {
		t.Errorf("second withdrawal: %v", err)
	}
	for _, c := range []struct {
		name   string
		reg    device.Registration
		r      vm.Range
		access device.Access
		want   error
	}{
		{"local access", to, vm.RangeOf(mid), device.LocalWrite, device.ErrAccess},
		{"no access", to, vm.RangeOf(mid), 0, device.ErrAccess},
		{"unbindable", from, vm.RangeOf(src), device.RemoteRead, device.ErrAccess},
		{"elsewhere", to, vm.RangeOf(src), device.RemoteRead, device.ErrInvalid},
		{"empty", to, vm.Range{}, device.RemoteRead, device.ErrInvalid},
		{"unknown", device.Registration{}, vm.RangeOf(mid), device.RemoteRead, device.ErrNotRegistered},
	} {
		if _, err := d.Expose(ctx, c.reg, c.r, c.access); !errors.Is(err, c.want) || err == c.want { //nolint:errorlint // The point is that it must be wrapped.
			t.Errorf("%s: %v, want %v wrapped", c.name, err, c.want)
		}
	}
	must(t, d.Deregister(to))
}

// Many exposures, by many goroutines, and one after the other.
func TestExposeMany(t *testing.T) {
	d := open(t, nil)
	ctx := t.Context()
	b := mapMemory(t, 4)
	reg := register(t, d, b, bindable)
	var last uint32
	for range 300 {
		x, err := d.Expose(ctx, reg, vm.RangeOf(b), device.RemoteRead|device.RemoteWrite)
		must(t, err)
		if x.RemoteKey == last {
			t.Fatalf("key %#x twice in a row", last)
		}
		last = x.RemoteKey
		must(t, d.Withdraw(ctx, x))
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	live := map[uint32]bool{}
	for range 4 {
		wg.Go(func() {
			for range 12 {
				var held [4]device.Exposure // So that many are live at a time.
				for i := range held {
					x, err := d.Expose(ctx, reg, vm.RangeOf(b), device.RemoteRead)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					if live[x.RemoteKey] {
						t.Errorf("key %#x is live twice", x.RemoteKey)
					}
					live[x.RemoteKey] = true
					mu.Unlock()
					held[i] = x
				}
				for _, x := range held {
					mu.Lock()
					delete(live, x.RemoteKey)
					mu.Unlock()
					if err := d.Withdraw(ctx, x); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	// What is exposed when the device is closed is closed with it.
	_, err := d.Expose(ctx, reg, vm.RangeOf(b), device.RemoteRead)
	must(t, err, d.Close())
	if _, err := d.Expose(ctx, reg, vm.RangeOf(b), device.RemoteRead); !errors.Is(err, device.ErrClosed) {
		t.Errorf("expose after close: %v", err)
	}
}

// Windows of type 2: bound and invalidated in the order of a queue.
func TestFastRegister(t *testing.T) {
	d := open(t, nil)
	ctx := t.Context()
	src, dst := mapMemory(t, 1), mapMemory(t, 3)
	page := len(src)
	mid := dst[page : 2*page]
	from, to, all := register(t, d, src, device.LocalWrite), register(t, d, mid, bindable), register(t, d, dst, bindable)
	p := connected(t, d)
	// The owner of the memory is b, its peer a.
	k, err := d.AllocFastKey(ctx, uint64(page))
	must(t, err)
	if err := p.b.PostFastRegister(device.FastRegister{Key: k.Key, Over: all, Range: vm.RangeOf(dst), Access: device.RemoteWrite}); !errors.Is(err, device.ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	key := k.Key
	for i := range 300 { // More than a key has consumer parts.
		key = device.NextKey(key)
		var outcome [2]error
		done := 0
		must(t, p.b.PostFastRegister(device.FastRegister{Key: key, Over: to, Range: vm.RangeOf(mid), Access: device.RemoteWrite, Done: func(err error) { outcome[0] = err; done++ }}))
		must(t, p.b.Do(ctx))
		if i%100 == 0 {
			fill(src, byte('a'+i/100))
			must(t, p.a.Write(1, vm.RangeOf(src), from.LocalKey, addr(mid), key), p.a.Do(ctx))
			if !bytes.Equal(mid, src) {
				t.Fatal("not what was written")
			}
			if err := d.FreeFastKey(k); !errors.Is(err, device.ErrBusy) {
				t.Errorf("free a key that means something: %v", err)
			}
			if err := d.Deregister(to); !errors.Is(err, device.ErrBusy) {
				t.Errorf("deregister under a key: %v", err)
			}
		}
		must(t, p.b.PostLocalInvalidate(device.LocalInvalidate{Key: key, Done: func(err error) { outcome[1] = err; done++ }}))
		must(t, p.b.Do(ctx))
		if done != 2 || outcome != [2]error{} {
			t.Fatalf("round %d: %d done, %v", i, done, outcome)
		}
	}
	// In one go: the queue's order is enough.
	must(t,
		p.b.PostFastRegister(device.FastRegister{Key: device.NextKey(key), Over: to, Range: vm.RangeOf(mid), Access: device.RemoteRead}),
		p.b.PostLocalInvalidate(device.LocalInvalidate{Key: device.NextKey(key)}),
		p.b.Do(ctx))
	fill(src, 'x')
	must(t, p.a.Write(1, vm.RangeOf(src), from.LocalKey, addr(mid), key))
	if err := p.a.Do(ctx); !errors.Is(err, verbs.ErrCompletion) || bytes.ContainsRune(dst, 'x') {
		t.Errorf("write through a dead key: %v", err)
	}
	must(t, d.FreeFastKey(k), d.Deregister(to))
	if err := d.FreeFastKey(k); !errors.Is(err, device.ErrNotRegistered) {
		t.Errorf("free again: %v", err)
	}
}
