package bpf

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/vm"
)

const (
	benchBlock = 500       // operations in one measured block
	benchRange = 416 << 20 // what an operation spans: room for 100 000 pages
	benchAlign = 16 << 20
)

// state is one way of the machine to be in while an operation is measured.
type state struct {
	name         string
	enter, leave func() error
	op           func()
}

// alternate measures one operation in several states, a short block at a time
// in turn, by the thread's processor time. It returns for each state the median
// time of the operation in ns, and the medians over the rounds of what it takes
// longer than in the first state, in ns and as a share. Medians of differences
// within a round, since the machine's speed changes from second to second.
func alternate(tb testing.TB, more func() bool, block int, states []state) (ns, extra, share []float64) {
	tb.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	try := func(f func() error) {
		if f == nil {
			return
		}
		if err := f(); err != nil {
			tb.Fatal(err)
		}
	}
	times, extras, shares := make([][]float64, len(states)), make([][]float64, len(states)), make([][]float64, len(states))
	for more() {
		for i, s := range states {
			try(s.enter)
			for range max(block/10, 1) {
				s.op()
			}
			start := threadTime(tb)
			for range block {
				s.op()
			}
			t := float64(threadTime(tb)-start) / float64(block)
			try(s.leave)
			times[i] = append(times[i], t)
			bare := times[0][len(times[0])-1]
			extras[i], shares[i] = append(extras[i], t-bare), append(shares[i], (t-bare)/bare)
		}
	}
	for i := range states {
		ns = append(ns, median(times[i]))
		extra = append(extra, median(extras[i]))
		share = append(share, median(shares[i]))
	}
	return ns, extra, share
}

// threadTime returns the thread's processor time in ns.
func threadTime(tb testing.TB) int64 {
	tb.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		tb.Fatal(err)
	}
	return ts.Nano()
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}

// mapBench maps the range that is measured, aligned as a large arena is.
func mapBench(tb testing.TB) vm.Range {
	tb.Helper()
	r := mapPages(tb, benchRange+benchAlign).RoundOut(benchAlign)
	r.End = r.Start + benchRange
	if r.Start+benchAlign > r.End {
		tb.Fatalf("range %v", r)
	}
	return vm.Range{Start: r.Start + benchAlign, End: r.End}
}

// benchOp is an operation that is measured.
type benchOp struct {
	name   string
	ranged bool // on the whole range
	do     func()
}

// benchOps are the operations that are measured. r is benchRange bytes without
// pages.
func benchOps(tb testing.TB, r vm.Range) []benchOp {
	tb.Helper()
	try := func(err error) {
		if err != nil {
			tb.Fatal(err)
		}
	}
	page := vm.Range{Start: r.Start, End: r.Start + 4096}
	return []benchOp{
		{"getppid", false, func() { unix.Getppid() }},
		{"fault", false, func() { poke(page.Start); try(madvise(page, unix.MADV_DONTNEED)) }},
		{"madvise", false, func() { try(madvise(page, unix.MADV_DONTNEED)) }},
		{"madvise-page-in-range", true, func() { poke(page.Start); try(madvise(r, unix.MADV_DONTNEED)) }},
		{"mmap-munmap", false, func() {
			a, err := mmap(0, 4096, 0)
			try(err)
			try(munmap(vm.Range{Start: a, End: a + 4096}))
		}},
		{"mmap-poke-munmap", false, func() {
			a, err := mmap(0, 4096, 0)
			try(err)
			poke(a)
			try(munmap(vm.Range{Start: a, End: a + 4096}))
		}},
		{"mmap-fixed-range", true, func() {
			_, err := mmap(r.Start, r.Len(), unix.MAP_FIXED)
			try(err)
		}},
		// The worst for the touch: edges on every level.
		{"mmap-fixed-unaligned", true, func() {
			_, err := mmap(r.Start+4096, r.Len()-3*4096, unix.MAP_FIXED)
			try(err)
		}},
	}
}

