package devicetest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// Queue is a work queue of the device under test, for [Options].NewQueue.
type Queue struct {
	device.WorkQueue
	// Do returns when everything that was posted has completed, and each Done has
	// been called. It returns nil even if requests have failed.
	Do func() error
	// Read has the queue's peer fetch len(b) bytes at address at under a fast
	// key. It may be nil. If the adapter refuses, an error comes back, and the
	// queue isn't used any more.
	Read func(at uintptr, key uint32, b []byte) error
}

// capable skips the test if err says that the device can't, although it has the
// method.
func (s *suite) capable(err error) {
	s.t.Helper()
	if errors.Is(err, device.ErrNotSupported) {
		wantError(s.t, "what the device can't", err, device.ErrNotSupported)
		s.t.Skipf("the device can't: %v", err)
	}
}

// keeps fails if the registration's local key doesn't work.
func (s *suite) keeps(what string, reg device.Registration) {
	s.t.Helper()
	if s.opts.Read == nil {
		return
	}
	if err := s.opts.Read(s.dev, reg, 0, make([]byte, 1)); err != nil {
		s.t.Errorf("%s: the local key doesn't work: %v", what, err)
	}
}

// dead fails if the registration's local key works.
func (s *suite) dead(what string, reg device.Registration) {
	s.t.Helper()
	if s.opts.Read == nil || s.opts.Write == nil {
		return
	}
	if err := s.opts.Read(s.dev, reg, 0, make([]byte, 1)); err == nil {
		s.t.Errorf("%s: a read succeeded", what)
	}
	if err := s.opts.Write(s.dev, reg, 0, make([]byte, 1)); err == nil {
		s.t.Errorf("%s: a write succeeded", what)
	}
}

// same fails if an update or load returned something else than what it was given.
func (s *suite) same(what string, got, want device.Registration) {
	s.t.Helper()
	if got.LocalKey != want.LocalKey || got.RemoteKey != want.RemoteKey || got.Range != want.Range || got.Access != want.Access {
		s.t.Errorf("%s returned %+v, want %+v", what, got, want)
	}
}

func cancelled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// revoker returns the device as a RevokingUpdater that can, or skips the test.
func (s *suite) revoker() device.RevokingUpdater {
	s.t.Helper()
	dev, ok := s.dev.(device.RevokingUpdater)
	if !ok {
		s.t.Skip("the device can't revoke")
	}
	reg := register(s.t, dev, vm.RangeOf(mapMemory(s.t, 1)), device.LocalWrite)
	err := dev.Revoke(context.Background(), reg)
	if errors.Is(err, device.ErrNotSupported) {
		s.keeps("after an unsupported revocation", reg)
	}
	deregister(s.t, dev, reg)
	s.capable(err)
	if err != nil {
		s.t.Fatalf("revoke: %v", err)
	}
	return dev
}

// What is revoked means nothing, keeps its keys, and is loaded, or deregistered.
func (s *suite) testRevoke() {
	t, ctx := s.t, context.Background()
	dev := s.revoker()
	b := mapMemory(t, 2)
	r := vm.RangeOf(b)
	reg := register(t, dev, r, device.LocalWrite)
	_, err := dev.Load(ctx, reg)
	wantError(t, "load of what isn't revoked", err, device.ErrNotRevoked)
	s.keeps("after a refused load", reg)
	wantError(t, "revoke with a cancelled context", dev.Revoke(cancelled(), reg), context.Canceled)
	s.keeps("after a cancelled revocation", reg)
	for round := range 3 {
		fillWith(b, 'o')
		if round > 0 {
			replace(t, r)
			fillWith(b, byte('0'+round))
		}
		for range 2 { // Idempotent.
			if err := dev.Revoke(ctx, reg); err != nil {
				t.Fatalf("revoke: %v", err)
			}
		}
		s.dead("revoked", reg)
		if up, ok := dev.(device.Updater); ok {
			_, err := up.Update(ctx, reg)
			wantError(t, "update of what is revoked", err, device.ErrRevoked, device.ErrNotSupported)
			s.dead("after a refused update", reg)
		}
		// Its keys are nobody else's.
		var others []device.Registration
		for n := dev.Limits().MaxRegistrations; len(others) < 100 && (n == 0 || len(others)+1 < n); {
			other, err := dev.Register(ctx, vm.RangeOf(b[:1]), device.LocalRead)
			if errors.Is(err, device.ErrNoMemory) {
				break
			}
			if err != nil {
				t.Fatalf("register beside what is revoked: %v", err)
			}
			if other.LocalKey == reg.LocalKey {
				t.Fatalf("key %#x is revoked, and was given to another", reg.LocalKey)
			}
			others = append(others, other)
		}
		deregister(t, dev, others...)
		_, err := dev.Load(cancelled(), reg)
		wantError(t, "load with a cancelled context", err, context.Canceled)
		s.dead("after a cancelled load", reg)
		got, err := dev.Load(ctx, reg)
		if err != nil {
			t.Fatalf("load: %v", err)
		}
		s.same("load", got, reg)
		if s.opts.Read != nil && !s.opts.Simulated && round > 0 {
			s.wantSees(t, "loaded", dev, got, byte('0'+round))
		}
		s.keeps("loaded", reg)
		_, err = dev.Load(ctx, reg)
		wantError(t, "second load", err, device.ErrNotRevoked)
	}
	if err := dev.Revoke(ctx, reg); err != nil {
		t.Fatalf("revoke: %v", err)
	}
	deregister(t, dev, reg)
	wantError(t, "deregister again", dev.Deregister(reg), device.ErrNotRegistered)
	wantError(t, "revoke of what is deregistered", dev.Revoke(ctx, reg), device.ErrNotRegistered)
	_, err = dev.Load(ctx, reg)
	wantError(t, "load of what is deregistered", err, device.ErrNotRegistered)
}

