package simhca

import (
	"context"
	"fmt"
	"sync"

	"github.com/pindown/pindown/device"
)

// CompletionQueue holds the completions of any number of queues, in the order
// in which they came. It has room for any number.
type CompletionQueue struct {
	stepper *Stepper // immutable; may be nil.

	mu   sync.Mutex
	list []Completion  // guarded by mu.
	more chan struct{} // holds one while list may not be empty.
}

// NewCompletionQueue returns a completion queue.
func (d *Device) NewCompletionQueue() *CompletionQueue {
	return &CompletionQueue{stepper: d.opts.Stepper, more: make(chan struct{}, 1)}
}

// Poll moves completions to dst and returns their number, zero if there are
// none.
func (c *CompletionQueue) Poll(dst []Completion) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(dst, c.list)
	c.list = c.list[:copy(c.list, c.list[n:])]
	if len(c.list) > 0 {
		c.signal()
	}
	return n
}

// Wait waits for a completion and returns it. With a Stepper it executes work
// until there is one, and returns a wrapped device.ErrBusy if there is nothing
// to execute.
func (c *CompletionQueue) Wait(ctx context.Context) (Completion, error) {
	var got [1]Completion
	for {
		if c.Poll(got[:]) == 1 {
			return got[0], nil
		}
		if err := ctx.Err(); err != nil {
			return Completion{}, fmt.Errorf("simhca: wait for a completion: %w", err)
		}
		if c.stepper != nil {
			if !c.stepper.Step() {
				return Completion{}, fmt.Errorf("simhca: wait for a completion: nothing to execute: %w", device.ErrBusy)
			}
			continue
		}
		select {
		case <-c.more:
		case <-ctx.Done():
		}
	}
}

func (c *CompletionQueue) add(one Completion) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = append(c.list, one)
	c.signal()
}

func (c *CompletionQueue) signal() {
	select {
	case c.more <- struct{}{}:
	default:
	}
}

// progress tells waiters that requests have completed.
type progress struct {
	mu   sync.Mutex
	cond sync.Cond // of mu.
}

func (p *progress) made() {
	p.mu.Lock()
	p.cond.Broadcast()
	p.mu.Unlock()
}

// finish takes the requests that have ended off the head of the queue, and
// delivers their completions. It reports whether there was one. The executor's
// lock is held.
func (q *Queue) finish() bool {
	some := false
	for {
		q.mu.Lock()
		if len(q.sends) == 0 || q.sends[0].status == StatusInvalid {
			q.mu.Unlock()
			return some
		}
		r := q.sends[0]
		q.mu.Unlock()
		some = true
		q.end(r, r.status)
		if r.status != StatusSuccess {
			q.flush()
			return true
		}
	}
}

// end completes the request at the head of the queue.
func (q *Queue) end(r *request, s Status) {
	d := q.dev
	q.abandon(r)
	d.mu.Lock()
	d.unprepareLocked(r)
	d.unlock()
	q.mu.Lock()
	peer := q.peer
	q.sends[0] = nil
	q.sends = q.sends[1:]
	q.completed++
	if s != StatusSuccess {
		q.failed = true
	}
	q.mu.Unlock()
	if peer == nil {
		// Nobody to tell.
	} else if s == StatusRemoteAccess || s == StatusRemoteInvalidRequest || s == StatusRemoteOperation {
		peer.fail()
	}
	d.note(s)
	if s != StatusSuccess || !r.Unsignaled {
		q.opts.Send.add(Completion{ID: r.ID, Op: r.Op, Status: s, Queue: q})
	}
	r.notify(s)
	d.progress.made()
}

// abandon ends what a request has begun at either end: it has ended, or was
// flushed. A receive that isn't filled is flushed, in a queue in error.
func (q *Queue) abandon(r *request) {
	q.dev.forget(&r.local)
	if r.remoteDev != nil {
		r.remoteDev.forget(&r.remote)
	}
	if r.recv != nil {
		recv, peer := r.recv, r.recvQueue
		r.recv = nil
		peer.fail()
		peer.endReceive(recv, StatusFlushed, 0)
	}
}

// endReceive completes a receive.
func (q *Queue) endReceive(recv *receive, s Status, bytes uintptr) {
	q.mu.Lock()
	if q.filling == recv {
		q.filling = nil
	}
	q.received++
	q.mu.Unlock()
	q.dev.note(s)
	q.opts.Receive.add(Completion{ID: recv.id, Op: OpReceive, Status: s, Bytes: bytes, Queue: q})
	q.dev.progress.made()
}

// flush completes everything in a queue in error. It reports whether there was
// anything. The executor's lock is held.
func (q *Queue) flush() bool {
	some := false
	for {
		q.mu.Lock()
		if !q.failed {
			q.mu.Unlock()
			return some
		}
		var r *request
		var recv *receive
		if len(q.sends) > 0 {
			r = q.sends[0]
		} else if len(q.receives) > 0 {
			recv = q.receives[0]
			q.receives = q.receives[1:]
		}
		q.mu.Unlock()
		switch {
		case r != nil:
			q.end(r, StatusFlushed)
		case recv != nil:
			q.endReceive(recv, StatusFlushed, 0)
		default:
			return some
		}
		some = true
	}
}

// note counts an error completion.
func (d *Device) note(s Status) {
	if s == StatusSuccess {
		return
	}
	d.queueMu.Lock()
	d.errors[s]++
	d.queueMu.Unlock()
}