// BenchmarkTax measures what operations that nobody is interested in cost
// more, and a system call that has nothing to do with memory: with the monitor,
// and with empty programs in its stead, which is what the kernel's hooks cost.
func BenchmarkTax(b *testing.B) {
	for _, mode := range []Mode{ModeFunctions, ModeSyscalls} {
		m, err := Open(&Options{Mode: mode, Heartbeat: -1})
		if err != nil {
			b.Logf("%v", err)
			continue
		}
		empty := newFloor(b, m)
		r := mapBench(b)
		if err := m.detach(); err != nil {
			b.Fatal(err)
		}
		for _, op := range benchOps(b, r) {
			b.Run(fmt.Sprintf("%v/%s", mode, op.name), func(b *testing.B) {
				ns, extra, share := alternate(b, b.Loop, benchBlock, []state{
					{"bare", nil, nil, op.do},
					{"floor", empty.attach, empty.detach, op.do},
					{"seen", m.attach, m.detach, op.do},
				})
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(ns[0], "bare-ns")
				b.ReportMetric(extra[1], "floor-ns")
				b.ReportMetric(extra[2], "extra-ns")
				b.ReportMetric(share[1]*100, "floor-%")
				b.ReportMetric(share[2]*100, "extra-%")
			})
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkTouch measures the touch alone, run by the kernel many times in one
// go: of an aligned range, one cut on every level at both ends, and one page,
// with so many registrations of a page in the range.
func BenchmarkTouch(b *testing.B) {
	const start, size = 0x7e0000000000, benchRange
	for _, n := range []int{0, 1, 1000, 100_000} {
		table := newTouchTable(b, epoch.BucketBitsFor(100_000))
		for k := range n {
			at := uintptr(start) + size/uintptr(2*n)&^4095 + uintptr(k)*4096
			if err := table.Watch(new(epoch.Watch), vm.Range{Start: at, End: at + 4096}); err != nil {
				b.Fatal(err)
			}
		}
		for _, tt := range []struct {
			name string
			r    vm.Range
		}{
			{"aligned", vm.Range{Start: start, End: start + size}},
			{"unaligned", vm.Range{Start: start + 4096, End: start + size - 2*4096}},
			{"page", vm.Range{Start: start + size/2, End: start + size/2 + 4096}},
			{"aside", vm.Range{Start: start + 2*size, End: start + 2*size + 4096}},
		} {
			b.Run(fmt.Sprintf("interest=%d/%s", n, tt.name), func(b *testing.B) {
				if err := table.coll.Variables["measured"].Set([2]uint64{uint64(tt.r.Start), uint64(tt.r.End)}); err != nil {
					b.Fatal(err)
				}
				best := time.Duration(1<<63 - 1)
				for b.Loop() {
					_, d, err := table.coll.Programs["measure_touch"].Benchmark(make([]byte, 64), 500, nil)
					if err != nil {
						b.Fatal(err)
					}
					best = min(best, d)
				}
				b.ReportMetric(float64(best), "touch-ns")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// TestCost reports what BenchmarkTax measures, where benchmarks don't run: in
// the virtual machine. Each operation is timed by itself and the median taken,
// since after each change of the kernel's text the emulator translates anew what
// runs. It asserts nothing.
func TestCost(t *testing.T) {
	if !inVM() && os.Getenv("PINDOWN_BPF_COST") == "" {
		t.Skip("for test/vm; elsewhere set PINDOWN_BPF_COST=1, or run BenchmarkTax")
	}
	const rounds, ops = 7, 1500
	eachMode(t, func(t *testing.T, mode Mode) {
		m := mustOpen(t, Options{Mode: mode, Heartbeat: -1})
		empty := newFloor(t, m)
		all := slices.DeleteFunc(benchOps(t, mapBench(t)), func(op benchOp) bool { return op.ranged })
		for _, op := range all {
			t.Logf("%v/%s: programs run: %s", mode, op.name, programsRun(t, m, op.do))
		}
		if err := m.detach(); err != nil {
			t.Fatal(err)
		}
		var elsewhere epoch.Watch
		far := mapPages(t, 4096)
		watch := func() error { return m.table.Watch(&elsewhere, far) }
		unwatch := func() error { m.table.Unwatch(&elsewhere); return m.detach() }
		states := []state{
			{name: "bare"},
			{"with empty programs", empty.attach, empty.detach, nil},
			{"with the monitor", m.attach, nil, nil},
			{"with interest elsewhere", watch, unwatch, nil},
		}
		times := make([][][]float64, len(all))
		for i := range times {
			times[i] = make([][]float64, len(states))
		}
		for range rounds {
			for k, s := range states {
				if s.enter != nil {
					if err := s.enter(); err != nil {
						t.Fatal(err)
					}
				}
				for i, op := range all {
					times[i][k] = append(times[i][k], medianTime(ops, op.do))
				}
				if s.leave != nil {
					if err := s.leave(); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		for i, op := range all {
			line := []string{fmt.Sprintf("%v/%s: %.0f ns", mode, op.name, median(slices.Clone(times[i][0])))}
			for k, s := range states[1:] {
				var shares []float64
				for n, bare := range times[i][0] {
					shares = append(shares, 100*(times[i][k+1][n]/bare-1))
				}
				mid := median(shares) // it sorts
				line = append(line, fmt.Sprintf("%s %+.1f %% (%+.0f … %+.0f)", s.name, mid, shares[len(shares)/4], shares[len(shares)*3/4]))
			}
			t.Log(strings.Join(line, ", "))
		}
	})
}

// programsRun returns how often each of the monitor's programs runs in an operation.
func programsRun(t *testing.T, m *Monitor, op func()) string {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		t.Fatal(err)
	}
	defer stats.Close()
	runs := func() map[string]uint64 {
		n := map[string]uint64{}
		for name, p := range m.coll.Programs {
			info, err := p.Stats()
			if err != nil {
				t.Fatal(err)
			}
			n[name] = info.RunCount
		}
		return n
	}
	const ops = 200
	before := runs()
	for range ops {
		op()
	}
	var all []string
	for name, n := range runs() {
		if n -= before[name]; n > 0 {
			all = append(all, fmt.Sprintf("%s %.2f", name, float64(n)/ops))
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// medianTime returns the median time of n calls, without that of the clock.
func medianTime(n int, op func()) float64 {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var with, without []float64
	for range n {
		start := time.Now()
		op()
		with = append(with, float64(time.Since(start)))
		start = time.Now()
		without = append(without, float64(time.Since(start)))
	}
	return median(with) - median(without)
}

// BenchmarkRegistrations measures what an operation over so many registrations
// takes longer than without a monitor, and how that grows with their number. The
// growth is taken from blocks that follow upon each other, since the machine's
// speed changes by more from one attachment to the next.
func BenchmarkRegistrations(b *testing.B) {
	for _, mode := range []Mode{ModeFunctions, ModeSyscalls} {
		m, err := Open(&Options{Mode: mode, Regions: 100_000, Heartbeat: -1})
		if err != nil {
			b.Logf("%v", err)
			continue
		}
		counts := []int{1, 1000, 100_000}
		ranges := make([]vm.Range, len(counts))
		for i, n := range counts {
			ranges[i] = mapBench(b)
			for k := range n {
				// The single one is in the middle, as are most of many.
				at := ranges[i].Start + ranges[i].Len()/uintptr(2*n)&^4095 + uintptr(k)*4096
				if err := m.table.Watch(new(epoch.Watch), vm.Range{Start: at, End: at + 4096}); err != nil {
					b.Fatal(err)
				}
			}
		}
		if err := m.detach(); err != nil {
			b.Fatal(err)
		}
		for i, op := range benchOps(b, ranges[0]) {
			if !op.ranged {
				continue
			}
			b.Run(fmt.Sprintf("%v/%s", mode, op.name), func(b *testing.B) {
				// Attaching takes long; between two times all are measured often.
				const turns = 20
				bare, seen := make([][]float64, len(counts)), make([][]float64, len(counts))
				for b.Loop() {
					for k, t := range measure(b, turns, each(b, ranges, i)) {
						bare[k] = append(bare[k], t...)
					}
					if err := m.attach(); err != nil {
						b.Fatal(err)
					}
					for k, t := range measure(b, turns, each(b, ranges, i)) {
						seen[k] = append(seen[k], t...)
					}
					if err := m.detach(); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(0, "ns/op")
				ns := make([]float64, len(counts))
				ns[0] = median(slices.Clone(seen[0])) - median(slices.Clone(bare[0]))
				for k := range counts {
					ns[k] = ns[0] + median(differences(seen[k], seen[0])) - median(differences(bare[k], bare[0]))
					b.ReportMetric(ns[k], fmt.Sprintf("extra-ns/%d", counts[k]))
				}
				b.ReportMetric(ns[2]/ns[0], "ratio")
			})
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// differences returns a - b, element by element.
func differences(a, b []float64) []float64 {
	d := slices.Clone(a)
	for i := range d {
		d[i] -= b[i]
	}
	return d
}

// each returns operation i on each of the ranges.
func each(b *testing.B, ranges []vm.Range, i int) []func() {
	var ops []func()
	for _, r := range ranges {
		ops = append(ops, benchOps(b, r)[i].do)
	}
	return ops
}

// measure runs short blocks of each operation in turn, and returns their times in ns.
func measure(b *testing.B, turns int, ops []func()) [][]float64 {
	b.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	times := make([][]float64, len(ops))
	for range turns {
		for k, op := range ops {
			for range 10 {
				op()
			}
			start := threadTime(b)
			for range 100 {
				op()
			}
			times[k] = append(times[k], float64(threadTime(b)-start)/100)
		}
	}
	return times
}

// floor is a set of empty programs where a monitor's are.
type floor struct {
	programs []*ebpf.Program
	links    []link.Link
}

func newFloor(tb testing.TB, m *Monitor) *floor {
	tb.Helper()
	f := new(floor)
	for name := range m.coll.Programs {
		spec := &ebpf.ProgramSpec{
			Type: ebpf.Tracing, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
		}
		spec.AttachType, spec.AttachTo = m.hookOf(tb, name)
		p, err := ebpf.NewProgram(spec)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = p.Close() })
		f.programs = append(f.programs, p)
	}
	return f
}

// hookOf returns where the program of that name is attached.
func (m *Monitor) hookOf(tb testing.TB, name string) (ebpf.AttachType, string) {
	tb.Helper()
	if m.mode == ModeSyscalls {
		return ebpf.AttachTraceRawTp, map[string]string{
			"on_rss_stat": "rss_stat", "on_lock": "mmap_lock_acquire_returned", "on_unlock": "mmap_lock_released",
		}[name]
	}
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		tb.Fatal(err)
	}
	found, err := targets(kernel)
	if err != nil {
		tb.Fatal(err)
	}
	var i int
	if _, err := fmt.Sscanf(name, "on_enter%d", &i); err == nil {
		return ebpf.AttachTraceFEntry, found[i].name
	}
	if _, err := fmt.Sscanf(name, "on_exit%d", &i); err != nil {
		tb.Fatalf("program %s: %v", name, err)
	}
	return ebpf.AttachTraceFExit, found[i].name
}

func (f *floor) attach() error {
	for _, p := range f.programs {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return err
		}
		f.links = append(f.links, l)
	}
	return nil
}

func (f *floor) detach() error {
	for _, l := range f.links {
		_ = l.Close()
	}
	f.links = nil
	return nil
}