// A load that fails leaves the registration revoked, or says that it is lost.
func (s *suite) testLoadFails() {
	t, ctx := s.t, context.Background()
	dev := s.revoker()
	if s.opts.Simulated {
		t.Skip("a simulated device doesn't look at memory")
	}
	b := mapMemory(t, 2)
	reg := register(t, dev, vm.RangeOf(b), device.LocalWrite)
	if err := dev.Revoke(ctx, reg); err != nil {
		t.Fatalf("revoke: %v", err)
	}
	half := b[os.Getpagesize():]
	if err := unix.Mprotect(half, unix.PROT_NONE); err != nil {
		t.Fatal(os.NewSyscallError("mprotect", err))
	}
	_, err := dev.Load(ctx, reg)
	wantError(t, "load without access", err, device.ErrFault)
	s.dead("after a failed load", reg)
	if errors.Is(err, device.ErrRegistrationLost) {
		wantError(t, "deregister of what is lost", dev.Deregister(reg), device.ErrNotRegistered)
		return
	}
	if err := dev.Revoke(ctx, reg); err != nil {
		t.Errorf("revoke after a failed load: %v", err)
	}
	if err := unix.Mprotect(half, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		t.Fatal(os.NewSyscallError("mprotect", err))
	}
	fillWith(b, 'l')
	if reg, err = dev.Load(ctx, reg); err != nil {
		t.Fatalf("second load: %v", err)
	}
	if s.opts.Read != nil {
		s.wantSees(t, "second load", dev, reg, 'l')
	}
	deregister(t, dev, reg)
}

// Verbs on one registration by many: each does what it says or refuses.
func (s *suite) testRevokeConcurrent() {
	t, ctx := s.t, context.Background()
	dev := s.revoker()
	up, _ := s.updates()
	rounds := 100
	if testing.Short() {
		rounds = 20
	}
	r := vm.RangeOf(mapMemory(t, 1))
	for range rounds {
		reg := register(t, dev, r, device.LocalWrite)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				if err := dev.Revoke(ctx, reg); err != nil {
					wantError(t, "concurrent revoke", err, device.ErrBusy, device.ErrNotRegistered)
				}
			})
			wg.Go(func() {
				if got, err := dev.Load(ctx, reg); err == nil {
					s.same("concurrent load", got, reg)
				} else {
					wantError(t, "concurrent load", err, device.ErrBusy, device.ErrNotRevoked, device.ErrNotRegistered)
				}
			})
			if up != nil {
				wg.Go(func() {
					if got, err := up.Update(ctx, reg); err == nil {
						s.same("concurrent update", got, reg)
					} else {
						wantError(t, "concurrent update", err, device.ErrBusy, device.ErrRevoked, device.ErrNotRegistered)
					}
				})
			}
		}
		wg.Wait()
		// Whatever it is now, this is what it can be.
		if err := dev.Revoke(ctx, reg); err != nil {
			t.Fatalf("revoke: %v", err)
		}
		s.dead("revoked", reg)
		if _, err := dev.Load(ctx, reg); err != nil {
			t.Fatalf("load: %v", err)
		}
		deregister(t, dev, reg)
	}
}

