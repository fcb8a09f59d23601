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
