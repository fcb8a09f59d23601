package pindown_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// TestUpdateConcurrent: users who acquire, work and release, through the cache and
// through lanes, while others update by either policy, change pages, and at last
// close the cache. Whoever acquires after an operation has returned works on what
// it has made; nobody's work fails.
func TestUpdateConcurrent(t *testing.T) {
	rounds := 1500
	if testing.Short() || raceDetector {
		rounds = 200
	}
	for _, onStale := range []pindown.StalePolicy{pindown.StaleDrop, pindown.StaleUpdate} {
		t.Run(onStale.String(), func(t *testing.T) {
			r := newSimRig(t, &simhca.Options{HoldRevoked: true}, &pindown.Options{MergeBytes: -1, OnStale: onStale})
			rng := r.alloc(t, 2)
			var started, done atomic.Uint64 // operations
			var wg, users sync.WaitGroup
			ctx, cancel := context.WithCancel(t.Context())
			for u := range 4 {
				sink := r.alloc(t, 2)
				own, err := r.dev.Register(t.Context(), sink, device.LocalWrite|device.RemoteWrite)
				if err != nil {
					t.Fatal(err)
				}
				q, err := r.dev.ProtectionDomain().NewQueue(nil)
				if err != nil {
					t.Fatal(err)
				}
				if err := simhca.Connect(q, q); err != nil {
					t.Fatal(err)
				}
				acquire := r.AcquireRange
				var lane *pindown.Lane
				if u%2 == 0 {
					if lane, err = r.NewLane(); err != nil {
						t.Fatal(err)
					}
					acquire = lane.AcquireRange
				}
				users.Go(func() {
					for n := 0; ; n++ {
						before := done.Load()
						reg, err := acquire(t.Context(), rng, allRemote)
						if errors.Is(err, pindown.ErrClosed) {
							break
						}
						if err != nil {
							t.Error(err)
							break
						}
						post := simhca.WorkRequest{
							Op: simhca.OpWrite, RemoteAddr: sink.Start, RemoteKey: own.RemoteKey,
							Local: []simhca.Segment{{Addr: rng.Start, Length: page, Key: reg.LocalKey()}},
						}
						if err := q.Post(post); err != nil {
							t.Error(err)
						}
						c, err := q.CompletionQueue().Wait(t.Context())
						if err != nil || c.Status != simhca.StatusSuccess {
							t.Errorf("%v, %v", c.Status, err)
						}
						var b [page]byte
						if err := r.space.Load(sink.Start, b[:]); err != nil {
							t.Error(err)
						}
						got, last := binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[page-8:])
						if after := started.Load(); after == before && (got != before || last != before) || got < before && got != 0 {
							t.Errorf("version %d, %d; %d was there before the acquire, %d have begun since", got, last, before, after)
						}
						if n%7 == 0 {
							u, err := reg.Update(t.Context(), pindown.UpdateAtomic)
							if err != nil && !errors.Is(err, pindown.ErrClosed) && u.Outcome != pindown.UpdateAgain {
								t.Errorf("%+v, %v", u, err)
							}
						}
						if err := reg.Release(); err != nil {
							t.Error(err)
						}
						if t.Failed() {
							break
						}
					}
					if err := r.dev.Deregister(own); err != nil {
						t.Error(err)
					}
				})
			}
			for _, policy := range policies() {
				wg.Go(func() {
					for ctx.Err() == nil {
						list, err := r.Update(ctx, rng, policy)
						for _, u := range list {
							if u.Outcome == pindown.UpdateGone || u.KeyChanged() {
								t.Errorf("%+v", u)
							}
						}
						if err != nil && ctx.Err() == nil && len(list) == 0 {
							t.Error(err)
						}
					}
				})
			}
			rnd := rand.New(rand.NewPCG(1, uint64(onStale)))
			const prot = simhca.ProtRead | simhca.ProtWrite
			for round := range rounds {
				var kept pindown.Region
				if round%16 == 0 {
					kept = r.get(t, rng, allRemote)
				}
				n := started.Add(1)
				var err error
				if rnd.IntN(2) == 0 {
					err = r.space.Dontneed(rng)
				} else {
					err = r.space.MapFixed(rng, prot)
				}
				var b [page]byte
				binary.LittleEndian.PutUint64(b[:], n)
				binary.LittleEndian.PutUint64(b[page-8:], n)
				if err := errors.Join(err, r.space.Store(rng.Start, b[:])); err != nil {
					t.Fatal(err)
				}
				if round%16 == 0 {
					if u, err := kept.Update(t.Context(), pindown.UpdateAtomic); err != nil {
						t.Errorf("%+v, %v", u, err)
					}
					if kept.Stale() {
						t.Error("stale after an update that nothing has overtaken")
					}
					release(t, &kept)
				}
				done.Store(n)
				reg := r.get(t, rng, allRemote)
				reg2, ok := r.TryAcquireRange(vm.Range{Start: rng.Start, End: rng.Start + page}, 0)
				if ok {
					release(t, &reg2)
				}
				release(t, &reg)
			}
			cancel()
			wg.Wait()
			_ = r.Close() // with whatever is held at the moment
			users.Wait()
			st := r.Stats()
			t.Logf("updates %v, registrations %d, hits %d", st.Updates, st.Register.Count, st.Hits)
			if st.Updates[pindown.UpdateDone] == 0 {
				t.Error("nothing was updated")
			}
		})
	}
}
