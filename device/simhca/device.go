package simhca

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"

	"github.com/pindown/pindown/device"
)

// Defaults of Limits.
const (
	defaultRegistrations = 1 << 16
	defaultMaxRange      = 1 << 30
)

// Device is a simulated adapter. It implements [device.Device] and all its
// optional interfaces, less Options.Without, and is safe for concurrent use.
type Device struct {
	mem    Memory            // immutable.
	opts   Options           // immutable.
	limits device.Limits     // immutable.
	page   uintptr           // immutable.
	pd     *ProtectionDomain // immutable; what Register uses.

	ledger   ledger
	progress progress
	workers  sync.WaitGroup // the queues' goroutines.

	// mu guards the translation table and what hangs on it. It is held for
	// moments: never while memory is pinned, moved or unpinned.
	mu       sync.Mutex
	settled  sync.Cond  // of mu: a packet or a verb has ended.
	closed   bool       // guarded by mu.
	table    table      // guarded by mu.
	bytes    uint64     // guarded by mu; pinned, in whole pages.
	live     [kinds]int // guarded by mu; entries by kind.
	calls    int        // guarded by mu; verbs under way.
	toUnpin  []*pinned  // guarded by mu; see unlock.
	unpinErr error      // guarded by mu.

	// queueMu guards the lists of queues. No other lock is taken under it.
	queueMu sync.Mutex
	queues  []*Queue          // guarded by queueMu.
	rng     *rand.Rand        // guarded by queueMu; seeds the queues.
	errors  map[Status]uint64 // guarded by queueMu; error completions.
}

var (
	_ device.Updater         = (*Device)(nil)
	_ device.RevokingUpdater = (*Device)(nil)
	_ device.Flusher         = (*Device)(nil)
	_ device.Exposer         = (*Device)(nil)
	_ device.FastRegistrar   = (*Device)(nil)
)

// Open returns a device that registers mem. Nil options mean the defaults.
func Open(mem Memory, opts *Options) *Device {
	d := &Device{mem: mem, page: mem.PageSize(), errors: make(map[Status]uint64)}
	if opts != nil {
		d.opts = *opts
	}
	d.opts.Name = cmp.Or(d.opts.Name, "simhca")
	var most device.Limits
	if m, ok := mem.(interface{ limits() device.Limits }); ok {
		most = m.limits()
	}
	d.limits = device.Limits{
		MaxRegistrations: limit(d.opts.Limits.MaxRegistrations, defaultRegistrations, most.MaxRegistrations, maxEntries),
		MaxRange:         limit(d.opts.Limits.MaxRange, defaultMaxRange, most.MaxRange),
		MaxPinnedBytes:   limit(d.opts.Limits.MaxPinnedBytes, 0, most.MaxPinnedBytes),
		PageSize:         d.page,
	}
	d.table.max = d.limits.MaxRegistrations
	d.ledger.sleep = d.opts.Sleep
	d.settled.L = &d.mu
	d.progress.cond.L = &d.progress.mu
	d.pd = &ProtectionDomain{d}
	d.rng = rand.New(rand.NewPCG(d.opts.Seed, 0))
	return d
}

// limit returns the wanted value, or else the default, but not more than any
// of most. Zero is no limit.
func limit[T int | uint64](want, otherwise T, most ...T) T {
	n := cmp.Or(want, otherwise)
	for _, m := range most {
		if m != 0 && (n == 0 || m < n) {
			n = m
		}
	}
	return n
}

// Name implements [device.Device].
func (d *Device) Name() string { return d.opts.Name }

// Limits implements [device.Device].
func (d *Device) Limits() device.Limits { return d.limits }

// ProtectionDomain groups registrations and queues: a key works only for
// queues of its own domain.
type ProtectionDomain struct{ dev *Device }

// ProtectionDomain returns the domain that Register uses.
func (d *Device) ProtectionDomain() *ProtectionDomain { return d.pd }

// NewProtectionDomain returns another domain.
func (d *Device) NewProtectionDomain() *ProtectionDomain { return &ProtectionDomain{d} }

// fault asks for an injected error.
func (d *Device) fault(f Fault) error {
	if d.opts.Fault == nil {
		return nil
	}
	f.N = d.ledger.number(f.Verb, f.Step)
	return d.opts.Fault(f)
}

// can returns an error if the device was opened without a capability.
func (d *Device) can(c Capability) error {
	if d.opts.Without&c != 0 {
		return device.ErrNotSupported
	}
	return nil
}

// done counts a verb and wraps its error.
func (d *Device) done(v Verb, about any, err error) error {
	d.ledger.count(v, err)
	if err != nil {
		return fmt.Errorf("%s: %s %v: %w", d.opts.Name, v, about, err)
	}
	return nil
}

// enter begins a verb, unless the device is closed. It returns with mu held if
// there is no error.
func (d *Device) enter() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return device.ErrClosed
	}
	d.calls++
	return nil
}

// leave ends a verb: mu is held, and unlocked.
func (d *Device) leave() {
	d.calls--
	d.settled.Broadcast()
	d.unlock()
}

// Stats returns the counters.
func (d *Device) Stats() Stats {
	s := Stats{Verbs: make(map[Verb]VerbStats), Errors: make(map[Status]uint64)}
	for v := VerbRegister; v < verbs; v++ {
		s.Verbs[v] = d.ledger.stats(v)
	}
	d.queueMu.Lock()
	maps.Copy(s.Errors, d.errors)
	d.queueMu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	s.Registrations, s.Exposures, s.FastKeys = d.live[kindRegion], d.live[kindExposure], d.live[kindFast]+d.live[kindWindow]
	s.PinnedBytes = d.bytes
	return s
}

// Close ends the device: queues go into error, what is registered is
// deregistered, goroutines end. It waits for calls that are under way.
// Later calls fail with a wrapped device.ErrClosed. It is idempotent.
func (d *Device) Close() error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()

	d.queueMu.Lock()
	queues := append([]*Queue(nil), d.queues...)
	d.queueMu.Unlock()
	for _, q := range queues {
		q.close()
	}
	d.workers.Wait()

	d.mu.Lock()
	for d.calls > 0 {
		d.settled.Wait()
	}
	for _, e := range d.table.entries {
		if e != nil && e.kind != kindFree {
			d.killLocked(e)
			d.freeLocked(e)
		}
	}
	err := d.unpinErr
	d.unlock()
	if err != nil {
		return fmt.Errorf("%s: close: %w", d.opts.Name, err)
	}
	return nil
}

// unlock unlocks mu and gives back the pages that nothing holds any more.
func (d *Device) unlock() {
	list := d.toUnpin
	d.toUnpin = nil
	d.mu.Unlock()
	var err error
	for _, p := range list {
		err = errors.Join(err, p.pages.Unpin())
	}
	if err != nil {
		d.mu.Lock()
		d.unpinErr = errors.Join(d.unpinErr, err)
		d.mu.Unlock()
	}
}
