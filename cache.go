package pindown

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/btree"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/forkguard"
	"github.com/pindown/pindown/monitor/auto"
	"github.com/pindown/pindown/vm"
)

// Range is the half-open range [Start,End) of virtual addresses.
type Range = vm.Range

// Access is what a registration lets the device and its peers do.
type Access = device.Access

// Access bits; see package device.
const (
	LocalRead       = device.LocalRead
	LocalWrite      = device.LocalWrite
	RemoteRead      = device.RemoteRead
	RemoteWrite     = device.RemoteWrite
	RemoteAtomic    = device.RemoteAtomic
	WindowBind      = device.WindowBind
	RelaxedOrdering = device.RelaxedOrdering
)

// Cache is a cache of registrations with one device. Create it with [New]. Its
// methods may be called from many goroutines.
type Cache struct {
	// What a hit reads stands first; all of it is immutable after New.
	sets     [2]*regionSet // by whether RelaxedOrdering is asked for
	table    *epoch.Table
	guard    *forkguard.Guard
	hitCheck func() bool // nil unless the monitor asks for it

	dev      device.Device
	opts     Options
	lim      device.Limits
	pageSize uintptr
	born     time.Time
	selected *auto.Selection // the monitor that New opened, or nil; guarded by mu
	parting  atomic.Pointer[auto.Selection]

	// wanted says whether anybody is interested in budget: how many goroutines
	// wait for it, or may soon, and whether a limit has kept something out
	// since it was last freed.
	wanted atomic.Int32
	stats  counters

	mu         sync.Mutex
	closed     bool
	perUseOnly PerUseCause // why nothing is cached any more
	flights    []*flight
	regions    int           // entries that are charged to the budget
	bytes      uint64        // pinned by them
	perUseHeld int           // registrations per use that are held
	budget     chan struct{} // closed when budget frees and somebody waits
	graves     []*entry      // settled, to be deregistered
	zombies    int           // dead entries that still have a holder
	evict      evictor

	reaper reaper
}

// regionSet is the live entries that may serve the same requests: those of one
// set of attributes. They never overlap.
type regionSet struct {
	index *index
	tree  *btree.BTreeG[treeItem] // guarded by the cache's mu
}

// wantedRefused is a flag in Cache.wanted.
const wantedRefused = 1 << 24

// treeItem carries the start address beside the entry, so that a search
// doesn't touch entries.
type treeItem struct {
	start uintptr
	e     *entry
}

func newRegionSet() *regionSet {
	s := &regionSet{tree: btree.NewG(32, func(a, b treeItem) bool { return a.start < b.start })}
	s.index = newIndex(func(visit func(*entry)) {
		s.tree.Ascend(func(i treeItem) bool { visit(i.e); return true })
	})
	return s
}

// overlapping appends the live entries that overlap r, in address order. mu
// must be held.
func (s *regionSet) overlapping(r Range, dst []*entry) []*entry {
	s.tree.DescendLessOrEqual(treeItem{start: r.Start}, func(i treeItem) bool {
		if i.e.end > r.Start && i.start != r.Start {
			dst = append(dst, i.e)
		}
		return false
	})
	s.tree.AscendRange(treeItem{start: r.Start}, treeItem{start: r.End}, func(i treeItem) bool {
		dst = append(dst, i.e)
		return true
	})
	return dst
}

// covering returns the live entry that contains r, or nil. mu must be held.
func (s *regionSet) covering(r Range) (e *entry) {
	s.tree.DescendLessOrEqual(treeItem{start: r.Start}, func(i treeItem) bool {
		if i.e.end >= r.End {
			e = i.e
		}
		return false
	})
	return e
}

func (c *Cache) set(a Access) *regionSet {
	if a&RelaxedOrdering != 0 {
		return c.sets[1]
	}
	return c.sets[0]
}