// Without work in flight a flush has nothing to wait for.
func (s *suite) testFlush() {
	t, ctx := s.t, context.Background()
	dev, ok := s.dev.(device.Flusher)
	if !ok {
		t.Skip("the device can't flush")
	}
	reg := register(t, dev, vm.RangeOf(mapMemory(t, 1)), device.LocalWrite)
	err := dev.Flush(ctx, reg)
	if errors.Is(err, device.ErrNotSupported) {
		deregister(t, dev, reg)
	}
	s.capable(err)
	if err != nil {
		t.Errorf("flush without work: %v", err)
	}
	wantError(t, "flush with a cancelled context", dev.Flush(cancelled(), reg), context.Canceled)
	s.keeps("flushed", reg)
	if err := dev.Flush(ctx, reg); err != nil {
		t.Errorf("flush after work that has completed: %v", err)
	}
	if rev, ok := s.dev.(device.RevokingUpdater); ok && rev.Revoke(ctx, reg) == nil {
		if err := dev.Flush(ctx, reg); err != nil {
			t.Errorf("flush of what is revoked: %v", err)
		}
	}
	deregister(t, dev, reg)
	wantError(t, "flush of what is deregistered", dev.Flush(ctx, reg), device.ErrNotRegistered)
}

const windowed = device.LocalWrite | device.WindowBind

// exposer returns the device as an Exposer that can, with a registration of two
// pages and what of it can be exposed, or skips the test.
func (s *suite) exposer() (device.Exposer, device.Registration, vm.Range) {
	t := s.t
	t.Helper()
	dev, ok := s.dev.(device.Exposer)
	if !ok {
		t.Skip("the device has no windows")
	}
	reg, err := dev.Register(context.Background(), vm.RangeOf(mapMemory(t, 2)), windowed)
	if errors.Is(err, device.ErrAccess) {
		t.Skip("the device doesn't register for windows")
	}
	if err != nil {
		t.Fatalf("register: %v", err)
	}
	part := vm.Range{Start: reg.Range.Start + 100, End: reg.Range.End - 100}
	x, err := dev.Expose(context.Background(), reg, part, device.RemoteRead)
	if errors.Is(err, device.ErrNotSupported) {
		// An adapter that can't bound a window exposes everything or nothing.
		part = reg.Range
		x, err = dev.Expose(context.Background(), reg, part, device.RemoteRead)
	}
	if errors.Is(err, device.ErrNotSupported) {
		deregister(t, dev, reg)
	}
	s.capable(err)
	if err != nil {
		t.Fatalf("expose: %v", err)
	}
	s.withdraw(dev, x)
	return dev, reg, part
}

// expose exposes r and checks what the device says of it.
func (s *suite) expose(dev device.Exposer, reg device.Registration, r vm.Range, access device.Access) device.Exposure {
	s.t.Helper()
	x, err := dev.Expose(context.Background(), reg, r, access)
	if err != nil {
		s.t.Fatalf("expose %v with %v: %v", r, access, err)
	}
	if x.Range != r || x.Access != access || x.RemoteKey == 0 || x.RemoteKey == reg.RemoteKey {
		s.t.Errorf("exposed %v with %v of %+v: %+v", r, access, reg, x)
	}
	return x
}

func (s *suite) withdraw(dev device.Exposer, x device.Exposure) {
	s.t.Helper()
	if err := dev.Withdraw(context.Background(), x); err != nil {
		s.t.Errorf("withdraw: %v", err)
	}
}

