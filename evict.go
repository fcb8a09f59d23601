package pindown

import (
	"math/bits"
	"runtime"
	"slices"

	"github.com/pindown/pindown/vm"
)

// queueID says which of the evictor's queues an entry is in.
type queueID uint8

const (
	queueNone  queueID = iota // not published
	queueSmall                // live and new: on probation
	queueMain                 // live, has been hit
	queueDying                // dead, holders unknown
	queueLimbo                // dead and held
	queueGone                 // settled: dead and not held
)

// evictor chooses which idle entry goes when a limit is met: S3-FIFO (Yang et
// al., SOSP 2023). New entries pass through a small queue; those that are hit
// there move to the main one, the others leave after a short time, so that a
// scan doesn't push out what is used. A ghost list remembers who left, and
// lets them into the main queue at once when they come back.
//
// What suits us is that a hit moves nothing: it sets a mark, if that isn't set
// yet.
//
// All of it is guarded by the cache's mu.
type evictor struct {
	small, main fifo
	// ghosts holds, at a place given by a hash of the start address, another
	// hash of the entry that left last.
	ghosts []uint32
}

// fifo is a queue of entries, the oldest first. An entry that leaves out of
// turn only changes its queueID; its place is passed over later.
type fifo struct {
	id          queueID
	first, last *fifoChunk
	places      int // taken ones, passed over or not
	n           int // entries that are still in it
}

// fifoChunk is 1 KiB.
type fifoChunk struct {
	from, to uint32 // places taken
	next     *fifoChunk
	e        [126]*entry
}

func (q *fifo) push(e *entry) {
	if q.places > 2*q.n+len(q.last.e) {
		q.tidy()
	}
	e.queue = q.id
	q.n++
	q.put(e)
}

func (q *fifo) put(e *entry) {
	if l := q.last; l == nil || int(l.to) == len(l.e) {
		q.last = &fifoChunk{}
		if l == nil {
			q.first = q.last
		} else {
			l.next = q.last
		}
	}
	q.last.e[q.last.to] = e
	q.last.to++
	q.places++
}

// tidy drops the places of entries that have left.
func (q *fifo) tidy() {
	old := q.first
	q.first, q.last, q.places = nil, nil, 0
	for c := old; c != nil; c = c.next {
		for _, e := range c.e[c.from:c.to] {
			if e.queue == q.id {
				q.put(e)
			}
		}
	}
}

// oldest returns the entry that has been there longest; the queue isn't empty.
func (q *fifo) oldest() *entry {
	for {
		c := q.first
		if c.from == c.to {
			q.first = c.next
			continue
		}
		if e := c.e[c.from]; e.queue == q.id {
			return e
		}
		q.skip()
	}
}

// pop takes the oldest off.
func (q *fifo) pop() *entry {
	e := q.oldest()
	q.skip()
	q.n--
	return e
}

func (q *fifo) skip() {
	c := q.first
	c.e[c.from] = nil
	c.from++
	q.places--
}

const maxGhosts = 1 << 16

func (v *evictor) init(maxRegions int) {
	v.small.id, v.main.id = queueSmall, queueMain
	v.ghosts = make([]uint32, 1<<bits.Len(uint(min(maxRegions, maxGhosts)-1)))
}

// ghost returns the place of the ghost of an entry that starts at addr, and
// what is noted there.
func (v *evictor) ghost(addr uintptr) (place *uint32, mark uint32) {
	h := uint64(addr>>indexPageShift) * 0x9e3779b97f4a7c15
	return &v.ghosts[h>>32&uint64(len(v.ghosts)-1)], uint32(h>>8) | 1
}

// add enters a live entry.
func (v *evictor) add(e *entry) {
	if place, mark := v.ghost(e.start); *place == mark {
		*place = 0
		v.main.push(e)
		return
	}
	v.small.push(e)
}

// drop takes a live entry off.
func (v *evictor) drop(e *entry) {
	if e.queue == queueMain {
		v.main.n--
	} else {
		v.small.n--
	}
	e.queue = queueNone
}

// remember notes that the entry at start was evicted.
func (v *evictor) remember(start uintptr) {
	place, mark := v.ghost(start)
	*place = mark
}