// New returns a cache of registrations with dev. nil options mean defaults.
//
// With Options.Monitor nil, New takes a share in the process's monitor. The first
// share loads it and runs its self-test, which costs some tenths of a second of
// CPU time; it goes with the last share. A machine without a usable monitor is not an error: see Options.Monitor.
//
// Errors: ErrOptions, and the error of mmap(2) for the fork guard.
func New(dev device.Device, o *Options) (*Cache, error) {
	var lim device.Limits
	if dev != nil {
		lim = dev.Limits()
	}
	opts := o.withDefaults(lim)
	if err := opts.validate(dev); err != nil {
		return nil, err
	}
	guard, err := forkguard.New()
	if err != nil {
		return nil, fmt.Errorf("new cache: %w", err)
	}
	c := &Cache{
		sets:     [2]*regionSet{newRegionSet(), newRegionSet()},
		guard:    guard,
		dev:      dev,
		lim:      lim,
		pageSize: uintptr(os.Getpagesize()),
		born:     time.Now(),
		budget:   make(chan struct{}),
	}
	if opts.Monitor == nil {
		c.selected = auto.Open(context.Background())
		opts.Monitor = c.selected.Monitor()
	}
	c.opts = opts
	c.evict.init(opts.MaxRegions, &c.stats.hits)
	if m := opts.Monitor; m != nil {
		c.table = m.Table()
		c.hitCheck = m.HitCheck()
	} else {
		c.perUseOnly = PerUseNoMonitor
		c.opts.Logger.Warn("no usable monitor, registering per use", slog.String("reason", c.selected.Reason()))
		if c.table, err = nullTable(); err != nil {
			return nil, errors.Join(err, guard.Close())
		}
	}
	c.startReaper()
	// Methods of a closed cache still ask the guard.
	runtime.AddCleanup(c, func(g *forkguard.Guard) { _ = g.Close() }, guard)
	return c, nil
}

// nullTable is what a cache without a monitor checks hits against, so that the
// hit path has no case for it: a lost table, with which nothing is valid.
func nullTable() (*epoch.Table, error) {
	t, err := epoch.Format(make([]byte, epoch.Size(0)), epoch.BucketBitsFor(0))
	if err != nil {
		return nil, fmt.Errorf("new cache: %w", err)
	}
	t.SetLost()
	return t, nil
}

// Monitor returns the name of the monitor in use, or "none".
func (c *Cache) Monitor() string {
	if c.opts.Monitor == nil {
		return "none"
	}
	return c.opts.Monitor.Name()
}

// Reason says why the cache registers everything per use; empty if it caches.
func (c *Cache) Reason() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.perUseOnly {
	case PerUseInvalid:
		return ""
	case PerUseNoMonitor:
		return "no usable monitor: " + c.selected.Reason()
	default:
		return c.perUseOnly.String()
	}
}

// clock returns the time since New; it is quicker than time.Now.
func (c *Cache) clock() time.Duration { return time.Since(c.born) }

// round returns what is registered for r: whole pages, where the device lets
// us.
func (c *Cache) round(r Range) Range {
	if c.lim.PageSize == 0 {
		return r
	}
	out := r.RoundOut(c.lim.PageSize)
	if !out.Contains(r) || c.lim.MaxRange != 0 && uint64(out.Len()) > c.lim.MaxRange {
		// At the very end of the address space, or too long only by rounding.
		return r
	}
	return out
}

// cost is what r takes of MaxBytes.
func (c *Cache) cost(r Range) uint64 { return uint64(r.RoundOut(c.pageSize).Len()) }

// fits reports whether r alone is within the limits.
func (c *Cache) fits(r Range) bool {
	return c.cost(r) <= c.opts.MaxBytes && (c.lim.MaxRange == 0 || uint64(r.Len()) <= c.lim.MaxRange)
}

// valid reports whether nothing has touched e since it was registered, and
// notes the word so that the next check is quick. e must have a holder, or be
// listed and mu held: else its watch may end meanwhile.
func (c *Cache) valid(e *entry) bool {
	if c.hitCheck != nil {
		c.awaitHitCheck()
	}
	return c.unchanged(e)
}

// unchanged is valid after the monitor's hit check.
func (c *Cache) unchanged(e *entry) bool {
	return uint64(c.table.Word()) == e.seen.Load() || c.table.Check(&e.watch, e.stamp, &e.seen) == epoch.VerdictValid
}

// overlappingFlight returns a flight of the set that overlaps r, or nil. mu
// must be held.
func (c *Cache) overlappingFlight(set *regionSet, r Range) *flight {
	for _, f := range c.flights {
		if f.set == set && (f.target.Overlaps(r) || f.want.Overlaps(r)) {
			return f
		}
	}
	return nil
}

// unlist ends f. mu must be held.
func (c *Cache) unlist(f *flight) {
	for i, g := range c.flights {
		if g == f {
			last := len(c.flights) - 1
			c.flights[i] = c.flights[last]
			c.flights[last] = nil
			c.flights = c.flights[:last]
			break
		}
	}
	close(f.done)
}

func (c *Cache) land(f *flight) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unlist(f)
}

