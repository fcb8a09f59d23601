package profile

import (
	"fmt"
	"math/bits"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/profile/probe"
	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/vm"
)

// Limits on what is kept.
const (
	maxSites         = 1 << 16
	maxThreads       = 1 << 16
	maxPoints        = 512
	firstInterval    = 10 * time.Millisecond
	maxRegistrations = 10000
	maxWindows       = 1000
)

// shmRemap is SHM_REMAP of shmat(2).
const shmRemap = 0o40000

// siteKey tells call sites apart.
type siteKey struct {
	space  *space
	stack  uint64
	caller uint64 // the return address on top of the stack, if there is one
}

// site is a place in a program.
type site struct {
	id     uint32
	key    siteKey
	pid    uint32
	seen   time.Duration
	addrs  []uint64 // of the stack, when they were asked for
	frames []Frame  // likewise
}

type siteOp struct {
	count, bytes uint64
	time         time.Duration
}

type operation struct {
	latency histogram
	kinds   map[string]uint64
	sizes   [65]SizeBucket // by the number of bits of size-1
	pages   uint64
	changes uint64
}

type thread struct {
	pid              uint32
	name             string
	operations, size uint64
	time             time.Duration
}

// analysis is what is kept of the events.
type analysis struct {
	began     time.Duration
	pageSize  uintptr
	spaces    *spaces
	stack     func(key uint64) []uint64
	trace     *trace.Writer // may be nil
	traceErr  error
	ops       map[probe.What]*operation
	sites     map[siteKey]*site
	siteOps   map[*site]map[probe.What]*siteOp
	threads   map[uint32]*thread
	processes map[uint32]string
	running   map[uint32]bool
	interval  time.Duration
	points    []TimelinePoint
	uses      Uses
	segments  map[segment]uint64 // sizes of System V shared memory that is attached
	regs      registrations
	cpu       time.Duration // of processes that have ended
	pid       uint32        // of the process that is followed, if it was there before
	status    *unix.WaitStatus
	events    uint64
	total     uint64 // operations
	bytes     uint64
}

type segment struct {
	pid  uint32
	addr uint64
}

func newAnalysis(began time.Duration, sp *spaces, stack func(uint64) []uint64, w *trace.Writer) *analysis {
	a := &analysis{
		began: began, pageSize: uintptr(os.Getpagesize()), spaces: sp, stack: stack, trace: w,
		ops: map[probe.What]*operation{}, sites: map[siteKey]*site{}, siteOps: map[*site]map[probe.What]*siteOp{},
		threads: map[uint32]*thread{}, processes: map[uint32]string{}, running: map[uint32]bool{},
		interval: firstInterval, segments: map[segment]uint64{},
	}
	a.uses.Kinds = map[string]uint64{}
	a.regs.init(a)
	return a
}

// event takes in one event.
func (a *analysis) event(e *probe.Event) {
	a.events++
	a.spaces.upTo(e.Time)
	switch {
	case e.What.Operation():
		a.operation(e)
	case e.What >= probe.Read && e.What <= probe.WriteFixed:
		a.use(e)
	default:
		switch e.What {
		case probe.Process, probe.Exec:
			a.process(e)
		case probe.Exit:
			a.regs.endProcess(e.PID, e.Time, "exit")
			a.cpu += time.Duration(e.Args[0])
			delete(a.running, e.PID)
			status := unix.WaitStatus(e.Result)
			if e.PID == a.pid {
				a.status = &status
			}
			if a.trace != nil {
				x := &trace.Exit{Time: a.since(e.Time), PID: e.PID, Code: max(0, status.ExitStatus())}
				if status.Signaled() {
					x.Signal = int(status.Signal())
				}
				a.traced(a.trace.Event(a.traceEvent(e, trace.Event{Kind: trace.KindOp, Op: trace.OpExit})))
				a.traced(a.trace.Exit(x))
			}
		default:
			a.regs.event(e)
		}
	}
}

func (a *analysis) since(t time.Duration) time.Duration { return max(0, t-a.began) }

func (a *analysis) traced(err error) {
	if err != nil && a.traceErr == nil {
		a.traceErr = err
	}
}

func (a *analysis) process(e *probe.Event) {
	a.spaces.follow(e.PID)
	a.processes[e.PID] = e.Comm()
	a.running[e.PID] = true
	if e.What == probe.Exec {
		a.regs.endProcess(e.PID, e.Time, "exec")
	}
	if a.trace == nil {
		return
	}
	a.traced(a.trace.Process(&trace.Process{Start: a.since(e.Time), PID: e.PID, PPID: e.Parent(), Comm: e.Comm()}))
	if e.What == probe.Exec {
		a.traced(a.trace.Event(a.traceEvent(e, trace.Event{Kind: trace.KindOp, Op: trace.OpExec})))
	}
}

