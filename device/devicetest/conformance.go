package devicetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// Options tell [Run] about a device. The zero value, or nil, is a device that
// pins real memory and has no data path to test.
type Options struct {
	// Simulated says that the device doesn't look at the memory it registers,
	// so that what is mapped makes no difference to it.
	Simulated bool
	// MaxRegistrations bounds the limit tests: a device with a higher limit
	// isn't filled. Zero means 65536.
	MaxRegistrations int
	// Write makes the device store data in memory, at off bytes from the start
	// of the registration's range, through the registration's local key.
	Write func(dev device.Device, reg device.Registration, off int, data []byte) error
	// Read makes the device fetch len(buf) bytes likewise.
	Read func(dev device.Device, reg device.Registration, off int, buf []byte) error
	// RemoteRead and RemoteWrite have a peer fetch or store bytes at an address under
	// a remote key, as Read and Write do under a local one. An error means that the
	// adapter has refused.
	RemoteRead, RemoteWrite func(dev device.Device, at uintptr, key uint32, b []byte) error
	// HoldsRevoked says that peers' requests under a revoked key wait for Load.
	HoldsRevoked bool
	// NewQueue returns a queue of the device that is ready for work, and closes it
	// by t.Cleanup.
	NewQueue func(t *testing.T, dev device.Device) Queue
	// Pinned returns how much memory the device holds pinned for this process,
	// in any unit. Each test must bring it back to what it was; it is asked
	// again for some seconds, since memory may be given back late.
	Pinned func() (uint64, error)
}

// pinnedPatience is how long memory may take to be given back.
const pinnedPatience = 10 * time.Second

// Run runs the conformance suite. newDevice is called for each test, must
// return a device without registrations, and closes it by t.Cleanup.
//
// The optional interfaces that a device has are tested as well: Updater,
// RevokingUpdater, Flusher, Exposer, FastRegistrar and its WorkQueue, and a Close
// method. Where its methods return ErrNotSupported the device must have changed
// nothing, and the tests of that interface are skipped.
//
// Errors must wrap the sentinels of package device, never be them.
func Run(t *testing.T, newDevice func(t *testing.T) device.Device, opts *Options) {
	t.Helper()
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.MaxRegistrations == 0 {
		o.MaxRegistrations = 1 << 16
	}
	for _, c := range []struct {
		name string
		f    func(s *suite)
	}{
		{"Register", (*suite).testRegister},
		{"BadRange", (*suite).testBadRange},
		{"BadMemory", (*suite).testBadMemory},
		{"AcrossMappings", (*suite).testAcrossMappings},
		{"DoubleDeregister", (*suite).testDoubleDeregister},
		{"StaleHandle", (*suite).testStaleHandle},
		{"DeregisterUnmapped", (*suite).testDeregisterUnmapped},
		{"Access", (*suite).testAccess},
		{"MaxRegistrations", (*suite).testMaxRegistrations},
		{"MaxRange", (*suite).testMaxRange},
		{"MaxPinnedBytes", (*suite).testMaxPinnedBytes},
		{"Context", (*suite).testContext},
		{"Concurrent", (*suite).testConcurrent},
		{"Update", (*suite).testUpdate},
		{"UpdateFails", (*suite).testUpdateFails},
		{"Data", (*suite).testData},
		{"DataStale", (*suite).testDataStale},
		{"DataUpdate", (*suite).testDataUpdate},
		{"Close", (*suite).testClose},
		{"Revoke", (*suite).testRevoke},
		{"LoadFails", (*suite).testLoadFails},
		{"RevokeConcurrent", (*suite).testRevokeConcurrent},
		{"Flush", (*suite).testFlush},
		{"Expose", (*suite).testExpose},
		{"ExposeUpdate", (*suite).testExposeUpdate},
		{"DataExposed", (*suite).testDataExposed},
		{"FastKey", (*suite).testFastKey},
		{"FastRotation", (*suite).testFastRotation},
		{"FastErrors", (*suite).testFastErrors},
		{"FastMisuse", (*suite).testFastMisuse},
		{"DataFast", (*suite).testDataFast},
		{"CloseOptional", (*suite).testCloseOptional},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &suite{t: t, dev: newDevice(t), newDevice: newDevice, opts: o}
			s.watchPinned(t)
			c.f(s)
		})
	}
}

// suite is what one test of the suite has.
type suite struct {
	t         *testing.T
	dev       device.Device
	newDevice func(t *testing.T) device.Device
	opts      Options
}

