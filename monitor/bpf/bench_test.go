package bpf

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
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

// pairs measures op in alternating blocks, with and without something
// attached, by the thread's processor time, and reports both lower quartiles
// and the difference: what others do on the machine only ever adds.
func pairs(b *testing.B, attach func() error, detach func() error, op func()) {
	b.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	now := func() int64 {
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
			b.Fatal(err)
		}
		return ts.Nano()
	}
	block := func(n int) float64 {
		start := now()
		for range n {
			op()
		}
		return float64(now()-start) / float64(n)
	}
	var bare, seen []float64
	for b.Loop() {
		if err := detach(); err != nil {
			b.Fatal(err)
		}
		block(benchBlock / 10)
		bare = append(bare, block(benchBlock))
		if err := attach(); err != nil {
			b.Fatal(err)
		}
		block(benchBlock / 10)
		seen = append(seen, block(benchBlock))
	}
	slices.Sort(bare)
	slices.Sort(seen)
	x, y := bare[len(bare)/4], seen[len(seen)/4]
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(x, "bare-ns")
	b.ReportMetric(y, "seen-ns")
	b.ReportMetric(y-x, "extra-ns")
	b.ReportMetric((y-x)/x*100, "%")
}

// mapBench maps the range that is measured, aligned as a large arena is.
func mapBench(b *testing.B) vm.Range {
	b.Helper()
	r := mapPages(b, benchRange+benchAlign).RoundOut(benchAlign)
	r.End = r.Start + benchRange
	if r.Start+benchAlign > r.End {
		b.Fatalf("range %v", r)
	}
	return vm.Range{Start: r.Start + benchAlign, End: r.End}
}

// benchOps are the operations that are measured. r is benchRange bytes without
// pages.
func benchOps(b *testing.B, r vm.Range) []struct {
	name string
	do   func()
} {
	try := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	page := vm.Range{Start: r.Start, End: r.Start + 4096}
	return []struct {
		name string
		do   func()
	}{
		{"getppid", func() { unix.Getppid() }},
		{"fault", func() { poke(page.Start); try(madvise(page, unix.MADV_DONTNEED)) }},
		{"madvise", func() { try(madvise(page, unix.MADV_DONTNEED)) }},
		{"madvise-page-in-range", func() { poke(page.Start); try(madvise(r, unix.MADV_DONTNEED)) }},
		{"mmap-munmap", func() {
			a, err := mmap(0, 4096, 0)
			try(err)
			try(munmap(vm.Range{Start: a, End: a + 4096}))
		}},
		{"mmap-poke-munmap", func() {
			a, err := mmap(0, 4096, 0)
			try(err)
			poke(a)
			try(munmap(vm.Range{Start: a, End: a + 4096}))
		}},
		{"mmap-fixed-range", func() {
			_, err := mmap(r.Start, r.Len(), unix.MAP_FIXED)
			try(err)
		}},
		// The worst for the touch: edges on every level.
		{"mmap-fixed-unaligned", func() {
			_, err := mmap(r.Start+4096, r.Len()-3*4096, unix.MAP_FIXED)
			try(err)
		}},
	}
}

// BenchmarkMonitor measures the tax on operations of this process and on a
// system call that has nothing to do with memory, by the number of
// registrations in the range.
func BenchmarkMonitor(b *testing.B) {
	for _, mode := range []Mode{ModeFunctions, ModeSyscalls} {
		m, err := Open(&Options{Mode: mode, Regions: 100_000, Heartbeat: -1})
		if err != nil {
			b.Logf("%v", err)
			continue
		}
		r := mapBench(b)
		for _, n := range []int{0, 1, 1000, 100_000} {
			watches := make([]epoch.Watch, n)
			for i := range watches {
				at := r.Start + uintptr(i)*4096
				if err := m.table.Watch(&watches[i], vm.Range{Start: at, End: at + 4096}); err != nil {
					b.Fatal(err)
				}
			}
			for _, op := range benchOps(b, r) {
				b.Run(fmt.Sprintf("%v/interest=%d/%s", mode, n, op.name), func(b *testing.B) {
					pairs(b, m.attach, m.detach, op.do)
				})
				// Whatever the last round left.
				_ = m.detach()
				if err := m.attach(); err != nil {
					b.Fatal(err)
				}
			}
			for i := range watches {
				m.table.Unwatch(&watches[i])
			}
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkFloor measures what an empty program costs on the tracepoints that
// the monitor uses, and on the entry and exit of all system calls, which it
// doesn't use.
func BenchmarkFloor(b *testing.B) {
	r := mapBench(b)
	for _, set := range []struct {
		name string
		tps  []string
	}{
		{"used", []string{"rss_stat", "mmap_lock_acquire_returned", "mmap_lock_released"}},
		{"rss_stat", []string{"rss_stat"}},
		{"syscalls", []string{"sys_enter", "sys_exit"}},
	} {
		var progs []*ebpf.Program
		for _, tp := range set.tps {
			p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: tp, License: "GPL",
				Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
			})
			if err != nil {
				b.Skipf("needs CAP_BPF and CAP_PERFMON: %v", err)
			}
			defer p.Close()
			progs = append(progs, p)
		}
		var links []link.Link
		attach := func() error {
			for _, p := range progs {
				l, err := link.AttachTracing(link.TracingOptions{Program: p})
				if err != nil {
					return err
				}
				links = append(links, l)
			}
			return nil
		}
		detach := func() error {
			for _, l := range links {
				_ = l.Close()
			}
			links = nil
			return nil
		}
		for _, op := range benchOps(b, r) {
			b.Run(set.name+"/"+op.name, func(b *testing.B) { pairs(b, attach, detach, op.do) })
			_ = detach()
		}
	}
}
