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
	tables [2]atomic.Pointer[indexTable] // of the sets
	// word is the table's; always zero, which nothing has seen, if the monitor
	// asks for a check before each hit.
	word  *atomic.Uint64
	holds *holdTable
	// state is the fork guard's word, in which release also finds who waits for
	// it: see the constants.
	state *atomic.Uint32

	table    *epoch.Table
	hitCheck func() bool // nil unless the monitor asks for it
	guard    *forkguard.Guard

	sets      [2]*regionSet // by whether RelaxedOrdering is asked for
	dev       device.Device
	opts      Options
	lim       device.Limits
	pageSize  uintptr
	born      time.Time
	noMonitor string          // why there is none; immutable after New
	selected  *auto.Selection // the monitor that New opened, or nil; guarded by mu
	parting   atomic.Pointer[auto.Selection]
	wider     sync.Map // of entry to the Range that the device registered

	stats counters

	hurry atomic.Int32 // goroutines that wait in lock

	over chan struct{} // closed when the first Close is over

	mu         sync.Mutex
	closed     bool
	kept       int         // registrations that the device kept when the cache was closed
	keptWhy    error       // for one of them
	perUseOnly PerUseCause // why nothing is cached any more
	flights    []*flight
	regions    int           // entries that are charged to the budget
	bytes      uint64        // pinned by them
	perUseHeld int           // registrations per use that are held
	budget     chan struct{} // closed when budget frees and somebody waits
	evict      evictor
	merging    merging
	uncovered  rangeRing // what the monitor refused

	// Of update.go, expose.go.
	moved    map[*entry]*entry   // from an alias to who has its registration
	aliases  map[*entry][]*entry // the inverse of moved
	lent     map[*entry]int      // holders in refs that are no users
	exposed  map[*entry]int      // exposures made of it
	revivals []revival
	warned   atomic.Bool // that the device can't update

	dying     []*entry            // dead, holders unknown
	settling  int                 // dead, and somebody makes a barrier for them
	limbo     map[*entry]struct{} // dead and held
	graves    []*entry            // settled, to be deregistered
	stuck     []stuck             // settled, deregistration has failed
	exhuming  atomic.Int32        // taken off graves, not deregistered yet
	noRetries bool                // nobody tries what is stuck any more

	lanes      []*Lane
	fenceLanes bool     // their holds need a fence
	pastClaims uint64   // of lanes that are closed
	shownHits  uint64   // what Stats has said
	scratch    []uint64 // for holders
	spare      *flight  // for the next miss

	pressure pressure // nil without; immutable after New
	reaper   reaper
}

// regionSet is the live entries that may serve the same requests: those of one
// set of attributes. They never overlap.
type regionSet struct {
	index *index
	spans spans // guarded by the cache's mu
}

// What Cache.state holds beside forkguard.Alive.
const (
	stateWaiter  = 2             // unit of the number of goroutines that wait for budget, or may soon
	stateWaiters = 1<<24 - 2     // their number
	stateRefused = 1 << 24       // a limit has kept something out since budget was last freed
	stateDead    = 1 << 25       // something dead is held, or may be
	stateBudget  = 1<<25 - 1 - 1 // somebody is interested in budget
)

func newRegionSet(table *atomic.Pointer[indexTable], maxRegions int) *regionSet {
	s := &regionSet{}
	s.index = newIndex(table, maxRegions, s.spans.all)
	return s
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
// CPU time; it goes with the last share. A machine without a usable monitor is not
// an error: see Options.Monitor. Of the device New asks only the limits: one that
// is closed is found out by the first Acquire.
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
		guard:    guard,
		state:    guard.Word(),
		dev:      dev,
		lim:      lim,
		pageSize: uintptr(os.Getpagesize()),
		born:     time.Now(),
		budget:   make(chan struct{}),
		over:     make(chan struct{}),
		holds:    newHoldTable(),
		limbo:    make(map[*entry]struct{}),
		moved:    make(map[*entry]*entry),
		aliases:  make(map[*entry][]*entry),
		lent:     make(map[*entry]int),
		exposed:  make(map[*entry]int),
	}
	for i := range c.sets {
		c.sets[i] = newRegionSet(&c.tables[i], opts.MaxRegions)
	}
	if opts.Monitor == nil {
		c.selected = auto.OpenFor(context.Background(), opts.MaxRegions)
		opts.Monitor = c.selected.Monitor()
	}
	c.opts = opts
	c.evict.init(opts.MaxRegions)
	if m := opts.Monitor; m != nil {
		c.table = m.Table()
		c.hitCheck = m.HitCheck()
	} else {
		c.perUseOnly = PerUseNoMonitor
		c.noMonitor = c.selected.Reason()
		c.opts.Logger.Warn("no usable monitor, registering per use", slog.String("reason", c.noMonitor))
		if c.table, err = nullTable(); err != nil {
			return nil, errors.Join(err, guard.Close())
		}
	}
	c.word = c.table.WordPlace()
	if c.hitCheck != nil {
		c.word = new(atomic.Uint64)
	}
	c.startPressure()
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
		return "no usable monitor: " + c.noMonitor
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

// valid reports whether nothing has touched e since it was registered, be it
// dead or not. e must have a holder, or be listed and mu held: else its watch
// may end meanwhile.
func (c *Cache) valid(e *entry) bool {
	if c.hitCheck != nil {
		c.awaitHitCheck()
	}
	return c.unchanged(e)
}

