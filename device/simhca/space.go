package simhca

import (
	"errors"
	"fmt"
	"sync"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// Errors of a Space.
var (
	// ErrNotMapped: an access to an address that isn't mapped, or not for that.
	ErrNotMapped = errors.New("simhca: segmentation fault")
	// ErrFreedPage: a page was reached after it had been freed. It is a fault
	// of the simulation, never of the program under it; see [Space.Check].
	ErrFreedPage = errors.New("simhca: access to a freed page")
	// ErrOutOfPages: SpaceOptions.Pages are in use.
	ErrOutOfPages = errors.New("simhca: out of pages")
	// ErrBadRange: an empty range, or one that isn't of whole pages.
	ErrBadRange = errors.New("simhca: bad range")
)

// Prot is what a mapping allows. The zero Prot allows nothing.
type Prot uint8

// Prot bits.
const (
	ProtRead Prot = 1 << iota
	ProtWrite
)

// SpaceOptions configure a Space. The zero value, or nil, means the defaults.
type SpaceOptions struct {
	// PageSize is the size of a page, a power of two. Default 4096.
	PageSize uintptr
	// Pages is the number of physical pages. Zero means any number.
	Pages int
	// Everywhere says that all addresses below 2^48 are mapped from the start,
	// for reading and writing. Unmap still unmaps. It is for replaying
	// operations on memory whose mapping wasn't recorded.
	Everywhere bool
	// Before and After are called round each VM operation, under the space's
	// lock, as a monitor in the kernel is that touches under the lock of the
	// page tables. They must not call the space. Mapping where nothing is
	// mapped isn't a VM operation.
	Before, After func(vm.Event)
}

// SpaceStats are a space's counters.
type SpaceStats struct {
	// Pages is how many physical pages are in use, Pinned how many of them are
	// pinned, Orphans how many of those are mapped nowhere.
	Pages, Pinned, Orphans int
	// Freed is how many pages have been freed ever.
	Freed uint64
	// OrphanWrites is how many writes went to orphans ever: data that is lost.
	OrphanWrites uint64
}

// Space is a simulated address space over simulated physical memory. It is
// safe for concurrent use; the content of a page is read and written
// atomically.
//
// Pages are given to an address at the first access or pin, zeroed. They are
// counted: one that is unmapped lives on while it is pinned, and only what
// pinned it reaches it. A freed page is poisoned and soon reused.
type Space struct {
	opts SpaceOptions // immutable.
	phys frames

	mu    sync.RWMutex     // the lock of the page tables; write-held by VM operations.
	table map[uintptr]*pte // guarded by mu; by page number.
	next  uintptr          // guarded by mu; where Map looks for room.
}

// pte is a page-table entry. With Everywhere, an absent entry is a mapped page
// and hole says that it was unmapped.
type pte struct {
	prot Prot
	hole bool
	page page // f is nil before the first access.
}

var _ Memory = (*Space)(nil)

const (
	spaceStart = 1 << 32 // Where Map begins; no address of ours is near zero.
	spaceEnd   = 1 << 48
)

// NewSpace returns an empty address space.
func NewSpace(opts *SpaceOptions) *Space {
	s := &Space{table: make(map[uintptr]*pte), next: spaceStart}
	if opts != nil {
		s.opts = *opts
	}
	if s.opts.PageSize == 0 {
		s.opts.PageSize = 4096
	}
	s.phys.size, s.phys.limit = s.opts.PageSize, s.opts.Pages
	return s
}

// PageSize returns the size of a page.
func (s *Space) PageSize() uintptr { return s.opts.PageSize }

// Stats returns the counters.
func (s *Space) Stats() SpaceStats {
	s.phys.mu.Lock()
	defer s.phys.mu.Unlock()
	return s.phys.stats
}

// Check returns what must never have happened: accesses to freed pages, free
// pages that were written to, counts below zero. It looks at all free pages.
func (s *Space) Check() error {
	s.phys.mu.Lock()
	defer s.phys.mu.Unlock()
	for _, f := range s.phys.free {
		s.phys.checkPoisonLocked(f)
	}
	return errors.Join(s.phys.faults...)
}

// wholePages checks a range for a VM operation and returns its page numbers.
func (s *Space) wholePages(verb string, r vm.Range) (first, end uintptr, err error) {
	if r.Empty() || r.End > spaceEnd || r.RoundOut(s.opts.PageSize) != r {
		return 0, 0, fmt.Errorf("%s %v: %w", verb, r, ErrBadRange)
	}
	return r.Start / s.opts.PageSize, r.End / s.opts.PageSize, nil
}

// entryLocked returns the entry of page n; nil if nothing is mapped there.
func (s *Space) entryLocked(n uintptr) *pte {
	e := s.table[n]
	if e == nil && s.opts.Everywhere {
		e = &pte{prot: ProtRead | ProtWrite}
		s.table[n] = e
	}
	if e == nil || e.hole {
		return nil
	}
	return e
}

// clearLocked takes away what is mapped at page n, if anything.
func (s *Space) clearLocked(n uintptr) {
	if e := s.table[n]; e != nil && e.page.f != nil {
		s.phys.count(e.page, -1, 0)
	}
	if s.opts.Everywhere {
		s.table[n] = &pte{hole: true}
	} else {
		delete(s.table, n)
	}
}

func (s *Space) tell(hook func(vm.Event), r vm.Range, op vm.Op) {
	if hook != nil {
		hook(vm.Event{Range: r, Op: op})
	}
}

// operate runs change on the pages of r under the lock, and tells of it.
func (s *Space) operate(verb string, r vm.Range, op vm.Op, change func(first, end uintptr)) error {
	first, end, err := s.wholePages(verb, r)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tell(s.opts.Before, r, op)
	defer s.tell(s.opts.After, r, op)
	change(first, end)
	return nil
}

// Map maps pages pages where there is room, as mmap(2) does.
func (s *Space) Map(pages int, prot Prot) (vm.Range, error) {
	if pages <= 0 {
		return vm.Range{}, fmt.Errorf("map %d pages: %w", pages, ErrBadRange)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	size := s.opts.PageSize
	r := vm.Range{Start: s.next, End: s.next + uintptr(pages)*size}
	if r.End > spaceEnd {
		return vm.Range{}, fmt.Errorf("map %d pages: %w", pages, ErrOutOfPages)
	}
	s.next = r.End + size // A page between mappings that is never mapped.
	for n := r.Start / size; n < r.End/size; n++ {
		s.table[n] = &pte{prot: prot}
	}
	return r, nil
}

// MapFixed maps r, and replaces what was there, as MAP_FIXED does.
func (s *Space) MapFixed(r vm.Range, prot Prot) error {
	return s.operate("map", r, vm.OpMmapFixed, func(first, end uintptr) {
		for n := first; n < end; n++ {
			s.clearLocked(n)
			s.table[n] = &pte{prot: prot}
		}
		s.next = max(s.next, (end+1)*s.opts.PageSize)
	})
}

// Unmap unmaps r, as munmap(2) does. Nothing need be mapped there.
func (s *Space) Unmap(r vm.Range) error {
	return s.operate("unmap", r, vm.OpMunmap, func(first, end uintptr) {
		for n := first; n < end; n++ {
			s.clearLocked(n)
		}
	})
}

// Dontneed drops the pages of r, as MADV_DONTNEED does: the next access finds
// zeros.
func (s *Space) Dontneed(r vm.Range) error {
	return s.operate("dontneed", r, vm.OpDontneed, func(first, end uintptr) {
		for n := first; n < end; n++ {
			if e := s.table[n]; e != nil && e.page.f != nil {
				s.phys.count(e.page, -1, 0)
				e.page = page{}
			}
		}
	})
}

// Remap moves the pages of from to to, as MREMAP_FIXED does: from is unmapped,
// what was mapped at to is replaced. The ranges have the same length and don't
// overlap.
func (s *Space) Remap(from, to vm.Range) error {
	src, end, err := s.wholePages("remap", from)
	if err != nil {
		return err
	}
	dst, _, err := s.wholePages("remap", to)
	if err != nil || from.Len() != to.Len() || from.Overlaps(to) {
		return fmt.Errorf("remap %v to %v: %w", from, to, ErrBadRange)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range []vm.Range{from, to} {
		s.tell(s.opts.Before, r, vm.OpMremapFixed)
		defer s.tell(s.opts.After, r, vm.OpMremapFixed)
	}
	for i := range end - src {
		e := s.entryLocked(src + i)
		s.clearLocked(dst + i)
		if e == nil {
			continue
		}
		s.table[dst+i] = &pte{prot: e.prot, page: e.page}
		e.page = page{} // Still mapped once.
		s.clearLocked(src + i)
	}
	s.next = max(s.next, to.End+s.opts.PageSize)
	return nil
}

// Protect changes what the mapped pages of r allow. That isn't a VM operation:
// the pages stay, and registrations keep the access that they were made with.
func (s *Space) Protect(r vm.Range, prot Prot) error {
	first, end, err := s.wholePages("protect", r)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := first; n < end; n++ {
		if e := s.entryLocked(n); e != nil {
			e.prot = prot
		}
	}
	return nil
}

// faultInLocked returns the page behind page number n, and gives it one if it
// has none. The lock is held for writing.
func (s *Space) faultInLocked(n uintptr, prot Prot) (page, error) {
	e := s.entryLocked(n)
	if e == nil || e.prot&prot != prot {
		return page{}, fmt.Errorf("address %#x: %w", n*s.opts.PageSize, ErrNotMapped)
	}
	if e.page.f == nil {
		p, err := s.phys.alloc()
		if err != nil {
			return page{}, err
		}
		e.page = p
	}
	return e.page, nil
}

// Load reads len(b) bytes at addr, as the processor does.
func (s *Space) Load(addr uintptr, b []byte) error {
	return s.access(addr, b, ProtRead, s.phys.read)
}

// Store writes b at addr, as the processor does. An error may come after part
// of it was written.
func (s *Space) Store(addr uintptr, b []byte) error {
	return s.access(addr, b, ProtWrite, s.phys.write)
}

func (s *Space) access(addr uintptr, b []byte, prot Prot, move func(page, uintptr, []byte) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(b) > 0 {
		off := addr % s.opts.PageSize
		n := min(uintptr(len(b)), s.opts.PageSize-off)
		p, err := s.faultInLocked(addr/s.opts.PageSize, prot)
		if err != nil {
			return err
		}
		if err := move(p, off, b[:n]); err != nil {
			return err
		}
		addr, b = addr+n, b[n:]
	}
	return nil
}

// Frames returns the numbers of the physical pages that back r now; zero for a
// page that isn't mapped, or not accessed yet.
func (s *Space) Frames(r vm.Range) []uint64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	size := s.opts.PageSize
	out := r.RoundOut(size)
	numbers := make([]uint64, 0, r.Pages(size))
	for n := out.Start / size; n < out.End/size; n++ {
		var number uint64
		if e := s.table[n]; e != nil && e.page.f != nil {
			number = e.page.f.number
		}
		numbers = append(numbers, number)
	}
	return numbers
}

// Pin implements [Memory].
func (s *Space) Pin(r vm.Range, write bool) (Pages, error) {
	if r.Empty() || r.End > spaceEnd {
		return nil, fmt.Errorf("pin %v: %w", r, errors.Join(device.ErrFault, ErrBadRange))
	}
	prot := ProtRead
	if write {
		prot |= ProtWrite
	}
	size := s.opts.PageSize
	pinned := &spacePages{phys: &s.phys, pages: make([]page, 0, r.Pages(size))}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := r.RoundOut(size)
	for n := out.Start / size; n < out.End/size; n++ {
		p, err := s.faultInLocked(n, prot)
		if err != nil {
			sentinel := device.ErrFault
			if errors.Is(err, ErrOutOfPages) {
				sentinel = device.ErrNoMemory
			}
			return nil, errors.Join(fmt.Errorf("pin %v: %w", r, errors.Join(sentinel, err)), pinned.Unpin())
		}
		s.phys.count(p, 0, 1)
		pinned.pages = append(pinned.pages, p)
	}
	return pinned, nil
}

// spacePages are pinned pages of a Space.
type spacePages struct {
	phys  *frames
	pages []page
}

func (p *spacePages) Read(i int, off uintptr, b []byte) error {
	return p.phys.read(p.pages[i], off, b)
}

func (p *spacePages) Write(i int, off uintptr, b []byte) error {
	return p.phys.write(p.pages[i], off, b)
}

func (p *spacePages) Frame(i int) uint64 { return p.pages[i].f.number }

func (p *spacePages) Unpin() error {
	for _, pg := range p.pages {
		p.phys.count(pg, 0, -1)
	}
	return nil
}
