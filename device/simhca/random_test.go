package simhca_test

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// The random test keeps a naive account of the world beside the simulation:
// which page is where, what each key may mean at this moment, and what each
// request in flight may therefore have met. A page holds one tag throughout,
// which is its own or of a write that may have reached it.

const (
	tinyPage   = 64 // bytes; so that a million steps take seconds.
	rangePages = 2
	ranges     = 4
	slots      = 6 // requests in flight.
)

// oPage is a page of the account.
type oPage struct {
	tags []uint64 // that it may hold.
}

// oMeaning is the pages that a key reaches; nil is none.
type oMeaning []*oPage

// oKey is a key of the account.
type oKey struct {
	key      uint32
	at       int        // the range's number.
	possible []oMeaning // what it may mean now: one, or more while a request that changes it is in flight.

	reg      device.Registration // of a region.
	revoked  bool
	windows  int
	exposure *device.Exposure
	over     *oKey           // of an exposure.
	fast     *device.FastKey // of a fast key.
	next     oMeaning        // of a fast key: what the request in flight makes it mean.
	changing bool            // a request is in flight.
	rotated  uint32          // the key after it.
}

// oRequest is a request in flight.
type oRequest struct {
	op      simhca.Opcode
	key     *oKey
	carried uint32
	tag     uint64
	met     []oMeaning // what the key may have meant since it was posted.
	length  uintptr
	shift   uintptr
}

type world struct {
	t       *testing.T
	seed    uint64
	rng     *rand.Rand
	space   *simhca.Space
	dev     *simhca.Device
	stepper *simhca.Stepper
	queue   [2]*simhca.Queue

	mem      [ranges]vm.Range
	now      [ranges]oMeaning // what is mapped; nil after an unmap.
	keys     []*oKey
	requests map[uint64]*oRequest
	buffers  [slots]device.Registration
	busySlot [slots]bool
	tag, id  uint64
	writes   int // in flight.
	unlined  int // reads in flight that have several packets in a page.
	keep     bool

	counts map[string]int
}

func (w *world) fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d: "+format, append([]any{w.seed}, args...)...)
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.fatalf("%v", err)
	}
}

func (w *world) open() {
	w.stepper = simhca.NewStepper(w.rng.Uint64())
	w.keep = w.rng.IntN(2) == 0
	w.dev = simhca.Open(w.space, &simhca.Options{Stepper: w.stepper, Seed: w.rng.Uint64(), KeepPages: w.keep, Limits: device.Limits{MaxRegistrations: 24}})
	w.keys, w.requests, w.busySlot = nil, map[uint64]*oRequest{}, [slots]bool{}
	w.writes, w.unlined = 0, 0
	for i := range w.queue {
		q, err := w.dev.ProtectionDomain().NewQueue(&simhca.QueueOptions{Window: 1 + w.rng.IntN(4)})
		w.must(err)
		w.must(simhca.Connect(q, q))
		w.queue[i] = q
	}
	for i := range w.buffers {
		r, err := w.space.Map(rangePages+1, rw)
		w.must(err)
		w.buffers[i], err = w.dev.Register(ctx, r, device.LocalWrite)
		w.must(err)
	}
}

// shut ends the device, in the middle of whatever, and looks for leaks.
func (w *world) shut() {
	if w.rng.IntN(2) == 0 {
		w.drain()
		for _, k := range slices.Backward(w.keys) {
			w.drop(k)
		}
		for _, b := range w.buffers {
			w.must(w.dev.Deregister(b))
		}
		if s := w.dev.Stats(); s.Registrations+s.Exposures+s.FastKeys != 0 || s.PinnedBytes != 0 {
			w.fatalf("left when all is given back: %+v", s)
		}
	}
	w.must(w.dev.Close())
	for _, b := range w.buffers {
		w.must(w.space.Unmap(b.Range))
	}
	mapped := 0
	for _, pages := range w.now {
		mapped += len(pages)
	}
	if s := w.space.Stats(); s.Pinned != 0 || s.Orphans != 0 || s.Pages != mapped {
		w.fatalf("pages left after close: %+v, %d are mapped", s, mapped)
	}
	w.must(w.space.Check())
}