// Exposures have keys of their own, keep their registration, and end once.
func (s *suite) testExpose() {
	t, ctx := s.t, context.Background()
	dev, reg, part := s.exposer()
	readOnly := register(t, dev, vm.RangeOf(mapMemory(t, 1)), device.WindowBind)
	plain := register(t, dev, vm.RangeOf(mapMemory(t, 1)), device.LocalWrite)
	gone := register(t, dev, vm.RangeOf(mapMemory(t, 1)), windowed)
	deregister(t, dev, gone)
	type bad struct {
		name   string
		reg    device.Registration
		r      vm.Range
		access device.Access
		want   error
	}
	list := []bad{
		{"no access", reg, part, 0, device.ErrAccess},
		{"local access", reg, part, windowed, device.ErrAccess},
		{"local and remote access", reg, part, device.RemoteRead | device.LocalWrite, device.ErrAccess},
		{"beyond the end", reg, vm.Range{Start: part.Start, End: reg.Range.End + 1}, device.RemoteRead, device.ErrInvalid},
		{"before the start", reg, vm.Range{Start: reg.Range.Start - 1, End: part.End}, device.RemoteRead, device.ErrInvalid},
		{"empty", reg, vm.Range{Start: part.Start, End: part.Start}, device.RemoteRead, device.ErrInvalid},
		{"no range", reg, vm.Range{}, device.RemoteRead, device.ErrInvalid},
		{"without window binding", plain, plain.Range, device.RemoteRead, device.ErrAccess},
		{"dead", gone, gone.Range, device.RemoteRead, device.ErrNotRegistered},
	}
	if readOnly.Access&device.LocalWrite == 0 {
		list = append(list, bad{"writing read-only", readOnly, readOnly.Range, device.RemoteWrite, device.ErrAccess})
	}
	for _, c := range list {
		_, err := dev.Expose(ctx, c.reg, c.r, c.access)
		wantError(t, "expose, "+c.name, err, c.want)
	}
	_, err := dev.Expose(cancelled(), reg, part, device.RemoteRead)
	wantError(t, "expose with a cancelled context", err, context.Canceled)
	deregister(t, dev, readOnly, plain)

	wantError(t, "withdrawal of nothing", dev.Withdraw(ctx, device.Exposure{}), device.ErrNotExposed)
	var live []device.Exposure
	keys := map[uint32]bool{}
	for range 3 {
		x := s.expose(dev, reg, part, device.RemoteRead|device.RemoteWrite)
		if keys[x.RemoteKey] {
			t.Errorf("key %#x twice at the same time", x.RemoteKey)
		}
		keys[x.RemoteKey] = true
		live = append(live, x)
	}
	for _, x := range live {
		wantError(t, "deregister what is exposed", dev.Deregister(reg), device.ErrBusy)
		wantError(t, "withdraw with a cancelled context", dev.Withdraw(cancelled(), x), context.Canceled)
		s.withdraw(dev, x)
		wantError(t, "second withdrawal", dev.Withdraw(ctx, x), device.ErrNotExposed)
	}
	s.keeps("no longer exposed", reg)
	var past []device.Exposure
	for i := range 300 {
		x := s.expose(dev, reg, part, device.RemoteRead)
		if i > 0 && past[i-1].RemoteKey == x.RemoteKey {
			t.Fatalf("key %#x twice running", x.RemoteKey)
		}
		past = append(past, x)
		s.withdraw(dev, x)
	}
	x := s.expose(dev, reg, part, device.RemoteRead)
	for _, old := range past {
		wantError(t, "withdrawal of an old one", dev.Withdraw(ctx, old), device.ErrNotExposed)
	}
	s.withdraw(dev, x)
	deregister(t, dev, reg)
}

// Whether what is exposed can be updated or revoked is the device's affair; if so,
// the exposures go along.
func (s *suite) testExposeUpdate() {
	t, ctx := s.t, context.Background()
	dev, reg, part := s.exposer()
	x := s.expose(dev, reg, part, device.RemoteRead|device.RemoteWrite)
	works := func(what string, want bool) {
		t.Helper()
		if s.opts.RemoteRead == nil {
			return
		}
		if err := s.opts.RemoteRead(dev, part.Start, x.RemoteKey, make([]byte, 1)); (err == nil) != want {
			t.Errorf("%s: a peer's read: %v", what, err)
		}
	}
	if up, ok := s.updates(); ok {
		got, err := up.Update(ctx, reg)
		if err == nil {
			s.same("update", got, reg)
		} else {
			wantError(t, "update of what is exposed", err, device.ErrBusy)
		}
		works("updated", true)
	}
	if rev, ok := s.dev.(device.RevokingUpdater); ok {
		if err := rev.Revoke(ctx, reg); err == nil {
			if !s.opts.HoldsRevoked {
				works("revoked", false)
			}
			_, err := dev.Expose(ctx, reg, part, device.RemoteRead)
			wantError(t, "expose of what is revoked", err, device.ErrRevoked)
			wantError(t, "deregister what is revoked and exposed", dev.Deregister(reg), device.ErrBusy)
			if _, err := rev.Load(ctx, reg); err != nil {
				t.Fatalf("load: %v", err)
			}
		} else {
			wantError(t, "revoke of what is exposed", err, device.ErrBusy, device.ErrNotSupported)
		}
		works("loaded", true)
	}
	s.withdraw(dev, x)
	works("withdrawn", false)
	deregister(t, dev, reg)
}

