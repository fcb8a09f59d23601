package simhca

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/pindown/pindown/device"
)

// QueueOptions configure a Queue. The zero value, or nil, means the defaults.
type QueueOptions struct {
	// Send and Receive are where completions go. Nil: one of the queue's own,
	// for both if both are nil.
	Send, Receive *CompletionQueue
	// Depth is how many requests may be posted and not completed; as many
	// receives. Default 1024.
	Depth int
	// Window is how many requests may have begun and not completed. With 1 they
	// are executed one by one. Default 16.
	Window int
	// FailNotReady has a request fail whose peer isn't ready. Without it waits
	// for as long as it takes.
	FailNotReady bool
}

// Queue is a queue pair: a send queue and a receive queue, connected with
// another queue or with itself.
//
// Requests begin in the order of posting. Sends and writes are executed one
// after the other, packet by packet; a packet is what lies in one page at
// either end. A read begins after the sends and writes before it, and those
// after it may overtake it. Requests that change a key wait for all before
// them and hold up all after them. Completions come in the order of posting.
//
// A request whose key was revoked when it had begun starts over, and fails if
// the key means nothing still.
//
// A request that fails puts the queue into error: those after it complete with
// StatusFlushed, so do receives, and what is posted then. Reset ends that.
type Queue struct {
	dev  *Device           // immutable.
	pd   *ProtectionDomain // immutable.
	opts QueueOptions      // immutable.
	wake chan struct{}     // of its goroutine; holds one.

	exec sync.Mutex // one step at a time.
	rng  *rand.Rand // guarded by exec.
	buf  []byte     // guarded by exec.

	mu        sync.Mutex
	peer      *Queue     // guarded by mu.
	failed    bool       // guarded by mu.
	closed    bool       // guarded by mu.
	sends     []*request // guarded by mu; posted, not completed.
	receives  []*receive // guarded by mu; posted, not begun.
	filling   *receive   // guarded by mu; begun, owned by the peer's executor.
	posted    uint64     // guarded by mu; requests so far.
	completed uint64     // guarded by mu; requests so far.
	received  uint64     // guarded by mu; receives completed so far.
}

var _ device.WorkQueue = (*Queue)(nil)

// NewQueue returns a queue of this domain. It is in error until it is
// connected. It returns a wrapped device.ErrClosed if the device is closed.
func (p *ProtectionDomain) NewQueue(opts *QueueOptions) (*Queue, error) {
	d := p.dev
	q := &Queue{dev: d, pd: p, wake: make(chan struct{}, 1), failed: true}
	if opts != nil {
		q.opts = *opts
	}
	q.opts.Depth = cmp.Or(q.opts.Depth, 1024)
	q.opts.Window = cmp.Or(q.opts.Window, 16)
	q.opts.Send = cmp.Or(q.opts.Send, q.opts.Receive)
	if q.opts.Send == nil {
		q.opts.Send = d.NewCompletionQueue()
	}
	q.opts.Receive = cmp.Or(q.opts.Receive, q.opts.Send)
	if err := d.enter(); err != nil {
		return nil, fmt.Errorf("%s: new queue: %w", d.opts.Name, err)
	}
	defer d.leave()
	d.queueMu.Lock()
	q.rng = rand.New(rand.NewPCG(d.rng.Uint64(), d.rng.Uint64()))
	d.queues = append(d.queues, q)
	d.queueMu.Unlock()
	if d.opts.Stepper != nil {
		d.opts.Stepper.add(q)
	} else {
		d.workers.Go(q.work)
	}
	return q, nil
}

// Connect connects two queues, of one device or of two, and makes them ready.
// A queue can be connected with itself. They must be new, or in error.
func Connect(a, b *Queue) error {
	for _, q := range []*Queue{a, b} {
		q.mu.Lock()
		failed, closed := q.failed, q.closed
		q.mu.Unlock()
		if closed {
			return fmt.Errorf("%s: connect: %w", q.dev.opts.Name, device.ErrClosed)
		}
		if !failed {
			return fmt.Errorf("%s: connect a queue that is connected: %w", q.dev.opts.Name, device.ErrBusy)
		}
	}
	a.reset(b)
	if a != b {
		b.reset(a)
	}
	return nil
}

// reset flushes the queue and makes it ready for a peer.
func (q *Queue) reset(peer *Queue) {
	q.exec.Lock()
	defer q.exec.Unlock()
	q.flush()
	q.mu.Lock()
	q.peer, q.failed = peer, q.closed
	q.mu.Unlock()
}

// CompletionQueue returns the queue's send completion queue, which is also
// that of receives unless the options say otherwise.
func (q *Queue) CompletionQueue() *CompletionQueue { return q.opts.Send }

// Failed reports whether the queue is in error.
func (q *Queue) Failed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.failed
}

// Pending returns how many requests are posted and not completed.
func (q *Queue) Pending() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.sends)
}

