package demo

import "encoding/binary"

// blockID names the content of a block: no two blocks of a run have the same.
type blockID uint64

func newBlockID(m Mode, warm bool, n uint64) blockID {
	id := blockID(m)<<56 | blockID(n+1)
	if warm {
		id |= 1 << 63
	}
	return id
}

// mode and number are the inverse of newBlockID.
func (id blockID) mode() Mode     { return Mode(id >> 56) }
func (id blockID) number() uint64 { return uint64(id&(1<<56-1)) - 1 }

// word returns the content's k-th word. The first is the name itself; in the
// others, too, any two contents differ, since the factor is odd.
func (id blockID) word(k int) uint64 {
	if k == 0 {
		return uint64(id)
	}
	return uint64(id)*0x9e3779b97f4a7c15 + uint64(k)*0xbf58476d1ce4e5b9
}

// fill writes the content to b, whose length is a multiple of 8.
func (id blockID) fill(b []byte) {
	for k := range len(b) / 8 {
		binary.LittleEndian.PutUint64(b[8*k:], id.word(k))
	}
}

// isIn reports whether b holds the content, the whole of it and nothing else.
func (id blockID) isIn(b []byte) bool {
	for k := range len(b) / 8 {
		if binary.LittleEndian.Uint64(b[8*k:]) != id.word(k) {
			return false
		}
	}
	return true
}

// found returns whose content b claims to hold.
func found(b []byte) blockID { return blockID(binary.LittleEndian.Uint64(b)) }