// A peer reaches what is exposed, as it is exposed, and nothing else.
func (s *suite) testDataExposed() {
	t := s.t
	if s.opts.RemoteRead == nil || s.opts.RemoteWrite == nil {
		t.Skip("no data path for peers given")
	}
	dev, reg, part := s.exposer()
	x := s.expose(dev, reg, part, device.RemoteRead|device.RemoteWrite)
	ro := s.expose(dev, reg, part, device.RemoteRead)
	wo := s.expose(dev, reg, part, device.RemoteWrite)
	if s.opts.RemoteRead(dev, part.Start, reg.LocalKey, make([]byte, 1)) == nil {
		t.Error("a peer's read under the local key of what lets no peer in succeeded")
	}
	data, got := bytes.Repeat([]byte("exposed"), 4), make([]byte, 28)
	for i, at := range []uintptr{part.Start, part.Start + 5, part.End - 28, part.Start + part.Len()/2 - 14} {
		data[0] = byte(i)
		if err := s.opts.RemoteWrite(dev, at, wo.RemoteKey, data); err != nil {
			t.Errorf("write at %d bytes: %v", at-part.Start, err)
		}
		if err := s.opts.RemoteRead(dev, at, ro.RemoteKey, got); err != nil || !bytes.Equal(got, data) {
			t.Errorf("read at %d bytes: %q, %v, want %q", at-part.Start, got, err, data)
		}
		if s.opts.Read == nil {
			continue
		}
		if err := s.opts.Read(dev, reg, int(at-reg.Range.Start), got); err != nil || !bytes.Equal(got, data) {
			t.Errorf("by the local key: %q, %v, want %q", got, err, data)
		}
	}
	for _, c := range []struct {
		name string
		at   uintptr
		key  uint32
		move func(device.Device, uintptr, uint32, []byte) error
	}{
		{"write under a key for reading", part.Start, ro.RemoteKey, s.opts.RemoteWrite},
		{"read under a key for writing", part.Start, wo.RemoteKey, s.opts.RemoteRead},
		{"read before the start", part.Start - 1, x.RemoteKey, s.opts.RemoteRead},
		{"write before the start", part.Start - 1, x.RemoteKey, s.opts.RemoteWrite},
		{"read beyond the end", part.End - 1, x.RemoteKey, s.opts.RemoteRead},
		{"write beyond the end", part.End - 1, x.RemoteKey, s.opts.RemoteWrite},
		{"write under the next key", part.Start, device.NextKey(device.NextKey(x.RemoteKey)), s.opts.RemoteWrite},
	} {
		if c.move(dev, c.at, c.key, make([]byte, 2)) == nil {
			t.Errorf("%s succeeded", c.name)
		}
	}
	s.withdraw(dev, ro)
	if err := s.opts.RemoteRead(dev, part.Start, x.RemoteKey, got); err != nil {
		t.Errorf("read after the withdrawal of another: %v", err)
	}
	s.withdraw(dev, x)
	s.withdraw(dev, wo)
	for _, x := range []device.Exposure{x, ro, wo} {
		if s.opts.RemoteRead(dev, part.Start, x.RemoteKey, got) == nil {
			t.Error("a peer's read after the withdrawal succeeded")
		}
		if s.opts.RemoteWrite(dev, part.Start, x.RemoteKey, got) == nil {
			t.Error("a peer's write after the withdrawal succeeded")
		}
	}
	deregister(t, dev, reg)
}

// fastRegistrar returns the device as a FastRegistrar that can, or skips the test.
func (s *suite) fastRegistrar() device.FastRegistrar {
	t := s.t
	t.Helper()
	dev, ok := s.dev.(device.FastRegistrar)
	if !ok {
		t.Skip("the device has no fast keys")
	}
	k, err := dev.AllocFastKey(context.Background(), uint64(os.Getpagesize()))
	s.capable(err)
	if err != nil {
		t.Fatalf("allocate fast key: %v", err)
	}
	s.free(dev, k)
	return dev
}