// victim finds an idle entry to give up: one that nobody in held holds. used
// tells, once, that an entry was hit. It returns nil if every entry is in use.
// The caller ends the entry.
func (v *evictor) victim(held holders, used func(*entry) bool) *entry {
	// The small queue keeps a tenth of what there is now, not of MaxRegions:
	// another limit may be met long before that one. Then each entry of the
	// main queue is looked at twice, once to take its mark and once to take it.
	// If all are in use, what the small queue has left must go.
	total := v.small.n + v.main.n
	for looks := 0; ; {
		probation, exhausted := v.small.n*10 >= total, looks >= 2*v.main.n
		switch {
		case v.small.n > 0 && (probation || exhausted):
			e := v.small.oldest()
			if held.of(e) == 0 && (!used(e) || !probation) {
				v.remember(e.start)
				return e
			}
			v.main.push(v.small.pop())
		case exhausted:
			return nil
		default:
			looks++
			e := v.main.oldest()
			if held.of(e) == 0 && !used(e) {
				return e
			}
			v.main.push(v.main.pop())
		}
	}
}

// reserve charges r to the budget, giving up the idle ones among victims and
// then idle regions of the evictor's choice as needed. It reports false, with
// nothing charged, if what is left is in use. mu must be held; it is released
// while regions are deregistered.
func (c *Cache) reserve(r Range, victims []*entry) bool {
	if len(victims) > 0 {
		held := c.holders()
		idle := slices.DeleteFunc(victims, func(e *entry) bool { return !e.listed() || held.of(e) > 0 })
		c.retireAll(Event{Kind: EventEvicted, Cause: EvictMerge}, idle...)
		c.wakeForGraves()
	}
	cost := c.cost(r)
	for waits := 0; ; {
		var cause EvictCause
		switch {
		case c.regions+1 > c.opts.MaxRegions:
			cause = EvictRegions
		case c.bytes+cost > c.opts.MaxBytes:
			cause = EvictBytes
		default:
			c.regions++
			c.bytes += cost
			return true
		}
		// What is dead already only waits for its deregistration.
		c.settle()
		if n := len(c.graves); n > 0 {
			e := c.graves[n-1]
			c.graves[n-1] = nil
			c.graves = c.graves[:n-1]
			c.mu.Unlock()
			_ = c.exhume(e) // counted and told
			c.lock()
			continue
		}
		if c.settling > 0 {
			// The reaper has some, in a moment.
			c.mu.Unlock()
			runtime.Gosched()
			c.lock()
			continue
		}
		if c.awaitExhumation(&waits) {
			continue
		}
		n, _ := c.giveUp(c.evictBatch(), 0, cause)
		c.wakeForGraves() // for those of a batch that aren't needed here
		if n == 0 {
			return false
		}
	}
}

// evictBatch returns how many entries are given up at a time: one, but where
// each batch costs a barrier, more.
func (c *Cache) evictBatch() int {
	if len(c.lanes) == 0 {
		return 1
	}
	return min(max(c.regions/64, 1), 64)
}

// giveUp retires idle entries of the evictor's choice: at least n, and as many
// as pin the given number of bytes, if there are. It returns what it retired. mu
// must be held.
func (c *Cache) giveUp(n int, bytes uint64, cause EvictCause) (regions int, freed uint64) {
	held := c.holders()
	var buf [8]*entry
	list := buf[:0]
	for len(list) < n || freed < bytes {
		e := c.evict.victim(held, c.used)
		if e == nil {
			break
		}
		c.end(e)
		freed += c.cost(e.rng())
		list = append(list, e)
	}
	c.settle()
	c.report(Event{Kind: EventEvicted, Cause: cause}, list)
	return len(list), freed
}

// used reports whether e was hit since the last call. mu must be held.
func (c *Cache) used(e *entry) bool { return c.set(e.granted()).index.used(e) }

// evictSome gives up idle regions because the device is short: enough for r,
// and an eighth of what there is at least, since a device that is short once is
// short again. It reports whether anything was given back.
func (c *Cache) evictSome(r vm.Range) bool {
	c.mu.Lock()
	c.giveUp(max(1, c.regions/8), c.cost(r), EvictDevice)
	c.mu.Unlock()
	return c.exhumeGraves()
}
