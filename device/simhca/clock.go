package simhca

import (
	"sync"
	"sync/atomic"
	"time"
)

// ledger counts what the device did and what it would have cost.
type ledger struct {
	sleep bool // immutable.

	calls [verbs]atomic.Uint64 // that succeeded.
	fails [verbs]atomic.Uint64
	spent [verbs]atomic.Int64 // nanoseconds.

	mu    sync.Mutex
	steps map[[2]uint8]int // guarded by mu; how often Fault was asked.
}

// charge adds the cost of a call on n pages.
func (l *ledger) charge(v Verb, c Cost, n int, more time.Duration) {
	d := c.Call + time.Duration(n)*c.Page + more
	l.spent[v].Add(int64(d))
	if l.sleep && d > 0 {
		time.Sleep(d)
	}
}

// count counts a call by its outcome.
func (l *ledger) count(v Verb, err error) {
	if err != nil {
		l.fails[v].Add(1)
	} else {
		l.calls[v].Add(1)
	}
}

// number returns how often v has come to s, this time included.
func (l *ledger) number(v Verb, s Step) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.steps == nil {
		l.steps = make(map[[2]uint8]int)
	}
	k := [2]uint8{uint8(v), uint8(s)}
	l.steps[k]++
	return l.steps[k]
}

// VerbStats are the counters of one verb. For VerbExecute a call is a packet,
// or a request that moves no data.
type VerbStats struct {
	Calls, Failures uint64
	// Time is what the calls cost in simulated time.
	Time time.Duration
}

// Stats are a device's counters.
type Stats struct {
	// Verbs are the counters by verb.
	Verbs map[Verb]VerbStats
	// Registrations, Exposures and FastKeys are how many there are now; windows
	// count as fast keys.
	Registrations, Exposures, FastKeys int
	// PinnedBytes is what is pinned now, in whole pages.
	PinnedBytes uint64
	// Errors counts completions with an error, of all queues, by status.
	Errors map[Status]uint64
}

// Time returns the simulated time that the device has spent in all.
func (s Stats) Time() time.Duration {
	var sum time.Duration
	for _, v := range s.Verbs {
		sum += v.Time
	}
	return sum
}

func (l *ledger) stats(v Verb) VerbStats {
	return VerbStats{Calls: l.calls[v].Load(), Failures: l.fails[v].Load(), Time: time.Duration(l.spent[v].Load())}
}
