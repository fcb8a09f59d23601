package verbs_test

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/pindown/pindown"
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
