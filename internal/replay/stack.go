package replay

import (
	"math"
	"math/bits"
	"slices"
)

// piece is a run of pages that were used last together, or of holes where such
// pages were. Its place in the stack is its slot, the highest the most recent,
// and within the slot its address.
type piece struct {
	start, end uint64
	slot       int32
	hole       bool
}

func (p *piece) len() int64 { return int64(p.end - p.start) }

// stack gives the stack distance of each request to one process's memory: the
// size in pages of the smallest cache that it hits. See the package comment for
// the cache.
type stack struct {
	live ordered[*piece] // pages, by address

	slots  []slot  // by age, oldest first
	weight []int64 // Fenwick tree of the slots' pages and holes
	total  int64
	pieces int
	limit  int // on pieces
	// forgot says that the oldest were dropped for it.
	forgot bool

	holes []int32 // a heap of slots that have some, the most recent first

	list  []*piece
	free  []*piece   // to use again
	spare [][]*piece // likewise, of slots
}

// spareLen is the capacity up to which a slot's list is used again.
const spareLen = 4

// slot has the pieces of one request, by address.
type slot struct {
	pieces []*piece
	inHeap bool // in stack.holes
}

// minSlots is the least number of slots that there is room for.
const minSlots = 16

// infinite is the distance of a request that no cache hits.
const infinite = math.MaxInt64

// pushHole adds a slot to the heap, if it isn't there.
func (s *stack) pushHole(n int32) {
	if s.slots[n].inHeap {
		return
	}
	s.slots[n].inHeap = true
	s.holes = append(s.holes, n)
	for i := len(s.holes) - 1; i > 0; {
		up := (i - 1) / 2
		if s.holes[up] >= s.holes[i] {
			break
		}
		s.holes[up], s.holes[i] = s.holes[i], s.holes[up]
		i = up
	}
}

// popHole removes the first of the heap.
func (s *stack) popHole() {
	h := s.holes
	s.slots[h[0]].inHeap = false
	n := len(h) - 1
	h[0] = h[n]
	h = h[:n]
	s.holes = h
	for i := 0; ; {
		top := i
		for _, k := range [2]int{2*i + 1, 2*i + 2} {
			if k < n && h[k] > h[top] {
				top = k
			}
		}
		if top == i {
			return
		}
		h[top], h[i] = h[i], h[top]
		i = top
	}
}

func newStack(limit int) *stack {
	return &stack{
		limit: limit, weight: make([]int64, 1+minSlots),
	}
}

func (s *stack) add(slot int32, n int64) {
	s.total += n
	for i := int(slot) + 1; i < len(s.weight); i += i & -i {
		s.weight[i] += n
	}
}

// above returns the pages and holes in slots more recent than slot.
func (s *stack) above(slot int32) int64 {
	sum := s.total
	for i := int(slot) + 1; i > 0; i -= i & -i {
		sum -= s.weight[i]
	}
	return sum
}

// put adds a piece to its slot.
func (s *stack) put(start, end uint64, n int32, hole bool) {
	var p *piece
	if k := len(s.free); k > 0 {
		p, s.free = s.free[k-1], s.free[:k-1]
	} else {
		p = new(piece)
	}
	*p = piece{start: start, end: end, slot: n, hole: hole}
	s.link(p)
	if hole {
		s.pushHole(n)
	} else {
		s.live.put(start, p)
	}
}

// take removes a piece; p is not to be used afterwards.
func (s *stack) take(p *piece) {
	s.unlink(p)
	if !p.hole {
		s.live.remove(p.start)
	}
	s.free = append(s.free, p)
}

// link puts a piece into its slot's list.
func (s *stack) link(p *piece) {
	l := s.slots[p.slot].pieces
	if k := len(s.spare); l == nil && k > 0 {
		l, s.spare = s.spare[k-1], s.spare[:k-1]
	}
	i := len(l)
	for i > 0 && l[i-1].start > p.start {
		i--
	}
	s.slots[p.slot].pieces = slices.Insert(l, i, p)
	s.pieces++
}

// unlink takes a piece out of its slot's list.
func (s *stack) unlink(p *piece) {
	x := &s.slots[p.slot]
	i := slices.Index(x.pieces, p)
	x.pieces = slices.Delete(x.pieces, i, i+1)
	if len(x.pieces) == 0 && cap(x.pieces) <= spareLen {
		s.spare = append(s.spare, x.pieces)
		x.pieces = nil
	}
	s.pieces--
}

// overlapping returns the pieces with pages in [start,end), by address. The
// list is valid until the next call.
func (s *stack) overlapping(start, end uint64) []*piece {
	s.list = s.list[:0]
	c, ok := s.live.floor(start)
	if !ok {
		c = cursor{}
	}
	for ; s.live.valid(c); c = s.live.next(c) {
		p := s.live.value(c)
		if p.start >= end {
			break
		}
		if p.end > start {
			s.list = append(s.list, p)
		}
	}
	return s.list
}

