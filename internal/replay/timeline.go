package replay

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/vm"
)

type actionKind uint8

// Kinds of action, in the order in which they happen at one time.
const (
	actReset actionKind = iota + 1 // the whole address space is gone
	actRelease
	actInvalidate // the pages of a range are others now
	actAcquire
)

// action is something that happens to a cache.
type action struct {
	at         int64  // nanoseconds
	start, end uint64 // pages
	slot       uint32 // of the request
	space      uint32 // the process
	kind       actionKind
	write      bool
	last       bool // of actReset: the process has ended
}

const (
	window      = 1 << 15 // actions kept for putting them in order
	maxSpaces   = 1 << 17 // processes at a time
	maxInFlight = 1 << 22 // requests
)

// timeline makes actions of events, in order of time as far as a window
// allows: recorders may write an event when the call returns.
type timeline struct {
	opts    *Options
	shift   uint // of a page
	pending []action
	spaces  map[uint32]uint32
	each    []perSpace
	unused  []uint32                     // spaces of processes that have ended
	live    map[uint32]map[handle]uint32 // registrations that a process holds
	free    []uint32
	slots   uint32
	now     int64
	out     func([]action) // doesn't keep them
	counts  Counts
	meta    trace.Meta
}

// perSpace is what is counted for a process.
type perSpace struct{ changing, requests uint64 }

// handle names a registration of a process.
type handle struct {
	via           trace.Via
	owner, handle uint64
}

// Counts are of what was in the trace.
type Counts struct {
	// Records is how many were read; Events how many of them were events.
	Records uint64 `json:"records"`
	Events  uint64 `json:"events"`
	// Operations is the number of VM operations, by kind, that changed pages.
	Operations map[string]uint64 `json:"operations"`
	Changing   uint64            `json:"changing_operations"`
	// Monitored are those in processes that have requests: the others need no
	// monitor.
	Monitored uint64 `json:"monitored_operations"`
	// Uses and Registrations are the requests by kind; UseBytes their lengths.
	Uses          uint64 `json:"uses"`
	UseBytes      uint64 `json:"use_bytes"`
	Registrations uint64 `json:"registrations"`
	RegisterBytes uint64 `json:"register_bytes"`
	// Skipped is the number of uses and registrations that were no requests:
	// through a registration of the program's own (Registered), failed, empty, too
	// small, or not asked for.
	Skipped    uint64 `json:"skipped"`
	Registered uint64 `json:"skipped_registered_uses"`
	Processes  int    `json:"processes"`
	// Lost is the number of records that the recorder or the file lost, as far
	// as known; LostPlaces the places at which it happened.
	Lost       uint64 `json:"lost"`
	LostPlaces uint64 `json:"lost_places"`
	// Late is the number of events that came too late to be put in order.
	Late uint64 `json:"late"`
	// Damage describes what is missing of the file.
	Damage string `json:"damage,omitempty"`
	// Seconds is the time from the start of the recording to the last event.
	Seconds float64 `json:"seconds"`

	operations [trace.OpUnknown + 1]uint64
}

func newTimeline(opts *Options, out func([]action)) *timeline {
	return &timeline{
		opts: opts, shift: 12, out: out,
		spaces: make(map[uint32]uint32), live: make(map[uint32]map[handle]uint32),
	}
}

// run reads the whole trace.
func (t *timeline) run(r *trace.Reader, canceled func() error) error {
	for {
		rec, err := r.Next()
		if err != nil {
			damage, ok := errors.AsType[*trace.DamageError](err)
			switch {
			case errors.Is(err, io.EOF):
			case ok:
				t.counts.Damage = damage.Error()
			default:
				return err
			}
			break
		}
		t.counts.Records++
		switch rec := rec.(type) {
		case *trace.Event:
			if err := t.event(rec); err != nil {
				return err
			}
		case *trace.Lost:
			t.counts.LostPlaces++
			if t.counts.Lost += rec.Records; t.counts.Lost < rec.Records {
				t.counts.Lost = math.MaxUint64
			}
		case *trace.Meta:
			t.meta = *rec
			if n := rec.PageSize; n >= 512 && t.counts.Events == 0 {
				for t.shift = 9; 1<<t.shift < n; t.shift++ {
				}
			}
		}
		if len(t.pending) >= 2*window {
			if err := canceled(); err != nil {
				return err
			}
			t.flush(window)
		}
	}
	t.flush(len(t.pending))
	for space := range t.each {
		t.count(uint32(space))
	}
	t.counts.Seconds = time.Duration(t.now).Seconds()
	t.counts.Operations = make(map[string]uint64)
	for o, n := range t.counts.operations {
		if n > 0 {
			t.counts.Operations[trace.Op(o).String()] = n
		}
	}
	return nil
}

// flush sorts what is pending and gives out the first n.
func (t *timeline) flush(n int) {
	order := func(a, b action) int {
		if a.at != b.at {
			return cmp.Compare(a.at, b.at)
		}
		if a.kind != b.kind {
			return cmp.Compare(a.kind, b.kind)
		}
		return cmp.Compare(a.slot, b.slot)
	}
	if !slices.IsSortedFunc(t.pending, order) {
		slices.SortStableFunc(t.pending, order)
	}
	batch := t.pending[:n]
	for i := range batch {
		a := &batch[i]
		if a.at < t.now {
			t.counts.Late++
			a.at = t.now
		}
		t.now = a.at
		switch {
		case a.kind == actRelease:
			t.free = append(t.free, a.slot)
		case a.kind == actReset && a.last:
			t.count(a.space)
			t.each[a.space] = perSpace{}
			t.unused = append(t.unused, a.space)
		}
	}
	if n > 0 {
		t.out(batch)
	}
	t.pending = t.pending[:copy(t.pending, t.pending[n:])]
}

