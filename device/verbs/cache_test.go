package verbs_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// lockedBuffer takes a log from several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// The cache's update on verbs: under the same keys where the adapter can
// re-register, else anew under others, which is logged once and reported.
func TestCacheUpdate(t *testing.T) {
	d := open(t, nil)
	m, err := manual.New(nil)
	must(t, err)
	defer m.Close()
	var log lockedBuffer
	events := make(chan pindown.Event, 100)
	cache, err := pindown.New(d, &pindown.Options{
		Monitor: m, MergeBytes: -1, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		OnEvent: func(e pindown.Event) { events <- e },
	})
	must(t, err)
	ctx := t.Context()
	src, dst := mapMemory(t, 1), mapMemory(t, 1)
	from := register(t, d, src, pindown.LocalWrite)
	const access = pindown.LocalWrite | pindown.RemoteWrite
	for round, policy := range []pindown.UpdatePolicy{pindown.UpdateAtomic, pindown.UpdateStrict, pindown.UpdateAtomic} {
		r, err := cache.Acquire(ctx, dst, access)
		must(t, err)
		must(t, m.Do(vm.RangeOf(dst), func() error { return churn[0].do(dst) }))
		if !r.Stale() {
			t.Error("not stale")
		}
		u, err := r.Update(ctx, policy)
		must(t, err)
		want, kind := pindown.UpdateKeyChanged, pindown.EventKeyChanged
		if d.Info().Update {
			want, kind = pindown.UpdateDone, pindown.EventUpdated
		}
		if u.Outcome != want || u.KeyChanged() != !d.Info().Update {
			t.Errorf("round %d: %+v, want %v", round, u, want)
		}
		for e := range events {
			if e.Kind == kind {
				if e.NewRemoteKey != u.RemoteKey || e.RemoteKey != u.OldRemoteKey {
					t.Errorf("event %+v for %+v", e, u)
				}
				break
			}
		}
		if round == 0 {
			t.Logf("device %s: %v, remote key %#x became %#x", d.Info().Name, u.Outcome, u.OldRemoteKey, u.RemoteKey)
		}
		// The key that the peer is told reaches the page that is mapped now.
		p := connected(t, d)
		fill(src, byte('a'+round))
		must(t, p.a.Write(1, vm.RangeOf(src), from.LocalKey, addr(dst), u.RemoteKey), p.a.Do(ctx))
		if !bytes.Equal(dst, src) {
			t.Errorf("round %d: the write didn't arrive", round)
		}
		must(t, r.Release())
	}
	must(t, cache.Close())
	warned := strings.Count(log.String(), "can't update registrations")
	if want := map[bool]int{true: 0, false: 1}[d.Info().Update]; warned != want {
		t.Errorf("%d warnings, want %d:\n%s", warned, want, log.String())
	}
	if warned > 0 {
		t.Log(strings.TrimSpace(log.String()))
	}
}

// A provider without the call, as soft-RoCE's.
func TestCacheUpdateFallback(t *testing.T) {
	fakeSet(t, setReregDeny, 7)
	TestCacheUpdate(t)
}

// What stays in the cache is not left open to peers: they get a key for one
// transfer, by a memory window of either type.
func TestCacheExpose(t *testing.T) {
	d := open(t, nil)
	m, err := manual.New(nil)
	must(t, err)
	defer m.Close()
	cache, err := pindown.New(d, &pindown.Options{Monitor: m, MergeBytes: -1})
	must(t, err)
	ctx := t.Context()
	src, dst := mapMemory(t, 1), mapMemory(t, 1)
	from := register(t, d, src, pindown.LocalWrite)
	owner := connected(t, d) // b is the owner of dst, a its peer.
	// write is what the peer does with a key.
	write := func(p *pair, c byte, key uint32) error {
		fill(src, c)
		must(t, p.a.Write(1, vm.RangeOf(src), from.LocalKey, addr(dst), key))
		return p.a.Do(ctx)
	}
	refused := func(key uint32) {
		t.Helper()
		if err := write(connected(t, d), 'x', key); !errors.Is(err, verbs.ErrCompletion) || bytes.ContainsRune(dst, 'x') {
			t.Errorf("write under key %#x: %v, or it arrived", key, err)
		}
	}
	const access = pindown.LocalWrite | pindown.WindowBind
	r, err := cache.Acquire(ctx, dst, access)
	must(t, err)
	refused(r.RemoteKey())
	keys := map[uint32]bool{}
	for c := byte('a'); c < 'e'; c++ {
		x, err := r.Expose(ctx, r.Range(), pindown.RemoteWrite)
		must(t, err)
		if keys[x.RemoteKey()] {
			t.Errorf("key %#x again", x.RemoteKey())
		}
		keys[x.RemoteKey()] = true
		if err := write(owner, c, x.RemoteKey()); err != nil || !bytes.Equal(dst, src) {
			t.Errorf("write under an exposure: %v, or it didn't arrive", err)
		}
		must(t, x.Revoke(ctx))
	}
	for key := range keys {
		refused(key)
	}
	// Windows of type 2, in the order of the owner's queue.
	k, err := cache.NewFastKey(ctx, owner.b, uint64(len(dst)))
	must(t, err)
	for c := byte('k'); c < 'n'; c++ {
		key, err := k.Register(r, r.Range(), pindown.RemoteWrite, nil)
		must(t, err, owner.b.Do(ctx))
		if err := write(owner, c, key); err != nil || !bytes.Equal(dst, src) {
			t.Errorf("write under a fast key: %v, or it didn't arrive", err)
		}
		must(t, k.Invalidate(nil), owner.b.Do(ctx))
		refused(key)
	}
	must(t, k.Close(), r.Release())
	again, err := cache.Acquire(ctx, dst, access)
	must(t, err, again.Release())
	if s := cache.Stats(); s.Hits != 1 || s.Register.Count != 1 {
		t.Errorf("%d hits, %d registrations, want one of each", s.Hits, s.Register.Count)
	}
	t.Logf("device %s: %d exposures and 3 fast keys over one registration, each dead after it was revoked", d.Info().Name, len(keys))
	must(t, cache.Close())
}