// use makes [start,end) the most recently used, and returns the distance that
// it had.
func (s *stack) use(start, end uint64) int64 {
	top := s.newSlot() // first: it may drop pieces
	list := s.overlapping(start, end)
	d := s.distance(list, start, end)
	if len(list) == 1 && list[0].start == start && list[0].end == end && len(s.slots[list[0].slot].pieces) == 1 && !s.holeAfter(list[0].slot, start) {
		// The common case: the same again, and nothing in its way.
		p := list[0]
		n := p.len()
		s.add(p.slot, -n)
		from, to := &s.slots[p.slot], &s.slots[top]
		from.pieces, to.pieces = to.pieces, from.pieces
		p.slot = top
		s.add(top, n)
		return d
	}
	at := start
	var same *piece
	for _, p := range list {
		if p.start > at {
			s.fill(at, p.start, -1)
		}
		at = min(p.end, end)
		if p.start == start && p.end == at {
			same = p // which keeps its key
		}
		s.move(p, max(p.start, start), at, p == same)
	}
	if at < end {
		s.fill(at, end, -1)
	}
	if same != nil {
		same.end, same.slot = end, top
		s.link(same)
	} else {
		s.put(start, end, top, false)
	}
	s.add(top, int64(end-start))
	return d
}

// distance is that of the least recently used page.
func (s *stack) distance(list []*piece, start, end uint64) int64 {
	covered := uint64(0)
	var oldest *piece
	for _, p := range list {
		covered += min(p.end, end) - max(p.start, start)
		if oldest == nil || p.slot < oldest.slot {
			oldest = p
		}
	}
	if covered < end-start {
		return infinite
	}
	page := max(oldest.start, start)
	d := s.above(oldest.slot)
	for _, p := range s.slots[oldest.slot].pieces {
		if p.end > page {
			d += int64(p.end - max(p.start, page))
		}
	}
	return d
}

// holeAfter reports whether a hole is more recent than the page at a slot.
func (s *stack) holeAfter(slot int32, page uint64) bool {
	if len(s.holes) == 0 {
		return false
	}
	h := s.holes[0]
	if h != slot {
		return h > slot
	}
	p := s.lastHole(h)
	return p.start > page
}

func (s *stack) lastHole(slot int32) *piece {
	for _, p := range slices.Backward(s.slots[slot].pieces) {
		if p.hole {
			return p
		}
	}
	return nil
}

// fill makes the pages [start,end), which are at a slot or (-1) nowhere, use up
// the holes that are more recent than they. It returns how many did.
func (s *stack) fill(start, end uint64, slot int32) (filled uint64) {
	for n := end - start; n > 0 && len(s.holes) > 0; {
		h := s.holes[0]
		if h < slot {
			break
		}
		p := s.lastHole(h)
		if h == slot && p.start < start {
			break
		}
		// Within one slot, a hole above the run has its whole length above it.
		k := min(n, p.end-p.start)
		s.add(h, -int64(k))
		filled += k
		n -= k
		if p.end -= k; p.start < p.end {
			continue
		}
		s.take(p)
		if s.lastHole(h) == nil {
			s.popHole()
		}
	}
	return filled
}

// move takes the pages [start,end) out of p, for them to become the most
// recent. Those that filled a hole leave one. If p is wanted it is of just these
// pages, and isn't in any slot afterwards.
func (s *stack) move(p *piece, start, end uint64, wanted bool) {
	n := p.slot
	filled := s.fill(start, end, n)
	if wanted {
		s.unlink(p)
	} else {
		s.cut(p, start, end)
	}
	s.add(n, -int64(end-start-filled))
	if filled > 0 {
		s.put(start, start+filled, n, true)
	}
}

// cut takes [start,end) out of p, leaving up to two pieces in its slot.
func (s *stack) cut(p *piece, start, end uint64) {
	oldEnd, n := p.end, p.slot
	if p.start < start {
		// It stays as what is left of it, and keeps its key.
		p.end = start
	} else {
		s.take(p)
	}
	if end < oldEnd {
		s.put(end, oldEnd, n, false)
	}
}

// invalidate makes the pages of [start,end) holes.
func (s *stack) invalidate(start, end uint64) {
	for _, p := range s.overlapping(start, end) {
		from, to, n := max(p.start, start), min(p.end, end), p.slot
		if from == p.start && to == p.end {
			s.live.remove(p.start)
			p.hole = true
			s.pushHole(n)
			continue
		}
		s.cut(p, from, to)
		s.put(from, to, n, true)
	}
}

