package pindown_test

import (
	"context"
	"math/rand/v2"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// decreased returns the names of the counters that are smaller in b than in a.
// Levels are what isn't a counter: ints.
func decreased(a, b any, name string) (names []string) {
	x, y := reflect.ValueOf(a), reflect.ValueOf(b)
	switch x.Kind() {
	case reflect.Struct:
		for i := range x.NumField() {
			names = append(names, decreased(x.Field(i).Interface(), y.Field(i).Interface(), name+"."+x.Type().Field(i).Name)...)
		}
	case reflect.Array:
		for i := range x.Len() {
			names = append(names, decreased(x.Index(i).Interface(), y.Index(i).Interface(), name)...)
		}
	case reflect.Map:
		for _, k := range x.MapKeys() {
			v := y.MapIndex(k)
			if !v.IsValid() || v.Uint() < x.MapIndex(k).Uint() {
				names = append(names, name)
			}
		}
	case reflect.Uint64:
		if y.Uint() < x.Uint() && name != "Stats.PinnedBytes" {
			names = append(names, name)
		}
	case reflect.Int64: // a duration: the sum of them
		if y.Int() < x.Int() {
			names = append(names, name)
		}
	default:
	}
	return names
}

// TestCountersOnlyGrow: in whatever goes on, no counter is ever seen to
// decrease, by any reader.
func TestCountersOnlyGrow(t *testing.T) {
	const workers, readers = 4, 2
	fo := &devicetest.FakeOptions{Limits: device.Limits{PageSize: page, MaxRegistrations: 30}}
	var calls atomic.Uint64
	now := func(n uint64) bool { return calls.Add(1)%n == 0 }
	fo.OnRegister = func(int, vm.Range, device.Access) error {
		if now(9) {
			return device.ErrBusy
		}
		return nil
	}
	fo.OnDeregister = func(int, device.Registration) error {
		if now(11) {
			return device.ErrBusy
		}
		return nil
	}
	fired := make(chan struct{})
	o := &pindown.Options{MaxRegions: 24, RegisterTimeout: time.Second, OnEvent: func(pindown.Event) {}}
	o.SetPressure(fired)
	r := newInjected(t, fo, o, nil)
	r.fake.SetCover(func(vm.Range) error {
		if now(13) {
			return monitor.ErrPending
		}
		return nil
	})
	var stop atomic.Bool
	var working, reading sync.WaitGroup
	for range readers {
		reading.Go(func() {
			last := r.Stats()
			for snapshots := 1; !stop.Load() || snapshots < 10; snapshots++ {
				s := r.Stats()
				if names := decreased(last, s, "Stats"); len(names) > 0 {
					t.Errorf("decreased: %v", names)
					return
				}
				last = s
			}
		})
	}
	n := steps(3000, 1000)
	for w := range workers {
		working.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(w)))
			acquire := r.Acquire
			try := r.TryAcquire
			for i := range n {
				if i%500 == 0 && w%2 == 0 {
					lane, err := r.NewLane()
					if err != nil {
						t.Error(err)
						return
					}
					defer func() { _ = lane.Close() }()
					acquire, try = lane.Acquire, lane.TryAcquire
				}
				at := rnd.IntN(200) * page
				b := r.mem[at : at+page*(1+rnd.IntN(8))]
				switch rnd.IntN(12) {
				case 0:
					r.fake.Touch(vm.OpMunmap, vm.RangeOf(b))
				case 1:
					if rnd.IntN(200) == 0 {
						fired <- struct{}{}
					}
				case 2, 3, 4, 5:
					if reg, ok := try(b, 0); ok {
						_ = reg.Release()
					}
				default:
					if reg, err := acquire(context.Background(), b, pindown.Access(rnd.IntN(2))); err == nil {
						_ = reg.Release()
					}
				}
			}
		})
	}
	working.Wait()
	stop.Store(true)
	reading.Wait()
	s := r.Stats()
	t.Logf("%v", s)
	if s.Hits == 0 || s.TotalMisses() == 0 || s.TotalInvalidations() == 0 || s.TotalPerUse() == 0 || s.Evictions[pindown.EvictMerge] == 0 ||
		s.DeregisterRetries == 0 || s.RegisterErrors == 0 || s.Evictions[pindown.EvictPressure] == 0 {
		t.Error("something didn't happen")
	}
	check(t, "leaked", s.Leaked, 0)
}
