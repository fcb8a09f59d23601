package simhca

import (
	"errors"
	"fmt"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// Segment is a piece of local memory under a local key.
type Segment struct {
	Addr   uintptr
	Length uintptr
	Key    uint32
}

// SegmentOf returns the segment of r, which lies in reg's range.
func SegmentOf(reg device.Registration, r vm.Range) Segment {
	return Segment{Addr: r.Start, Length: r.Len(), Key: reg.LocalKey}
}

// WorkRequest is a request to a queue.
type WorkRequest struct {
	// ID comes back in the completion.
	ID uint64
	// Op is what to do: any opcode but OpReceive.
	Op Opcode
	// Local are the local segments of a send, write (they are read) or read
	// (they are written), gathered or filled in this order.
	Local []Segment
	// RemoteAddr and RemoteKey are the peer's memory, of a write or read.
	RemoteAddr uintptr
	RemoteKey  uint32
	// Fence has the request wait for reads posted before it.
	Fence bool
	// Unsignaled means no completion for success.
	Unsignaled bool
	// FastRegister, LocalInvalidate and Bind are what those requests do.
	FastRegister    *device.FastRegister
	LocalInvalidate *device.LocalInvalidate
	Bind            *Bind
}

// Bind is a work request that has a window's key reach part of a registration:
// a memory window of type 2. The window follows its registration: it means the
// new pages after an update, nothing while the registration is revoked. The
// registration can't be deregistered while the window is bound.
type Bind struct {
	// Key is the key from now on: a window's entry with any consumer part. The
	// window must not be bound when the request is executed. LocalInvalidate
	// unbinds it.
	Key uint32
	// Over, Range and Access are as in [device.Exposer].
	Over   device.Registration
	Range  vm.Range
	Access device.Access
}

// Completion says that a request has ended.
type Completion struct {
	ID     uint64
	Op     Opcode
	Status Status
	// Bytes is what a receive got.
	Bytes uintptr
	// Queue is the request's.
	Queue *Queue
}

// request is a posted work request.
type request struct {
	WorkRequest
	seq    uint64 // from 1, by queue.
	length uintptr

	// Guarded by the device's mu.
	pages    *pinned // of a fast-register: what the key will mean.
	changing *entry  // whose meaning it changes, and which counts it.

	// What follows is the executor's.
	done   uintptr // bytes moved.
	status Status  // StatusInvalid until it has ended.
	local  view
	remote view
	// remoteDev is the device that remote is a view of; recv is what a send
	// that has begun fills, of recvQueue.
	remoteDev *Device
	recv      *receive
	recvQueue *Queue
}

// receive is a posted receive.
type receive struct {
	id     uint64
	local  []Segment
	length uintptr
}

// check returns an error for a request that can't be posted.
func (wr *WorkRequest) check() (length uintptr, err error) {
	var ok bool
	switch wr.Op {
	case OpSend, OpWrite, OpRead:
		ok = true
	case OpFastRegister:
		ok = wr.FastRegister != nil
	case OpLocalInvalidate:
		ok = wr.LocalInvalidate != nil
	case OpBind:
		ok = wr.Bind != nil
	default:
	}
	if !ok {
		return 0, fmt.Errorf("opcode %v, or its arguments: %w", wr.Op, device.ErrInvalid)
	}
	return lengthOf(wr.Local)
}

func lengthOf(segments []Segment) (uintptr, error) {
	var sum uintptr
	for _, s := range segments {
		if s.Addr+s.Length < s.Addr || sum+s.Length < sum {
			return 0, fmt.Errorf("segment at %#x of %d bytes: %w", s.Addr, s.Length, errors.Join(device.ErrInvalid, vm.ErrOverflow))
		}
		sum += s.Length
	}
	return sum, nil
}

// isData says that the request moves bytes.
func (r *request) isData() bool { return r.Op == OpSend || r.Op == OpWrite || r.Op == OpRead }

// changes returns the key that the request changes, if it is of that kind.
func (r *request) changes() (key uint32, ok bool) {
	switch r.Op {
	case OpFastRegister:
		return r.FastRegister.Key, true
	case OpLocalInvalidate:
		return r.LocalInvalidate.Key, true
	case OpBind:
		return r.Bind.Key, true
	default:
		return 0, false
	}
}

// notify calls the request's Done, if it has one.
func (r *request) notify(s Status) {
	var done func(error)
	switch r.Op {
	case OpFastRegister:
		done = r.FastRegister.Done
	case OpLocalInvalidate:
		done = r.LocalInvalidate.Done
	default:
	}
	switch {
	case done == nil:
	case s == StatusSuccess:
		done(nil)
	case s == StatusFlushed:
		done(fmt.Errorf("%v: %w", r.Op, errors.Join(device.ErrQueue, s.Err())))
	default:
		done(fmt.Errorf("%v: %w", r.Op, s.Err()))
	}
}

// uses says whether the request carries a key of one of the entries.
func (r *request) uses(keys []uint32) bool {
	for _, k := range keys {
		if (r.Op == OpWrite || r.Op == OpRead) && device.SameKeyIndex(r.RemoteKey, k) || usesLocal(r.Local, k) {
			return true
		}
		if r.Op == OpBind && device.SameKeyIndex(r.Bind.Over.LocalKey, k) {
			return true
		}
	}
	return false
}

func usesLocal(segments []Segment, key uint32) bool {
	for _, s := range segments {
		if device.SameKeyIndex(s.Key, key) {
			return true
		}
	}
	return false
}
