package bpf

import (
	"errors"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/monitortest"
	"github.com/pindown/pindown/vm"
)

// rough are the operations whose range system-call mode can't tell, so that
// they count for the whole address space.
var rough = []monitortest.Exception{
	{By: "io_uring"},
	{Op: vm.OpProcessMadvise},
	{Op: vm.OpShmat},
}

func TestConformance(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		mustOpen(t, Options{Mode: mode})
		beat := 50 * time.Millisecond
		o := &monitortest.Options{
			Require: []vm.Mapping{vm.MappingAnonPrivate, vm.MappingGoHeap, vm.MappingTHP},
		}
		if inVM() {
			// Elsewhere a libc, linked in for the race detector, may own the break.
			o.Require = append(o.Require, vm.MappingBrk)
			// Under emulation a start takes seconds, most of them in the verifier.
			o.Opens, o.Patience = 1, 10*time.Minute
			beat = time.Second
		}
		if mode == ModeFunctions {
			o.Require = append(o.Require, vm.MappingAnonShared, vm.MappingMemfd, vm.MappingFilePrivate,
				vm.MappingFileShared, vm.MappingSysV)
			if inVM() {
				o.Require = append(o.Require, vm.MappingHugeTLB)
			}
		} else {
			o.Needless = rough
		}
		monitortest.Run(t, func(t *testing.T) monitor.Monitor {
			m, err := Open(&Options{Mode: mode, Heartbeat: beat})
			if err != nil {
				t.Fatal(err)
			}
			return m
		}, o)
	})
}

// mapPages maps anonymous memory that Go doesn't know, until the test ends.
func mapPages(tb testing.TB, bytes uintptr) vm.Range {
	tb.Helper()
	a, err := mmap(0, bytes, unix.MAP_NORESERVE)
	if err != nil {
		tb.Fatal(err)
	}
	r := vm.Range{Start: a, End: a + bytes}
	tb.Cleanup(func() {
		if err := munmap(r); err != nil {
			tb.Error(err)
		}
	})
	return r
}

// watch states interest in r until the test ends.
func watch(tb testing.TB, m *Monitor, r vm.Range) *epoch.Watch {
	tb.Helper()
	w := new(epoch.Watch)
	if err := m.Table().Watch(w, r); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { m.Table().Unwatch(w) })
	return w
}

func TestCover(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := mustOpen(t, Options{Mode: mode})
		r := mapPages(t, 16<<12)
		hole := vm.Range{Start: r.Start + 8<<12, End: r.Start + 9<<12}
		heap := make([]byte, 1<<20)
		text, err := mmapFile(t)
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			name      string
			r         vm.Range
			syscalls  error
			functions error
		}{
			{"anonymous", r, nil, nil},
			{"go heap", vm.RangeOf(heap), nil, nil},
			{"file", text, monitor.ErrUncovered, nil},
			{"file and what is beside it", vm.Range{Start: text.Start - 4096, End: text.End}, monitor.ErrUncovered, nil},
			{"empty", vm.Range{}, monitor.ErrUncovered, monitor.ErrUncovered},
			{"beyond the table", vm.Range{Start: epoch.MaxAddress - 4096, End: epoch.MaxAddress + 4096},
				monitor.ErrUncovered, monitor.ErrUncovered},
			{"wrapped", vm.Range{Start: r.End, End: r.Start}, monitor.ErrUncovered, monitor.ErrUncovered},
		} {
			want := tt.syscalls
			if mode == ModeFunctions {
				want = tt.functions
			}
			if got := m.Cover(tt.r); !errors.Is(got, want) {
				t.Errorf("%s: %v, want %v", tt.name, got, want)
			}
		}
		runtime.KeepAlive(heap)
		if err := munmap(hole); err != nil {
			t.Fatal(err)
		}
		if err := m.Cover(r); mode == ModeSyscalls && !errors.Is(err, monitor.ErrUncovered) {
			t.Errorf("range with a hole: %v", err)
		}
		if _, err := mmap(hole.Start, hole.Len(), unix.MAP_FIXED); err != nil {
			t.Fatal(err)
		}
	})
}

// mmapFile maps a page of this program shared.
func mmapFile(tb testing.TB) (vm.Range, error) {
	tb.Helper()
	fd, err := unix.Open("/proc/self/exe", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return vm.Range{}, err
	}
	defer func() { _ = unix.Close(fd) }()
	mem, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return vm.Range{}, err
	}
	tb.Cleanup(func() { _ = unix.Munmap(mem) })
	return vm.RangeOf(mem), nil
}