// publish lists e, which then may be hit, and ends f. Entries that e overlaps
// (in use, else they would be gone) get no more hits.
func (c *Cache) publish(f *flight, e *entry) {
	c.mu.Lock()
	// What was reserved is the target's cost; e may be smaller.
	if spare := c.cost(f.target) - c.cost(e.rng()); spare > 0 {
		c.bytes -= spare
		c.freed()
	}
	var old []*entry
	if c.closed {
		// Close reports it as in use, and its holder's release deregisters it.
		e.refs.Or(refDead)
		c.zombies++
	} else {
		old = f.set.overlapping(e.rng(), nil)
		for _, v := range old {
			c.unpublish(v)
			c.laid(v, v.kill(&c.stats.hits))
		}
		f.set.index.insert(e)
		f.set.tree.ReplaceOrInsert(treeItem{start: e.start, e: e})
		c.evict.add(e)
		if f.void {
			c.retireLocked(e, vm.OpManual)
		}
	}
	c.unlist(f)
	c.mu.Unlock()
	if !c.unchanged(e) {
		// The news may have come when e wasn't listed yet, and doesn't come
		// again.
		c.retire(e, vm.OpUnknown)
	}
	for _, v := range old {
		c.stats.evictions[EvictMerge].Add(1)
		c.tell(Event{Kind: EventEvicted, Range: v.rng(), Cause: EvictMerge, InUse: v.holders() > 0, LocalKey: v.localKey, RemoteKey: v.remoteKey})
	}
}

// unpublish takes e off every list, so that no look-up finds it. mu must be
// held, and e be listed.
func (c *Cache) unpublish(e *entry) {
	set := c.set(e.access)
	set.index.remove(e)
	set.tree.Delete(treeItem{start: e.start})
	c.evict.drop(e)
}

// listed reports whether e is live. mu must be held.
func (e *entry) listed() bool { return e.queue != queueNone }

// retire ends a live entry that has been found stale: no hit will find it
// again. Its registration goes when the last holder does. It is harmless on an
// entry that is retired already.
func (c *Cache) retire(e *entry, op vm.Op) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.retireLocked(e, op)
}

func (c *Cache) retireLocked(e *entry, op vm.Op) {
	if e.listed() {
		c.laid(e, c.unlistStale(e, op))
	}
}

// replace is retire by someone who is about to register e's range anew. If the
// entry has no holder it is deregistered here and now: that costs no more than
// to wake the reaper, and makes room.
func (c *Cache) replace(e *entry) {
	c.mu.Lock()
	if !e.listed() {
		c.mu.Unlock()
		return
	}
	mine := c.unlistStale(e, vm.OpUnknown)
	if !mine {
		c.zombies++
	}
	c.mu.Unlock()
	if mine {
		c.exhume(e)
	}
}

// unlistStale unpublishes a stale entry, marks it dead, counts and tells. It
// reports whether the caller has to deregister it. mu must be held.
func (c *Cache) unlistStale(e *entry, op vm.Op) (mine bool) {
	c.unpublish(e)
	mine = e.kill(&c.stats.hits)
	c.stats.invalidations[op].Add(1)
	c.tell(Event{Kind: EventInvalidated, Range: e.rng(), Op: op, InUse: !mine, LocalKey: e.localKey, RemoteKey: e.remoteKey})
	return mine
}

// laid queues an entry that has just been marked dead for deregistration, if
// that is for the caller to do, and else counts it as held. mu must be held.
func (c *Cache) laid(e *entry, mine bool) {
	if mine {
		c.graves = append(c.graves, e)
		c.reaper.wake()
	} else {
		c.zombies++
	}
}

// bury hands a settled entry to the reaper, which deregisters it; after Close
// the caller does.
func (c *Cache) bury(e *entry) {
	c.mu.Lock()
	c.zombies--
	if !c.closed {
		c.graves = append(c.graves, e)
		c.mu.Unlock()
		c.reaper.wake()
		return
	}
	c.mu.Unlock()
	c.exhume(e)
}

// exhume deregisters a settled entry and gives its budget back.
func (c *Cache) exhume(e *entry) {
	_ = c.deviceDeregister(e) // counted and told
	c.table.Unwatch(&e.watch)
	c.mu.Lock()
	c.unreserve(e.rng())
	c.mu.Unlock()
	c.letGo()
}

// exhumeGraves deregisters everything that waits for it, and reports whether
// there was anything.
func (c *Cache) exhumeGraves() bool {
	any := false
	for {
		c.mu.Lock()
		batch := c.graves
		c.graves = nil
		c.mu.Unlock()
		if len(batch) == 0 {
			return any
		}
		any = true
		for _, e := range batch {
			c.exhume(e)
		}
	}
}

