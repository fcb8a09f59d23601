package devicetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// maxFakeIndex bounds the index part of a key: 24 bits beside an 8-bit counter.
const maxFakeIndex = 1 << 24

// FakeOptions configure a [Fake]. The zero value, or nil, is a device without
// limits and without faults.
//
// The hooks are called with no lock held, from the goroutine that called the
// device, so they may call the fake, unmap memory, or block. They are copied by
// [NewFake]; to change behaviour during a test, let the hook read a variable.
type FakeOptions struct {
	// Name is the device's name; "fake" if empty.
	Name string
	// Limits are what Limits returns, and are enforced: MaxRegistrations with
	// ErrNoSlots, MaxPinnedBytes (counted in whole pages) with ErrNoMemory,
	// MaxRange with ErrTooLarge.
	Limits device.Limits
	// Round makes the fake round each registration outward to
	// Limits.PageSize (or the system's page size).
	Round bool
	// Forbid lists access bits that are refused with ErrAccess.
	Forbid device.Access
	// Grant lists access bits that every registration gets beside those asked
	// for, as for a device that can't pin for reading only.
	Grant device.Access
	// CountsOnly keeps four bytes for each registration instead of 32: Live
	// returns nothing, and a registration's fields but Handle aren't verified.
	CountsOnly bool

	// OnRegister decides whether the n-th call of Register, counted from 1,
	// fails. It runs first; an error is returned to the caller, wrapped.
	OnRegister func(n int, r vm.Range, access device.Access) error
	// BeforePin runs before the pages are looked up, AfterPin after that and
	// before Register or Update returns. n counts the calls of Register and
	// Update together.
	BeforePin, AfterPin func(n int, r vm.Range)
	// OnDeregister decides whether the n-th call of Deregister fails; the
	// registration stays live then.
	OnDeregister func(n int, reg device.Registration) error
	// OnUpdate decides whether the n-th call of Update fails. The registration
	// stays intact, unless the error wraps ErrRegistrationLost.
	OnUpdate func(n int, reg device.Registration) error
	// OnMisuse is told of each deregistration or update of what isn't
	// registered. Misuses are recorded for AssertEmpty too.
	OnMisuse func(err error)

	// Frames, if set, is asked for the frame numbers of the pages of each
	// range while it is "pinned"; see [Fake.Frames]. The fake pins nothing by
	// itself, so a freed frame can come back behind the same address; set
	// Backing as well to compare frames that are held.
	Frames func(r vm.Range) ([]uint64, error)
	// Backing, if set, really registers each range: the fake is then a device
	// with hooks and fault injection round another. Keys are Backing's.
	Backing device.Device
}

// FakeStats are a fake's counters. All but Live and PinnedBytes only grow.
type FakeStats struct {
	// Registers, Deregisters and Updates count the calls that succeeded.
	Registers, Deregisters, Updates uint64
	// Failures counts the calls that returned an error.
	Failures uint64
	// Live is the number of registrations now, PeakLive the highest so far.
	Live, PeakLive int
	// PinnedBytes is the memory in live registrations in whole pages, a page
	// counted once for each registration that holds it; PeakPinnedBytes is the
	// highest so far.
	PinnedBytes, PeakPinnedBytes uint64
}

// Fake is a [device.Device] in memory. It has no cost but a short mutex, and
// one registration takes 32 bytes, or four with CountsOnly. It is safe for
// concurrent use.
//
// A Fake isn't an Updater; [Fake.Updater] is a view of it that is one.
type Fake struct {
	opts FakeOptions // immutable after NewFake.
	page uintptr     // immutable after NewFake; what pinned bytes are counted in.

	mu        sync.Mutex
	closed    bool                           // guarded by mu.
	gens      []uint32                       // guarded by mu; odd while the slot is live.
	live      []fakeEntry                    // guarded by mu; parallel to gens unless CountsOnly.
	free      []uint32                       // guarded by mu; a stack of free slots.
	frames    map[uint32][]uint64            // guarded by mu; with Frames only.
	backing   map[uint32]device.Registration // guarded by mu; with Backing only.
	stats     FakeStats                      // guarded by mu.
	reserved  int                            // guarded by mu; registrations being made.
	reservedB uint64                         // guarded by mu; their bytes.
	misuses   []error                        // guarded by mu.

	nRegister, nDeregister, nUpdate, nPin atomic.Int64 // calls so far.
}