// watchPinned checks at the end of the test, before the device is closed, that
// the test's pins are gone.
func (s *suite) watchPinned(t *testing.T) {
	t.Helper()
	if s.opts.Pinned == nil {
		return
	}
	pinned := func() uint64 {
		n, err := s.opts.Pinned()
		if err != nil {
			t.Fatalf("ask for pinned memory: %v", err)
		}
		return n
	}
	before := pinned()
	t.Cleanup(func() {
		deadline := time.Now().Add(pinnedPatience)
		for pinned() > before && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond)
		}
		if after := pinned(); after > before {
			t.Errorf("pinned memory is %d, was %d before the test", after, before)
		}
	})
}

// mapMemory maps private anonymous memory of base pages for the test's time.
func mapMemory(tb testing.TB, pages int) []byte {
	tb.Helper()
	b, err := unix.Mmap(-1, 0, pages*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		tb.Fatal(os.NewSyscallError("mmap", err))
	}
	tb.Cleanup(func() { _ = unix.Munmap(b) }) // The test may have unmapped it.
	// A kernel without huge pages answers EINVAL.
	if err := unix.Madvise(b, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
		tb.Fatal(os.NewSyscallError("madvise", err))
	}
	return b
}

// replace gives r fresh pages, as if it had been unmapped and mapped again.
func replace(tb testing.TB, r vm.Range) {
	tb.Helper()
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_FIXED | unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Start, r.Len(), prot, flags, ^uintptr(0), 0); errno != 0 {
		tb.Fatal(os.NewSyscallError("mmap", errno))
	}
}

// wantError fails unless err wraps one of the sentinels, and isn't one itself.
func wantError(tb testing.TB, what string, err error, sentinels ...error) {
	tb.Helper()
	for _, want := range sentinels {
		if err == want { //nolint:errorlint // The point is that it must be wrapped.
			tb.Errorf("%s: bare sentinel %v, want it wrapped", what, err)
		}
		if errors.Is(err, want) {
			return
		}
	}
	tb.Errorf("%s: %v, want one of %q", what, err, sentinels)
}

// register registers r and checks that the device promises no less.
func register(tb testing.TB, dev device.Device, r vm.Range, access device.Access) device.Registration {
	tb.Helper()
	reg, err := dev.Register(context.Background(), r, access)
	if err != nil {
		tb.Fatalf("register %v, %v: %v", r, access, err)
	}
	if !reg.Range.Contains(r) {
		tb.Errorf("registered %v, want at least %v", reg.Range, r)
	}
	if page := dev.Limits().PageSize; page == 0 && reg.Range != r {
		tb.Errorf("registered %v, want %v of a device without a page size", reg.Range, r)
	} else if page != 0 && !r.RoundOut(page).Contains(reg.Range) {
		tb.Errorf("registered %v, want at most %v in whole pages", reg.Range, r)
	}
	if !reg.Access.Covers(access) {
		tb.Errorf("granted %v, want at least %v", reg.Access, access)
	}
	return reg
}

func deregister(tb testing.TB, dev device.Device, regs ...device.Registration) {
	tb.Helper()
	for _, reg := range regs {
		if err := dev.Deregister(reg); err != nil {
			tb.Errorf("deregister %v: %v", reg.Range, err)
		}
	}
}

func (s *suite) testRegister() {
	t, dev := s.t, s.dev
	page := uintptr(os.Getpagesize())
	b := vm.RangeOf(mapMemory(t, 4))
	if dev.Name() == "" {
		t.Error("empty name")
	}
	if p := dev.Limits().PageSize; p&(p-1) != 0 {
		t.Errorf("page size %d, want zero or a power of two", p)
	}
	keys := map[uint32]vm.Range{}
	var regs []device.Registration
	for _, r := range []vm.Range{
		b,                                        // Whole pages.
		b,                                        // The same again: a key of its own.
		{Start: b.Start, End: b.Start + 1},       // One byte.
		{Start: b.End - 1, End: b.End},           // The last byte.
		{Start: b.Start + 100, End: b.End - 100}, // Pages cut at both ends.
		{Start: b.Start + page - 1, End: b.Start + page + 1}, // Two bytes of two pages.
	} {
		if n := dev.Limits().MaxRegistrations; n != 0 && len(regs) == n {
			break
		}
		reg := register(t, dev, r, device.LocalRead)
		if other, ok := keys[reg.LocalKey]; ok {
			t.Errorf("key %#x for %v, and at the same time for %v", reg.LocalKey, r, other)
		}
		keys[reg.LocalKey] = r
		regs = append(regs, reg)
	}
	deregister(t, dev, regs...)
	// Again and again: nothing is used up.
	for range 1000 {
		deregister(t, dev, register(t, dev, b, device.LocalRead))
	}
}