// traceEvent fills in what all events have.
func (a *analysis) traceEvent(e *probe.Event, t trace.Event) *trace.Event {
	t.PID, t.TID = e.PID, e.TID
	t.Start, t.Duration = a.since(e.Time), e.Took
	return &t
}

// failed reports whether a system call's result is an error.
func failed(result int64) bool { return result < 0 && result >= -4095 }

// decoded is an operation as the address space sees it.
type decoded struct {
	ev   trace.Event
	kind string
	size uint64 // as it was passed
}

// decode says what an operation does to which memory.
func (a *analysis) decode(e *probe.Event) decoded {
	d := decoded{ev: *a.traceEvent(e, trace.Event{Kind: trace.KindOp})}
	r := func(start, length uint64) vm.Range {
		if failed(int64(start)) || start+length < start {
			return vm.Range{}
		}
		return vm.Range{Start: uintptr(start), End: uintptr(start + length)}.RoundOut(a.pageSize)
	}
	args := &e.Args
	bad := failed(e.Result)
	if bad {
		d.ev.Result = e.Result
	}
	switch e.What {
	case probe.Munmap:
		d.ev.Op, d.size, d.ev.Range = trace.OpMunmap, args[1], r(args[0], args[1])
	case probe.Mmap:
		d.ev.Op, d.size, d.kind = trace.OpMmap, args[1], mmapKind(args[3])
		start := uint64(e.Result)
		if bad {
			start = args[0]
		}
		if args[3]&unix.MAP_FIXED != 0 && args[3]&unix.MAP_FIXED_NOREPLACE != unix.MAP_FIXED_NOREPLACE {
			d.ev.Op = trace.OpMmapFixed
		}
		d.ev.Range = r(start, args[1])
	case probe.Mremap:
		d.ev.Op, d.size = trace.OpMremap, max(args[1], args[2])
		d.ev.Range = r(args[0], args[1])
		if args[3]&unix.MREMAP_FIXED != 0 {
			d.ev.Op = trace.OpMremapFixed
		}
		switch {
		case bad:
			d.kind = "failed"
		case uint64(e.Result) == args[0] && args[2] <= args[1]:
			d.kind = "shrink"
		case uint64(e.Result) == args[0]:
			d.kind = "grow in place"
		default:
			d.kind = "move"
		}
		if !bad {
			d.ev.Dest = r(uint64(e.Result), args[2])
		}
	case probe.Madvise:
		d.ev.Op, d.kind = advice(args[2])
		d.size, d.ev.Range = args[1], r(args[0], args[1])
	case probe.Brk:
		before, after := args[1], uint64(e.Result)
		d.ev.Op = trace.OpBrk
		switch {
		case after < before:
			d.kind, d.size, d.ev.Range = "shrink", before-after, r(after, before-after)
		case after > before:
			d.kind, d.size, d.ev.Range = "grow", after-before, r(before, after-before)
			d.ev.Dest = d.ev.Range
		default:
			d.kind = "ask"
		}
	case probe.Shmat:
		d.ev.Op = trace.OpShmat
		if args[2]&shmRemap != 0 {
			d.ev.Op = trace.OpShmatRemap
		}
		if !bad {
			d.size = segmentSize(int(args[0]))
			a.segments[segment{e.PID, uint64(e.Result)}] = d.size
			d.ev.Range = r(uint64(e.Result), d.size)
		}
	case probe.Shmdt:
		key := segment{e.PID, args[0]}
		d.ev.Op, d.size = trace.OpShmdt, a.segments[key]
		d.ev.Range = r(args[0], d.size)
		if !bad {
			delete(a.segments, key)
		}
	case probe.Mprotect:
		d.ev.Op, d.size, d.ev.Range = trace.OpMprotect, args[1], r(args[0], args[1])
	case probe.ProcessMadvise:
		d.ev.Op = trace.OpProcessMadvise
		_, d.kind = advice(args[3])
		d.size = uint64(max(0, e.Result))
	case probe.Fallocate:
		d.size = args[3]
		if args[1]&unix.FALLOC_FL_PUNCH_HOLE != 0 {
			d.ev.Op, d.kind = trace.OpPunchHole, "punch hole"
		}
	case probe.Ftruncate, probe.Truncate:
		d.ev.Op = trace.OpTruncate
	case probe.RemapFilePages:
		d.ev.Op, d.size, d.ev.Range = trace.OpMmapFixed, args[1], r(args[0], args[1])
	default:
	}
	return d
}

