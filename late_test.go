package pindown

import (
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