func (s *suite) testBadRange() {
	t, dev := s.t, s.dev
	b := vm.RangeOf(mapMemory(t, 1))
	top := ^uintptr(0)
	for _, c := range []struct {
		name string
		r    vm.Range
	}{
		{"zero", vm.Range{}},
		{"empty", vm.Range{Start: b.Start, End: b.Start}},
		{"inverted", vm.Range{Start: b.End, End: b.Start}},
		{"wrapping", vm.Range{Start: top - 10, End: 10}},
	} {
		_, err := dev.Register(context.Background(), c.r, device.LocalRead)
		wantError(t, c.name, err, device.ErrInvalid)
	}
	if s.opts.Simulated {
		return
	}
	for _, c := range []struct {
		name string
		r    vm.Range
	}{
		{"null", vm.Range{Start: 0, End: 4096}},
		{"first page but for the null", vm.Range{Start: 1, End: 4096}},
		{"non-canonical", vm.Range{Start: 1 << 62, End: 1<<62 + 4096}},
		{"kernel", vm.Range{Start: 1<<63 + 1<<62, End: 1<<63 + 1<<62 + 4096}},
		{"last page", vm.Range{Start: top &^ 4095, End: top}},
	} {
		_, err := dev.Register(context.Background(), c.r, device.LocalRead)
		wantError(t, c.name, err, device.ErrFault, device.ErrInvalid)
	}
}

func (s *suite) testBadMemory() {
	t, dev := s.t, s.dev
	if s.opts.Simulated {
		t.Skip("a simulated device doesn't look at memory")
	}
	page := uintptr(os.Getpagesize())
	//	page: 0      1    2     3         4      5
	//	      +------+----+-----+---------+------+-------+
	//	      | hole | ok | r/o | no prot | hole | ok    |
	//	      +------+----+-----+---------+------+-------+
	b := mapMemory(t, 6)
	at := func(from, to uintptr) vm.Range {
		start := vm.RangeOf(b).Start
		return vm.Range{Start: start + from*page, End: start + to*page}
	}
	for _, n := range []uintptr{0, 4} {
		r := at(n, n+1)
		if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, r.Start, r.Len(), 0); errno != 0 {
			t.Fatal(os.NewSyscallError("munmap", errno))
		}
	}
	t.Cleanup(func() { replace(t, at(0, 6)) }) // So that mapMemory's unmap is whole.
	if err := errors.Join(
		unix.Mprotect(b[2*page:3*page], unix.PROT_READ),
		unix.Mprotect(b[3*page:4*page], unix.PROT_NONE),
	); err != nil {
		t.Fatal(os.NewSyscallError("mprotect", err))
	}
	ok := register(t, dev, at(1, 2), device.LocalWrite)
	for _, c := range []struct {
		name string
		r    vm.Range
	}{
		{"unmapped", at(0, 1)},
		{"hole first", at(0, 2)},
		{"hole last", at(3, 5)},
		{"hole in the middle", at(1, 6)},
		{"no access", at(3, 4)},
		{"one byte without access", vm.Range{Start: at(3, 4).Start, End: at(3, 4).Start + 1}},
		{"read-only", at(2, 3)},
		{"read-only after writable", at(1, 3)},
	} {
		_, err := dev.Register(context.Background(), c.r, device.LocalWrite)
		wantError(t, c.name, err, device.ErrFault)
	}
	// Whether reading alone can be registered is the device's affair.
	if reg, err := dev.Register(context.Background(), at(2, 3), device.LocalRead); err == nil {
		if reg.Access&device.LocalWrite != 0 {
			t.Errorf("read-only memory registered with %v", reg.Access)
		}
		deregister(t, dev, reg)
	} else {
		wantError(t, "read-only for reading", err, device.ErrFault)
	}
	deregister(t, dev, ok, register(t, dev, at(5, 6), device.LocalWrite))
}