func (s *suite) free(dev device.FastRegistrar, k device.FastKey) {
	s.t.Helper()
	if err := dev.FreeFastKey(k); err != nil {
		s.t.Errorf("free fast key: %v", err)
	}
}

// Fast keys are reserved and given back.
func (s *suite) testFastKey() {
	t, ctx := s.t, context.Background()
	dev := s.fastRegistrar()
	page := uint64(os.Getpagesize())
	_, err := dev.AllocFastKey(ctx, 0)
	wantError(t, "fast key for nothing", err, device.ErrInvalid)
	if m := dev.Limits().MaxRange; m != 0 {
		_, err := dev.AllocFastKey(ctx, m+1)
		wantError(t, "fast key for too much", err, device.ErrTooLarge)
	}
	_, err = dev.AllocFastKey(cancelled(), page)
	wantError(t, "fast key with a cancelled context", err, context.Canceled)
	wantError(t, "free nothing", dev.FreeFastKey(device.FastKey{}), device.ErrNotRegistered)
	var keys []device.FastKey
	for range 3 {
		k, err := dev.AllocFastKey(ctx, page+1)
		if err != nil {
			t.Fatalf("allocate fast key: %v", err)
		}
		if k.MaxBytes < page+1 {
			t.Errorf("a key for %d bytes, want %d", k.MaxBytes, page+1)
		}
		for _, other := range keys {
			if device.SameKeyIndex(k.Key, other.Key) {
				t.Errorf("keys %#x and %#x at the same time", k.Key, other.Key)
			}
		}
		keys = append(keys, k)
	}
	for _, k := range keys {
		s.free(dev, k)
		wantError(t, "free again", dev.FreeFastKey(k), device.ErrNotRegistered)
	}
}

// lending has what tests of fast keys in a queue need.
type lending struct {
	*suite
	dev device.FastRegistrar
	q   Queue
	reg device.Registration
	key device.FastKey
	now uint32 // the key as it was last posted
}

// lend prepares to lend a fast key, or skips the test.
func (s *suite) lend() *lending {
	t := s.t
	t.Helper()
	l := &lending{suite: s, dev: s.fastRegistrar()}
	if s.opts.NewQueue == nil {
		t.Skip("no work queue given")
	}
	l.q = s.opts.NewQueue(t, s.dev)
	l.reg = register(t, s.dev, vm.RangeOf(mapMemory(t, 2)), windowed)
	var err error
	if l.key, err = l.dev.AllocFastKey(context.Background(), uint64(l.reg.Range.Len())); err != nil {
		t.Fatalf("allocate fast key: %v", err)
	}
	l.now = l.key.Key
	return l
}

// outcome is what Done was told.
type outcome struct {
	mu   sync.Mutex
	told []error // guarded by mu.
}

func (o *outcome) done(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.told = append(o.told, err)
}

