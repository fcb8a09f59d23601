//go:build amd64 && !race

package pindown

import "testing"

// These are about what only a plain store can do: see plainStores.

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