// unreserve gives back what reserve took for r. mu must be held.
func (c *Cache) unreserve(r Range) {
	c.regions--
	c.bytes -= c.cost(r)
	c.freed()
	c.finish()
}

// freed wakes whoever waits for budget. mu must be held.
func (c *Cache) freed() {
	wanted := c.wanted.And(^wantedRefused)
	if wanted&^wantedRefused > 0 {
		close(c.budget)
		c.budget = make(chan struct{})
	}
	if wanted&wantedRefused != 0 {
		c.tell(Event{Kind: EventBudgetFreed})
	}
}

// Invalidate gives up every cached region that overlaps r: those in use get no
// more hits and are deregistered at their last release. It is for what a
// program knows and no monitor sees; the next Acquire registers anew. It
// returns the number of regions. Errors: ErrRange, ErrClosed, ErrForked.
func (c *Cache) Invalidate(r Range) (int, error) {
	if err := r.Check(); err != nil {
		return 0, fmt.Errorf("invalidate %v: %w: %w", r, ErrRange, err)
	}
	if c.guard.Forked() {
		return 0, fmt.Errorf("invalidate %v: %w", r, ErrForked)
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return 0, fmt.Errorf("invalidate %v: %w", r, ErrClosed)
	}
	defer c.mu.Unlock()
	var hit []*entry
	for _, s := range c.sets {
		hit = s.overlapping(r, hit)
	}
	for _, e := range hit {
		c.retireLocked(e, vm.OpManual)
	}
	// A registration that is on its way over r was pinned at an unknown time:
	// it ends as it is published.
	for _, f := range c.flights {
		if f.target.Overlaps(r) || f.want.Overlaps(r) {
			f.void = true
		}
	}
	return len(hit), nil
}

// Close ends the cache: idle regions are deregistered before it returns, and
// no region can be acquired any more. If regions are in use it returns a
// wrapped [ErrInUse] with their number; each is deregistered at its last
// release. Use [Cache.Shutdown] to wait for them. Close is idempotent. The
// device and a monitor given in Options stay open.
func (c *Cache) Close() error {
	if c.guard.Forked() {
		return fmt.Errorf("close: %w", ErrForked)
	}
	c.close()
	if n := c.inUse(); n > 0 {
		return fmt.Errorf("close with %d regions held: %w", n, ErrInUse)
	}
	return nil
}

// Shutdown is Close, but waits until every region has been released and
// deregistered, or returns the context's error with ErrInUse.
func (c *Cache) Shutdown(ctx context.Context) error {
	if c.guard.Forked() {
		return fmt.Errorf("shut down: %w", ErrForked)
	}
	c.close()
	c.wanted.Add(1)
	defer c.wanted.Add(-1)
	for {
		c.mu.Lock()
		n, budget := c.held(), c.budget
		c.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-budget:
		case <-ctx.Done():
			return fmt.Errorf("shut down with %d regions held: %w: %w", n, ErrInUse, ctx.Err())
		}
	}
}

// held returns the registrations that exist. mu must be held.
func (c *Cache) held() int { return c.regions + c.perUseHeld }

func (c *Cache) inUse() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held()
}

func (c *Cache) close() {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	close(c.budget) // whoever waits gets ErrClosed
	c.budget = make(chan struct{})
	var live []*entry
	for _, s := range c.sets {
		s.tree.Ascend(func(i treeItem) bool { live = append(live, i.e); return true })
	}
	for _, e := range live {
		c.unpublish(e)
		c.stats.evictions[EvictClose].Add(1)
		c.laid(e, e.kill(&c.stats.hits))
	}
	c.mu.Unlock()
	if !first {
		<-c.reaper.done
		return
	}
	c.stopReaper()
	c.exhumeGraves()
	c.mu.Lock()
	c.finish()
	c.mu.Unlock()
	c.letGo()
}

// finish notes that the closed cache holds nothing any more, so that the shared
// monitor may go: until then its table is in use. mu must be held; whoever
// releases it calls letGo.
func (c *Cache) finish() {
	if c.closed && c.held() == 0 && c.selected != nil {
		c.parting.Store(c.selected)
		c.selected = nil
	}
}

// letGo closes the share in the monitor that finish has set aside. It takes
// locks and makes system calls, so mu must not be held.
func (c *Cache) letGo() {
	if s := c.parting.Swap(nil); s != nil {
		_ = s.Close() // nothing of ours depends on it any more
	}
}