// unchanged is valid after the monitor's hit check.
func (c *Cache) unchanged(e *entry) bool {
	return !c.table.Quiet().Lost() && c.table.Stamp(&e.watch) == e.stamp
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

// unlist ends f, which the caller must not look at afterwards: if nobody waits
// for it, it serves the next miss. mu must be held.
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
	if f.done != nil {
		close(f.done)
	} else {
		c.spare = f
	}
}

// land is unlist for who doesn't hold mu.
func (c *Cache) land(f *flight) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unlist(f)
}

// publish lists e, which then may be hit, and ends f. Entries that e overlaps
// (in use, else they would be gone) get no more hits.
func (c *Cache) publish(f *flight, e *entry) {
	if f.grew {
		e.refs.Or(refGrown)
	}
	c.lock()
	// What was reserved is the target's cost; e may be smaller.
	if f.target != e.rng() {
		if spare := c.cost(f.target) - c.cost(e.rng()); spare > 0 {
			c.bytes -= spare
			c.freed()
		}
	}
	seen := seenNothing
	if c.closed {
		// Close reports it as in use, and its holder's release deregisters it.
		e.refs.Or(refDead)
		e.queue = queueLimbo
		c.limbo[e] = struct{}{}
		c.state.Or(stateDead)
	} else {
		if f.crowded || f.inserted != f.set.spans.inserted {
			var buf [4]*entry
			if old := f.set.spans.overlapping(e.rng(), buf[:0]); len(old) > 0 {
				c.retireAll(Event{Kind: EventEvicted, Cause: EvictMerge}, old...)
				c.wakeForGraves()
			}
		}
		// Word before stamp, as in a hit.
		if word := c.table.Word(); !word.Busy() && !word.Lost() && c.table.Stamp(&e.watch) == e.stamp {
			seen = uint64(word)
		}
		f.set.index.insert(e, seen)
		f.set.spans.insert(e)
		c.evict.add(e)
		if f.void {
			e.refs.Or(refVoid)
			c.retireAll(Event{Kind: EventInvalidated, Op: vm.OpManual}, e)
			c.wakeForGraves()
		}
	}
	c.unlist(f)
	c.mu.Unlock()
	if uint64(c.table.Word()) != seen && !c.unchanged(e) {
		// The news may have come when e wasn't listed yet, and doesn't come
		// again.
		c.lock()
		c.retire(e)
		c.wakeForGraves()
		c.mu.Unlock()
	}
}

// unreserve gives back what reserve took for r. mu must be held.
func (c *Cache) unreserve(r Range) {
	c.regions--
	c.bytes -= c.cost(r)
	c.freed()
	c.finish()
}

// wait announces someone who waits for budget, or may soon.
func (c *Cache) wait() { c.state.Add(stateWaiter) }

func (c *Cache) unwait() { c.state.Add(^uint32(stateWaiter - 1)) }

// freed wakes whoever waits for budget. mu must be held.
func (c *Cache) freed() {
	wanted := c.state.And(^uint32(stateRefused))
	if wanted&stateWaiters > 0 {
		close(c.budget)
		c.budget = make(chan struct{})
	}
	if wanted&stateRefused != 0 {
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
		hit = s.spans.overlapping(r, hit)
	}
	for _, e := range hit {
		e.refs.Or(refVoid)
	}
	c.retireAll(Event{Kind: EventInvalidated, Op: vm.OpManual}, hit...)
	c.wakeForGraves()
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
// release. Use [Cache.Shutdown] to wait for them. If the device doesn't take a
// registration back Close returns its error, wrapped, too. Close is idempotent, and
// returns only when the cache is closed, whoever is closing it. The device and a
// monitor given in Options stay open.
func (c *Cache) Close() error {
	if c.guard.Forked() {
		return fmt.Errorf("close: %w", ErrForked)
	}
	c.close()
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.keptError()
	if n := c.held(); n > 0 {
		err = errors.Join(fmt.Errorf("close with %d regions held: %w", n, ErrInUse), err)
	}
	return err
}

// keptError returns why the device kept registrations when the cache was closed;
// nil if it didn't. mu must be held.
func (c *Cache) keptError() error {
	if c.kept == 0 {
		return nil
	}
	return fmt.Errorf("close: %d registrations not taken back: %w", c.kept, c.keptWhy)
}

// Shutdown is Close, but waits until every region has been released and
// deregistered, or returns the context's error with ErrInUse.
func (c *Cache) Shutdown(ctx context.Context) error {
	if c.guard.Forked() {
		return fmt.Errorf("shut down: %w", ErrForked)
	}
	c.close()
	c.wait()
	defer c.unwait()
	for {
		c.mu.Lock()
		n, budget, err := c.held(), c.budget, c.keptError()
		c.mu.Unlock()
		if n == 0 {
			return err
		}
		select {
		case <-budget:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("shut down with %d regions held: %w: %w", n, ErrInUse, ctx.Err()), err)
		}
	}
}

// held returns the registrations that exist. mu must be held.
func (c *Cache) held() int { return c.regions + c.perUseHeld }

func (c *Cache) close() {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	close(c.budget) // whoever waits gets ErrClosed
	c.budget = make(chan struct{})
	var live []*entry
	for _, s := range c.sets {
		s.spans.all(func(e *entry) { live = append(live, e) })
	}
	c.retireAll(Event{Cause: EvictClose}, live...)
	c.mu.Unlock()
	if !first {
		<-c.over
		return
	}
	c.stopReaper()
	c.stopPressure()
	c.mu.Lock()
	c.finish()
	c.mu.Unlock()
	c.letGo()
	close(c.over)
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
