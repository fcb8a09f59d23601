package pindown

import (
	"context"
	"sync/atomic"
	"testing"
	"time"
)

// eventually waits until ok, which nothing else brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: " + what)
		}
	}
}

// releaseLate does what Release does where the processor does the load of the
// state before the store of the hold is seen: between runs in between.
func releaseLate(t *testing.T, r *Region, between func()) {
	t.Helper()
	if r.h == nil || r.h.load() != r.word || r.c.state.Load() != 1 {
		t.Fatalf("not in a hold, or state %#x", r.c.state.Load())
	}
	between()
	r.h.put(r.word & holdCount)
}

// A release that misses that its region has just died isn't the last look.
func TestLateReleaseOfDead(t *testing.T) {
	c, dev, _ := newTestCache(t, Options{})
	release(t, acquire(t, c, pages(0, 1)))
	r := acquire(t, c, pages(0, 1))
	releaseLate(t, &r, func() {
		if _, err := c.Invalidate(pages(0, 1)); err != nil {
			t.Fatal(err)
		}
	})
	eventually(t, "deregistered", func() bool { return dev.Stats().Deregisters == 1 })
}

// Nor one that misses that somebody has begun to wait for budget.
func TestLateReleaseOfBudget(t *testing.T) {
	c, _, _ := newTestCache(t, Options{MaxRegions: 1, WaitForBudget: true})
	release(t, acquire(t, c, pages(0, 1)))
	r := acquire(t, c, pages(0, 1))
	done := make(chan error, 1)
	releaseLate(t, &r, func() {
		go func() {
			b, err := c.AcquireRange(t.Context(), pages(10, 1), 0)
			if err == nil {
				err = b.Release()
			}
			done <- err
		}()
		eventually(t, "waits", func() bool { return c.Stats().Waits > 0 })
	})
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// What an eviction gives up beyond what it needs is deregistered too.
func TestEvictedBatchIsDeregistered(t *testing.T) {
	c, dev, _ := newTestCache(t, Options{MaxRegions: 640, MergeBytes: -1})
	if _, err := c.NewLane(); err != nil {
		t.Fatal(err)
	}
	for i := range uintptr(641) {
		release(t, acquire(t, c, pages(2*i, 1)))
	}
	s := c.Stats()
	if s.TotalEvictions() < 2 {
		t.Fatalf("%d evictions, want a batch", s.TotalEvictions())
	}
	eventually(t, "deregistered", func() bool { return dev.Stats().Deregisters == s.TotalEvictions() })
}

// twins finds a range of n pages two of whose blocks have the same bucket and tag
// in a table, and a page of the second.
func twins(t *testing.T, tab *indexTable) (r Range, page uintptr) {
	t.Helper()
	for n := uintptr(242); n <= 255; n++ {
		for first := range uintptr(400_000) {
			r := pages(first, n)
			_, lo, hi := indexBlocks(&entry{start: r.Start, end: r.End})
			seen := map[[2]uint64]bool{}
			for b := lo; b <= hi; b++ {
				h := indexHash(1, b)
				k := [2]uint64{tab.home(h), indexTag(h)}
				if seen[k] {
					return r, max(uintptr(b)<<4, r.Start>>indexPageShift)
				}
				seen[k] = true
			}
		}
	}
	t.Fatal("no such range")
	return Range{}, 0
}

// Two listings of one entry in one bucket under one tag are two.
func TestIndexTwins(t *testing.T) {
	r, _ := twins(t, newIndexTable(minIndexBuckets))
	var at atomic.Pointer[indexTable]
	x := newIndex(&at, 100, func(func(*entry)) {})
	e := &entry{start: r.Start, end: r.End}
	x.insert(e, 1000)
	check := func(what string, taken int) {
		t.Helper()
		n := 0
		for i := range at.Load().buckets {
			for j := range at.Load().buckets[i].list {
				l := &at.Load().buckets[i].list[j]
				if l.seen.Load()|l.span.Load() != 0 {
					t.Errorf("%s: a listing can still be hit", what)
				}
				if l.e.Load() != nil {
					n++
				}
			}
		}
		if n != taken || x.void != taken {
			t.Errorf("%s: %d places taken, %d counted, want %d", what, n, x.void, taken)
		}
	}
	_, first, last := indexBlocks(e)
	x.remove(e)
	check("removed", int(last-first+1))
	x.forget(e)
	check("forgotten", 0)
}

// And through the cache: none of them is hit after the end, and an acquire of its
// pages comes to an end.
func TestTwinsThroughCache(t *testing.T) {
	c, _, mon := newTestCache(t, Options{MergeBytes: -1})
	for i := range uintptr(8) {
		release(t, acquire(t, c, pages(1<<22+i*1024, 255)))
	}
	r, page := twins(t, c.tables[0].Load())
	part := Range{Start: page << indexPageShift, End: (page + 1) << indexPageShift}
	old := acquire(t, c, r)
	mon.Table().Touch(r)
	anew := acquire(t, c, r)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	hit, err := c.AcquireRange(ctx, part, 0)
	if err != nil || hit.e != anew.e {
		t.Fatalf("acquired %v, %v", hit.e, err)
	}
	if _, err := c.Invalidate(r); err != nil {
		t.Fatal(err)
	}
	if b, ok := c.TryAcquireRange(part, 0); ok {
		t.Errorf("hit after Invalidate, dead %v", b.e.dead())
		release(t, b)
	}
	for _, r := range []Region{hit, anew, old} {
		release(t, r)
	}
}