func (s *suite) testAcrossMappings() {
	t, dev := s.t, s.dev
	b := mapMemory(t, 4)
	r := vm.RangeOf(b)
	fd, err := unix.MemfdCreate("devicetest", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(os.NewSyscallError("memfd_create", err))
	}
	defer func() { _ = unix.Close(fd) }()
	page := uintptr(os.Getpagesize())
	if err := unix.Ftruncate(fd, int64(2*page)); err != nil {
		t.Fatal(os.NewSyscallError("ftruncate", err))
	}
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_FIXED | unix.MAP_SHARED
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Start+page, 2*page, prot, flags, uintptr(fd), 0); errno != 0 {
		t.Fatal(os.NewSyscallError("mmap", errno))
	}
	// Anonymous memory, a page of a file, and anonymous memory again: a
	// device may take it or not, but it takes all of it.
	reg, err := dev.Register(context.Background(), r, device.LocalWrite)
	if err != nil {
		wantError(t, "private and shared memory in one range", err, device.ErrFault, device.ErrUnsupportedMemory)
		return
	}
	if s.opts.Write != nil {
		data := bytes.Repeat([]byte("xyz"), len(b))[:len(b)]
		if err := s.opts.Write(dev, reg, int(r.Start-reg.Range.Start), data); err != nil {
			t.Errorf("write across mappings: %v", err)
		} else if !bytes.Equal(b, data) {
			t.Error("write across mappings didn't arrive everywhere")
		}
	}
	deregister(t, dev, reg)
}

func (s *suite) testDoubleDeregister() {
	t, dev := s.t, s.dev
	b := vm.RangeOf(mapMemory(t, 1))
	first, second := register(t, dev, b, 0), register(t, dev, b, 0)
	deregister(t, dev, first)
	wantError(t, "second deregister", dev.Deregister(first), device.ErrNotRegistered)
	deregister(t, dev, second)
	wantError(t, "second deregister of another", dev.Deregister(second), device.ErrNotRegistered)
	wantError(t, "third deregister", dev.Deregister(first), device.ErrNotRegistered)
	wantError(t, "zero registration", dev.Deregister(device.Registration{}), device.ErrNotRegistered)
	if up, ok := dev.(device.Updater); ok {
		_, err := up.Update(context.Background(), first)
		wantError(t, "update of a dead registration", err, device.ErrNotRegistered, device.ErrNotSupported)
	}
}

// A dead registration's handle never reaches one that came after it, even when
// the device reuses what the handle stood for.
func (s *suite) testStaleHandle() {
	t, dev := s.t, s.dev
	b := vm.RangeOf(mapMemory(t, 1))
	var dead []device.Registration
	for range 300 {
		reg := register(t, dev, b, 0)
		dead = append(dead, reg)
		deregister(t, dev, reg)
	}
	live := make([]device.Registration, 4)
	for i := range live {
		live[i] = register(t, dev, b, 0)
	}
	for _, reg := range dead {
		wantError(t, "deregister of a dead registration", dev.Deregister(reg), device.ErrNotRegistered)
	}
	deregister(t, dev, live...)
}

func (s *suite) testDeregisterUnmapped() {
	t, dev := s.t, s.dev
	b := mapMemory(t, 3)
	reg := register(t, dev, vm.RangeOf(b), device.LocalWrite)
	if err := unix.Munmap(b); err != nil {
		t.Fatal(os.NewSyscallError("munmap", err))
	}
	deregister(t, dev, reg)
}

func (s *suite) testAccess() {
	t, dev := s.t, s.dev
	b := vm.RangeOf(mapMemory(t, 1))
	ctx := context.Background()
	for access := range device.RelaxedOrdering << 1 {
		reg, err := dev.Register(ctx, b, access)
		switch {
		case !access.Valid():
			wantError(t, fmt.Sprint("invalid access ", access), err, device.ErrAccess)
		case err != nil:
			wantError(t, fmt.Sprint("access ", access), err, device.ErrAccess)
		case !reg.Access.Covers(access):
			t.Errorf("granted %v for %v", reg.Access, access)
		}
		if err == nil {
			deregister(t, dev, reg)
		}
	}
	_, err := dev.Register(ctx, b, 1<<31)
	wantError(t, "unknown access bit", err, device.ErrAccess)
	deregister(t, dev, register(t, dev, b, device.LocalRead), register(t, dev, b, device.LocalWrite))
}

