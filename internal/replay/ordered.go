package replay

import (
	"slices"
)

// ordered is a map by ascending keys, in blocks that fit into a few cache
// lines. It is made for finding neighbours; with a million keys an insertion
// still moves but some kilobytes.
type ordered[V any] struct {
	first  []uint64 // of each block
	blocks []*block[V]
	spare  []*block[V]
	n      int
}

const blockLen = 64

type block[V any] struct {
	keys []uint64
	vals []V
}

func (o *ordered[V]) len() int { return o.n }

// search returns the number of keys that are at most key.
func search(keys []uint64, key uint64) int {
	lo, hi := 0, len(keys)
	for lo < hi {
		m := int(uint(lo+hi) >> 1)
		if keys[m] <= key {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo
}

// floor returns where the last key is that is at most key; ok is false if there
// is none.
func (o *ordered[V]) floor(key uint64) (at cursor, ok bool) {
	b := search(o.first, key) - 1
	if b < 0 {
		return cursor{}, false
	}
	return cursor{b, search(o.blocks[b].keys, key) - 1}, true
}

// cursor is a place in an ordered map, valid until it changes.
type cursor struct{ b, i int }

func (o *ordered[V]) value(c cursor) V { return o.blocks[c.b].vals[c.i] }

// next returns the place after c.
func (o *ordered[V]) next(c cursor) cursor {
	if c.i++; c.i >= len(o.blocks[c.b].keys) {
		return cursor{c.b + 1, 0}
	}
	return c
}

// valid reports whether c is a place with a key.
func (o *ordered[V]) valid(c cursor) bool { return c.b < len(o.blocks) }

// get returns the value of key.
func (o *ordered[V]) get(key uint64) (v V, ok bool) {
	c, ok := o.floor(key)
	if !ok || o.blocks[c.b].keys[c.i] != key {
		return v, false
	}
	return o.value(c), true
}

// block returns an empty block.
func (o *ordered[V]) block() *block[V] {
	if n := len(o.spare); n > 0 {
		b := o.spare[n-1]
		o.spare = o.spare[:n-1]
		return b
	}
	return &block[V]{keys: make([]uint64, 0, blockLen), vals: make([]V, 0, blockLen)}
}

// put sets the value of key.
func (o *ordered[V]) put(key uint64, v V) {
	if len(o.blocks) == 0 {
		// Many maps stay small.
		b := new(block[V])
		if len(o.spare) > 0 {
			b = o.block()
		}
		o.first, o.blocks = append(o.first, key), append(o.blocks, b)
	}
	b := max(0, search(o.first, key)-1)
	x := o.blocks[b]
	i := search(x.keys, key)
	if i > 0 && x.keys[i-1] == key {
		x.vals[i-1] = v
		return
	}
	o.n++
	if len(x.keys) == blockLen {
		half := blockLen / 2
		if b == len(o.blocks)-1 && i == blockLen {
			half = blockLen // keys that come in order fill their blocks
		}
		y := o.block()
		y.keys, y.vals = append(y.keys, x.keys[half:]...), append(y.vals, x.vals[half:]...)
		clear(x.vals[half:])
		x.keys, x.vals = x.keys[:half], x.vals[:half]
		at := key
		if len(y.keys) > 0 {
			at = y.keys[0]
		}
		o.first, o.blocks = slices.Insert(o.first, b+1, at), slices.Insert(o.blocks, b+1, y)
		if i > half || half == blockLen {
			x, b, i = y, b+1, i-half
		}
	}
	x.keys, x.vals = slices.Insert(x.keys, i, key), slices.Insert(x.vals, i, v)
	o.first[b] = x.keys[0]
}

// remove removes key, if it is there.
func (o *ordered[V]) remove(key uint64) {
	c, ok := o.floor(key)
	if !ok {
		return
	}
	x := o.blocks[c.b]
	if x.keys[c.i] != key {
		return
	}
	o.n--
	x.keys, x.vals = slices.Delete(x.keys, c.i, c.i+1), slices.Delete(x.vals, c.i, c.i+1)
	if len(x.keys) == 0 {
		o.first, o.blocks = slices.Delete(o.first, c.b, c.b+1), slices.Delete(o.blocks, c.b, c.b+1)
		o.spare = append(o.spare, x)
		return
	}
	o.first[c.b] = x.keys[0]
}
