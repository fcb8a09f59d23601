package profile

import (
	"slices"
	"sort"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/profile/probe"
	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/vm"
)

// Operations of io_uring_register(2).
const (
	ringRegisterBuffers       = 0
	ringUnregisterBuffers     = 1
	ringRegisterBuffers2      = 15
	ringRegisterBuffersUpdate = 16
)

// regKey names a registration: by the ring and the index, or the process and
// the region.
type regKey struct {
	via           trace.Via
	owner, handle uint64
}

// reg is a registration that lives.
type reg struct {
	key     regKey
	r       vm.Range
	pid     uint32
	done    time.Duration // when the call that made it returned
	out     *Registration
	site    *site
	windows []*window
}

// window is a stale window of a registration that lives.
type window struct {
	r     vm.Range
	done  time.Duration
	used  bool
	out   *StaleWindow // nil if there are too many
	reg   *reg
	site  *site
	where *site // of the first use
}

// maxWindowsEach is how many windows of one registration are told apart; then
// the last grows.
const maxWindowsEach = 16

// registrations follows those that the program makes.
type registrations struct {
	a      *analysis
	live   map[regKey]*reg
	byPID  map[uint32]*live
	rings  map[uint64]uint64 // the numbers of contexts
	next   uint64
	sum    Registering
	stale  Stale
	list   []*reg
	stales []*window
	bytes  uint64 // registered now
	// pending are the calls of threads whose buffers come next.
	pending map[uint32]*probe.Event
}

// live are a process's registrations in the order of their start.
type live struct {
	list    []*reg
	longest uintptr
}

func (g *registrations) init(a *analysis) {
	*g = registrations{
		a: a, live: map[regKey]*reg{}, byPID: map[uint32]*live{}, rings: map[uint64]uint64{}, pending: map[uint32]*probe.Event{},
	}
}

// ring returns the number of a context: addresses are used again.
func (g *registrations) ring(context uint64) uint64 {
	n := g.rings[context]
	if n == 0 {
		g.next++
		n = g.next
		g.rings[context] = n
	}
	return n
}

func (g *registrations) event(e *probe.Event) {
	switch e.What {
	case probe.RingRegister:
		g.ringRegister(e)
	case probe.RingBuffer:
		call := g.pending[e.TID]
		if call == nil {
			return
		}
		key := regKey{trace.ViaIOUring, g.ring(e.Ring), e.Args[4]}
		r := vm.Range{Start: uintptr(e.Args[0]), End: uintptr(e.Args[0] + e.Args[2])}
		took := call.Took / time.Duration(g.share(call))
		g.end(key, e.Time, took, "replaced")
		if !r.Empty() {
			g.add(call, key, r, device.LocalWrite, 0, took)
		}
	case probe.RingClose:
		n := g.ring(e.Ring)
		delete(g.rings, e.Ring)
		for _, x := range g.ofRing(n) {
			g.end(x.key, e.Time, 0, "ring closed")
		}
	case probe.VerbsRegister:
		if e.Result == 0 {
			g.sum.RegisterFailed++
			return
		}
		g.sum.RegisterSeconds += e.Took.Seconds()
		key := regKey{trace.ViaVerbs, uint64(e.PID), uint64(e.Result)}
		g.end(key, e.Time, 0, "replaced")
		g.add(e, key, vm.Range{Start: uintptr(e.Args[1]), End: uintptr(e.Args[1] + e.Args[2])},
			device.Access(e.Args[3])&device.LocalWrite, e.Args[4], e.Took)
	case probe.VerbsDeregister:
		if e.Result != 0 {
			return
		}
		g.sum.DeregisterSeconds += e.Took.Seconds()
		g.end(regKey{trace.ViaVerbs, uint64(e.PID), e.Args[0]}, e.Time, e.Took, "deregistered")
	case probe.VerbsReregister:
		const changeTranslation = 1
		if e.Result != 0 || e.Args[3]&changeTranslation == 0 {
			return
		}
		g.sum.RegisterSeconds += e.Took.Seconds()
		key := regKey{trace.ViaVerbs, uint64(e.PID), e.Args[0]}
		g.end(key, e.Time, 0, "replaced")
		g.add(e, key, vm.Range{Start: uintptr(e.Args[1]), End: uintptr(e.Args[1] + e.Args[2])}, 0, 0, e.Took)
	default:
	}
}

// share is by how many buffers a call's time is shared.
func (g *registrations) share(call *probe.Event) int64 {
	switch call.Args[1] {
	case ringRegisterBuffers:
		return max(1, int64(call.Args[3]))
	case ringRegisterBuffersUpdate:
		return max(1, call.Result)
	}
	return 1
}

func (g *registrations) ringRegister(e *probe.Event) {
	if failed(e.Result) {
		if e.Args[1] != ringUnregisterBuffers {
			g.sum.RegisterFailed++
		}
		delete(g.pending, e.TID)
		return
	}
	if e.Args[1] != ringUnregisterBuffers {
		g.sum.RegisterSeconds += e.Took.Seconds()
		call := *e
		g.pending[e.TID] = &call
		return
	}
	g.sum.DeregisterSeconds += e.Took.Seconds()
	all := g.ofRing(g.ring(e.Ring))
	for _, x := range all {
		g.end(x.key, e.Time, e.Took/time.Duration(len(all)), "deregistered")
	}
}

func (g *registrations) ofRing(n uint64) []*reg {
	var all []*reg
	for k, x := range g.live {
		if k.via == trace.ViaIOUring && k.owner == n {
			all = append(all, x)
		}
	}
	slices.SortFunc(all, func(x, y *reg) int { return int(x.key.handle) - int(y.key.handle) })
	return all
}

