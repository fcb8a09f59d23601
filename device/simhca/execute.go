package simhca

import (
	"errors"

	"github.com/pindown/pindown/device"
)

// step executes a packet, or a request that moves none, or flushes a queue in
// error. It returns false if there is nothing to do, or nothing can be done
// now.
func (q *Queue) step() bool {
	q.exec.Lock()
	defer q.exec.Unlock()
	if q.flush() {
		return true
	}
	first, second := q.runnable()
	if first == nil {
		return false
	}
	if second != nil && q.rng.IntN(2) == 0 {
		first, second = second, first
	}
	moved := q.execute(first)
	if !moved && second != nil {
		moved = q.execute(second)
	}
	return q.finish() || moved
}

// runnable returns the requests of which a packet may be executed now, at most
// two: see Queue.
func (q *Queue) runnable() (first, second *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.failed {
		return nil, nil
	}
	for _, r := range q.sends[:min(len(q.sends), q.opts.Window)] {
		switch {
		case r.status == StatusSuccess:
			continue
		case r.status != StatusInvalid:
			return first, nil // Failed: nothing after it begins.
		case !r.isData():
			if first == nil {
				first = r
			}
			return first, nil
		case r.Op == OpRead:
			if first != nil {
				return first, nil
			}
			first = r // Those after it may overtake it.
		case first != nil && r.Fence:
			return first, nil
		case first != nil:
			return first, r
		default:
			return r, nil
		}
	}
	return first, nil
}

// execute executes a packet of a request, and sets its status when it ends. It
// returns false if nothing could be done.
func (q *Queue) execute(r *request) bool {
	d := q.dev
	f := Fault{Verb: VerbExecute, Step: StepBegin, Key: r.RemoteKey, ID: r.ID, Op: r.Op}
	if key, ok := r.changes(); ok {
		f.Key = key
	}
	var status Status
	if err := d.fault(f); err != nil {
		status = statusOf(err)
	} else if r.isData() {
		status = q.packet(r, f)
	} else {
		status = d.changeKey(q.pd, r)
	}
	if status == statusTryLater {
		if !q.opts.FailNotReady {
			return false
		}
		status = StatusNotReady
	}
	var err error
	if status != StatusInvalid {
		err = status.Err()
	}
	d.ledger.count(VerbExecute, err)
	q.mu.Lock()
	r.status = status
	q.mu.Unlock()
	return true
}

// statusOf returns the status that an injected error asks for.
func statusOf(err error) Status {
	var s StatusError
	if errors.As(err, &s) && s.Status > StatusSuccess && s.Status < statusTryLater {
		return s.Status
	}
	return StatusGeneral
}

// packet moves the next bytes of a request: at most a page at either end. It
// returns StatusInvalid if there are more.
func (q *Queue) packet(r *request, f Fault) Status {
	q.mu.Lock()
	peer := q.peer
	q.mu.Unlock()
	if peer == nil || peer.Failed() {
		return StatusRetryExceeded
	}
	r.remoteDev = peer.dev
	remote := Segment{Addr: r.RemoteAddr + r.done, Length: r.length - r.done, Key: r.RemoteKey}
	if r.Op == OpSend {
		if status := q.meet(r, peer); status != StatusSuccess {
			return status
		}
		remote = segmentAt(r.recv.local, r.done)
	}
	if r.done == r.length {
		return q.arrived(r)
	}
	local := segmentAt(r.Local, r.done)
	n := min(local.Length, remote.Length, toPageEnd(local.Addr, q.dev.page), toPageEnd(remote.Addr, peer.dev.page))

	var localNeed, remoteNeed device.Access
	side := sideRemote
	switch r.Op {
	case OpRead:
		localNeed, remoteNeed = device.LocalWrite, device.RemoteRead
	case OpWrite:
		remoteNeed = device.RemoteWrite
	default:
		remoteNeed, side = device.LocalWrite, sideReceive
	}
	here, status := q.dev.beginUse(&r.local, q.pd, local.Key, local.Addr, n, localNeed, sideLocal)
	if status == StatusSuccess {
		var there use
		there, status = peer.dev.beginUse(&r.remote, peer.pd, remote.Key, remote.Addr, n, remoteNeed, side)
		if status == StatusSuccess {
			status = q.move(r, f, here, there, n)
			peer.dev.endUse(there)
		} else {
			status = q.refused(r, status)
		}
		q.dev.endUse(here)
	}
	if status == statusRestart {
		q.dev.forget(&r.local)
		peer.dev.forget(&r.remote)
		r.done = 0
		return StatusInvalid
	}
	if status != StatusSuccess {
		return status
	}
	r.done += n
	if r.done == r.length {
		return q.arrived(r)
	}
	return StatusInvalid
}

// move copies n bytes between pages that are in use.
func (q *Queue) move(r *request, f Fault, here, there use, n uintptr) Status {
	f.Step = StepMoving
	if err := q.dev.fault(f); err != nil {
		return statusOf(err)
	}
	q.dev.ledger.charge(VerbExecute, Cost{Call: q.dev.opts.Costs.Packet}, 0, 0)
	from, to := here, there
	if r.Op == OpRead {
		from, to = there, here
	}
	if uintptr(cap(q.buf)) < n {
		q.buf = make([]byte, n)
	}
	b := q.buf[:n]
	if from.m.pinned.pages.Read(from.index, from.off, b) != nil || to.m.pinned.pages.Write(to.index, to.off, b) != nil {
		return StatusGeneral
	}
	return StatusSuccess
}

// meet finds the receive that a send fills.
func (q *Queue) meet(r *request, peer *Queue) Status {
	if r.recv != nil {
		return StatusSuccess
	}
	peer.mu.Lock()
	if len(peer.receives) == 0 {
		peer.mu.Unlock()
		return statusTryLater
	}
	recv := peer.receives[0]
	peer.receives = peer.receives[1:]
	peer.filling = recv
	peer.mu.Unlock()
	r.recv, r.recvQueue = recv, peer
	if recv.length < r.length {
		q.endSend(r, StatusLocalLength)
		return StatusRemoteInvalidRequest
	}
	return StatusSuccess
}

// refused is what becomes of a request whose other end refused it.
func (q *Queue) refused(r *request, s Status) Status {
	if r.Op == OpSend && s < statusTryLater {
		q.endSend(r, s)
		return StatusRemoteOperation
	}
	return s
}

// arrived ends a request whose bytes have all moved.
func (q *Queue) arrived(r *request) Status {
	if r.Op == OpSend {
		q.endSend(r, StatusSuccess)
	}
	return StatusSuccess
}

// endSend completes the receive of a send.
func (q *Queue) endSend(r *request, s Status) {
	recv := r.recv
	r.recv = nil
	if s != StatusSuccess {
		r.recvQueue.fail()
	}
	r.recvQueue.endReceive(recv, s, r.length)
}

// segmentAt returns what is left of the segment that holds byte number off.
func segmentAt(segments []Segment, off uintptr) Segment {
	for _, s := range segments {
		if off < s.Length {
			return Segment{Addr: s.Addr + off, Length: s.Length - off, Key: s.Key}
		}
		off -= s.Length
	}
	return Segment{}
}

func toPageEnd(addr, page uintptr) uintptr { return page - addr%page }
