package pindown

import (
	"math/bits"
	"unsafe"
)

// bucket is &t.buckets[t.home(h)], without the comparison that the compiler
// can't know to be superfluous.
func (t *indexTable) bucket(h uint64) *indexBucket {
	return (*indexBucket)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(t.buckets)), uintptr(t.home(h))*unsafe.Sizeof(indexBucket{})))
}

// match returns the first listing that may be under h; any if there is none.
func (b *indexBucket) match(h uint64) *listing {
	// Both lines are fetched at once.
	_ = b.list[bucketListings-1].span.Load()
	top := uintptr(bits.TrailingZeros64(matches(b.meta.Load(), indexTag(h)) | tagTop<<(tagBits*(bucketListings-1))))
	// That is 12j+11 for listing j, which is at 24j+8. Rounding down gives 24j+16:
	// the compiler then uses one address for all of the listing's words, and a hit
	// is a tenth faster.
	return (*listing)(unsafe.Add(unsafe.Pointer((uintptr(unsafe.Pointer(b))+2*top)&^7), -8))
}

// match depends on these.
const (
	_ = uint(2*tagBits-unsafe.Sizeof(listing{})) + uint(unsafe.Sizeof(listing{})-2*tagBits)
	_ = uint(8-unsafe.Offsetof(indexBucket{}.list)) + uint(unsafe.Offsetof(indexBucket{}.list)-8)
)
