package profile

import (
	"testing"
	"time"

	"github.com/pindown/pindown/internal/profile/probe"
)

// fakeSideband has what was told since it was read last.
type fakeSideband struct{ records []probe.Record }

func (f *fakeSideband) Drain(each func(*probe.Record)) {
	for i := range f.records {
		each(&f.records[i])
	}
	f.records = nil
}

// TestSpacesInOrder: the buffers of two processors are read one after the other, so
// that of what happens meanwhile the later may be told before the earlier. What is
// mapped after an exec is mapped there all the same, and a child has what its
// parent had.
func TestSpacesInOrder(t *testing.T) {
	const parent, child = 7, 8
	side := &fakeSideband{}
	s := newSpaces()
	s.side = side
	s.follow(parent)
	s.follow(child)
	text := func(pid uint32, at time.Duration, start uint64) probe.Record {
		return probe.Record{Kind: probe.RecordMap, PID: pid, Time: at, Start: start, Length: 4096, Path: "//anon"}
	}
	side.records = []probe.Record{text(parent, 5, 4096), text(parent, 12, 8192), {Kind: probe.RecordFork, PID: child, Parent: parent, Time: 13}}
	s.drain(10)
	side.records = []probe.Record{{Kind: probe.RecordExec, PID: parent, Time: 11}}
	s.drain(20)
	for _, c := range []struct {
		pid  uint32
		at   time.Duration
		addr uint64
		want bool
	}{
		{parent, 10, 4096, true}, {parent, 15, 4096, false}, {parent, 15, 8192, true}, {parent, 11, 8192, false},
		{child, 15, 8192, true}, {child, 15, 4096, false},
	} {
		if got := s.at(c.pid, c.at).find(c.addr, c.at) != nil; got != c.want {
			t.Errorf("process %d at %d: %#x is mapped: %t", c.pid, c.at, c.addr, got)
		}
	}
	// What has passed is asked for before it is needed.
	side.records = []probe.Record{text(parent, 21, 1<<20)}
	if s.upTo(20); len(side.records) == 0 {
		t.Error("asked though all is known")
	}
	if s.upTo(21); s.at(parent, 22).find(1<<20, 22) == nil {
		t.Error("not known in time")
	}
}