// maxMisuses bounds what is remembered of a test gone wrong.
const maxMisuses = 32

type fakeEntry struct {
	r      vm.Range
	access device.Access
}

var (
	_ device.Device  = (*Fake)(nil)
	_ device.Updater = (*UpdatingFake)(nil)
)

// NewFake returns a fake device. Nil options are the zero FakeOptions.
func NewFake(opts *FakeOptions) *Fake {
	f := &Fake{page: uintptr(os.Getpagesize())}
	if opts != nil {
		f.opts = *opts
	}
	if f.opts.Name == "" {
		f.opts.Name = "fake"
	}
	if f.opts.Limits.PageSize != 0 {
		f.page = f.opts.Limits.PageSize
	}
	return f
}

// UpdatingFake is a [Fake] that can update registrations.
type UpdatingFake struct{ *Fake }

// Updater returns a view of f that implements [device.Updater].
func (f *Fake) Updater() *UpdatingFake { return &UpdatingFake{f} }

// Name implements [device.Device].
func (f *Fake) Name() string { return f.opts.Name }

// Limits implements [device.Device].
func (f *Fake) Limits() device.Limits { return f.opts.Limits }

// fakeBytes returns what r counts against MaxPinnedBytes.
func (f *Fake) fakeBytes(r vm.Range) uint64 { return uint64(r.RoundOut(f.page).Len()) }

// Register implements [device.Device].
func (f *Fake) Register(ctx context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	reg, err := f.register(ctx, r, access)
	if err != nil {
		f.mu.Lock()
		f.stats.Failures++
		f.mu.Unlock()
		return device.Registration{}, fmt.Errorf("%s: register %v: %w", f.opts.Name, r, err)
	}
	return reg, nil
}

func (f *Fake) register(ctx context.Context, r vm.Range, access device.Access) (device.Registration, error) {
	n := int(f.nRegister.Add(1))
	if hook := f.opts.OnRegister; hook != nil {
		if err := hook(n, r, access); err != nil {
			return device.Registration{}, err
		}
	}
	if err := ctx.Err(); err != nil {
		return device.Registration{}, err
	}
	if err := r.Check(); err != nil {
		return device.Registration{}, errors.Join(device.ErrInvalid, err)
	}
	if !access.Valid() || access&f.opts.Forbid != 0 {
		return device.Registration{}, fmt.Errorf("access %v: %w", access, device.ErrAccess)
	}
	if m := f.opts.Limits.MaxRange; m != 0 && uint64(r.Len()) > m {
		return device.Registration{}, fmt.Errorf("%d bytes, at most %d: %w", r.Len(), m, device.ErrTooLarge)
	}
	if f.opts.Round {
		r = r.RoundOut(f.page)
	}
	access |= f.opts.Grant
	bytes := f.fakeBytes(r)

	if err := f.reserve(bytes); err != nil {
		return device.Registration{}, err
	}
	inner, frames, err := f.pin(r, func() (device.Registration, error) {
		return f.opts.Backing.Register(ctx, r, access)
	})
	if err != nil {
		f.unreserve(bytes)
		return device.Registration{}, err
	}
	reg, err := f.publish(r, access, bytes, inner, frames)
	if err != nil && f.opts.Backing != nil {
		err = errors.Join(err, f.opts.Backing.Deregister(inner))
	}
	return reg, err
}