// add makes a registration. The event is that of the call.
func (g *registrations) add(e *probe.Event, key regKey, r vm.Range, access device.Access, lkey uint64, took time.Duration) {
	a := g.a
	x := &reg{key: key, r: r, pid: e.PID, done: e.Time + e.Took, site: a.site(e)}
	x.out = &Registration{
		Number: int(g.sum.Registrations) + 1, Via: "verbs", PID: e.PID, Handle: key.handle,
		Start: uint64(r.Start), Length: uint64(r.Len()), At: a.since(e.Time).Seconds(), Seconds: took.Seconds(), Stack: []Frame{},
	}
	if key.via == trace.ViaIOUring {
		x.out.Via, x.out.Ring = "io_uring", int(key.owner)
	}
	g.live[key] = x
	l := g.byPID[e.PID]
	if l == nil {
		l = &live{}
		g.byPID[e.PID] = l
	}
	i := sort.Search(len(l.list), func(i int) bool { return l.list[i].r.Start > r.Start })
	l.list = slices.Insert(l.list, i, x)
	l.longest = max(l.longest, r.Len())
	if len(g.list) < maxRegistrations {
		g.list = append(g.list, x)
	}
	g.sum.Registrations++
	g.sum.RegisteredBytes += uint64(r.Len())
	g.bytes += uint64(r.Len())
	g.sum.MostBytes = max(g.sum.MostBytes, g.bytes)
	a.point(e.Time).Registrations++
	if a.trace != nil {
		ev := a.traceEvent(e, trace.Event{
			Kind: trace.KindRegister, Via: key.via, Access: access, Range: r, Owner: key.owner, Handle: key.handle, Key: lkey, Stack: x.site.ID(),
		})
		ev.Duration = took
		a.traced(a.trace.Event(ev))
	}
}

// end ends a registration, if there is one of that name.
func (g *registrations) end(key regKey, at, took time.Duration, how string) {
	x := g.live[key]
	if x == nil {
		return
	}
	delete(g.live, key)
	l := g.byPID[x.pid]
	i := sort.Search(len(l.list), func(i int) bool { return l.list[i].r.Start >= x.r.Start })
	for l.list[i] != x {
		i++
	}
	l.list = slices.Delete(l.list, i, i+1)
	x.out.Ended, x.out.EndedAt = how, g.a.since(at).Seconds()
	g.bytes -= uint64(x.r.Len())
	if how == "deregistered" {
		g.sum.Deregistrations++
		x.out.DeregisterSeconds = took.Seconds()
	}
	for _, w := range x.windows {
		if w.out != nil {
			w.out.EndedAt = x.out.EndedAt
		}
	}
	if g.a.trace != nil && how != "replaced" {
		g.a.traced(g.a.trace.Event(&trace.Event{
			Kind: trace.KindDeregister, Via: key.via, PID: x.pid, Start: g.a.since(at), Duration: took,
			Range: x.r, Owner: key.owner, Handle: key.handle,
		}))
	}
}

func (g *registrations) endProcess(pid uint32, at time.Duration, how string) {
	l := g.byPID[pid]
	if l == nil {
		return
	}
	for len(l.list) > 0 {
		g.end(l.list[0].key, at, 0, how)
	}
	delete(g.byPID, pid)
}

// change takes in that memory of a process was changed.
func (g *registrations) change(e *probe.Event, name string, r vm.Range, at *site) {
	l := g.byPID[e.PID]
	if l == nil || len(l.list) == 0 {
		return
	}
	from := uintptr(0)
	if r.Start > l.longest {
		from = r.Start - l.longest
	}
	for i := sort.Search(len(l.list), func(i int) bool { return l.list[i].r.Start >= from }); i < len(l.list); i++ {
		x := l.list[i]
		if x.r.Start >= r.End {
			break
		}
		// What began before the registration returned may have come before it.
		if hit := x.r.Intersect(r); !hit.Empty() && e.Time >= x.done {
			g.open(x, e, name, hit, at)
		}
	}
}

func (g *registrations) open(x *reg, e *probe.Event, name string, r vm.Range, at *site) {
	g.stale.Windows++
	x.out.Changes++
	w := &window{r: r, done: e.Time + e.Took, reg: x, site: at}
	if len(x.windows) == maxWindowsEach {
		last := x.windows[maxWindowsEach-1]
		last.r = last.r.Union(r)
		return
	}
	x.windows = append(x.windows, w)
	if len(g.stales) == maxWindows {
		return
	}
	g.stales = append(g.stales, w)
	w.out = &StaleWindow{
		Registration: x.out.Number, Operation: name, PID: e.PID, TID: e.TID, At: g.a.since(e.Time).Seconds(),
		Start: uint64(r.Start), Length: uint64(r.Len()), Stack: []Frame{}, RegistrationStack: []Frame{},
	}
}

// use takes in a use of a registration; an empty range is all of it.
func (g *registrations) use(e *probe.Event, r vm.Range, at *site) {
	x := g.live[regKey{trace.ViaIOUring, g.ring(e.Ring), e.Args[0]}]
	if x == nil {
		return
	}
	x.out.Uses++
	g.sum.Uses++
	if r.Empty() {
		r = x.r
	}
	for _, w := range x.windows {
		if e.Time < w.done || !w.r.Overlaps(r) {
			continue
		}
		if !w.used {
			w.used, w.where = true, at
			g.stale.UsedAgain++
			if w.out != nil {
				w.out.UsedAgain, w.out.FirstUseAt = true, g.a.since(e.Time).Seconds()
			}
		}
		if w.out != nil {
			w.out.Uses++
		}
	}
}

func (g *registrations) rangeOf(owner, handle uint64) vm.Range {
	if x := g.live[regKey{trace.ViaIOUring, owner, handle}]; x != nil {
		return x.r
	}
	return vm.Range{}
}