// fill gives the pages of range i, which are new, tags of their own.
func (w *world) fill(i int) {
	w.now[i] = nil
	for j := range rangePages {
		w.tag++
		w.store(w.mem[i].Start+uintptr(j)*tinyPage, w.tag, tinyPage)
		w.now[i] = append(w.now[i], &oPage{tags: []uint64{w.tag}})
	}
}

func (w *world) store(addr uintptr, tag uint64, n int) {
	b := make([]byte, n)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], tag)
	}
	w.must(w.space.Store(addr, b))
}

// tagOf returns the tag that fills a page.
func tagOf(b []byte) (tag uint64, whole bool) {
	tag = binary.LittleEndian.Uint64(b)
	for i := 0; i < len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) != tag {
			return tag, false
		}
	}
	return tag, true
}

// may says that k may mean m from now on, beside or instead of what it may.
func (w *world) may(k *oKey, instead bool, m oMeaning) {
	if instead {
		k.possible = nil
	}
	k.possible = append(k.possible, m)
	for _, r := range w.requests {
		if r.key == k {
			w.meet(r, m)
		}
	}
	for _, x := range w.keys {
		if x.over == k {
			w.may(x, instead, m)
		}
	}
}

// meet says that a request in flight may meet m.
func (w *world) meet(r *oRequest, m oMeaning) {
	r.met = append(r.met, m)
	if r.op == simhca.OpWrite {
		for _, p := range m {
			p.tags = append(p.tags, r.tag)
		}
	}
}

// change is a VM operation.
func (w *world) change() string {
	i := w.rng.IntN(ranges)
	switch n := w.rng.IntN(6); {
	case n == 0 || w.now[i] == nil && n < 3:
		w.must(w.space.MapFixed(w.mem[i], rw))
		w.fill(i)
		return "map over"
	case w.now[i] == nil:
		return "nothing"
	case n == 1:
		w.must(w.space.Dontneed(w.mem[i]))
		w.fill(i)
		return "dontneed"
	case n == 2:
		w.must(w.space.Unmap(w.mem[i]))
		w.now[i] = nil
		return "unmap"
	case n == 3: // One page of two.
		r := vm.Range{Start: w.mem[i].Start, End: w.mem[i].Start + tinyPage}
		w.must(w.space.Dontneed(r))
		w.tag++
		w.store(r.Start, w.tag, tinyPage)
		w.now[i] = oMeaning{{tags: []uint64{w.tag}}, w.now[i][1]}
		return "dontneed one page"
	default:
		j := (i + 1 + w.rng.IntN(ranges-1)) % ranges
		w.must(w.space.Remap(w.mem[i], w.mem[j]))
		w.now[j], w.now[i] = w.now[i], nil
		return "remap"
	}
}

