package simhca_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// Bytes arrive where they should, however they are cut up.
func TestData(t *testing.T) {
	for _, op := range []simhca.Opcode{simhca.OpWrite, simhca.OpRead, simhca.OpSend} {
		g := newRig(t, simhca.Options{}, false)
		rng := rand.New(rand.NewPCG(1, uint64(op)))
		a, b := g.mapped(8, 0), g.mapped(8, 0)
		ra, rb := g.register(a, allAcc), g.register(b, allAcc)
		for range 50 {
			want := make([]byte, a.Len())
			for i := range want {
				want[i] = byte(rng.Uint32())
			}
			g.must(g.space.Store(a.Start, want))
			// Up to four pieces of a, to one place in b.
			var local []simhca.Segment
			var data []byte
			for range rng.IntN(5) {
				off, n := rng.IntN(2*page), rng.IntN(3*page/2)
				local = append(local, simhca.Segment{Addr: a.Start + uintptr(off), Length: uintptr(n), Key: ra.LocalKey})
				data = append(data, want[off:off+n]...)
			}
			to := b.Start + uintptr(rng.IntN(page))
			wr := simhca.WorkRequest{Op: op, Local: local, RemoteAddr: to, RemoteKey: rb.RemoteKey}
			if op == simhca.OpSend {
				cut := uintptr(rng.IntN(len(data) + 1))
				g.must(g.queue.PostReceive(9, simhca.Segment{Addr: to, Length: cut, Key: rb.LocalKey},
					simhca.Segment{Addr: to + cut, Length: uintptr(len(data)) - cut + 7, Key: rb.LocalKey}))
			}
			if op == simhca.OpRead {
				g.must(g.space.Store(to, data))
			}
			g.must(g.queue.Post(wr))
			g.stepper.Run()
			var done [4]simhca.Completion
			n := g.queue.CompletionQueue().Poll(done[:])
			for _, c := range done[:n] {
				if c.Status != simhca.StatusSuccess {
					t.Fatalf("%v: %v", op, c.Status)
				}
				if c.Op == simhca.OpReceive && (c.ID != 9 || c.Bytes != uintptr(len(data))) {
					t.Errorf("receive %d of %d bytes, want 9 of %d", c.ID, c.Bytes, len(data))
				}
			}
			got := make([]byte, len(data))
			if op == simhca.OpRead {
				got = got[:0]
				for _, s := range local {
					b := make([]byte, s.Length)
					g.must(g.space.Load(s.Addr, b))
					got = append(got, b...)
				}
				// Segments may overlap: the last byte written is what counts.
				if len(local) > 1 {
					continue
				}
			} else {
				g.must(g.space.Load(to, got))
			}
			if !slices.Equal(got, data) {
				t.Fatalf("%v of %d bytes in %d segments: other bytes", op, len(data), len(local))
			}
		}
	}
}

// Sends and their receives: lengths, waiting, and what the receiver lacks.
func TestSend(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	from, to := g.scratch(1, 's'), g.scratch(1, 'r')
	constant := g.register(to.Range, device.LocalRead)
	send := simhca.WorkRequest{ID: 1, Op: simhca.OpSend, Local: []simhca.Segment{simhca.SegmentOf(from, from.Range)}}

	statuses := func(q *simhca.Queue) map[simhca.Opcode]simhca.Status {
		g.stepper.Run()
		got := map[simhca.Opcode]simhca.Status{}
		var done [8]simhca.Completion
		for _, c := range done[:q.CompletionQueue().Poll(done[:])] {
			got[c.Op] = c.Status
		}
		return got
	}
	for _, c := range []struct {
		name             string
		recv             []simhca.Segment
		send, recvStatus simhca.Status
	}{
		{"fits", []simhca.Segment{simhca.SegmentOf(to, to.Range)}, simhca.StatusSuccess, simhca.StatusSuccess},
		{"too short", []simhca.Segment{{Addr: to.Range.Start, Length: page - 1, Key: to.LocalKey}}, simhca.StatusRemoteInvalidRequest, simhca.StatusLocalLength},
		{"not writable", []simhca.Segment{simhca.SegmentOf(constant, to.Range)}, simhca.StatusRemoteOperation, simhca.StatusLocalProtection},
	} {
		q := g.newQueue(nil)
		g.must(q.Post(send))
		if g.stepper.Step() {
			t.Errorf("%s: a send without a receive was executed", c.name)
		}
		g.must(q.PostReceive(2, c.recv...))
		got := statuses(q)
		if got[simhca.OpSend] != c.send || got[simhca.OpReceive] != c.recvStatus {
			t.Errorf("%s: %v", c.name, got)
		}
	}

	q := g.newQueue(&simhca.QueueOptions{FailNotReady: true})
	g.must(q.Post(send))
	if got := statuses(q); got[simhca.OpSend] != simhca.StatusNotReady {
		t.Errorf("no receive: %v", got)
	}
	// A receive that is posted when the queue fails is flushed.
	q = g.newQueue(nil)
	g.must(q.PostReceive(3, simhca.SegmentOf(to, to.Range)))
	g.must(q.Post(simhca.WorkRequest{Op: simhca.OpRead, Local: send.Local, RemoteAddr: 1 << 40, RemoteKey: 7}))
	if got := statuses(q); got[simhca.OpReceive] != simhca.StatusFlushed || got[simhca.OpRead] != simhca.StatusRemoteAccess {
		t.Errorf("receive in a failed queue: %v", got)
	}
}

