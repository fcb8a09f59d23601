package profile

import (
	"math/bits"
	"time"
)

// histogram counts durations with a relative error of an eighth. The zero value
// is empty.
type histogram struct {
	counts [64 * subBuckets]uint64
	n      uint64
	sum    time.Duration
	max    time.Duration
}

const (
	subBits    = 2
	subBuckets = 1 << subBits
)

// bucketOf returns the bucket of n: its highest bit and the subBits after it.
func bucketOf(n uint64) int {
	if n < subBuckets {
		return int(n)
	}
	shift := bits.Len64(n) - 1 - subBits
	return (shift+1)<<subBits + int(n>>shift)&(subBuckets-1)
}

// bucketEnd returns the first number that is too large for a bucket.
func bucketEnd(b int) uint64 {
	b++
	if b < subBuckets {
		return uint64(b)
	}
	shift := b>>subBits - 1
	return uint64(subBuckets+b&(subBuckets-1)) << shift
}

func (h *histogram) add(d time.Duration) {
	d = max(d, 0)
	h.counts[bucketOf(uint64(d))]++
	h.n++
	h.sum += d
	h.max = max(h.max, d)
}

// quantile returns an upper bound of the q-th quantile.
func (h *histogram) quantile(q float64) time.Duration {
	left := uint64(q * float64(h.n))
	for b, n := range h.counts {
		if n > left {
			return min(time.Duration(bucketEnd(b)-1), h.max)
		}
		left -= n
	}
	return h.max
}

// buckets returns those that aren't empty.
func (h *histogram) buckets() []LatencyBucket {
	var list []LatencyBucket
	for b, n := range h.counts {
		if n > 0 {
			list = append(list, LatencyBucket{Below: time.Duration(bucketEnd(b)).Seconds(), Count: n})
		}
	}
	return list
}