func (s *suite) testMaxRegistrations() {
	t, dev := s.t, s.dev
	limits := dev.Limits()
	n := limits.MaxRegistrations
	page := uint64(os.Getpagesize())
	switch {
	case n == 0:
		t.Skip("the device has no limit")
	case n > s.opts.MaxRegistrations, limits.MaxPinnedBytes != 0 && uint64(n)*page > limits.MaxPinnedBytes:
		t.Skipf("%d registrations are too many to make", n)
	}
	b := vm.RangeOf(mapMemory(t, 1))
	keys := make(map[uint32]bool, n)
	regs := make([]device.Registration, n)
	for i := range n {
		regs[i] = register(t, dev, b, 0)
		keys[regs[i].LocalKey] = true
	}
	if len(keys) != n {
		t.Errorf("%d keys for %d registrations", len(keys), n)
	}
	_, err := dev.Register(context.Background(), b, 0)
	wantError(t, "one registration more than the limit", err, device.ErrNoSlots)
	deregister(t, dev, regs[n/2])
	regs[n/2] = register(t, dev, b, 0)
	_, err = dev.Register(context.Background(), b, 0)
	wantError(t, "one more than the limit again", err, device.ErrNoSlots)
	deregister(t, dev, regs...)
	deregister(t, dev, register(t, dev, b, 0))
}

// aliases maps size bytes of address space, all of which is one chunk of
// memory over and over, so that a long range costs little memory.
func aliases(tb testing.TB, size uintptr) vm.Range {
	tb.Helper()
	const chunk = 4 << 20
	fd, err := unix.MemfdCreate("devicetest", unix.MFD_CLOEXEC)
	if err != nil {
		tb.Fatal(os.NewSyscallError("memfd_create", err))
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Ftruncate(fd, chunk); err != nil {
		tb.Fatal(os.NewSyscallError("ftruncate", err))
	}
	b, err := unix.Mmap(-1, 0, int(size), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		tb.Fatal(os.NewSyscallError("mmap", err))
	}
	tb.Cleanup(func() { _ = unix.Munmap(b) })
	r := vm.RangeOf(b)
	for at := r.Start; at < r.End; at += chunk {
		const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_FIXED | unix.MAP_SHARED
		if _, _, errno := unix.Syscall6(unix.SYS_MMAP, at, min(chunk, r.End-at), prot, flags, uintptr(fd), 0); errno != 0 {
			tb.Fatal(os.NewSyscallError("mmap", errno))
		}
	}
	return r
}

func (s *suite) testMaxRange() {
	t, dev := s.t, s.dev
	limits := dev.Limits()
	page := uintptr(os.Getpagesize())
	longest := uintptr(limits.MaxRange)
	if longest == 0 {
		t.Skip("the device has no limit")
	}
	const reserved = 8 << 30
	if longest > reserved {
		t.Skipf("a range of %d bytes is too long to map", longest)
	}
	r := aliases(t, longest+page)
	_, err := dev.Register(context.Background(), vm.Range{Start: r.Start, End: r.Start + longest + 1}, 0)
	wantError(t, "one byte more than the longest range", err, device.ErrTooLarge)
	_, err = dev.Register(context.Background(), vm.Range{Start: page, End: 1 << 46}, 0)
	wantError(t, "64 TiB", err, device.ErrTooLarge)
	if limits.MaxPinnedBytes != 0 && uint64(longest+page) > limits.MaxPinnedBytes {
		return
	}
	deregister(t, dev, register(t, dev, vm.Range{Start: r.Start, End: r.Start + longest}, 0))
	deregister(t, dev, register(t, dev, vm.Range{Start: r.Start, End: r.Start + longest - 1}, 0))
}

func (s *suite) testMaxPinnedBytes() {
	t, dev := s.t, s.dev
	limits := dev.Limits()
	page := os.Getpagesize()
	pages := int(limits.MaxPinnedBytes) / page
	switch {
	case limits.MaxPinnedBytes == 0:
		t.Skip("the device has no limit")
	case limits.MaxPinnedBytes > 1<<30:
		t.Skipf("%d bytes are too many to pin", limits.MaxPinnedBytes)
	case pages < 4:
		t.Skipf("a limit of %d pages is too low to test", pages)
	case limits.MaxRegistrations != 0 && limits.MaxRegistrations < 3:
		t.Skip("too few registrations to reach the limit")
	case limits.MaxRange != 0 && uint64(pages*page) > limits.MaxRange:
		t.Skip("one range can't reach the limit")
	}
	b := mapMemory(t, pages)
	at := func(from, to int) vm.Range { return vm.RangeOf(b[from*page : to*page]) }
	// What earlier tests had pinned may be given back late.
	eventually := func(r vm.Range) device.Registration {
		t.Helper()
		deadline := time.Now().Add(pinnedPatience)
		for {
			reg, err := dev.Register(context.Background(), r, 0)
			if err == nil {
				return reg
			}
			if !errors.Is(err, device.ErrNoMemory) || time.Now().After(deadline) {
				t.Fatalf("register %v: %v", r, err)
			}
			time.Sleep(time.Millisecond)
		}
	}
	deregister(t, dev, eventually(at(0, pages)))
	big := eventually(at(0, pages-2))
	// Two bytes are two pages, if they lie so.
	edge := eventually(vm.RangeOf(b[page-1 : page+1]))
	_, err := dev.Register(context.Background(), at(0, 1), 0)
	wantError(t, "one page more than the limit", err, device.ErrNoMemory)
	deregister(t, dev, edge)
	last := eventually(at(pages-1, pages))
	_, err = dev.Register(context.Background(), at(0, 2), 0)
	wantError(t, "two pages where there is room for one", err, device.ErrNoMemory)
	deregister(t, dev, eventually(at(0, 1)), big, last)
	deregister(t, dev, eventually(at(0, pages)))
}

func (s *suite) testContext() {
	t, dev := s.t, s.dev
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	b := vm.RangeOf(mapMemory(t, 1))
	_, err := dev.Register(ctx, b, 0)
	wantError(t, "register with a cancelled context", err, context.Canceled)
	reg := register(t, dev, b, 0)
	if up, ok := dev.(device.Updater); ok {
		_, err := up.Update(ctx, reg)
		wantError(t, "update with a cancelled context", err, context.Canceled, device.ErrNotSupported)
	}
	deregister(t, dev, reg)
}

func (s *suite) testConcurrent() {
	t, dev := s.t, s.dev
	const workers = 8
	rounds := 400
	if testing.Short() {
		rounds = 100
	}
	hold := 4
	if n := dev.Limits().MaxRegistrations; n != 0 {
		hold = min(hold, n/workers)
	}
	if n := dev.Limits().MaxPinnedBytes; n != 0 { // Twice: for an update's new page.
		hold = min(hold, int(n)/os.Getpagesize()/(2*workers))
	}
	if hold == 0 {
		t.Skip("too few registrations for all workers")
	}
	up, _ := s.updates()
	b := mapMemory(t, workers)
	page := os.Getpagesize()
	var live sync.Map // of local keys.
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := vm.RangeOf(b[w*page : (w+1)*page])
			var held []device.Registration
			for i := range rounds {
				reg, err := dev.Register(context.Background(), r, device.LocalWrite)
				if err != nil {
					t.Errorf("register: %v", err)
					break
				}
				if _, dup := live.LoadOrStore(reg.LocalKey, w); dup {
					t.Errorf("key %#x handed out while it is live", reg.LocalKey)
				}
				if up != nil && i%3 == 0 {
					got, err := up.Update(context.Background(), reg)
					if err != nil || got.LocalKey != reg.LocalKey || got.RemoteKey != reg.RemoteKey {
						t.Errorf("update of key %#x: key %#x, %v", reg.LocalKey, got.LocalKey, err)
					} else {
						reg = got
					}
				}
				held = append(held, reg)
				if len(held) < hold && i != rounds-1 {
					continue
				}
				for _, reg := range held {
					live.Delete(reg.LocalKey)
					if err := dev.Deregister(reg); err != nil {
						t.Errorf("deregister: %v", err)
					}
				}
				held = held[:0]
			}
		})
	}
	wg.Wait()
	// Of several that deregister the same, one wins.
	for range rounds / 10 {
		reg := register(t, dev, vm.RangeOf(b), 0)
		errs := make([]error, workers)
		for w := range workers {
			wg.Go(func() { errs[w] = dev.Deregister(reg) })
		}
		wg.Wait()
		won := 0
		for _, err := range errs {
			if err == nil {
				won++
			} else {
				wantError(t, "concurrent deregister", err, device.ErrNotRegistered, device.ErrBusy)
			}
		}
		if won != 1 {
			t.Fatalf("%d of %d concurrent deregistrations succeeded, want one", won, workers)
		}
	}
}

