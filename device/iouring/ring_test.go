package iouring_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

func newRing(tb testing.TB, opts *iouring.RingOptions) *iouring.Ring {
	tb.Helper()
	r, err := iouring.NewRing(opts)
	needRing(tb, err)
	tb.Cleanup(func() {
		if err := r.Close(); err != nil {
			tb.Error(err)
		}
	})
	return r
}

func TestRingReadsAndWrites(t *testing.T) {
	ring := newRing(t, nil)
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd := int(f.Fd())
	b := mapAnon(t, 8)
	for i := range b {
		b[i] = byte(i * 7)
	}
	page := os.Getpagesize()
	at := func(i int) vm.Range { return vm.RangeOf(b[i*page : (i+1)*page]) }
	for i := range 4 {
		if err := ring.Write(fd, at(i), int64(i*page), uint64(100+i)); err != nil {
			t.Fatal(err)
		}
	}
	if n := ring.Queued(); n != 4 {
		t.Errorf("%d queued, want 4", n)
	}
	for _, c := range do(t, ring, 4) {
		if c.Res != int32(page) || c.UserData < 100 || c.UserData > 103 {
			t.Errorf("write: %+v", c)
		}
	}
	if err := errors.Join(ring.Fsync(fd, false, 1), ring.Fsync(fd, true, 2)); err != nil {
		t.Fatal(err)
	}
	for _, c := range do(t, ring, 2) {
		if c.Res != 0 {
			t.Errorf("fsync: %+v", c)
		}
	}
	for i := range 4 {
		if err := ring.Read(fd, at(4+i), int64(i*page), 0); err != nil {
			t.Fatal(err)
		}
	}
	do(t, ring, 4)
	if !bytes.Equal(b[:4*page], b[4*page:]) {
		t.Error("read other bytes than were written")
	}
	// A read across the file's end is short, one beyond it is empty.
	if err := errors.Join(
		ring.Read(fd, vm.RangeOf(b[:2*page]), int64(3*page), 1),
		ring.Read(fd, at(0), int64(9*page), 2),
	); err != nil {
		t.Fatal(err)
	}
	for _, c := range do(t, ring, 2) {
		if want := map[uint64]int32{1: int32(page), 2: 0}[c.UserData]; c.Res != want {
			t.Errorf("read at the end: %+v, want %d", c, want)
		}
	}
}

func TestRingErrors(t *testing.T) {
	ring := newRing(t, nil)
	b := vm.RangeOf(mapAnon(t, 1))
	// A failing request in the middle of a batch holds nothing up.
	if err := errors.Join(ring.Nop(1), ring.Write(-1, b, 0, 2), ring.ReadFixed(0, b, 0, 5, 3), ring.Nop(4)); err != nil {
		t.Fatal(err)
	}
	got := map[uint64]error{}
	for _, c := range do(t, ring, 4) {
		got[c.UserData] = c.Err()
	}
	want := map[uint64]error{1: nil, 2: unix.EBADF, 3: unix.EFAULT, 4: nil}
	for ud, err := range want {
		if got[ud] != err { //nolint:errorlint // Err returns the plain errno.
			t.Errorf("request %d: %v, want %v", ud, got[ud], err)
		}
	}
	if err := ring.ReadFixed(0, b, 0, iouring.MaxSlots, 0); !errors.Is(err, device.ErrInvalid) {
		t.Errorf("slot beyond every table: %v", err)
	}
	if err := ring.Read(0, vm.Range{Start: 1, End: 1 << 40}, 0, 0); !errors.Is(err, device.ErrInvalid) {
		t.Errorf("1 TiB: %v", err)
	}
	if ring.Queued() != 0 {
		t.Errorf("%d queued of refused requests", ring.Queued())
	}
	if _, err := ring.SubmitAndWait(1 << 20); !errors.Is(err, device.ErrInvalid) {
		t.Errorf("wait for more than the queue holds: %v", err)
	}
	if n, err := ring.Wait(nil); n != 0 || err != nil {
		t.Errorf("wait for nothing: %d, %v", n, err)
	}
	for _, o := range []iouring.RingOptions{{Entries: -1}, {Entries: 1 << 20}, {CQEntries: -1}, {Entries: 64, CQEntries: 8}} {
		if r, err := iouring.NewRing(&o); !errors.Is(err, device.ErrInvalid) {
			t.Errorf("options %+v: %v", o, err)
			if err == nil {
				r.Close()
			}
		}
	}
}

func TestRingQueueFull(t *testing.T) {
	ring := newRing(t, &iouring.RingOptions{Entries: 4})
	for round := range uint64(10) { // Round and round the queues.
		for i := range uint64(4) {
			if err := ring.Nop(round*4 + i); err != nil {
				t.Fatal(err)
			}
		}
		if err := ring.Nop(99); !errors.Is(err, iouring.ErrQueueFull) {
			t.Errorf("fifth of four: %v", err)
		}
		if n, err := ring.Submit(); n != 4 || err != nil {
			t.Fatalf("submit: %d, %v", n, err)
		}
		if n, err := ring.Submit(); n != 0 || err != nil {
			t.Errorf("submit of nothing: %d, %v", n, err)
		}
		got := do(t, ring, 4)
		for i, c := range got {
			if c.UserData != round*4+uint64(i) {
				t.Errorf("completion %d of round %d is of request %d", i, round, c.UserData)
			}
		}
	}
}

