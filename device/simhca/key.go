package simhca

import (
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// A key is 24 bits of index into the table of entries and 8 bits, the low
// ones, that must equal the entry's consumer part.
const (
	maxEntries = 1<<24 - 1 // index zero isn't used, so that no key is zero.
	indexShift = 8
)

// quarantine is how many freed entries are kept aside while there are fresh
// ones.
const quarantine = 64

// kind is what an entry is for.
type kind uint8

const (
	kindFree     kind = iota
	kindRegion        // a registration.
	kindFast          // given a meaning by FastRegister.
	kindWindow        // bound to a registration by Bind.
	kindExposure      // a window that Expose bound.

	kinds
)

func (k kind) isWindow() bool { return k == kindWindow || k == kindExposure }

// entry is one entry of the translation table, guarded by Device.mu.
type entry struct {
	index    uint32
	consumer uint8
	gen      uint64 // uses so far; part of the handle.
	kind     kind
	pd       *ProtectionDomain
	r        vm.Range
	access   device.Access

	// now is what the key means; nil if nothing.
	now *meaning
	// before are meanings that updates replaced and that requests which have
	// begun go on with.
	before []*meaning

	over     *entry // of a bound window: the region.
	windows  int    // of a region: how many are bound to it.
	posted   int    // of a fast key or window: requests under way that change it.
	maxPages int    // of a fast key.
	busy     bool   // a verb is at work on it.
	ending   bool   // that verb takes it away: no window may be bound to it.
	revoked  bool   // of a region: by Revoke.
}

func (e *entry) key() uint32 { return e.index<<indexShift | uint32(e.consumer) }

func (e *entry) handle() uint64 { return e.gen<<24 | uint64(e.index) }

// meaning is what a key reaches: pages that it holds, or, for a window, a
// region's key. All guarded by Device.mu.
type meaning struct {
	pinned *pinned // nil for a window.
	r      vm.Range
	access device.Access

	moving  int  // packets that are reading or writing the pages now.
	viewed  int  // requests that go on with it after an update.
	revoked bool // nobody may begin to use it.
	dropped bool // it has given its pages back.
}

// pinned are pages that some meanings, and requests that are to make one,
// share. holds is guarded by Device.mu.
type pinned struct {
	pages Pages
	r     vm.Range
	bytes uint64
	holds int
}

// table is the translation table, guarded by Device.mu.
type table struct {
	entries []*entry // by index.
	free    []uint32 // a queue: an index rests as long as possible.
	max     int
	used    int
}

// alloc returns a free entry with the next consumer part, nil if there is
// none.
func (t *table) alloc(k kind, pd *ProtectionDomain) *entry {
	if t.used >= t.max {
		return nil
	}
	if len(t.entries) == 0 {
		t.entries = append(t.entries, nil) // No key has index zero.
	}
	var e *entry
	if len(t.free) > 0 && (len(t.free) >= quarantine || len(t.entries) > t.max) {
		e = t.entries[t.free[0]]
		t.free = t.free[1:]
		*e = entry{index: e.index, consumer: e.consumer + 1, gen: e.gen}
	} else {
		e = &entry{index: uint32(len(t.entries))}
		t.entries = append(t.entries, e)
	}
	e.gen++
	e.kind, e.pd = k, pd
	t.used++
	return e
}

func (t *table) release(e *entry) {
	e.kind, e.now, e.over = kindFree, nil, nil
	e.gen++
	t.free = append(t.free, e.index)
	t.used--
}

// byKey returns the entry of a key's index, whatever the consumer part; nil if
// it is free.
func (t *table) byKey(key uint32) *entry {
	if i := key >> indexShift; int(i) < len(t.entries) {
		if e := t.entries[i]; e != nil && e.kind != kindFree {
			return e
		}
	}
	return nil
}

// byHandle returns the live entry of a handle; nil if there is none.
func (t *table) byHandle(h uint64, k kind) *entry {
	if i := h & (1<<24 - 1); int(i) < len(t.entries) {
		if e := t.entries[i]; e != nil && e.kind == k && e.handle() == h {
			return e
		}
	}
	return nil
}