// Post posts a request. An error means that nothing was posted: the request is
// malformed (ErrInvalid and, for requests that change a key, what
// [device.WorkQueue] says), the queue is full (ErrBusy), or closed. A queue in
// error takes requests, and completes them with StatusFlushed.
//
// The request's slices may be reused; what its pointers lead to must not be
// changed until it has completed.
func (q *Queue) Post(wr WorkRequest) error {
	return q.dev.done(VerbPost, wr.Op, q.post(wr))
}

func (q *Queue) post(wr WorkRequest) error {
	length, err := wr.check()
	if err != nil {
		return err
	}
	d := q.dev
	wr.Local = slices.Clone(wr.Local)
	r := &request{WorkRequest: wr, length: length}
	key, ok := r.changes()
	if !ok {
		key = wr.RemoteKey
	} else if err := d.can(CanFastRegister); err != nil && wr.Op != OpBind {
		return err
	}
	if err := d.fault(Fault{Verb: VerbPost, Step: StepBegin, Key: key, ID: wr.ID, Op: wr.Op}); err != nil {
		return err
	}
	if err := d.enter(); err != nil {
		return err
	}
	err = d.prepareLocked(r)
	d.mu.Unlock()
	if err == nil {
		err = q.append(r)
	}
	d.mu.Lock()
	if err != nil {
		d.unprepareLocked(r)
	}
	d.leave()
	if err != nil {
		return err
	}
	q.nudge()
	return nil
}

func (q *Queue) append(r *request) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.closed:
		return device.ErrClosed
	case len(q.sends) >= q.opts.Depth:
		return fmt.Errorf("%d requests posted: %w", len(q.sends), device.ErrBusy)
	}
	q.posted++
	r.seq = q.posted
	q.sends = append(q.sends, r)
	return nil
}

// PostReceive posts memory for a peer's send. Errors are as Post's.
func (q *Queue) PostReceive(id uint64, segments ...Segment) error {
	return q.dev.done(VerbPost, OpReceive, q.postReceive(id, segments))
}

func (q *Queue) postReceive(id uint64, segments []Segment) error {
	length, err := lengthOf(segments)
	if err != nil {
		return err
	}
	if err := q.dev.fault(Fault{Verb: VerbPost, Step: StepBegin, ID: id, Op: OpReceive}); err != nil {
		return err
	}
	q.mu.Lock()
	switch {
	case q.closed:
		err = device.ErrClosed
	case len(q.receives) >= q.opts.Depth:
		err = fmt.Errorf("%d receives posted: %w", len(q.receives), device.ErrBusy)
	default:
		q.receives = append(q.receives, &receive{id: id, local: slices.Clone(segments), length: length})
	}
	peer := q.peer
	q.mu.Unlock()
	if err != nil {
		return err
	}
	q.nudge()
	if peer != nil {
		peer.nudge()
	}
	return nil
}

// PostFastRegister implements [device.WorkQueue].
func (q *Queue) PostFastRegister(wr device.FastRegister) error {
	return q.postChange(WorkRequest{Op: OpFastRegister, FastRegister: &wr, Unsignaled: wr.Done != nil})
}

// PostLocalInvalidate implements [device.WorkQueue].
func (q *Queue) PostLocalInvalidate(wr device.LocalInvalidate) error {
	return q.postChange(WorkRequest{Op: OpLocalInvalidate, LocalInvalidate: &wr, Unsignaled: wr.Done != nil})
}

func (q *Queue) postChange(wr WorkRequest) error {
	if q.Failed() {
		return q.dev.done(VerbPost, wr.Op, device.ErrQueue)
	}
	return q.Post(wr)
}

// Close ends the queue: what is posted is flushed, and its peer gets no
// answer. It is idempotent.
func (q *Queue) Close() error {
	q.close()
	d := q.dev
	d.queueMu.Lock()
	if i := slices.Index(d.queues, q); i >= 0 {
		d.queues = slices.Delete(d.queues, i, i+1)
	}
	d.queueMu.Unlock()
	if d.opts.Stepper != nil {
		d.opts.Stepper.remove(q)
	}
	return nil
}

func (q *Queue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.fail()
	q.exec.Lock()
	q.flush()
	q.exec.Unlock()
}

// fail puts the queue into error. Its executor flushes it.
func (q *Queue) fail() {
	q.mu.Lock()
	q.failed = true
	peer := q.peer
	q.mu.Unlock()
	q.nudge()
	if peer != nil {
		peer.nudge()
	}
}

// nudge wakes the queue's goroutine.
func (q *Queue) nudge() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// wakeSenders wakes the queues that send to the device's.
func (d *Device) wakeSenders() {
	d.queueMu.Lock()
	queues := slices.Clone(d.queues)
	d.queueMu.Unlock()
	for _, q := range queues {
		q.mu.Lock()
		peer := q.peer
		q.mu.Unlock()
		if peer != nil {
			peer.nudge()
		}
	}
}

// work is the queue's goroutine.
func (q *Queue) work() {
	for {
		for q.step() {
		}
		q.mu.Lock()
		closed := q.closed && len(q.sends) == 0 && len(q.receives) == 0
		q.mu.Unlock()
		if closed {
			return
		}
		<-q.wake
	}
}
