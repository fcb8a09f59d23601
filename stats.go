package pindown

import (
	"bytes"
	"fmt"
	"io"
	"math/bits"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/pindown/pindown/vm"
)

// counters are the cache's counters that only grow.
type counters struct {
	unnoted           atomic.Uint64 // acquires that found no free hold
	undone            atomic.Uint64 // acquires that turned out to be no hits
	restamped         atomic.Uint64
	misses            [missCauses]atomic.Uint64
	invalidations     [vm.OpUnknown + 1]atomic.Uint64
	evictions         [evictCauses]atomic.Uint64
	perUse            [perUseCauses]atomic.Uint64
	waits             atomic.Uint64
	sweeps            atomic.Uint64
	registerErrors    atomic.Uint64
	deregisterErrors  atomic.Uint64
	deregisterRetries atomic.Uint64
	leaked            atomic.Uint64
	updates           [updateOutcomes]atomic.Uint64
	update            histogram
	register          histogram
	deregister        histogram
}

// histogram counts durations by powers of two of nanoseconds.
type histogram struct {
	count [40]atomic.Uint64
	sum   atomic.Int64
}

func (h *histogram) record(d time.Duration) {
	h.count[min(bits.Len64(uint64(max(d, 0))), len(h.count)-1)].Add(1)
	h.sum.Add(int64(d))
}

// Latency is the distribution of a call's duration.
type Latency struct {
	Count uint64
	Sum   time.Duration
	// Buckets[i] counts calls of at least 2^(i-1) and less than 2^i
	// nanoseconds; the last also those that took longer.
	Buckets [40]uint64
}

// Mean returns the mean duration; 0 without calls.
func (l *Latency) Mean() time.Duration {
	if l.Count == 0 {
		return 0
	}
	return l.Sum / time.Duration(l.Count)
}

// Quantile returns an upper bound, a power of two nanoseconds, of the q-th
// quantile, 0 ≤ q ≤ 1.
func (l *Latency) Quantile(q float64) time.Duration {
	rank := uint64(q * float64(l.Count))
	for i, n := range l.Buckets {
		if n > rank {
			return 1 << i
		}
		rank -= n
	}
	return 0
}

func (h *histogram) latency() Latency {
	l := Latency{Sum: time.Duration(h.sum.Load())}
	for i := range h.count {
		l.Buckets[i] = h.count[i].Load()
		l.Count += l.Buckets[i]
	}
	return l
}

// Stats is a snapshot of a cache's counters. Counters never decrease,
// but for the levels at the end.
type Stats struct {
	Monitor string // name of the monitor, "none" without
	Device  string // name of the device

	// Hits is the number of acquires that were served from the cache, of which
	// Restamped compared the stamp because some VM operation had touched some
	// watched range; the others compared one word. What is under way while Stats
	// looks may be counted as a hit already and turn out to be a miss.
	Hits, Restamped uint64

	Misses        map[MissCause]uint64
	Invalidations map[vm.Op]uint64
	Evictions     map[EvictCause]uint64
	// PerUse counts acquires that went to the device for one holder, beside the
	// cache, whether or not the device then registered.
	PerUse map[PerUseCause]uint64

	// Waits counts acquires that waited for another goroutine's registration
	// or for budget, and strict updates that waited for holders.
	Waits uint64
	// Sweeps counts times that news was lost and every region was looked at.
	Sweeps uint64
	// EventsDropped counts events that OnEvent was too slow for.
	EventsDropped uint64

	// Register and Deregister are the latencies of the device's calls that
	// succeeded; Register.Count is the number of registrations made.
	Register, Deregister             Latency
	RegisterErrors, DeregisterErrors uint64
	// DeregisterRetries counts second and later tries of a deregistration that
	// the device refused for the moment. Leaked counts registrations that it
	// didn't take back at all: they don't count against the limits, but their
	// memory may be pinned until the device is closed.
	DeregisterRetries, Leaked uint64

	// Updates counts updates of regions by what came of them, and Update is the
	// latency of the device's calls for them that succeeded.
	Updates map[UpdateOutcome]uint64
	Update  Latency

	// Levels.
	Regions     int    // registrations that the cache holds or is making
	InUse       int    // those with a holder, stale ones included
	PinnedBytes uint64 // pinned by Regions, in whole pages
	PerUseHeld  int    // registrations per use that are held
}

// TotalMisses returns the misses of all causes.
func (s *Stats) TotalMisses() uint64 { return sum(s.Misses) }

// TotalInvalidations returns the invalidations by all operations.
func (s *Stats) TotalInvalidations() uint64 { return sum(s.Invalidations) }

// TotalEvictions returns the evictions of all causes.
func (s *Stats) TotalEvictions() uint64 { return sum(s.Evictions) }

// TotalPerUse returns the registrations per use of all causes.
func (s *Stats) TotalPerUse() uint64 { return sum(s.PerUse) }

func sum[K comparable](m map[K]uint64) (n uint64) {
	for _, v := range m {
		n += v
	}
	return n
}