// updates returns the device as an Updater, if it can update.
func (s *suite) updates() (device.Updater, bool) {
	s.t.Helper()
	up, ok := s.dev.(device.Updater)
	if !ok {
		return nil, false
	}
	reg := register(s.t, up, vm.RangeOf(mapMemory(s.t, 1)), device.LocalWrite)
	_, err := up.Update(context.Background(), reg)
	deregister(s.t, up, reg)
	if errors.Is(err, device.ErrNotSupported) {
		return nil, false
	}
	if err != nil {
		s.t.Errorf("update: %v", err)
	}
	return up, true
}

// updater returns the device as an Updater, or skips the test.
func (s *suite) updater() device.Updater {
	s.t.Helper()
	up, ok := s.updates()
	if !ok {
		s.t.Skip("the device can't update")
	}
	return up
}

func (s *suite) testUpdate() {
	t, dev := s.t, s.dev
	up := s.updater()
	b := vm.RangeOf(mapMemory(t, 2))
	reg := register(t, dev, b, device.LocalWrite)
	for range 3 {
		replace(t, b)
		got, err := up.Update(context.Background(), reg)
		if err != nil {
			t.Fatalf("update: %v", err)
		}
		if got.LocalKey != reg.LocalKey || got.RemoteKey != reg.RemoteKey {
			t.Errorf("keys %#x, %#x after update, want %#x, %#x", got.LocalKey, got.RemoteKey, reg.LocalKey, reg.RemoteKey)
		}
		if got.Range != reg.Range || got.Access != reg.Access {
			t.Errorf("%v, %v after update, want %v, %v", got.Range, got.Access, reg.Range, reg.Access)
		}
		reg = got
	}
	deregister(t, dev, reg)
}