// Completions that don't fit into the queue are kept by the kernel, and none
// gets lost.
func TestRingOverflow(t *testing.T) {
	ring := newRing(t, &iouring.RingOptions{Entries: 4, CQEntries: 8})
	const total = 100
	for i := range uint64(total) {
		err := ring.Nop(i)
		if errors.Is(err, iouring.ErrQueueFull) {
			if _, err := ring.Submit(); err != nil {
				t.Fatal(err)
			}
			err = ring.Nop(i)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, err := ring.SubmitAndWait(8); n == 0 || err != nil {
		t.Fatalf("submit and wait: %d, %v", n, err)
	}
	var got []uint64
	buf := make([]iouring.Completion, 13)
	for len(got) < total {
		n, err := ring.Completions(buf)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			t.Fatalf("%d completions of %d, and no more", len(got), total)
		}
		for _, c := range buf[:n] {
			got = append(got, c.UserData)
		}
	}
	slices.Sort(got)
	for i, ud := range got {
		if ud != uint64(i) {
			t.Fatalf("completions %v, want each request's once", got)
		}
	}
	if n, err := ring.Completions(buf); n != 0 || err != nil {
		t.Errorf("%d completions too many, %v", n, err)
	}
}

func TestRingClosed(t *testing.T) {
	ring := newRing(t, nil)
	if err := ring.Nop(0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := ring.Close(); err != nil {
			t.Error(err)
		}
	}
	b := vm.RangeOf(mapAnon(t, 1))
	_, submitErr := ring.Submit()
	_, takeErr := ring.Completions(make([]iouring.Completion, 1))
	_, waitErr := ring.Wait(make([]iouring.Completion, 1))
	for i, err := range []error{ring.Nop(0), ring.Read(0, b, 0, 0), ring.Fsync(0, false, 0), submitErr, takeErr, waitErr} {
		if !errors.Is(err, device.ErrClosed) {
			t.Errorf("call %d on a closed ring: %v", i, err)
		}
	}
	if ring.Queued() != 0 {
		t.Error("requests queued in a closed ring")
	}
}

// A wait goes on when signals interrupt it, as the Go runtime's do.
func TestRingWaitsThroughSignals(t *testing.T) {
	ring := newRing(t, nil)
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(p[0]); _ = unix.Close(p[1]) }()
	b := mapAnon(t, 1)
	if err := ring.Read(p[0], vm.RangeOf(b), -1, 1); err != nil {
		t.Fatal(err)
	}
	tid := make(chan int)
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		tid <- unix.Gettid()
		var done [1]iouring.Completion
		err := ring.Do(done[:])
		if err == nil && done[0].Res != 3 {
			err = done[0].Err()
		}
		result <- err
	}()
	waiter := <-tid
	for range 200 {
		if err := unix.Tgkill(os.Getpid(), waiter, unix.SIGURG); err != nil {
			t.Error(err)
		}
		runtime.Gosched()
	}
	select {
	case err := <-result:
		t.Fatalf("waited only until a signal came: %v", err)
	default:
	}
	if _, err := unix.Write(p[1], []byte("abc")); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil || string(b[:3]) != "abc" {
		t.Errorf("read %q, %v", b[:3], err)
	}
}

func TestAllocs(t *testing.T) {
	d := open(t, nil)
	ring, fd := d.Ring(), memfd(t)
	r := vm.RangeOf(mapAnon(t, 1))
	ctx := t.Context()
	reg, err := d.Register(ctx, r, 0)
	if err != nil {
		t.Fatal(err)
	}
	var done [2]iouring.Completion
	if n := testing.AllocsPerRun(200, func() {
		if err := ring.WriteFixed(fd, r, 0, reg.LocalKey, 1); err != nil {
			t.Fatal(err)
		}
		if err := ring.Read(fd, r, 0, 2); err != nil {
			t.Fatal(err)
		}
		if err := ring.Do(done[:]); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations for two requests, want 0", n)
	}
	if n := testing.AllocsPerRun(200, func() {
		if _, err := d.Update(ctx, reg); err != nil {
			t.Fatal(err)
		}
	}); n != 0 && !raceEnabled {
		t.Errorf("%v allocations for an update, want 0", n)
	}
	if n := testing.AllocsPerRun(200, func() {
		reg, err := d.Register(ctx, r, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Deregister(reg); err != nil {
			t.Fatal(err)
		}
	}); n != 0 && !raceEnabled {
		t.Errorf("%v allocations for register and deregister, want 0", n)
	}
}