// String returns the figures as text, a line each, without those that are
// zero: to be pasted into a report.
func (s Stats) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "device %s, monitor %s\n", s.Device, s.Monitor)
	fmt.Fprintf(&b, "regions %d (%d in use, %d bytes pinned), per use %d\n", s.Regions, s.InUse, s.PinnedBytes, s.PerUseHeld)
	fmt.Fprintf(&b, "hits %d (%d re-stamped), misses %d\n", s.Hits, s.Restamped, s.TotalMisses())
	lines(&b, "miss", s.Misses)
	lines(&b, "invalidated by", s.Invalidations)
	lines(&b, "evicted for", s.Evictions)
	lines(&b, "per use:", s.PerUse)
	lines(&b, "update:", s.Updates)
	for _, l := range []struct {
		name string
		lat  *Latency
		errs uint64
	}{{"register", &s.Register, s.RegisterErrors}, {"deregister", &s.Deregister, s.DeregisterErrors}} {
		fmt.Fprintf(&b, "%s %d, mean %v, p50 < %v, p99 < %v, errors %d\n",
			l.name, l.lat.Count, l.lat.Mean(), l.lat.Quantile(0.5), l.lat.Quantile(0.99), l.errs)
	}
	if s.DeregisterRetries+s.Leaked > 0 {
		fmt.Fprintf(&b, "  deregistrations tried again %d, registrations leaked %d\n", s.DeregisterRetries, s.Leaked)
	}
	if s.Waits+s.Sweeps+s.EventsDropped > 0 {
		fmt.Fprintf(&b, "waits %d, sweeps %d, events dropped %d\n", s.Waits, s.Sweeps, s.EventsDropped)
	}
	return b.String()
}

func lines[K interface {
	comparable
	fmt.Stringer
	~uint8
}](w io.Writer, what string, m map[K]uint64) {
	for k := range K(255) {
		if n := m[k]; n > 0 {
			fmt.Fprintf(w, "  %s %v %d\n", what, k, n)
		}
	}
}

func load[K ~uint8](a []atomic.Uint64) map[K]uint64 {
	m := make(map[K]uint64)
	for i := range a {
		if n := a[i].Load(); n > 0 {
			m[K(i)] = n
		}
	}
	return m
}

// Stats returns a snapshot. It visits every region, holding the lock that
// misses take, so it isn't for a hot loop. In a forked child it is empty.
func (c *Cache) Stats() Stats {
	if c.guard.Forked() {
		return Stats{}
	}
	s := Stats{
		Monitor:           c.Monitor(),
		Device:            c.dev.Name(),
		Restamped:         c.stats.restamped.Load(),
		Misses:            load[MissCause](c.stats.misses[:]),
		Invalidations:     load[vm.Op](c.stats.invalidations[:]),
		Evictions:         load[EvictCause](c.stats.evictions[:]),
		PerUse:            load[PerUseCause](c.stats.perUse[:]),
		Waits:             c.stats.waits.Load(),
		Sweeps:            c.stats.sweeps.Load(),
		Register:          c.stats.register.latency(),
		Deregister:        c.stats.deregister.latency(),
		RegisterErrors:    c.stats.registerErrors.Load(),
		DeregisterErrors:  c.stats.deregisterErrors.Load(),
		DeregisterRetries: c.stats.deregisterRetries.Load(),
		Leaked:            c.stats.leaked.Load(),
		Updates:           load[UpdateOutcome](c.stats.updates[:]),
		Update:            c.stats.update.latency(),
	}
	c.reaper.mu.Lock()
	s.EventsDropped = c.reaper.dropped
	c.reaper.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	// While somebody acquires the sum can be behind what was said before, and
	// below zero.
	undone := c.stats.undone.Load()
	hits := int64(c.claims() + c.stats.unnoted.Load() - undone)
	c.shownHits = max(c.shownHits, uint64(max(hits, 0)))
	s.Hits = c.shownHits
	s.Regions, s.PinnedBytes, s.PerUseHeld = c.regions, c.bytes, c.perUseHeld
	held := c.holders()
	count := func(e *entry) {
		if held.of(e) > 0 && e.refs.Load()&refMoved == 0 {
			s.InUse++
		}
	}
	for _, set := range c.sets {
		set.spans.all(count)
	}
	for _, e := range c.dying {
		count(e)
	}
	for e := range c.limbo {
		count(e)
	}
	return s
}

// Dump writes a line for each live region: range, access, keys, holders
// and whether it is stale. It is for people; the format may change.
func (c *Cache) Dump(w io.Writer) error {
	if c.guard.Forked() {
		return fmt.Errorf("dump regions: %w", ErrForked)
	}
	if c.hitCheck != nil {
		c.awaitHitCheck()
	}
	var text bytes.Buffer
	tw := tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "START\tEND\tBYTES\tACCESS\tLKEY\tRKEY\tHOLDERS\tSTATE")
	c.mu.Lock()
	held := c.holders()
	for _, s := range c.sets {
		s.spans.all(func(e *entry) {
			state := "valid"
			if !c.unchanged(e) {
				state = "stale"
			}
			fmt.Fprintf(tw, "%#x\t%#x\t%d\t%v\t%d\t%d\t%d\t%s\n",
				e.start, e.end, e.end-e.start, e.granted(), e.localKey, e.remoteKey, held.of(e), state)
		})
	}
	c.mu.Unlock()
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("dump regions: %w", err)
	}
	if _, err := text.WriteTo(w); err != nil {
		return fmt.Errorf("dump regions: %w", err)
	}
	return nil
}