// reserve counts a registration that is about to be made against the limits,
// so that concurrent ones can't exceed them together.
func (f *Fake) reserve(bytes uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := &f.opts.Limits
	live := f.stats.Live + f.reserved
	switch {
	case f.closed:
		return device.ErrClosed
	case l.MaxRegistrations != 0 && live >= l.MaxRegistrations, live >= maxFakeIndex:
		return fmt.Errorf("%d live: %w", live, device.ErrNoSlots)
	case l.MaxPinnedBytes != 0 && f.stats.PinnedBytes+f.reservedB+bytes > l.MaxPinnedBytes:
		return fmt.Errorf("%d bytes pinned: %w", f.stats.PinnedBytes, device.ErrNoMemory)
	}
	f.reserved++
	f.reservedB += bytes
	return nil
}

func (f *Fake) unreserve(bytes uint64) {
	f.mu.Lock()
	f.reserved--
	f.reservedB -= bytes
	f.mu.Unlock()
}

// pin runs the hooks round the look-up of the pages.
func (f *Fake) pin(r vm.Range, backing func() (device.Registration, error)) (inner device.Registration, frames []uint64, err error) {
	n := int(f.nPin.Add(1))
	if hook := f.opts.BeforePin; hook != nil {
		hook(n, r)
	}
	if f.opts.Backing != nil {
		if inner, err = backing(); err != nil {
			return inner, nil, err
		}
	}
	if f.opts.Frames != nil {
		if frames, err = f.opts.Frames(r); err != nil {
			if f.opts.Backing != nil {
				err = errors.Join(err, f.opts.Backing.Deregister(inner))
			}
			return inner, nil, errors.Join(device.ErrFault, err)
		}
	}
	if hook := f.opts.AfterPin; hook != nil {
		hook(n, r)
	}
	return inner, frames, nil
}

func (f *Fake) publish(r vm.Range, access device.Access, bytes uint64, inner device.Registration, frames []uint64) (device.Registration, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reserved--
	f.reservedB -= bytes
	if f.closed {
		return device.Registration{}, device.ErrClosed
	}
	var i uint32
	if n := len(f.free); n > 0 {
		i = f.free[n-1]
		f.free = f.free[:n-1]
		f.gens[i]++
	} else {
		i = uint32(len(f.gens))
		f.gens = append(f.gens, 1)
		if !f.opts.CountsOnly {
			f.live = append(f.live, fakeEntry{})
		}
	}
	if !f.opts.CountsOnly {
		f.live[i] = fakeEntry{r, access}
	}
	if f.opts.Frames != nil {
		f.setFramesLocked(i, frames)
	}
	if f.opts.Backing != nil {
		f.setBackingLocked(i, inner)
	}
	f.stats.Registers++
	f.stats.Live++
	f.stats.PeakLive = max(f.stats.PeakLive, f.stats.Live)
	f.stats.PinnedBytes += bytes
	f.stats.PeakPinnedBytes = max(f.stats.PeakPinnedBytes, f.stats.PinnedBytes)
	return f.registrationLocked(i, r, access), nil
}

func (f *Fake) setFramesLocked(i uint32, frames []uint64) {
	if f.frames == nil {
		f.frames = make(map[uint32][]uint64)
	}
	f.frames[i] = frames
}

func (f *Fake) setBackingLocked(i uint32, inner device.Registration) {
	if f.backing == nil {
		f.backing = make(map[uint32]device.Registration)
	}
	f.backing[i] = inner
}

// registrationLocked builds what the caller gets. The key's low byte counts
// the uses of the slot, so a key of the last 128 uses isn't mistaken for the
// present one.
func (f *Fake) registrationLocked(i uint32, r vm.Range, access device.Access) device.Registration {
	gen := f.gens[i]
	reg := device.Registration{
		Range:    r,
		LocalKey: i<<8 | gen>>1&0xff,
		Access:   access,
		Handle:   uint64(gen)<<32 | uint64(i),
	}
	if inner, ok := f.backing[i]; ok {
		reg.LocalKey, reg.RemoteKey = inner.LocalKey, inner.RemoteKey
	} else if access&(device.RemoteRead|device.RemoteWrite|device.RemoteAtomic) != 0 {
		reg.RemoteKey = reg.LocalKey
	}
	return reg
}

