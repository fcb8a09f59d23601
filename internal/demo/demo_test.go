package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/auto"
	"github.com/pindown/pindown/monitor/manual"
)

// lacks skips the test for want of something, or fails it where everything is
// supposed to be there.
func lacks(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}

func needRing(t *testing.T) {
	t.Helper()
	dev, err := iouring.Open(nil)
	if errors.Is(err, device.ErrNotSupported) {
		lacks(t, "io_uring: "+err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
}

// shared keeps a monitor open from run to run.
type shared struct{ monitor.Monitor }

func (shared) Close() error { return nil }

var selection = sync.OnceValue(func() *auto.Selection { return auto.Open(context.Background()) })

func TestMain(m *testing.M) {
	code := m.Run()
	if err := selection().Close(); err != nil && code == 0 {
		code = 1
	}
	os.Exit(code)
}

func realMonitor(t *testing.T) func() (monitor.Monitor, string) {
	t.Helper()
	m := selection().Monitor()
	if m == nil {
		lacks(t, "a monitor: "+selection().Reason())
	}
	return func() (monitor.Monitor, string) { return shared{m}, "" }
}

// blind opens a monitor that nobody tells anything.
func blind() (monitor.Monitor, string) {
	m, err := manual.New(nil)
	if err != nil {
		return nil, err.Error()
	}
	return m, ""
}

func mustRun(t *testing.T, o *Options) *Result {
	t.Helper()
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	checkCounters(t, r)
	return r
}

// checkCounters checks what holds in every run.
func checkCounters(t *testing.T, r *Result) {
	t.Helper()
	if len(r.Modes) != len(Modes()) {
		t.Fatalf("%d modes, want %v", len(r.Modes), Modes())
	}
	for i, m := range r.Modes {
		if m.Name != Modes()[i] {
			t.Errorf("mode %d is %v, want %v", i, m.Name, Modes()[i])
		}
		if m.Blocks != uint64(r.Rounds) {
			t.Errorf("%v wrote %d blocks, want %d", m.Name, m.Blocks, r.Rounds)
		}
		if m.Changes != r.Modes[0].Changes {
			t.Errorf("%v made %d changes, %v made %d", m.Name, m.Changes, r.Modes[0].Name, r.Modes[0].Changes)
		}
		if m.Seconds <= 0 || m.WallSeconds <= 0 || m.RatioToPerUse <= 0 {
			t.Errorf("%v took %v s, %v s, %v of per-use", m.Name, m.Seconds, m.WallSeconds, m.RatioToPerUse)
		}
	}
	for _, m := range []Mode{NoMonitor, Pindown} {
		c := r.Mode(m)
		if m == Pindown && r.Monitor == "none" {
			continue
		}
		if c.Hits+c.Misses != c.Blocks {
			t.Errorf("%v: %d hits and %d misses of %d blocks", m, c.Hits, c.Misses, c.Blocks)
		}
		if c.Registrations != c.Misses {
			t.Errorf("%v: %d registrations for %d misses", m, c.Registrations, c.Misses)
		}
	}
	if c := r.Mode(NoMonitor); c.Invalidations != 0 {
		t.Errorf("no-monitor: %d invalidations", c.Invalidations)
	}
	if c := r.Mode(PerUse); c.Registrations != c.Blocks || c.WrongBlocks != 0 {
		t.Errorf("per-use: %d registrations, %d wrong, of %d blocks", c.Registrations, c.WrongBlocks, c.Blocks)
	}
	if c := r.Mode(Unregistered); c.Registrations != 0 || c.WrongBlocks != 0 {
		t.Errorf("unregistered: %d registrations, %d wrong", c.Registrations, c.WrongBlocks)
	}
}

var kinds = []Churn{ChurnNone, ChurnUnmap, ChurnDontneed, ChurnRemap, ChurnMixed}

func TestNoWrongBlocks(t *testing.T) {
	needRing(t)
	open := realMonitor(t)
	for _, churn := range kinds {
		t.Run(churn.String(), func(t *testing.T) {
			rounds := 2000
			if testing.Short() {
				rounds = 400
			}
			r := mustRun(t, &Options{Churn: churn, Rounds: rounds, Monitor: open})
			naive, pin := r.Mode(NoMonitor), r.Mode(Pindown)
			if err := r.Failure(); err != nil {
				t.Error(err)
			}
			if pin.Hits == 0 {
				t.Error("no hits")
			}
			if churn == ChurnNone {
				if naive.WrongBlocks != 0 || naive.Changes != 0 {
					t.Errorf("%d wrong blocks, %d changes, without churn", naive.WrongBlocks, naive.Changes)
				}
				if pin.Registrations*50 > pin.Blocks {
					t.Errorf("%d registrations for %d blocks, at most 2 %%", pin.Registrations, pin.Blocks)
				}
				return
			}
			if naive.WrongBlocks == 0 || naive.StaleBlocks != naive.WrongBlocks {
				t.Errorf("no-monitor: %d wrong blocks, %d of them stale", naive.WrongBlocks, naive.StaleBlocks)
			}
			// What was registered first in a slice is missed too.
			if pin.Invalidations == 0 || pin.Misses < pin.Invalidations {
				t.Errorf("pindown: %d invalidations, %d misses", pin.Invalidations, pin.Misses)
			}
		})
	}
}

func TestBlindMonitorFails(t *testing.T) {
	needRing(t)
	r := mustRun(t, &Options{Rounds: 200, Monitor: blind})
	if err := r.Failure(); !errors.Is(err, ErrWrongBlocks) {
		t.Errorf("failure %v, want %v", err, ErrWrongBlocks)
	}
	if text := textOf(t, r); !strings.Contains(text, "PINDOWN WROTE") {
		t.Errorf("the text doesn't scream:\n%s", text)
	}
}

func TestWithoutMonitor(t *testing.T) {
	needRing(t)
	r := mustRun(t, &Options{Rounds: 200, Monitor: func() (monitor.Monitor, string) { return nil, "the moon is full" }})
	if err := r.Failure(); err != nil {
		t.Error(err)
	}
	if c := r.Mode(Pindown); c.Registrations != c.Blocks || r.Monitor != "none" {
		t.Errorf("monitor %q, %d registrations of %d blocks", r.Monitor, c.Registrations, c.Blocks)
	}
	if text := textOf(t, r); !strings.Contains(text, "the moon is full") {
		t.Errorf("the text has no reason:\n%s", text)
	}
}

func textOf(t *testing.T, r *Result) string {
	t.Helper()
	var b bytes.Buffer
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestSizes(t *testing.T) {
	needRing(t)
	page := os.Getpagesize()
	for _, o := range []Options{
		{Rounds: 1}, {Rounds: 2}, {Rounds: 3}, {Rounds: 101},
		{Rounds: 50, Buffer: 3 * page}, {Rounds: 20, Buffer: 1 << 20},
	} {
		o.Monitor = blind
		o.Churn = ChurnNone
		r := mustRun(t, &o)
		if err := r.Failure(); err != nil {
			t.Errorf("%d rounds of %d bytes: %v", o.Rounds, o.Buffer, err)
		}
	}
}

func TestSameSequence(t *testing.T) {
	needRing(t)
	o := Options{Rounds: 300, Monitor: blind, Seed: 7}
	a, b := mustRun(t, &o), mustRun(t, &o)
	if x, y := a.Mode(NoMonitor), b.Mode(NoMonitor); x.WrongBlocks != y.WrongBlocks {
		t.Errorf("%d and %d wrong blocks with one seed", x.WrongBlocks, y.WrongBlocks)
	}
}

func TestPoolFitsTheLimit(t *testing.T) {
	for _, c := range []struct {
		limit uint64
		size  int
		want  int // 0: refused
	}{
		{0, 4096, poolBuffers},
		{8 << 20, 4096, poolBuffers},
		{64 << 10, 4096, 4},
		{8 << 20, 1 << 20, 2},
		{8 << 20, 2 << 20, 1},
		{8 << 20, 4 << 20, 0},
		{0, MaxBuffer, 2},
	} {
		r := run{opts: (&Options{Buffer: c.size, Rounds: 100_000}).withDefaults()}
		err := r.size(device.Limits{MaxPinnedBytes: c.limit})
		if c.want == 0 {
			if !errors.Is(err, ErrMemlock) {
				t.Errorf("limit %d, size %d: %v, want %v", c.limit, c.size, err, ErrMemlock)
			}
			continue
		}
		if err != nil || r.buffers != c.want {
			t.Errorf("limit %d, size %d: %d buffers, %v, want %d", c.limit, c.size, r.buffers, err, c.want)
		}
	}
}

func TestSlices(t *testing.T) {
	for rounds, want := range map[int]int{1: 1, 100: 1, 12_800: 4, 400_000: 4, 400_001: 5, 10_000_000: 100} {
		r := run{opts: Options{Rounds: rounds}, buffers: poolBuffers}
		if got := r.slices(); got != want {
			t.Errorf("%d blocks: %d slices, want %d", rounds, got, want)
		}
	}
}

func TestInterrupted(t *testing.T) {
	needRing(t)
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	calls := 0
	r, err := Run(ctx, &Options{Rounds: 100_000, Monitor: blind, Progress: func(int, int) { calls++; cancel() }})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
	if calls != 1 {
		t.Errorf("went on for %d windows", calls-1)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	// One window of the first mode was written, and counts.
	naive := r.Mode(NoMonitor)
	if !r.Interrupted || naive.Blocks == 0 || naive.WrongBlocks == 0 || naive.WrongBlocks > naive.Blocks || r.Mode(PerUse).Blocks > 0 {
		t.Errorf("%+v", naive)
	}
	text := textOf(t, r)
	for _, want := range []string{"Interrupted. Until then, of 100000 blocks", "of the blocks in the file are wrong", "With pindown nothing was written."} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if r, err := Run(ctx, &Options{Monitor: blind}); r != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("before anything: %+v, %v", r, err)
	}
}

// What is interrupted in the middle of a window is read back up to there.
func TestInterruptedWindow(t *testing.T) {
	needRing(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var left atomic.Int64
	left.Store(500)
	r, err := Run(asked{ctx, &left, cancel}, &Options{Rounds: 100_000, Monitor: blind})
	if !errors.Is(err, context.Canceled) || r == nil {
		t.Fatalf("%+v, %v", r, err)
	}
	var blocks uint64
	for _, m := range r.Modes {
		blocks += m.Blocks
		if m.WrongBlocks > m.Blocks || (m.Name == PerUse || m.Name == Unregistered) && m.WrongBlocks > 0 {
			t.Errorf("%+v", m)
		}
	}
	if window := uint64(windowBytes / DefaultBuffer); blocks == 0 || blocks%window == 0 {
		t.Errorf("%d blocks", blocks)
	}
}

// asked is a context that ends when it has been asked so often.
type asked struct {
	context.Context

	left   *atomic.Int64
	cancel func()
}

func (a asked) Err() error {
	if a.left.Add(-1) == 0 {
		a.cancel()
	}
	return a.Context.Err()
}

// Words for few blocks are right too.
func TestFewBlocks(t *testing.T) {
	needRing(t)
	r := mustRun(t, &Options{Rounds: 1, Monitor: blind})
	if text := textOf(t, r); !strings.HasPrefix(text, "1 block of ") || !strings.Contains(text, "No buffer changed its pages") {
		t.Errorf("%s", text)
	}
	r = &Result{}
	var totals [modeEnd]Totals
	totals[NoMonitor] = Totals{Blocks: 3, Changes: 1}
	totals[Pindown] = Totals{Blocks: 3, WrongBlocks: 1}
	r.conclude(totals)
	if text := textOf(t, r); !strings.Contains(text, "more blocks would show") || !strings.Contains(text, "PINDOWN WROTE 1 WRONG BLOCK with") {
		t.Errorf("%s", text)
	}
	r.Modes[0].exposed = 1
	if text := textOf(t, r); !strings.Contains(text, "although 1 block came from") {
		t.Errorf("%s", text)
	}
}

func TestValidate(t *testing.T) {
	for _, o := range []Options{
		{Rounds: -1}, {Rounds: MaxRounds + 1}, {Buffer: -1}, {Buffer: 1}, {Buffer: os.Getpagesize() + 1},
		{Buffer: MaxBuffer + os.Getpagesize()}, {Churn: ChurnMixed + 1},
	} {
		if _, err := Run(t.Context(), &o); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v, want %v", o, err, ErrOptions)
		}
	}
	if err := (*Options)(nil).Validate(); err != nil {
		t.Error(err)
	}
}

func TestParseChurn(t *testing.T) {
	for _, k := range kinds {
		if got, err := ParseChurn(k.String()); got != k || err != nil {
			t.Errorf("%v: %v, %v", k, got, err)
		}
	}
	for _, s := range []string{"", "invalid", "Mixed"} {
		if _, err := ParseChurn(s); !errors.Is(err, ErrOptions) {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func TestJSON(t *testing.T) {
	r := &Result{Device: "d", Monitor: "m", Rounds: 3}
	var totals [modeEnd]Totals
	for _, m := range Modes() {
		totals[m].Blocks = uint64(m)
		totals[m].times.add(1000, 1)
	}
	r.conclude(totals)
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var back Result
	if err := json.Unmarshal(b.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	for _, m := range Modes() {
		if back.Mode(m).Blocks != uint64(m) {
			t.Errorf("mode %v came back as %+v", m, back.Mode(m).Blocks)
		}
	}
	if err := new(Mode).UnmarshalText([]byte("invalid")); err == nil {
		t.Error("an invalid mode was accepted")
	}
}

// Each kind of renewal gives other, empty or foreign pages at the same
// address.
func TestRenew(t *testing.T) {
	p, err := newPool(3, uintptr(2*os.Getpagesize()))
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for _, how := range kinds {
		for range 8 {
			before := p.bufs[1]
			id := newBlockID(Pindown, false, 5)
			for i := range p.bufs {
				id.fill(p.bytes(i))
			}
			if err := p.renew(1, how, rng); err != nil {
				t.Fatal(how, err)
			}
			if p.bufs[1] != before {
				t.Logf("%v: moved from %v to %v", how, before, p.bufs[1])
			}
			if same := id.isIn(p.bytes(1)); same != (how == ChurnNone) {
				t.Errorf("%v: the content stays is %v", how, same)
			}
			if !id.isIn(p.bytes(0)) || !id.isIn(p.bytes(2)) {
				t.Errorf("%v: a neighbour changed", how)
			}
		}
	}
	if err := p.close(); err != nil {
		t.Error(err)
	}
}

func TestBlocksDiffer(t *testing.T) {
	ids := []blockID{newBlockID(NoMonitor, false, 0), newBlockID(NoMonitor, false, 1), newBlockID(Pindown, false, 0), newBlockID(NoMonitor, true, 0)}
	b := make([]byte, 4096)
	for i, x := range ids {
		x.fill(b)
		for j, y := range ids {
			if y.isIn(b) != (i == j) {
				t.Errorf("block %#x holds %#x: %v", x, y, y.isIn(b))
			}
			for k := range len(b) / 8 {
				if i != j && x.word(k) == y.word(k) {
					t.Fatalf("blocks %#x and %#x share word %d", x, y, k)
				}
			}
		}
		if found(b) != x {
			t.Errorf("found %#x in block %#x", found(b), x)
		}
		b[len(b)-1] ^= 1
		if x.isIn(b) {
			t.Errorf("block %#x is the same with another last byte", x)
		}
	}
}

func TestTypical(t *testing.T) {
	for _, c := range []struct {
		micros []int
		want   float64
	}{
		{nil, 0},
		{[]int{5}, 5},
		{[]int{4, 6}, 5},
		{[]int{1, 10, 10, 1000}, 10},
		{[]int{10, 10, 10, 10, 10, 10, 1, 100_000}, 10},
	} {
		var ts times
		for _, us := range c.micros {
			ts.add(time.Duration(3*us)*time.Microsecond, 3)
		}
		if got := ts.typical() * 1e6; got < c.want*0.999 || got > c.want*1.001 {
			t.Errorf("%v: %v, want %v", c.micros, got, c.want)
		}
	}
}

func TestFileStays(t *testing.T) {
	needRing(t)
	path := filepath.Join(t.TempDir(), "blocks")
	o := Options{Rounds: 64, Monitor: blind, Churn: ChurnNone, File: path}
	for range 2 { // the second time over the first one's
		r := mustRun(t, &o)
		if r.File != path {
			t.Errorf("file %q, want %q", r.File, path)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(b, []byte(fileMark)) {
		t.Errorf("begins with %q", b[:min(len(b), 64)])
	}
}

func TestFileRefused(t *testing.T) {
	needRing(t)
	dir := t.TempDir()
	try := func(o Options) error {
		o.Rounds, o.Monitor = 16, blind
		_, err := Run(t.Context(), &o)
		return err
	}
	theirs := filepath.Join(dir, "theirs")
	if err := os.WriteFile(theirs, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := try(Options{File: theirs}); !errors.Is(err, ErrNotOurs) {
		t.Errorf("foreign file: %v", err)
	}
	if b, err := os.ReadFile(theirs); string(b) != "precious" {
		t.Errorf("the foreign file now has %d bytes, %v", len(b), err)
	}
	if err := try(Options{File: theirs, Force: true}); err != nil {
		t.Errorf("foreign file by force: %v", err)
	}
	if err := try(Options{File: filepath.Join(dir, "no", "where")}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing directory: %v", err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, "/dev/null", fifo} {
		if err := try(Options{File: path, Force: true}); err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s: %v", path, err)
		}
	}
	busy, err := os.Create(filepath.Join(dir, "busy"))
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	if err := flock(busy); err != nil {
		t.Fatal(err)
	}
	if err := try(Options{File: busy.Name()}); err == nil || !strings.Contains(err.Error(), "in use by another demo") {
		t.Errorf("locked file: %v", err)
	}
}

func TestFullDisk(t *testing.T) {
	needRing(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		lacks(t, "the privilege to mount a file system: "+err.Error())
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	t.Setenv("TMPDIR", dir)
	for _, file := range []string{"", filepath.Join(dir, "blocks")} {
		if _, err := Run(t.Context(), &Options{Monitor: blind, File: file}); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("file %q: %v, want %v", file, err, unix.ENOSPC)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left %v, %v", left, err)
		}
	}
}

// A file system without O_DIRECT is written through the page cache.
func TestBuffered(t *testing.T) {
	needRing(t)
	dir := t.TempDir()
	if err := unix.Mount("ramfs", dir, "ramfs", 0, ""); err != nil {
		lacks(t, "the privilege to mount a file system: "+err.Error())
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	r := mustRun(t, &Options{Rounds: 200, Monitor: blind, Churn: ChurnDontneed, File: filepath.Join(dir, "blocks")})
	if r.Direct || r.FileSystem != "ramfs" {
		t.Errorf("direct %v on %s", r.Direct, r.FileSystem)
	}
	if r.Mode(NoMonitor).WrongBlocks == 0 {
		t.Error("no-monitor: no wrong block")
	}
}