func (w *world) pick(ok func(*oKey) bool) *oKey {
	var list []*oKey
	for _, k := range w.keys {
		if ok(k) {
			list = append(list, k)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return list[w.rng.IntN(len(list))]
}

func region(k *oKey) bool { return k.over == nil && k.fast == nil }

// want checks a verb's outcome.
func (w *world) want(what string, err, want error) {
	w.t.Helper()
	if !errors.Is(err, want) || want == nil && err != nil {
		w.fatalf("%s: %v, want %v", what, err, want)
	}
}

// missing is ErrFault if nothing is mapped at range i.
func (w *world) missing(i int) error {
	if w.now[i] == nil {
		return device.ErrFault
	}
	return nil
}

// call is a verb.
func (w *world) call() string {
	switch w.rng.IntN(8) {
	case 0:
		i := w.rng.IntN(ranges)
		reg, err := w.dev.Register(ctx, w.mem[i], allAcc)
		if errors.Is(err, device.ErrNoSlots) && len(w.keys)+slots >= 24 {
			return "register: full"
		}
		w.want("register", err, w.missing(i))
		if err == nil {
			w.keys = append(w.keys, &oKey{key: reg.RemoteKey, at: i, reg: reg, possible: []oMeaning{w.now[i]}})
		}
		return "register"
	case 1:
		k := w.pick(func(*oKey) bool { return true })
		if k == nil {
			return "nothing"
		}
		w.drop(k)
		return "drop"
	case 2, 3:
		k := w.pick(region)
		if k == nil {
			return "nothing"
		}
		want := w.missing(k.at)
		if k.revoked {
			want = device.ErrRevoked
		}
		got, err := w.dev.Update(ctx, k.reg)
		w.want("update", err, want)
		if err == nil {
			if got != k.reg {
				w.fatalf("updated %+v, want %+v", got, k.reg)
			}
			w.may(k, true, w.now[k.at])
		}
		return "update"
	case 4:
		k := w.pick(region)
		if k == nil {
			return "nothing"
		}
		if !k.revoked {
			w.want("revoke", w.dev.Revoke(ctx, k.reg), nil)
			k.revoked = true
			w.may(k, true, nil)
			return "revoke"
		}
		_, err := w.dev.Load(ctx, k.reg)
		w.want("load", err, w.missing(k.at))
		if err == nil {
			k.revoked = false
			w.may(k, true, w.now[k.at])
		}
		return "load"
	case 5:
		k := w.pick(region)
		if k == nil || len(w.keys)+slots >= 23 {
			return "nothing"
		}
		x, err := w.dev.Expose(ctx, k.reg, w.mem[k.at], device.RemoteRead|device.RemoteWrite)
		var want error
		if k.revoked {
			want = device.ErrRevoked
		}
		w.want("expose", err, want)
		if err == nil {
			w.keys = append(w.keys, &oKey{key: x.RemoteKey, at: k.at, exposure: &x, over: k, possible: slices.Clone(k.possible)})
			k.windows++
		}
		return "expose"
	case 6:
		if len(w.keys)+slots >= 20 {
			return "nothing"
		}
		f, err := w.dev.AllocFastKey(ctx, rangePages*tinyPage)
		w.must(err)
		w.keys = append(w.keys, &oKey{key: f.Key, fast: &f, possible: []oMeaning{nil}})
		return "alloc fast key"
	default:
		k := w.pick(region)
		if k == nil {
			return "nothing"
		}
		w.must(w.dev.Flush(ctx, k.reg))
		w.poll()
		for _, r := range w.requests {
			if r.key == k {
				w.fatalf("request in flight after flush")
			}
		}
		return "flush"
	}
}

// drop gives a key back, if that can be done.
func (w *world) drop(k *oKey) {
	switch {
	case k.over != nil:
		w.want("withdraw", w.dev.Withdraw(ctx, *k.exposure), nil)
		k.over.windows--
	case k.fast != nil:
		err := w.dev.FreeFastKey(*k.fast)
		if k.changing || k.possible[0] != nil {
			w.want("free fast key", err, device.ErrBusy)
			if !k.changing {
				w.post(k, nil)
				w.drain()
				w.drop(k)
			}
			return
		}
		w.want("free fast key", err, nil)
	default:
		err := w.dev.Deregister(k.reg)
		if k.windows > 0 {
			w.want("deregister", err, device.ErrBusy)
			return
		}
		w.want("deregister", err, nil)
	}
	w.keys = slices.DeleteFunc(w.keys, func(x *oKey) bool { return x == k })
	w.may(k, true, nil) // Requests in flight meet nothing.
}

// post posts a request that changes a fast key: to mean over's pages, or
// nothing.
func (w *world) post(k, over *oKey) string {
	w.id++
	wr := invalidate(w.id, k.key)
	k.next, k.rotated = nil, k.key
	if over != nil {
		if w.rng.IntN(2) == 0 {
			k.rotated = device.NextKey(k.key)
		}
		wr = fastRegister(w.id, k.rotated, over.reg, w.mem[over.at], device.LocalWrite|device.RemoteRead|device.RemoteWrite)
		k.next, k.at = over.possible[0], over.at
	}
	w.must(w.queue[w.rng.IntN(2)].Post(wr))
	k.changing = true
	w.requests[w.id] = &oRequest{op: wr.Op, key: k}
	w.may(k, false, k.next)
	return wr.Op.String()
}

// work posts a request.
func (w *world) work() string {
	k := w.pick(func(k *oKey) bool { return !k.changing })
	if k == nil {
		return "nothing"
	}
	if k.fast != nil && w.rng.IntN(3) == 0 {
		if k.possible[0] != nil {
			return w.post(k, nil)
		}
		if over := w.pick(func(k *oKey) bool { return region(k) && !k.revoked }); over != nil {
			return w.post(k, over)
		}
	}
	slot := slices.Index(w.busySlot[:], false)
	if slot < 0 {
		return "nothing"
	}
	r := &oRequest{op: simhca.OpRead, key: k, carried: k.key, length: rangePages * tinyPage}
	switch {
	case w.rng.IntN(2) == 0 && w.unlined == 0:
		r.op = simhca.OpWrite
		w.writes++
		w.tag++
		r.tag = w.tag
		w.store(w.buffers[slot].Range.Start, r.tag, int(r.length))
	case w.writes == 0 && w.rng.IntN(2) == 0:
		r.shift = 8 * (1 + uintptr(w.rng.IntN(6)))
		w.unlined++
	}
	for _, m := range k.possible {
		w.meet(r, m)
	}
	w.id = w.id/slots*slots + slots + uint64(slot) // So that the slot is known.
	w.busySlot[slot] = true
	w.requests[w.id] = r
	w.must(w.queue[w.rng.IntN(2)].Post(simhca.WorkRequest{
		ID: w.id, Op: r.op, RemoteAddr: w.mem[k.at].Start, RemoteKey: k.key,
		Local: []simhca.Segment{{Addr: w.buffers[slot].Range.Start + r.shift, Length: r.length, Key: w.buffers[slot].LocalKey}},
	}))
	return r.op.String()
}

// poll looks at what has completed, and has failed queues go on.
func (w *world) poll() {
	var done [32]simhca.Completion
	for _, q := range w.queue {
		n := q.CompletionQueue().Poll(done[:])
		for _, c := range done[:n] {
			w.completed(c)
		}
		if q.Failed() && q.Pending() == 0 {
			w.must(simhca.Connect(q, q))
		}
	}
}

func (w *world) completed(c simhca.Completion) {
	r, ok := w.requests[c.ID]
	if !ok {
		w.fatalf("completion of nothing: %+v", c)
	}
	delete(w.requests, c.ID)
	w.counts[c.Op.String()+": "+c.Status.String()]++
	if r.op != simhca.OpRead && r.op != simhca.OpWrite {
		w.changed(r.key, c.Status)
		return
	}
	w.busySlot[c.ID%slots] = false
	if r.op == simhca.OpWrite {
		w.writes--
	}
	if r.shift != 0 {
		w.unlined--
	}
	switch c.Status {
	case simhca.StatusFlushed:
	case simhca.StatusRemoteAccess:
		if !slices.ContainsFunc(r.met, func(m oMeaning) bool { return m == nil }) && r.carried == r.key.key {
			w.fatalf("%v was refused under key %#x, which always meant something", r.op, r.carried)
		}
	case simhca.StatusSuccess:
		if !slices.ContainsFunc(r.met, func(m oMeaning) bool { return m != nil }) {
			w.fatalf("%v succeeded under key %#x, which meant nothing", r.op, r.carried)
		}
		if r.op == simhca.OpRead {
			w.look(r, w.buffers[c.ID%slots].Range.Start+r.shift)
		}
	default:
		w.fatalf("%+v", c)
	}
}

// changed ends a request that was to change a key.
func (w *world) changed(k *oKey, s simhca.Status) {
	if s != simhca.StatusSuccess && s != simhca.StatusFlushed {
		w.fatalf("change of key %#x: %v", k.key, s)
	}
	k.changing = false
	if s == simhca.StatusSuccess {
		k.possible, k.key = []oMeaning{k.next}, k.rotated
	} else {
		k.possible = k.possible[:1]
	}
}

// look checks what a read has brought.
func (w *world) look(r *oRequest, addr uintptr) {
	b := make([]byte, r.length)
	w.must(w.space.Load(addr, b))
	var whole []bool // which meanings all pages fit.
	for range r.met {
		whole = append(whole, true)
	}
	for j := range rangePages {
		tag, ok := tagOf(b[j*tinyPage : (j+1)*tinyPage])
		if !ok {
			w.fatalf("page %d is torn: %x", j, b)
		}
		fits := false
		for i, m := range r.met {
			if m != nil && slices.Contains(m[j].tags, tag) {
				fits = true
			} else {
				whole[i] = false
			}
		}
		if !fits {
			w.fatalf("page %d has tag %d, which the key can't have reached", j, tag)
		}
	}
	if w.keep && !slices.Contains(whole, true) {
		w.fatalf("a request that keeps its pages saw pages of two meanings")
	}
}

// drain executes everything, and compares memory with the account.
func (w *world) drain() {
	w.stepper.Run()
	w.poll()
	w.stepper.Run()
	w.poll()
	if len(w.requests) != 0 {
		w.fatalf("%d requests don't complete", len(w.requests))
	}
	for i, pages := range w.now {
		for j, p := range pages {
			b := make([]byte, tinyPage)
			w.must(w.space.Load(w.mem[i].Start+uintptr(j)*tinyPage, b))
			tag, ok := tagOf(b)
			if !ok || !slices.Contains(p.tags, tag) {
				w.fatalf("page %d of range %d has tag %d, whole %v: a write went astray", j, i, tag, ok)
			}
			p.tags = []uint64{tag}
		}
	}
}

// A million random steps of VM operations, verbs, work and closing. PINDOWN_SEED
// repeats a run.
func TestRandom(t *testing.T) {
	steps := fewer(1_000_000)
	seed := rand.Uint64()
	if s := os.Getenv("PINDOWN_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seed = n
	}
	t.Logf("seed %d", seed)
	w := &world{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 0)), counts: map[string]int{}}
	w.space = simhca.NewSpace(&simhca.SpaceOptions{PageSize: tinyPage})
	for i := range w.mem {
		r, err := w.space.Map(rangePages, rw)
		w.must(err)
		w.mem[i] = r
		w.fill(i)
	}
	w.open()
	for i := range steps {
		var did string
		switch n := w.rng.IntN(100); {
		case n < 12:
			did = w.change()
		case n < 27:
			did = w.call()
		case n < 47:
			did = w.work()
		case n < 98:
			w.stepper.Step()
			w.poll()
			did = "step"
		default:
			w.drain()
			did = "drain"
		}
		w.counts[did]++
		if i%2000 == 1999 {
			w.shut()
			w.open()
			w.counts["close"]++
		}
	}
	w.shut()
	t.Log(w.counts)
	for _, what := range []string{
		"map over", "dontneed", "dontneed one page", "unmap", "remap", "register", "drop", "update", "revoke", "load", "expose", "flush",
		"read: success", "read: remote access error", "write: success", "write: remote access error", "fast-register: success", "local-invalidate: success",
	} {
		if w.counts[what] < steps/5000 {
			t.Errorf("%q happened %d times only", what, w.counts[what])
		}
	}
}