// A failed update leaves the old registration, or says that it is lost.
func (s *suite) testUpdateFails() {
	t, dev := s.t, s.dev
	up := s.updater()
	if s.opts.Simulated {
		t.Skip("a simulated device doesn't look at memory")
	}
	b := mapMemory(t, 2)
	fillWith(b, 'a')
	reg := register(t, dev, vm.RangeOf(b), device.LocalWrite)
	if err := unix.Mprotect(b[os.Getpagesize():], unix.PROT_NONE); err != nil {
		t.Fatal(os.NewSyscallError("mprotect", err))
	}
	_, err := up.Update(context.Background(), reg)
	wantError(t, "update without access", err, device.ErrFault)
	if errors.Is(err, device.ErrRegistrationLost) {
		wantError(t, "deregister of what is lost", dev.Deregister(reg), device.ErrNotRegistered)
		return
	}
	if s.opts.Read != nil {
		got := make([]byte, len(b))
		if err := s.opts.Read(dev, reg, 0, got); err != nil || !bytes.Equal(got, bytes.Repeat([]byte("a"), len(b))) {
			t.Errorf("read after a failed update: %.8q, %v, want the old pages", got, err)
		}
	}
	deregister(t, dev, reg)
}

func fillWith(b []byte, c byte) {
	for i := range b {
		b[i] = c
	}
}

// sees returns the byte that the device sees everywhere in reg, or an error.
func (s *suite) sees(dev device.Device, reg device.Registration) (byte, error) {
	got := make([]byte, reg.Range.Len())
	if err := s.opts.Read(dev, reg, 0, got); err != nil {
		return 0, err
	}
	for _, c := range got {
		if c != got[0] {
			return 0, fmt.Errorf("mixture of %q and %q", got[0], c)
		}
	}
	return got[0], nil
}

func (s *suite) wantSees(t *testing.T, what string, dev device.Device, reg device.Registration, want byte) {
	t.Helper()
	if got, err := s.sees(dev, reg); err != nil || got != want {
		t.Errorf("%s: the device sees %q, %v, want %q", what, got, err, want)
	}
}

func (s *suite) needData(t *testing.T) {
	t.Helper()
	if s.opts.Read == nil || s.opts.Write == nil {
		t.Skip("no data path given")
	}
}

func (s *suite) testData() {
	t, dev := s.t, s.dev
	s.needData(t)
	page := os.Getpagesize()
	b := mapMemory(t, 3)
	want := make([]byte, len(b))
	for i := range want {
		want[i] = byte(i ^ i>>8)
	}
	copy(b, want)
	r := vm.RangeOf(b[100 : 3*page-100])
	reg := register(t, dev, r, device.LocalWrite)
	base := int(r.Start - reg.Range.Start)
	// Within a page, up to its end, across an edge, all of it.
	for _, c := range []struct{ off, n int }{{0, 1}, {5, 100}, {page - 200, 100}, {page - 101, 2}, {0, int(r.Len())}, {int(r.Len()) - 1, 1}} {
		got := make([]byte, c.n)
		if err := s.opts.Read(dev, reg, base+c.off, got); err != nil || !bytes.Equal(got, want[100+c.off:100+c.off+c.n]) {
			t.Errorf("read [%d,+%d): %v, or other bytes than memory has", c.off, c.n, err)
		}
		for i := range got {
			got[i] ^= 0x5a
		}
		copy(want[100+c.off:], got)
		if err := s.opts.Write(dev, reg, base+c.off, got); err != nil {
			t.Errorf("write [%d,+%d): %v", c.off, c.n, err)
		}
		if !bytes.Equal(b, want) {
			t.Fatalf("write [%d,+%d) didn't arrive, or arrived elsewhere too", c.off, c.n)
		}
	}
	if err := s.opts.Read(dev, reg, int(reg.Range.Len()), make([]byte, 1)); err == nil {
		t.Error("read beyond the registration succeeded")
	}
	deregister(t, dev, reg)
	if err := s.opts.Read(dev, reg, base, make([]byte, 1)); err == nil {
		t.Error("read through a dead key succeeded")
	}
	if err := s.opts.Write(dev, reg, base, []byte{1}); err == nil {
		t.Error("write through a dead key succeeded")
	}
}