// lookupLocked returns the slot of a live registration.
func (f *Fake) lookupLocked(reg device.Registration) (uint32, bool) {
	i, gen := uint32(reg.Handle), uint32(reg.Handle>>32)
	if gen&1 == 0 || uint64(i) >= uint64(len(f.gens)) || f.gens[i] != gen {
		return 0, false
	}
	if !f.opts.CountsOnly && f.live[i] != (fakeEntry{reg.Range, reg.Access}) {
		return 0, false
	}
	return i, true
}

// misuse records that verb was called on reg, which isn't registered.
func (f *Fake) misuse(verb string, reg device.Registration) error {
	err := fmt.Errorf("%s: %s %v, key %#x: %w", f.opts.Name, verb, reg.Range, reg.LocalKey, device.ErrNotRegistered)
	f.mu.Lock()
	f.stats.Failures++
	if len(f.misuses) < maxMisuses {
		f.misuses = append(f.misuses, err)
	}
	f.mu.Unlock()
	if hook := f.opts.OnMisuse; hook != nil {
		hook(err)
	}
	return err
}

// fail counts a failure and wraps its error.
func (f *Fake) fail(verb string, reg device.Registration, err error) error {
	f.mu.Lock()
	f.stats.Failures++
	f.mu.Unlock()
	return fmt.Errorf("%s: %s %v, key %#x: %w", f.opts.Name, verb, reg.Range, reg.LocalKey, err)
}

// Deregister implements [device.Device]. Deregistering what isn't registered
// is reported as a misuse.
func (f *Fake) Deregister(reg device.Registration) error {
	n := int(f.nDeregister.Add(1))
	if hook := f.opts.OnDeregister; hook != nil {
		if err := hook(n, reg); err != nil {
			return f.fail("deregister", reg, err)
		}
	}
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return f.fail("deregister", reg, device.ErrClosed)
	}
	i, ok := f.lookupLocked(reg)
	if !ok {
		f.mu.Unlock()
		return f.misuse("deregister", reg)
	}
	inner := f.freeLocked(i, reg.Range)
	f.stats.Deregisters++
	f.mu.Unlock()
	if f.opts.Backing != nil {
		if err := f.opts.Backing.Deregister(inner); err != nil {
			return f.fail("deregister", reg, err)
		}
	}
	return nil
}

// freeLocked ends the life of slot i and returns what backed it.
func (f *Fake) freeLocked(i uint32, r vm.Range) (inner device.Registration) {
	f.gens[i]++
	f.free = append(f.free, i)
	if !f.opts.CountsOnly {
		f.live[i] = fakeEntry{}
	}
	inner = f.backing[i]
	delete(f.backing, i)
	delete(f.frames, i)
	f.stats.Live--
	f.stats.PinnedBytes -= f.fakeBytes(r)
	return inner
}