// count adds up what is counted for a process.
func (t *timeline) count(space uint32) {
	if x := &t.each[space]; x.requests > 0 {
		t.counts.Monitored += x.changing
	}
}

func (t *timeline) space(pid uint32) (uint32, error) {
	if s, ok := t.spaces[pid]; ok {
		return s, nil
	}
	s := uint32(len(t.each))
	switch n := len(t.unused); {
	case n > 0:
		s, t.unused = t.unused[n-1], t.unused[:n-1]
	case len(t.each) == maxSpaces:
		return 0, fmt.Errorf("%w: more than %d processes at once", ErrLimit, maxSpaces)
	default:
		t.each = append(t.each, perSpace{})
	}
	t.counts.Processes++
	t.spaces[pid] = s
	return s, nil
}

func (t *timeline) slot() (uint32, error) {
	if n := len(t.free); n > 0 {
		s := t.free[n-1]
		t.free = t.free[:n-1]
		return s, nil
	}
	if t.slots == maxInFlight {
		return 0, fmt.Errorf("%w: more than %d requests at once", ErrLimit, maxInFlight)
	}
	t.slots++
	return t.slots - 1, nil
}

// pages returns the range in whole pages; none if it is empty.
func (t *timeline) pages(r vm.Range) (start, end uint64) {
	if r.Empty() {
		return 0, 0
	}
	return uint64(r.Start) >> t.shift, (uint64(r.End)-1)>>t.shift + 1
}

func (t *timeline) event(e *trace.Event) error {
	t.counts.Events++
	space, err := t.space(e.PID)
	if err != nil {
		return err
	}
	begin, end := int64(e.Start), int64(e.Start)+int64(e.Duration)
	switch e.Kind {
	case trace.KindOp:
		t.operation(e, space, end)
	case trace.KindUse:
		if e.Failed() || e.Range.Empty() || e.Via != trace.ViaInvalid || !t.opts.Requests.uses() ||
			uint64(e.Range.Len()) < t.opts.MinUse {
			t.counts.Skipped++
			if e.Via != trace.ViaInvalid {
				t.counts.Registered++
			}
			return nil
		}
		t.counts.Uses++
		t.each[space].requests++
		t.counts.UseBytes += uint64(e.Range.Len())
		slot, err := t.slot()
		if err != nil {
			return err
		}
		s, n := t.pages(e.Range)
		t.pending = append(t.pending,
			action{at: begin, kind: actAcquire, start: s, end: n, slot: slot, space: space, write: e.Use.Writes()},
			action{at: max(end, begin+1), kind: actRelease, slot: slot, space: space})
	case trace.KindRegister:
		if e.Failed() || e.Range.Empty() || !t.opts.Requests.registrations() {
			t.counts.Skipped++
			return nil
		}
		h := handle{e.Via, e.Owner, e.Handle}
		live := t.live[space]
		if live == nil {
			live = make(map[handle]uint32)
			t.live[space] = live
		}
		if old, ok := live[h]; ok {
			t.pending = append(t.pending, action{at: begin, kind: actRelease, slot: old, space: space})
		}
		t.counts.Registrations++
		t.each[space].requests++
		t.counts.RegisterBytes += uint64(e.Range.Len())
		slot, err := t.slot()
		if err != nil {
			return err
		}
		live[h] = slot
		s, n := t.pages(e.Range)
		t.pending = append(t.pending, action{at: begin, kind: actAcquire, start: s, end: n, slot: slot, space: space, write: true})
	case trace.KindDeregister:
		h := handle{e.Via, e.Owner, e.Handle}
		if slot, ok := t.live[space][h]; ok && !e.Failed() {
			delete(t.live[space], h)
			t.pending = append(t.pending, action{at: begin, kind: actRelease, slot: slot, space: space})
		}
	default:
	}
	return nil
}

func (t *timeline) operation(e *trace.Event, space uint32, at int64) {
	a, b := e.Changed()
	if a.Empty() && b.Empty() {
		return
	}
	if e.Op == trace.OpExec || e.Op == trace.OpExit {
		t.pending = append(t.pending, action{at: at, kind: actReset, space: space, last: e.Op == trace.OpExit})
		// What it held is gone; this frees the requests.
		for _, slot := range slices.Sorted(maps.Values(t.live[space])) {
			t.pending = append(t.pending, action{at: at, kind: actRelease, slot: slot, space: space})
		}
		delete(t.live, space)
		if e.Op == trace.OpExit {
			delete(t.spaces, e.PID)
		}
		return
	}
	t.counts.Changing++
	t.each[space].changing++
	t.counts.operations[e.Op]++
	for _, r := range []vm.Range{a, b} {
		if s, n := t.pages(r); s < n {
			t.pending = append(t.pending, action{at: at, kind: actInvalidate, start: s, end: n, space: space})
		}
	}
}
