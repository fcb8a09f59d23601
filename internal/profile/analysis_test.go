package profile

import (
	"bytes"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/pindown/pindown/internal/profile/probe"
	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/vm"
)

func TestHistogram(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var h histogram
	var all []time.Duration
	for range 10000 {
		d := time.Duration(rng.Uint64N(1 << rng.IntN(40)))
		h.add(d)
		all = append(all, d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.5, 0.9, 0.99} {
		exact := all[int(q*float64(len(all)))]
		got := h.quantile(q)
		if got < exact || float64(got) > float64(exact)*1.25+1 {
			t.Errorf("quantile %g: %d, exactly %d", q, got, exact)
		}
	}
	var n uint64
	last := 0.0
	for _, b := range h.buckets() {
		n += b.Count
		if b.Below <= last {
			t.Errorf("bucket below %g after %g", b.Below, last)
		}
		last = b.Below
	}
	if n != 10000 || h.n != n || h.max != all[len(all)-1] {
		t.Errorf("%d in buckets, %d in all, max %d", n, h.n, h.max)
	}
	for b := range len(h.counts) - 8 {
		if end := bucketEnd(b); bucketOf(end-1) != b || bucketOf(end) != b+1 {
			t.Fatalf("bucket %d ends at %d", b, end)
		}
	}
}

func analyze() *analysis {
	return newAnalysis(0, newSpaces(), func(uint64) []uint64 { return nil }, nil)
}

// TestDecodeOperations: what each call does to which memory.
func TestDecodeOperations(t *testing.T) {
	const page = 4096
	r := func(start, n uintptr) vm.Range { return vm.Range{Start: start * page, End: (start + n) * page} }
	a := analyze()
	if a.pageSize != page {
		t.Skip("written for pages of 4096 bytes")
	}
	for _, tt := range []struct {
		e             probe.Event
		op            trace.Op
		kind          string
		size          uint64
		changes, more vm.Range
	}{
		{e: probe.Event{What: probe.Munmap, Args: [5]uint64{page, page + 1}}, op: trace.OpMunmap, size: page + 1, changes: r(1, 2)},
		{e: probe.Event{What: probe.Munmap, Args: [5]uint64{1, page}, Result: -int64(unix.EINVAL)}, op: trace.OpMunmap, size: page},
		{e: probe.Event{What: probe.Mmap, Args: [5]uint64{0, page, 0, unix.MAP_ANONYMOUS}, Result: 8 * page}, op: trace.OpMmap, kind: "anonymous", size: page},
		{
			e:  probe.Event{What: probe.Mmap, Args: [5]uint64{8 * page, page, 0, unix.MAP_ANONYMOUS | unix.MAP_FIXED}, Result: 8 * page},
			op: trace.OpMmapFixed, kind: "anonymous fixed", size: page, changes: r(8, 1),
		},
		{
			e:  probe.Event{What: probe.Mmap, Args: [5]uint64{8 * page, page, 0, unix.MAP_FIXED_NOREPLACE}, Result: 8 * page},
			op: trace.OpMmap, kind: "file", size: page,
		},
		{
			e:  probe.Event{What: probe.Mremap, Args: [5]uint64{page, 2 * page, 4 * page, unix.MREMAP_MAYMOVE}, Result: 16 * page},
			op: trace.OpMremap, kind: "move", size: 4 * page, changes: r(1, 2),
		},
		{
			e:  probe.Event{What: probe.Mremap, Args: [5]uint64{page, 4 * page, 2 * page, unix.MREMAP_MAYMOVE}, Result: page},
			op: trace.OpMremap, kind: "shrink", size: 4 * page, changes: r(3, 2),
		},
		{
			e:  probe.Event{What: probe.Mremap, Args: [5]uint64{page, page, 2 * page}, Result: page},
			op: trace.OpMremap, kind: "grow in place", size: 2 * page,
		},
		{
			e:  probe.Event{What: probe.Mremap, Args: [5]uint64{page, page, page, unix.MREMAP_FIXED | unix.MREMAP_MAYMOVE, 32 * page}, Result: 32 * page},
			op: trace.OpMremapFixed, kind: "move", size: page, changes: r(1, 1), more: r(32, 1),
		},
		{e: probe.Event{What: probe.Madvise, Args: [5]uint64{page, page, unix.MADV_DONTNEED}}, op: trace.OpDontneed, kind: "dontneed", size: page, changes: r(1, 1)},
		{
			e:  probe.Event{What: probe.Madvise, Args: [5]uint64{page, page, unix.MADV_DONTNEED}, Result: -int64(unix.ENOMEM)},
			op: trace.OpDontneed, kind: "dontneed", size: page, changes: r(1, 1),
		},
		{e: probe.Event{What: probe.Madvise, Args: [5]uint64{page, page, unix.MADV_HUGEPAGE}}, op: trace.OpMadvise, kind: "hugepage", size: page},
		{e: probe.Event{What: probe.Madvise, Args: [5]uint64{page, page, 4711}}, op: trace.OpMadvise, kind: "4711", size: page},
		{e: probe.Event{What: probe.Brk, Args: [5]uint64{0, 5 * page}, Result: 5 * page}, op: trace.OpBrk, kind: "ask"},
		{e: probe.Event{What: probe.Brk, Args: [5]uint64{0, 5 * page}, Result: 7 * page}, op: trace.OpBrk, kind: "grow", size: 2 * page},
		{e: probe.Event{What: probe.Brk, Args: [5]uint64{0, 5 * page}, Result: 4 * page}, op: trace.OpBrk, kind: "shrink", size: page, changes: r(4, 1)},
		{e: probe.Event{What: probe.Mprotect, Args: [5]uint64{page, page}}, op: trace.OpMprotect, size: page},
		{e: probe.Event{What: probe.Ftruncate, Args: [5]uint64{3, 0}}, op: trace.OpTruncate},
		{e: probe.Event{What: probe.Fallocate, Args: [5]uint64{3, unix.FALLOC_FL_PUNCH_HOLE, 0, page}}, op: trace.OpPunchHole, kind: "punch hole", size: page},
		{e: probe.Event{What: probe.Fallocate, Args: [5]uint64{3, 0, 0, page}}, size: page},
		{e: probe.Event{What: probe.Munmap, Args: [5]uint64{^uint64(0) - 100, page}}, op: trace.OpMunmap, size: page},
	} {
		d := a.decode(&tt.e)
		if d.ev.Op != tt.op || d.kind != tt.kind || d.size != tt.size {
			t.Errorf("%v %v: %v %q, %d bytes", tt.e.What, tt.e.Args, d.ev.Op, d.kind, d.size)
		}
		changes, more := d.ev.Changed()
		if changes.Empty() {
			changes = vm.Range{}
		}
		if changes != tt.changes || more != tt.more {
			t.Errorf("%v %v: changes %v and %v, want %v and %v", tt.e.What, tt.e.Args, changes, more, tt.changes, tt.more)
		}
	}
}

// TestRegistrationsAgainstNaive: random registrations, changes and uses, with a
// list of everything beside it.
func TestRegistrationsAgainstNaive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := analyze()
		type naive struct {
			r       vm.Range
			changed []vm.Range
			used    []bool
		}
		slots := map[uint64]*naive{}
		var windows, used uint64
		now := time.Duration(0)
		ranges := rapid.Custom(func(t *rapid.T) vm.Range {
			start := rapid.UintptrRange(1, 40).Draw(t, "start") * 4096
			return vm.Range{Start: start, End: start + rapid.UintptrRange(1, 12).Draw(t, "pages")*4096}
		})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += 10
			slot := rapid.Uint64Range(0, 5).Draw(t, "slot")
			r := ranges.Draw(t, "range")
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0: // register
				call := probe.Event{What: probe.RingRegister, PID: 1, TID: 1, Time: now, Ring: 9, Args: [5]uint64{3, ringRegisterBuffersUpdate}, Result: 1}
				a.event(&call)
				call.What, call.Args = probe.RingBuffer, [5]uint64{uint64(r.Start), ringRegisterBuffersUpdate, uint64(r.Len()), 1, slot}
				a.event(&call)
				slots[slot] = &naive{r: r}
			case 1: // unregister all
				if rapid.IntRange(0, 4).Draw(t, "all") == 0 {
					a.event(&probe.Event{What: probe.RingRegister, PID: 1, TID: 1, Time: now, Ring: 9, Args: [5]uint64{3, ringUnregisterBuffers}})
					clear(slots)
				}
			case 2: // change
				a.event(&probe.Event{What: probe.Munmap, PID: 1, TID: 2, Time: now, Args: [5]uint64{uint64(r.Start), uint64(r.Len())}})
				for _, n := range slots {
					if hit := n.r.Intersect(r); !hit.Empty() {
						windows++
						if len(n.changed) < maxWindowsEach {
							n.changed, n.used = append(n.changed, hit), append(n.used, false)
						} else {
							n.changed[maxWindowsEach-1] = n.changed[maxWindowsEach-1].Union(hit)
						}
					}
				}
			case 3: // use
				a.event(&probe.Event{
					What: probe.WriteFixed, PID: 1, TID: 1, Time: now, Ring: 9, Args: [5]uint64{slot, uint64(r.Start)}, Result: int64(r.Len()),
				})
				if n := slots[slot]; n != nil {
					for i, c := range n.changed {
						if c.Overlaps(r) && !n.used[i] {
							n.used[i] = true
							used++
						}
					}
				}
			}
			if a.regs.stale.Windows != windows || a.regs.stale.UsedAgain != used {
				t.Fatalf("%+v, want %d windows, %d used again", a.regs.stale, windows, used)
			}
			if len(a.regs.live) != len(slots) {
				t.Fatalf("%d live, want %d", len(a.regs.live), len(slots))
			}
			var bytes uint64
			for _, n := range slots {
				bytes += uint64(n.r.Len())
			}
			if a.regs.bytes != bytes {
				t.Fatalf("%d bytes registered, want %d", a.regs.bytes, bytes)
			}
		}
	})
}

// TestTimelineCoarsens: the sums stay when the interval doubles.
func TestTimelineCoarsens(t *testing.T) {
	a := analyze()
	const n = 5000
	for i := range n {
		a.event(&probe.Event{What: probe.Munmap, PID: 1, TID: 1, Time: time.Duration(i) * 7 * time.Millisecond, Args: [5]uint64{4096, 4096}})
	}
	var sum uint64
	for _, p := range a.points {
		sum += p.Operations
	}
	if sum != n || len(a.points) > maxPoints {
		t.Errorf("%d operations in %d points", sum, len(a.points))
	}
}

// TestTextOfEverything: no result makes the text fail, or an error is passed on.
func TestTextOfEverything(t *testing.T) {
	res := analyze().result(map[probe.What]probe.Count{probe.Mmap: {Calls: 1}}, DefaultSites)
	var b bytes.Buffer
	if err := res.WriteText(&b); err != nil || b.Len() == 0 {
		t.Errorf("%v, %d bytes", err, b.Len())
	}
	if err := res.WriteText(broken{}); err == nil {
		t.Error("no error of a broken writer")
	}
	if err := res.WriteJSON(io.Discard); err != nil {
		t.Error(err)
	}
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