func mmapKind(flags uint64) string {
	kind := "file"
	if flags&unix.MAP_ANONYMOUS != 0 {
		kind = "anonymous"
	}
	if flags&unix.MAP_FIXED != 0 {
		kind += " fixed"
	}
	return kind
}

// advice names an advice of madvise(2).
func advice(n uint64) (trace.Op, string) {
	switch n {
	case unix.MADV_DONTNEED, unix.MADV_DONTNEED_LOCKED:
		return trace.OpDontneed, "dontneed"
	case unix.MADV_FREE:
		return trace.OpFree, "free"
	case unix.MADV_REMOVE:
		return trace.OpRemove, "remove"
	case madvGuardInstall:
		return trace.OpGuard, "guard install"
	}
	names := map[uint64]string{
		unix.MADV_NORMAL: "normal", unix.MADV_RANDOM: "random", unix.MADV_SEQUENTIAL: "sequential", unix.MADV_WILLNEED: "willneed",
		unix.MADV_HUGEPAGE: "hugepage", unix.MADV_NOHUGEPAGE: "nohugepage", unix.MADV_COLLAPSE: "collapse",
		unix.MADV_DONTFORK: "dontfork", unix.MADV_DOFORK: "dofork", unix.MADV_COLD: "cold", unix.MADV_PAGEOUT: "pageout",
		unix.MADV_DONTDUMP: "dontdump", unix.MADV_DODUMP: "dodump", unix.MADV_MERGEABLE: "mergeable",
		unix.MADV_POPULATE_READ: "populate read", unix.MADV_POPULATE_WRITE: "populate write",
	}
	if name := names[n]; name != "" {
		return trace.OpMadvise, name
	}
	return trace.OpMadvise, fmt.Sprint(n)
}

// madvGuardInstall is MADV_GUARD_INSTALL, since Linux 6.13.
const madvGuardInstall = 102

func segmentSize(id int) uint64 {
	var d unix.SysvShmDesc
	// It may be gone, or somebody else's: then the size isn't known.
	if _, err := unix.SysvShmCtl(id, unix.IPC_STAT, &d); err != nil {
		return 0
	}
	return d.Segsz
}

func (a *analysis) operation(e *probe.Event) {
	d := a.decode(e)
	o := a.ops[e.What]
	if o == nil {
		o = &operation{kinds: map[string]uint64{}}
		a.ops[e.What] = o
	}
	o.latency.add(e.Took)
	if d.kind != "" {
		o.kinds[d.kind]++
	}
	s := &o.sizes[bits.Len64(max(d.size, 1)-1)]
	s.Count++
	s.Bytes += d.size
	if !failed(e.Result) {
		o.pages += uint64(d.ev.Range.Len() / a.pageSize)
	}
	first, second := d.ev.Changed()
	changes := !first.Empty() || !second.Empty() || d.ev.Op == trace.OpTruncate || d.ev.Op == trace.OpPunchHole
	if changes && !failed(e.Result) {
		o.changes++
	}

	st := a.site(e)
	if st != nil {
		by := a.siteOps[st]
		if by == nil {
			by = map[probe.What]*siteOp{}
			a.siteOps[st] = by
		}
		so := by[e.What]
		if so == nil {
			so = &siteOp{}
			by[e.What] = so
		}
		so.count++
		so.bytes += d.size
		so.time += e.Took
	}
	if t := a.thread(e); t != nil {
		t.operations++
		t.size += d.size
		t.time += e.Took
	}
	a.total++
	a.bytes += d.size
	p := a.point(e.Time)
	p.Operations++
	p.Bytes += d.size
	p.Seconds += e.Took.Seconds()
	if changes && !failed(e.Result) {
		p.Changes++
	}
	if a.trace != nil && d.ev.Op != trace.OpInvalid {
		d.ev.Stack = st.ID()
		a.traced(a.trace.Event(&d.ev))
	}
	for _, r := range []vm.Range{first, second} {
		if !r.Empty() {
			a.regs.change(e, d.name(e), r, st)
		}
	}
}

// name is the operation's for people.
func (d *decoded) name(e *probe.Event) string {
	if d.kind == "" {
		return e.What.String()
	}
	return e.What.String() + " " + d.kind
}

// ID returns 0 for a site that isn't known.
func (s *site) ID() uint32 {
	if s == nil {
		return 0
	}
	return s.id
}

// site returns where an event came from; nil if there are too many.
func (a *analysis) site(e *probe.Event) *site {
	if e.Stack == 0 {
		return nil
	}
	sp := a.spaces.at(e.PID, e.Time)
	key := siteKey{space: sp, stack: e.Stack}
	for _, word := range e.Top {
		if sp.find(word, e.Time) != nil {
			key.caller = word
			break
		}
	}
	s := a.sites[key]
	if s == nil && len(a.sites) < maxSites {
		s = &site{id: uint32(len(a.sites) + 1), key: key, pid: e.PID, seen: e.Time}
		a.sites[key] = s
	}
	return s
}