// newSlot returns a new most recent slot.
func (s *stack) newSlot() int32 {
	if len(s.slots) == len(s.weight)-1 {
		s.compact()
	}
	s.slots = append(s.slots, slot{})
	return int32(len(s.slots) - 1)
}

// compact leaves the empty slots out, and the oldest if there are too many
// pieces.
func (s *stack) compact() {
	from := 0
	for ; s.pieces > s.limit && from < len(s.slots); from++ {
		for l := s.slots[from].pieces; len(l) > 0; l = s.slots[from].pieces {
			s.take(l[0])
			s.forgot = true
		}
	}
	n := 0
	s.holes = s.holes[:0]
	for i := from; i < len(s.slots); i++ {
		x := s.slots[i]
		if len(x.pieces) == 0 {
			continue
		}
		x.inHeap = false
		for _, p := range x.pieces {
			p.slot = int32(n)
			x.inHeap = x.inHeap || p.hole
		}
		if x.inHeap {
			s.holes = append(s.holes, int32(n))
		}
		s.slots[n] = x
		n++
	}
	clear(s.slots[n:])
	s.slots = s.slots[:n]
	slices.Reverse(s.holes)
	size := 1 + max(minSlots, 1<<bits.Len(uint(2*n)))
	if size != len(s.weight) {
		s.weight = make([]int64, size)
	} else {
		clear(s.weight)
	}
	if cap(s.slots) < size-1 {
		// Appending would copy it several times until it is full.
		s.slots = append(make([]slot, 0, size-1), s.slots...)
	}
	s.total = 0
	for i := range s.slots {
		sum := int64(0)
		for _, p := range s.slots[i].pieces {
			sum += p.len()
		}
		s.weight[i+1] = sum
		s.total += sum
	}
	for i := 1; i < size; i++ {
		if j := i + i&-i; j < size {
			s.weight[j] += s.weight[i]
		}
	}
}

// curve counts requests by stack distance.
type curve struct {
	requests, pages uint64
	// near is exact; far is by the upper ends of spans of 1/64 of an octave.
	near      []point
	far       map[int64]*point
	infinite  point
	processes []*stack
	forgot    bool
}

// point counts requests and the pages that they were for.
type point struct{ n, pages uint64 }

func (p *point) add(pages uint64) {
	p.n++
	p.pages += pages
}

const (
	nearPages = 1 << 20 // up to 4 GiB of 4 KiB pages every size is exact
	maxPieces = 1 << 20 // of a process
)

func newCurve() *curve { return &curve{far: make(map[int64]*point)} }

func (c *curve) run(batch []action) {
	for i := range batch {
		a := &batch[i]
		if a.kind == actRelease {
			continue // the curve knows nothing of what is in use
		}
		for int(a.space) >= len(c.processes) {
			c.processes = append(c.processes, nil)
		}
		s := c.processes[a.space]
		if s == nil {
			if a.kind != actAcquire {
				continue
			}
			s = newStack(maxPieces)
			c.processes[a.space] = s
		}
		switch a.kind {
		case actAcquire:
			c.count(s.use(a.start, a.end), a.end-a.start)
			c.forgot = c.forgot || s.forgot
		case actInvalidate:
			s.invalidate(a.start, a.end)
		default: // actReset
			c.processes[a.space] = nil
		}
	}
}

func (c *curve) count(distance int64, pages uint64) {
	c.requests++
	c.pages += pages
	switch {
	case distance == infinite:
		c.infinite.add(pages)
	case distance < nearPages:
		for int64(len(c.near)) <= distance {
			c.near = append(c.near, make([]point, max(1024, int(distance)+1-len(c.near)))...)
		}
		c.near[distance].add(pages)
	default:
		// Round up: never a hit that isn't one.
		unit := int64(1) << (bits.Len64(uint64(distance)) - 7)
		up := (distance + unit - 1) / unit * unit
		p := c.far[up]
		if p == nil {
			p = new(point)
			c.far[up] = p
		}
		p.add(pages)
	}
}

// steps returns the distances that occurred with what hits from there on, in
// order.
func (c *curve) steps() (sizes []int64, hits []point) {
	var sum point
	for d := range c.near {
		if p := &c.near[d]; p.n > 0 {
			sum.n, sum.pages = sum.n+p.n, sum.pages+p.pages
			sizes, hits = append(sizes, int64(d)), append(hits, sum)
		}
	}
	var far []int64
	for d := range c.far {
		far = append(far, d)
	}
	slices.Sort(far)
	for _, d := range far {
		sum.n, sum.pages = sum.n+c.far[d].n, sum.pages+c.far[d].pages
		sizes, hits = append(sizes, d), append(hits, sum)
	}
	return sizes, hits
}