// A registration keeps the pages it was made of; a new one has the new pages.
func (s *suite) testDataStale() {
	t, dev := s.t, s.dev
	s.needData(t)
	if s.opts.Simulated {
		t.Skip("a simulated device doesn't look at memory")
	}
	for _, c := range []struct {
		name string
		op   func(b []byte)
	}{
		{"dontneed", func(b []byte) {
			if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
				t.Fatal(os.NewSyscallError("madvise", err))
			}
		}},
		{"map over", func(b []byte) { replace(t, vm.RangeOf(b)) }},
	} {
		b := mapMemory(t, 2)
		fillWith(b, 'o')
		old := register(t, dev, vm.RangeOf(b), device.LocalWrite)
		s.wantSees(t, c.name+", before", dev, old, 'o')
		c.op(b)
		fillWith(b, 'n')
		s.wantSees(t, c.name+", stale", dev, old, 'o')
		fresh := register(t, dev, vm.RangeOf(b), device.LocalWrite)
		s.wantSees(t, c.name+", fresh", dev, fresh, 'n')
		s.wantSees(t, c.name+", stale beside fresh", dev, old, 'o')
		if err := s.opts.Write(dev, old, 0, []byte{'x'}); err != nil {
			t.Errorf("%s: write through the stale registration: %v", c.name, err)
		}
		if b[0] != 'n' {
			t.Errorf("%s: a write through the stale registration reached the new page", c.name)
		}
		deregister(t, dev, old)
		s.wantSees(t, c.name+", fresh alone", dev, fresh, 'n')
		deregister(t, dev, fresh)
	}
}

func (s *suite) testDataUpdate() {
	t, dev := s.t, s.dev
	s.needData(t)
	up := s.updater()
	if s.opts.Simulated {
		t.Skip("a simulated device doesn't look at memory")
	}
	b := mapMemory(t, 2)
	fillWith(b, '0')
	reg := register(t, dev, vm.RangeOf(b), device.LocalWrite)
	for c := byte('1'); c <= '3'; c++ {
		replace(t, vm.RangeOf(b))
		fillWith(b, c)
		s.wantSees(t, "before update", dev, reg, c-1)
		var err error
		if reg, err = up.Update(context.Background(), reg); err != nil {
			t.Fatalf("update: %v", err)
		}
		s.wantSees(t, "after update", dev, reg, c)
	}
	deregister(t, dev, reg)
}

func (s *suite) testClose() {
	t, dev := s.t, s.dev
	closer, ok := dev.(interface{ Close() error })
	if !ok {
		t.Skip("the device can't be closed")
	}
	b := vm.RangeOf(mapMemory(t, 1))
	reg := register(t, dev, b, 0)
	for i := range 3 {
		if err := closer.Close(); err != nil {
			t.Errorf("close number %d: %v", i+1, err)
		}
	}
	_, err := dev.Register(context.Background(), b, 0)
	wantError(t, "register after close", err, device.ErrClosed)
	wantError(t, "deregister after close", dev.Deregister(reg), device.ErrClosed)
	if up, ok := dev.(device.Updater); ok {
		_, err := up.Update(context.Background(), reg)
		wantError(t, "update after close", err, device.ErrClosed, device.ErrNotSupported)
	}
	_ = dev.Limits() // Still answers.
	// Closing while others are in the middle of calls.
	busy := s.newDevice(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				reg, err := busy.Register(context.Background(), b, 0)
				if err == nil {
					err = busy.Deregister(reg)
				}
				if err != nil {
					wantError(t, "call while closing", err, device.ErrClosed)
					return
				}
			}
		})
	}
	for range 20 {
		reg := register(t, busy, b, 0)
		deregister(t, busy, reg)
	}
	if err := busy.(interface{ Close() error }).Close(); err != nil {
		t.Errorf("close in the middle of calls: %v", err)
	}
	wg.Wait()
}