func (a *analysis) addresses(s *site) []uint64 {
	if s.addrs == nil {
		s.addrs = a.stack(s.key.stack)
	}
	return s.addrs
}

// readSymbols reads the symbols of all modules that are on a stack, several at a
// time: of large programs that takes a tenth of a second each.
func (a *analysis) readSymbols() {
	needed := map[*module]bool{}
	for _, s := range a.sites {
		for _, addr := range slices.Concat(a.addresses(s), []uint64{s.key.caller}) {
			if m := s.key.space.find(addr, s.seen); m != nil {
				needed[m.module] = true
			}
		}
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	for m := range needed {
		slots <- struct{}{}
		wg.Go(func() {
			m.symbols()
			<-slots
		})
	}
	wg.Wait()
}

// resolve returns the frames of a site, innermost first.
func (a *analysis) resolve(s *site) []Frame {
	if s == nil || s.frames != nil {
		if s != nil {
			return s.frames
		}
		return []Frame{}
	}
	addrs := a.addresses(s)
	sp := s.key.space
	s.frames = []Frame{}
	for i, addr := range addrs {
		s.frames = append(s.frames, sp.frame(addr, s.seen, i > 0))
		if caller := s.key.caller; i == 0 && caller != 0 && (len(addrs) == 1 || addrs[1] != caller) && sp.returnsTo(caller, s.seen) {
			s.frames = append(s.frames, sp.frame(caller, s.seen, true))
		}
	}
	return s.frames
}

func (a *analysis) thread(e *probe.Event) *thread {
	t := a.threads[e.TID]
	if t == nil && len(a.threads) < maxThreads {
		t = &thread{pid: e.PID}
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/comm", e.PID, e.TID))
		t.name = strings.TrimSpace(string(comm))
		if err != nil {
			t.name = a.processes[e.PID]
		}
		a.threads[e.TID] = t
		if a.trace != nil {
			a.traced(a.trace.Thread(&trace.Thread{Start: a.since(e.Time), PID: e.PID, TID: e.TID, Comm: t.name}))
		}
	}
	return t
}

// point returns the point of the timeline for a time. When there are too many
// the interval doubles.
func (a *analysis) point(t time.Duration) *TimelinePoint {
	for a.since(t)/a.interval >= maxPoints {
		for i := range a.points {
			p := a.points[i]
			if i%2 == 0 {
				a.points[i/2] = p
				continue
			}
			q := &a.points[i/2]
			q.Operations += p.Operations
			q.Changes += p.Changes
			q.Bytes += p.Bytes
			q.Seconds += p.Seconds
			q.Uses += p.Uses
			q.Registrations += p.Registrations
		}
		a.points = a.points[:(len(a.points)+1)/2]
		a.interval *= 2
	}
	i := int(a.since(t) / a.interval)
	for len(a.points) <= i {
		a.points = append(a.points, TimelinePoint{})
	}
	return &a.points[i]
}

// uses are what a transfer is in a trace.
var traceUses = map[probe.What]trace.UseKind{
	probe.Read: trace.UseRead, probe.Write: trace.UseWrite, probe.Recv: trace.UseRecv, probe.Send: trace.UseSend,
	probe.ReadFixed: trace.UseReadFixed, probe.WriteFixed: trace.UseWriteFixed,
}

// use takes in a transfer.
func (a *analysis) use(e *probe.Event) {
	st := a.site(e)
	ev := a.traceEvent(e, trace.Event{Kind: trace.KindUse, Use: traceUses[e.What], Stack: st.ID(), Result: e.Result})
	if e.What == probe.Recv || e.What == probe.Send {
		ev.FD = trace.FDSocket
	}
	ev.Range = vm.Range{Start: uintptr(e.Args[1]), End: uintptr(e.Args[1] + uint64(max(0, e.Result)))}
	if e.What == probe.ReadFixed || e.What == probe.WriteFixed {
		ev.Via = trace.ViaIOUring
		ev.Owner, ev.Handle = a.regs.ring(e.Ring), e.Args[0]
		a.regs.use(e, ev.Range, st)
		if ev.Range.Empty() {
			ev.Range = a.regs.rangeOf(ev.Owner, ev.Handle)
		}
	}
	a.uses.Count++
	a.uses.Bytes += uint64(max(0, e.Result))
	a.uses.Kinds[e.What.String()]++
	a.point(e.Time).Uses++
	if a.trace != nil {
		a.traced(a.trace.Event(ev))
	}
}