// What is posted in one order is completed in it; reads are overtaken but not
// where a fence says so.
func TestOrder(t *testing.T) {
	seeds := fewer(200)
	overtaken := 0
	for seed := range uint64(seeds) {
		for _, fence := range []bool{false, true} {
			g := newRigSeed(t, simhca.Options{}, seed)
			r := g.mapped(4, 'o')
			reg := g.register(r, allAcc)
			to, from := g.scratch(4, 0), g.scratch(4, 'n')
			// A read, then a write to the same place: the read sees old pages
			// and new, in that order from its end, or only old with a fence.
			g.must(g.queue.Post(read(1, to, r.Start, reg.RemoteKey)))
			wr := write(2, from, r.Start, reg.RemoteKey)
			wr.Fence = fence
			g.must(g.queue.Post(wr))
			// A read after a write sees all of it.
			to2 := g.scratch(4, 0)
			g.must(g.queue.Post(read(3, to2, r.Start, reg.RemoteKey)))
			g.stepper.Run()
			var done [4]simhca.Completion
			if n := g.queue.CompletionQueue().Poll(done[:]); n != 3 || done[0].ID != 1 || done[1].ID != 2 || done[2].ID != 3 {
				t.Fatalf("seed %d: completions %+v", seed, done[:n])
			}
			if c := g.memory(to2.Range); c != 'n' {
				t.Errorf("seed %d: a read after a write sees %q", seed, c)
			}
			switch c := g.memory(to.Range); {
			case c == 'o':
			case fence:
				t.Errorf("seed %d: a read before a fenced write sees %q", seed, c)
			default:
				overtaken++
			}
			g.close()
		}
	}
	if overtaken == 0 {
		t.Errorf("no read of %d was overtaken", seeds)
	}
}

// A window of one executes one by one.
func TestWindowOfOne(t *testing.T) {
	for seed := range uint64(20) {
		g := newRigSeed(t, simhca.Options{}, seed)
		q := g.newQueue(&simhca.QueueOptions{Window: 1})
		r := g.mapped(4, 'o')
		reg := g.register(r, allAcc)
		to, from := g.scratch(4, 0), g.scratch(4, 'n')
		g.must(q.Post(read(1, to, r.Start, reg.RemoteKey)))
		g.must(q.Post(write(2, from, r.Start, reg.RemoteKey)))
		g.stepper.Run()
		if c := g.memory(to.Range); c != 'o' {
			t.Errorf("seed %d: %q", seed, c)
		}
		g.close()
	}
}

func TestDepth(t *testing.T) {
	g := newRig(t, simhca.Options{}, false)
	q := g.newQueue(&simhca.QueueOptions{Depth: 2})
	from := g.scratch(1, 'w')
	wr := write(1, from, from.Range.Start, 0)
	wr.Local[0].Length = 0
	g.must(q.Post(wr))
	g.must(q.Post(wr))
	g.wantError("third request", q.Post(wr), device.ErrBusy)
	g.must(q.PostReceive(1))
	g.must(q.PostReceive(2))
	g.wantError("third receive", q.PostReceive(3), device.ErrBusy)
	if n := q.Pending(); n != 2 {
		t.Errorf("%d pending", n)
	}
	g.stepper.Run()
	g.must(q.Post(wr))
	g.must(q.Close())
	g.must(q.Close())
	g.wantError("post to a closed queue", q.Post(wr), device.ErrClosed)
	g.wantError("receive on a closed queue", q.PostReceive(1), device.ErrClosed)
	g.wantError("connect a closed queue", simhca.Connect(q, q), device.ErrClosed)
	g.wantError("connect twice", simhca.Connect(g.queue, g.queue), device.ErrBusy)
	if _, err := q.CompletionQueue().Wait(ctx); err != nil {
		t.Error(err)
	}
}

// Two devices with memory of their own, each the other's peer: a key of one
// means nothing to the other.
func TestPeers(t *testing.T) {
	a, b := newRig(t, simhca.Options{Name: "a"}, true), newRig(t, simhca.Options{Name: "b"}, true)
	qa, err := a.dev.ProtectionDomain().NewQueue(nil)
	a.must(err)
	qb, err := b.dev.ProtectionDomain().NewQueue(nil)
	b.must(err)
	a.must(simhca.Connect(qa, qb))
	from := a.scratch(2, 'a')
	far := b.register(b.mapped(2, 'b'), allAcc)
	a.wantStatus("write", a.do(qa, write(1, from, far.Range.Start, far.RemoteKey)), simhca.StatusSuccess)
	if c := b.memory(far.Range); c != 'a' {
		t.Errorf("peer has %q", c)
	}
	a.wantStatus("read", a.do(qa, read(2, from, far.Range.Start, far.RemoteKey)), simhca.StatusSuccess)
	b.must(b.dev.Deregister(far))
	a.wantStatus("dead key", a.do(qa, write(3, from, far.Range.Start, far.RemoteKey)), simhca.StatusRemoteAccess)
	if !qb.Failed() || a.dev.Stats().Errors[simhca.StatusRemoteAccess] != 1 {
		t.Errorf("peer's queue in error: %v, errors %v", qb.Failed(), a.dev.Stats().Errors)
	}
	a.must(simhca.Connect(qa, qb))
	b.must(b.dev.Close())
	a.wantStatus("peer gone", a.do(qa, write(4, from, far.Range.Start, far.RemoteKey)), simhca.StatusRetryExceeded)
}