// want fails unless Done was told n times, always of success or always not.
func (o *outcome) want(t *testing.T, what string, n int, success bool) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.told) != n {
		t.Errorf("%s: told of %d outcomes, want %d", what, len(o.told), n)
	}
	for _, err := range o.told {
		if (err == nil) != success {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func (l *lending) register(o *outcome, key uint32) error {
	return l.q.PostFastRegister(device.FastRegister{Key: key, Over: l.reg, Range: l.reg.Range, Access: device.RemoteRead, Done: o.done})
}

func (l *lending) invalidate(o *outcome, key uint32) error {
	return l.q.PostLocalInvalidate(device.LocalInvalidate{Key: key, Done: o.done})
}

func (l *lending) do() {
	l.t.Helper()
	if err := l.q.Do(); err != nil {
		l.t.Fatalf("carry out what was posted: %v", err)
	}
}

// A key is lent and taken back in the queue, again and again, with another consumer
// part each time; in between it can't be given back.
func (s *suite) testFastRotation() {
	t := s.t
	l := s.lend()
	seen := map[uint32]int{}
	for n := range 300 {
		l.now = device.NextKey(l.now)
		if last, ok := seen[l.now]; ok && n-last != 256 {
			t.Fatalf("key %#x again after %d rotations", l.now, n-last)
		}
		seen[l.now] = n
		var o outcome
		if err := l.register(&o, l.now); err != nil {
			t.Fatalf("post fast register: %v", err)
		}
		if n%16 == 0 {
			wantError(t, "free what is posted or lent", l.dev.FreeFastKey(l.key), device.ErrBusy)
			l.do()
			wantError(t, "free what is lent", l.dev.FreeFastKey(l.key), device.ErrBusy)
			if l.q.Read != nil {
				if err := l.q.Read(l.reg.Range.Start, l.now, make([]byte, 8)); err != nil {
					t.Fatalf("a peer's read under a key that is lent: %v", err)
				}
			}
		}
		if err := l.invalidate(&o, l.now); err != nil {
			t.Fatalf("post local invalidate: %v", err)
		}
		l.do()
		o.want(t, "lend and take back", 2, true)
	}
	s.free(l.dev, l.key)
	deregister(t, s.dev, l.reg)
}

// What can't be posted isn't, and nothing is told of it.
func (s *suite) testFastErrors() {
	t, ctx := s.t, context.Background()
	l := s.lend()
	dead := register(t, s.dev, vm.RangeOf(mapMemory(t, 1)), windowed)
	deregister(t, s.dev, dead)
	long := register(t, s.dev, vm.RangeOf(mapMemory(t, 4)), windowed)
	r := l.reg.Range
	next := device.NextKey(l.now)
	type bad struct {
		name string
		wr   device.FastRegister
		want error
	}
	list := []bad{
		{"a dead registration", device.FastRegister{Key: next, Over: dead, Range: dead.Range, Access: device.RemoteRead}, device.ErrNotRegistered},
		{"beyond the end", device.FastRegister{Key: next, Over: l.reg, Range: vm.Range{Start: r.Start, End: r.End + 1}, Access: device.RemoteRead}, device.ErrInvalid},
		{"empty", device.FastRegister{Key: next, Over: l.reg, Access: device.RemoteRead}, device.ErrInvalid},
		{"more than it can mean", device.FastRegister{Key: next, Over: long, Range: long.Range, Access: device.RemoteRead}, device.ErrTooLarge},
		{"no fast key", device.FastRegister{Key: l.reg.LocalKey, Over: l.reg, Range: r, Access: device.RemoteRead}, device.ErrInvalid},
		{"invalid access", device.FastRegister{Key: next, Over: l.reg, Range: r, Access: 1 << 31}, device.ErrAccess},
	}
	if rev, ok := s.dev.(device.RevokingUpdater); ok {
		revoked := register(t, s.dev, vm.RangeOf(mapMemory(t, 1)), windowed)
		if rev.Revoke(ctx, revoked) == nil {
			list = append(list, bad{"a revoked registration", device.FastRegister{Key: next, Over: revoked, Range: revoked.Range, Access: device.RemoteRead}, device.ErrRevoked})
		}
		defer func() { deregister(t, s.dev, revoked) }()
	}
	var o outcome
	for _, c := range list {
		c.wr.Done = o.done
		wantError(t, "fast-register, "+c.name, l.q.PostFastRegister(c.wr), c.want)
	}
	wantError(t, "invalidate what is no fast key", l.invalidate(&o, l.reg.LocalKey), device.ErrInvalid)
	l.do()
	o.want(t, "what wasn't posted", 0, false)
	s.free(l.dev, l.key)
	deregister(t, s.dev, l.reg, long)
}

// A request that doesn't fit the key's state isn't posted, or fails, and then the
// queue takes no more.
func (s *suite) testFastMisuse() {
	for _, c := range []struct {
		name string
		lent bool
		post func(l *lending, o *outcome) error
	}{
		{"lent twice", true, func(l *lending, o *outcome) error { return l.register(o, device.NextKey(l.now)) }},
		{"invalidated under an old key", true, func(l *lending, o *outcome) error { return l.invalidate(o, l.key.Key) }},
		{"not lent", false, func(l *lending, o *outcome) error { return l.invalidate(o, l.now) }},
	} {
		s.t.Run(c.name, func(t *testing.T) {
			s := &suite{t: t, dev: s.dev, newDevice: s.newDevice, opts: s.opts}
			l := s.lend()
			var fine, o outcome
			if c.lent {
				l.now = device.NextKey(l.now)
				if err := l.register(&fine, l.now); err != nil {
					t.Fatalf("post fast register: %v", err)
				}
			}
			if err := c.post(l, &o); err != nil {
				wantError(t, c.name, err, device.ErrBusy, device.ErrInvalid, device.ErrNotRegistered)
				l.do()
				o.want(t, c.name, 0, false)
				if c.lent {
					// The key is what it was.
					if err := l.invalidate(&fine, l.now); err != nil {
						t.Fatalf("invalidate afterwards: %v", err)
					}
					l.do()
					fine.want(t, "beside it", 2, true)
				}
			} else {
				l.do()
				o.want(t, c.name, 1, false)
				wantError(t, "fast-register on a queue in error", l.register(&o, device.NextKey(l.now)), device.ErrQueue)
				wantError(t, "invalidate on a queue in error", l.invalidate(&o, l.now), device.ErrQueue)
				if c.lent {
					l.q = s.opts.NewQueue(t, s.dev)
					if err := l.invalidate(&fine, l.now); err != nil {
						t.Fatalf("invalidate by another queue: %v", err)
					}
					l.do()
					fine.want(t, "beside it", 2, true)
				}
			}
			s.free(l.dev, l.key)
			deregister(t, s.dev, l.reg)
		})
	}
}

// Peers reach what a key means, and nothing by one that was taken back.
func (s *suite) testDataFast() {
	for _, c := range []struct {
		name  string
		again bool // it has been lent again, with another consumer part
	}{{"taken back", false}, {"lent again", true}} {
		s.t.Run(c.name, func(t *testing.T) {
			s := &suite{t: t, dev: s.dev, newDevice: s.newDevice, opts: s.opts}
			l := s.lend()
			if l.q.Read == nil {
				s.free(l.dev, l.key)
				deregister(t, s.dev, l.reg)
				t.Skip("no data path for peers given")
			}
			var o outcome
			old := device.NextKey(l.now)
			if err := l.register(&o, old); err != nil {
				t.Fatalf("post fast register: %v", err)
			}
			l.do()
			if err := l.q.Read(l.reg.Range.End-8, old, make([]byte, 8)); err != nil {
				t.Errorf("a peer's read: %v", err)
			}
			if err := l.invalidate(&o, old); err != nil {
				t.Fatalf("post local invalidate: %v", err)
			}
			if l.now = old; c.again {
				l.now = device.NextKey(old)
				if err := l.register(&o, l.now); err != nil {
					t.Fatalf("post fast register: %v", err)
				}
			}
			l.do()
			if c.again {
				if err := l.q.Read(l.reg.Range.Start, l.now, make([]byte, 8)); err != nil {
					t.Errorf("a peer's read under the new key: %v", err)
				}
				if err := l.invalidate(&o, l.now); err != nil {
					t.Fatalf("post local invalidate: %v", err)
				}
				l.do()
			}
			if l.q.Read(l.reg.Range.Start, old, make([]byte, 8)) == nil {
				t.Error("a peer's read under an old key succeeded")
			}
			s.free(l.dev, l.key)
			deregister(t, s.dev, l.reg)
		})
	}
}

// After Close every optional method answers that it is closed, or that it can't.
func (s *suite) testCloseOptional() {
	t, ctx := s.t, context.Background()
	closer, ok := s.dev.(interface{ Close() error })
	if !ok {
		t.Skip("the device can't be closed")
	}
	reg := register(t, s.dev, vm.RangeOf(mapMemory(t, 1)), device.LocalWrite)
	if err := closer.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	closed := func(what string, err error) {
		t.Helper()
		wantError(t, what+" after close", err, device.ErrClosed, device.ErrNotSupported)
	}
	if dev, ok := s.dev.(device.RevokingUpdater); ok {
		closed("revoke", dev.Revoke(ctx, reg))
		_, err := dev.Load(ctx, reg)
		closed("load", err)
	}
	if dev, ok := s.dev.(device.Flusher); ok {
		closed("flush", dev.Flush(ctx, reg))
	}
	if dev, ok := s.dev.(device.Exposer); ok {
		_, err := dev.Expose(ctx, reg, reg.Range, device.RemoteRead)
		closed("expose", err)
		closed("withdraw", dev.Withdraw(ctx, device.Exposure{}))
	}
	if dev, ok := s.dev.(device.FastRegistrar); ok {
		_, err := dev.AllocFastKey(ctx, uint64(os.Getpagesize()))
		closed("allocate fast key", err)
		closed("free fast key", dev.FreeFastKey(device.FastKey{}))
	}
}