// A mapping that nobody touched has no page to zap; that it is replaced must be
// on record all the same, since what Cover saw of it no longer holds.
func TestReplacedUntouched(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := mustOpen(t, Options{Mode: mode})
		for _, op := range []struct {
			name string
			do   func(r vm.Range) error
		}{
			{"mmap", func(r vm.Range) error {
				_, err := mmap(r.Start, r.Len(), unix.MAP_FIXED)
				return err
			}},
			{"munmap and mmap", func(r vm.Range) error {
				if err := munmap(r); err != nil {
					return err
				}
				_, err := mmap(r.Start, r.Len(), unix.MAP_FIXED)
				return err
			}},
			{"mremap from", func(r vm.Range) error { return mremap(r, mapPages(t, r.Len()).Start) }},
			{"mremap onto", func(r vm.Range) error { return mremap(mapPages(t, r.Len()), r.Start) }},
		} {
			r := mapPages(t, 16<<12)
			w := watch(t, m, r)
			before := m.Table().Stamp(w)
			if err := op.do(r); err != nil {
				t.Fatal(err)
			}
			if m.Table().Stamp(w) == before {
				t.Errorf("%s: not seen", op.name)
			}
		}
	})
}

// What doesn't change a page isn't recorded.
func TestQuiet(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := mustOpen(t, Options{Mode: mode, Heartbeat: -1})
		r := mapPages(t, 16<<12)
		w := watch(t, m, r)
		before := m.Table().Stamp(w)
		for range 3 {
			for a := r.Start; a < r.End; a += 4096 {
				poke(a)
			}
			other := mapPages(t, 16<<12)
			poke(other.Start)
			if err := madvise(other, unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			for _, advice := range []int{unix.MADV_WILLNEED, unix.MADV_DONTFORK, unix.MADV_DOFORK, unix.MADV_NOHUGEPAGE} {
				if err := madvise(r, advice); err != nil {
					t.Fatal(err)
				}
			}
			// Faults its buffer in, in the middle of a system call.
			buf := mapPages(t, 1<<20)
			fd, err := unix.Open("/dev/zero", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, _, errno := unix.Syscall(unix.SYS_READ, uintptr(fd), buf.Start, buf.Len()); errno != 0 {
				t.Fatal(errno)
			}
			_ = unix.Close(fd)
		}
		if got := m.Table().Stamp(w); got != before {
			t.Errorf("stamp %d became %d", before, got)
		}
	})
}

// Memory that the Go runtime gave back and got again.
func TestGoHeap(t *testing.T) {
	rounds := 1500
	if testing.Short() || inVM() {
		rounds = 300
	}
	if s := os.Getenv("PINDOWN_BPF_ROUNDS"); s != "" {
		var err error
		if rounds, err = strconv.Atoi(s); err != nil {
			t.Fatalf("PINDOWN_BPF_ROUNDS: %v", err)
		}
	}
	eachMode(t, func(t *testing.T, mode Mode) {
		for _, procs := range []int{1, 2} {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			testGoHeap(t, mode, rounds)
		}
	})
}

var sink []byte

// testGoHeap allocates, registers, drops, has the pages given back to the
// kernel, and allocates again, hoping for the same addresses. A registration
// that the table calls valid must hold the pages that are mapped.
func testGoHeap(t *testing.T, mode Mode, rounds int) {
	m := mustOpen(t, Options{Mode: mode})
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
				runtime.Gosched()
			}
		}
	}()
	defer func() { close(stop); <-stopped }()

	var stale, reused, invalid int
	regs := map[uintptr]*registration{}
	for i := range rounds {
		buf := make([]byte, 64<<10)
		for j := 0; j < len(buf); j += 4096 {
			buf[j] = byte(i)
		}
		r := vm.RangeOf(buf)
		reg := regs[r.Start]
		if reg != nil {
			reused++
			valid := reg.valid()
			diff, err := reg.pages.Compare()
			if err != nil {
				t.Fatal(err)
			}
			if valid && diff.Any() {
				stale++
			}
			if !valid {
				invalid++
				reg.end(t)
				reg = nil
			}
		}
		if reg == nil {
			reg = register(t, m, r)
			regs[r.Start] = reg
		}
		sink = buf
		if len(regs) > 64 {
			for a, old := range regs {
				old.end(t)
				delete(regs, a)
			}
		}
		sink = nil
		if i%16 == 0 {
			debug.FreeOSMemory()
		}
	}
	for _, reg := range regs {
		reg.end(t)
	}
	t.Logf("GOMAXPROCS=%d: %d addresses came back, %d of them invalid", runtime.GOMAXPROCS(0), reused, invalid)
	if stale > 0 {
		t.Errorf("%d of %d registrations were stale", stale, reused)
	}
	if (!testing.Short() || inVM()) && (reused == 0 || invalid == 0) {
		t.Errorf("nothing was tried: %d addresses came back, %d of them invalid", reused, invalid)
	}
}

// registration is what a cache keeps, without a device: the pages are held by
// a second reference.
type registration struct {
	m     *Monitor
	w     epoch.Watch
	stamp uint64
	pages *oracle.Witness
}

func register(t *testing.T, m *Monitor, r vm.Range) *registration {
	t.Helper()
	reg := &registration{m: m}
	if err := m.Table().Watch(&reg.w, r); err != nil {
		t.Fatal(err)
	}
	_, reg.stamp = m.Table().Take(&reg.w)
	if err := m.Cover(r); err != nil {
		t.Fatal(err)
	}
	var err error
	if reg.pages, err = oracle.Hold(r, 4096); err != nil {
		t.Fatal(err)
	}
	return reg
}

