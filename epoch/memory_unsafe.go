package epoch

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// header overlays the first bytes of a table. Field order and padding are part
// of the format (layout.h).
type header struct {
	magic          atomic.Uint64 // written last
	version        uint32
	headerSize     uint32
	features       uint64
	readerFeatures atomic.Uint64
	writerFeatures atomic.Uint64
	pageShift      uint32
	fanoutShift    uint32
	levels         uint32
	bucketSlots    uint32
	bucketBits     uint32
	bucketSize     uint32
	_              [64]byte
	word           atomic.Uint64 // on a cache line of its own
	_              [120]byte
}

// bucket overlays eight slots. Arrays by field, so that finding a tag reads
// one cache line.
type bucket struct {
	tag       [bucketSlots]atomic.Uint64
	self      [bucketSlots]atomic.Uint64
	below     [bucketSlots]atomic.Uint64
	want      [bucketSlots]atomic.Uint32
	wantBelow [bucketSlots]atomic.Uint32
}

// overlay lays a header over mem.
func overlay(mem []byte) (*header, error) {
	if len(mem) < headerSize {
		return nil, fmt.Errorf("overlay %d bytes: %w", len(mem), ErrMemory)
	}
	p := unsafe.Pointer(unsafe.SliceData(mem))
	if uintptr(p)%8 != 0 {
		return nil, fmt.Errorf("overlay memory at %p: %w", p, ErrMemory)
	}
	return (*header)(p), nil
}

// overlayBuckets lays n buckets over mem, which must hold them.
func overlayBuckets(mem []byte, n int) []bucket {
	p := unsafe.Add(unsafe.Pointer(unsafe.SliceData(mem)), headerSize)
	return unsafe.Slice((*bucket)(p), n)
}