// Closing in the middle of everything leaves nothing, and everything posted
// completes.
func TestCloseUnderLoad(t *testing.T) {
	for i := range fewer(50) {
		g := newRig(t, simhca.Options{Seed: uint64(i)}, true)
		reg := g.register(g.mapped(4, 'x'), allAcc)
		from := g.scratch(4, 'w')
		cq := g.dev.NewCompletionQueue()
		queues := make([]*simhca.Queue, 4)
		for j := range queues {
			queues[j] = g.newQueue(&simhca.QueueOptions{Send: cq})
		}
		var wg sync.WaitGroup
		posted := make([]int, len(queues))
		started := make(chan struct{}, len(queues))
		for j, q := range queues {
			wg.Go(func() {
				for q.Post(write(uint64(posted[j]), from, reg.Range.Start, reg.RemoteKey)) == nil {
					if posted[j]++; posted[j] == 3 {
						started <- struct{}{}
					}
				}
				if posted[j] < 3 {
					started <- struct{}{}
				}
			})
		}
		for range queues {
			<-started
		}
		// What doesn't fit into a queue ends its loop; the rest ends here.
		g.must(g.dev.Close())
		wg.Wait()
		sum, completed := 0, 0
		for _, n := range posted {
			sum += n
		}
		done := make([]simhca.Completion, 64)
		for n := cq.Poll(done); n > 0; n = cq.Poll(done) {
			completed += n
		}
		if completed != sum {
			t.Errorf("round %d: %d posted, %d completed", i, sum, completed)
		}
		_, err := g.dev.ProtectionDomain().NewQueue(nil)
		g.wantError("new queue of a closed device", err, device.ErrClosed)
	}
}

// newRigSeed is newRig with a stepper of a seed.
func newRigSeed(tb testing.TB, opts simhca.Options, seed uint64) *rig {
	tb.Helper()
	g := &rig{t: tb, space: simhca.NewSpace(nil), stepper: simhca.NewStepper(seed)}
	opts.Stepper = g.stepper
	opts.Seed = seed
	g.dev = simhca.Open(g.space, &opts)
	g.queue = g.newQueue(nil)
	return g
}

// Waiting ends with the context, and in a stepped device when there is nothing
// to wait for.
func TestWait(t *testing.T) {
	g := newRig(t, simhca.Options{}, true)
	c, cancel := context.WithCancel(ctx)
	cancel()
	_, err := g.queue.CompletionQueue().Wait(c)
	g.wantError("wait", err, context.Canceled)
	s := newRig(t, simhca.Options{}, false)
	_, err = s.queue.CompletionQueue().Wait(ctx)
	s.wantError("wait for nothing", err, device.ErrBusy)
}

func ExampleStepper() {
	// Memory, an adapter, a queue connected to itself.
	space := simhca.NewSpace(nil)
	stepper := simhca.NewStepper(1)
	dev := simhca.Open(space, &simhca.Options{Stepper: stepper})
	defer dev.Close()
	queue, _ := dev.ProtectionDomain().NewQueue(nil)
	_ = simhca.Connect(queue, queue)

	// A page that a peer may write to, and one to write from.
	mem, _ := space.Map(2, simhca.ProtRead|simhca.ProtWrite)
	target, _ := dev.Register(context.Background(), vm.Range{Start: mem.Start, End: mem.Start + 4096}, device.LocalWrite|device.RemoteWrite)
	source, _ := dev.Register(context.Background(), vm.Range{Start: mem.Start + 4096, End: mem.End}, device.LocalRead)
	_ = space.Store(source.Range.Start, []byte("news"))
	post := func() {
		_ = queue.Post(simhca.WorkRequest{
			Op: simhca.OpWrite, RemoteAddr: target.Range.Start, RemoteKey: target.RemoteKey,
			Local: []simhca.Segment{simhca.SegmentOf(source, source.Range)},
		})
		stepper.Run()
		got := make([]byte, 4)
		_ = space.Load(target.Range.Start, got)
		fmt.Printf("%q, %d writes lost\n", got, space.Stats().OrphanWrites)
	}

	post()
	_ = space.Dontneed(target.Range) // The registration is stale now.
	post()
	_, _ = dev.Update(context.Background(), target)
	post()
	// Output:
	// "news", 0 writes lost
	// "\x00\x00\x00\x00", 1 writes lost
	// "news", 1 writes lost
}
