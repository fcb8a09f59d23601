package demo

import (
	"math/bits"
	"time"
)

// times collects durations, of batches of n things, in bounded memory.
type times struct {
	total   time.Duration
	n       int
	buckets [64 * subBuckets]bucket
}

// subBuckets is how many buckets there are to a power of two.
const subBuckets = 16

type bucket struct {
	n   int
	sum float64 // of seconds per thing
}

// add notes that n things took d together.
func (t *times) add(d time.Duration, n int) {
	each := max(uint64(d)/uint64(n), subBuckets)
	exp := bits.Len64(each) - bits.Len64(subBuckets)
	b := &t.buckets[exp*subBuckets+int(each>>exp)-subBuckets]
	b.n++
	b.sum += d.Seconds() / float64(n)
	t.n++
	t.total += d
}

// typical returns the mean of the middle half in seconds per thing, or of all
// if there are too few for a half; 0 without any.
func (t *times) typical() float64 {
	lo, hi := t.n/4, t.n-t.n/4
	var sum float64
	seen := 0
	for _, b := range t.buckets {
		// The part of the bucket between ranks lo and hi, at the bucket's mean.
		if k := min(seen+b.n, hi) - max(seen, lo); k > 0 {
			sum += b.sum * float64(k) / float64(b.n)
		}
		seen += b.n
	}
	if hi == lo {
		return 0
	}
	return sum / float64(hi-lo)
}