func (r *registration) valid() bool { return r.m.Table().Stamp(&r.w) == r.stamp }

func (r *registration) end(t *testing.T) {
	t.Helper()
	r.m.Table().Unwatch(&r.w)
	if err := r.pages.Close(); err != nil {
		t.Error(err)
	}
}

// One operation over 100 000 registrations: all invalid, by a handful of
// counters.
func TestManyRegistrations(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		const n = 100_000
		m := mustOpen(t, Options{Mode: mode, Regions: n, Heartbeat: -1})
		r := mapPages(t, (n+1)<<12)
		watches, stamps := make([]epoch.Watch, n), make([]uint64, n)
		table := m.Table()
		for i := range watches {
			at := r.Start + uintptr(i)<<12
			if err := table.Watch(&watches[i], vm.Range{Start: at, End: at + 4096}); err != nil {
				t.Fatal(err)
			}
			_, stamps[i] = table.Take(&watches[i])
		}
		beside := watch(t, m, vm.Range{Start: r.End - 4096, End: r.End})
		_, besideStamp := table.Take(beside)
		poke(r.Start)
		word := table.Word()
		if err := madvise(vm.Range{Start: r.Start, End: r.End - 4096}, unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		if got := table.Word().Generation() - word.Generation(); got < 1 || got > 2 {
			t.Errorf("%d touches of one operation on one page", got)
		}
		var missed int
		for i := range watches {
			if table.Stamp(&watches[i]) == stamps[i] {
				missed++
			}
			table.Unwatch(&watches[i])
		}
		if missed > 0 {
			t.Errorf("%d of %d registrations don't know", missed, n)
		}
		if table.Stamp(beside) != besideStamp {
			t.Error("the page beside was invalidated too")
		}
	})
}

// Nobody reads the ring: news is lost, counted and told, the table is right.
func TestNewsOverflow(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		mustOpen(t, Options{Mode: mode})
		o, err := (&Options{NewsBytes: 4096}).withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		m := newMonitor(mode, &o)
		defer func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}()
		if err := m.start(&o); err != nil {
			t.Fatal(err)
		}
		feed := m.Subscribe()
		defer feed.Close()
		r := mapPages(t, 16<<12)
		w := watch(t, m, r)
		_, stamp := m.Table().Take(w)
		for range 1000 {
			poke(r.Start)
			if err := madvise(r, unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			_, now := m.Table().Take(w)
			if now == stamp {
				t.Fatal("not seen")
			}
			stamp = now
		}
		m.wg.Go(m.readNews)
		for feed.Lost() == 0 {
			if _, ok := <-feed.C; !ok {
				t.Fatal("feed closed")
			}
		}
		// 4096 bytes hold 128 records of 32.
		if got := m.Stats().NewsLost; got < 1000-128 {
			t.Errorf("%d lost", got)
		}
	})
}

func TestModes(t *testing.T) {
	m := mustOpen(t, Options{})
	want := ModeSyscalls
	if inVM() {
		want = ModeFunctions
	}
	if m.Mode() != want {
		// An unlocked machine may well run functions.
		t.Logf("mode %v", m.Mode())
		if inVM() {
			t.Errorf("want %v", want)
		}
	}
	if m.Name() != "bpf" || m.HitCheck() != nil {
		t.Errorf("name %q, hit check %v", m.Name(), m.HitCheck() != nil)
	}
	if _, err := Open(&Options{Mode: 17}); !errors.Is(err, monitor.ErrNotSupported) {
		t.Errorf("unknown mode: %v", err)
	}
}

func TestHeartbeat(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := mustOpen(t, Options{Mode: mode, Heartbeat: time.Millisecond})
		feed := m.Subscribe()
		for m.Stats().Beats < 3 {
			runtime.Gosched()
		}
		// The programs go behind the monitor's back.
		if err := m.detach(); err != nil {
			t.Fatal(err)
		}
		for range feed.C {
			// Closed when the monitor is lost.
		}
		if !m.Table().Word().Lost() {
			t.Error("not lost")
		}
		if err := m.Cover(mapPages(t, 4096)); !errors.Is(err, monitor.ErrLost) || !errors.Is(err, ErrBlind) {
			t.Errorf("cover: %v", err)
		}
	})
}

// The verifier gives up at a million instructions; it must stay far from that,
// since what it looks at grows and shrinks with its version.
func TestVerifier(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := mustOpen(t, Options{Mode: mode})
		for name, p := range m.coll.Programs {
			info, err := p.Info()
			if err != nil {
				t.Fatal(err)
			}
			n, ok := info.VerifiedInstructions()
			t.Logf("%s: %d instructions verified", name, n)
			if ok && n > 100_000 {
				t.Errorf("%s: %d instructions verified", name, n)
			}
		}
	})
}