// Update implements [device.Updater]. With a Backing that isn't an Updater it
// fails with [device.ErrNotSupported].
func (f *UpdatingFake) Update(ctx context.Context, reg device.Registration) (device.Registration, error) {
	n := int(f.nUpdate.Add(1))
	if hook := f.opts.OnUpdate; hook != nil {
		if err := hook(n, reg); err != nil {
			if errors.Is(err, device.ErrRegistrationLost) {
				f.lose(reg)
			}
			return device.Registration{}, f.fail("update", reg, err)
		}
	}
	if err := ctx.Err(); err != nil {
		return device.Registration{}, f.fail("update", reg, err)
	}
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return device.Registration{}, f.fail("update", reg, device.ErrClosed)
	}
	i, ok := f.lookupLocked(reg)
	inner := f.backing[i]
	f.mu.Unlock()
	if !ok {
		return device.Registration{}, f.misuse("update", reg)
	}
	inner, frames, err := f.pin(reg.Range, func() (device.Registration, error) {
		up, ok := f.opts.Backing.(device.Updater)
		if !ok {
			return inner, device.ErrNotSupported
		}
		return up.Update(ctx, inner)
	})
	if err != nil {
		return device.Registration{}, f.fail("update", reg, err)
	}
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return device.Registration{}, f.fail("update", reg, device.ErrClosed)
	}
	if _, ok := f.lookupLocked(reg); !ok {
		f.mu.Unlock()
		return device.Registration{}, f.misuse("update", reg)
	}
	if f.opts.Frames != nil {
		f.setFramesLocked(i, frames)
	}
	if f.opts.Backing != nil {
		f.setBackingLocked(i, inner)
	}
	f.stats.Updates++
	out := f.registrationLocked(i, reg.Range, reg.Access)
	f.mu.Unlock()
	return out, nil
}

// lose drops a registration that an injected error says is lost.
func (f *Fake) lose(reg device.Registration) {
	f.mu.Lock()
	i, ok := f.lookupLocked(reg)
	var inner device.Registration
	if ok {
		inner = f.freeLocked(i, reg.Range)
	}
	f.mu.Unlock()
	if ok && f.opts.Backing != nil {
		_ = f.opts.Backing.Deregister(inner) // The injected error is what counts.
	}
}

// Close makes every later call fail with [device.ErrClosed]. Live
// registrations stay counted, so that AssertEmpty still finds them. It is
// idempotent. Backing is left open, but what is registered there for the fake
// is deregistered.
func (f *Fake) Close() error {
	f.mu.Lock()
	f.closed = true
	backing := f.backing
	f.backing = nil
	f.mu.Unlock()
	var errs []error
	for _, inner := range backing {
		errs = append(errs, f.opts.Backing.Deregister(inner))
	}
	return errors.Join(errs...)
}

// Stats returns the counters.
func (f *Fake) Stats() FakeStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stats
}

// Live returns the live registrations in the order of their slots; none with
// CountsOnly.
func (f *Fake) Live() []device.Registration {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []device.Registration
	for i, e := range f.live {
		if f.gens[i]&1 != 0 {
			out = append(out, f.registrationLocked(uint32(i), e.r, e.access))
		}
	}
	return out
}

// IsLive reports whether reg is registered now.
func (f *Fake) IsLive(reg device.Registration) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.lookupLocked(reg)
	return ok
}

// Frames returns the frame numbers that FakeOptions.Frames gave for reg when it
// was registered or last updated; nil if reg isn't live or that isn't set. The
// caller must not modify the slice.
func (f *Fake) Frames(reg device.Registration) []uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	i, ok := f.lookupLocked(reg)
	if !ok {
		return nil
	}
	return f.frames[i]
}

// Misuses returns the deregistrations and updates of what wasn't registered;
// at most 32 of them.
func (f *Fake) Misuses() []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]error(nil), f.misuses...)
}

// AssertEmpty fails the test if a registration is live, or if the fake was
// misused.
func (f *Fake) AssertEmpty(tb testing.TB) {
	tb.Helper()
	s := f.Stats()
	if s.Live != 0 || s.PinnedBytes != 0 {
		tb.Errorf("%s: %d live registrations of %d bytes, want none", f.opts.Name, s.Live, s.PinnedBytes)
		for i, reg := range f.Live() {
			if i == 8 {
				tb.Errorf("…")
				break
			}
			tb.Errorf("live: %v, key %#x, %v", reg.Range, reg.LocalKey, reg.Access)
		}
	}
	for _, err := range f.Misuses() {
		tb.Errorf("misuse: %v", err)
	}
}
