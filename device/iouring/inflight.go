package iouring

import (
	"math/rand/v2"
	"sync/atomic"
)

// inflight knows the requests of a ring that are queued or in flight, or whose
// completion nobody has taken: how many of them use each slot. The kernel carries
// a number into it in place of the program's user data.
//
// It belongs to the ring's goroutine, but for slots.
type inflight struct {
	slots []atomic.Int32 // requests by slot.
	list  []tracked
	free  uint32 // head of the list of free ones, plus one.
	mark  uint64 // upper half of the numbers, which tells them from what others send to the ring.
}

// tracked is a request, or a free place.
type tracked struct {
	userData uint64
	slot     int32  // noSlot for a request that uses none, notUsed for a free place.
	next     uint32 // link of the free list, plus one.
}

const (
	noSlot  = -1
	notUsed = -2
)

// newInflight makes room for n requests; more take more room.
func newInflight(n int) *inflight {
	return &inflight{slots: make([]atomic.Int32, MaxSlots), list: make([]tracked, 0, n), mark: rand.Uint64() &^ (1<<32 - 1)}
}

// begin notes a request and returns what stands for it.
func (f *inflight) begin(userData uint64, slot int32) uint64 {
	i := f.free
	if i == 0 {
		f.list = append(f.list, tracked{})
		i = uint32(len(f.list))
	}
	t := &f.list[i-1]
	f.free = t.next
	*t = tracked{userData: userData, slot: slot}
	if slot != noSlot {
		f.slots[slot].Add(1)
	}
	return f.mark | uint64(i-1)
}

// end forgets a request and returns its user data. What isn't a request's number,
// such as another ring sends (IORING_OP_MSG_RING), is user data as it is.
func (f *inflight) end(id uint64) uint64 {
	i := id ^ f.mark
	if i >= uint64(len(f.list)) || f.list[i].slot == notUsed {
		return id
	}
	t := &f.list[i]
	if t.slot != noSlot {
		f.slots[t.slot].Add(-1)
	}
	t.slot, t.next, f.free = notUsed, f.free, uint32(i)+1
	return t.userData
}

// of returns how many requests use a slot. Any goroutine may ask.
func (f *inflight) of(slot uint32) int { return int(f.slots[slot].Load()) }
