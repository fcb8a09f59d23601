package vmops

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// ErrUnavailable is returned, wrapped, for a kind of mapping or an operation
// that this machine doesn't offer to this process.
var ErrUnavailable = errors.New("vmops: not available here")

// Kinds returns every kind of mapping that New can make.
func Kinds() []vm.Mapping {
	return []vm.Mapping{
		vm.MappingAnonPrivate, vm.MappingAnonShared, vm.MappingMemfd, vm.MappingFilePrivate, vm.MappingFileShared,
		vm.MappingSysV, vm.MappingHugeTLB, vm.MappingGoHeap, vm.MappingBrk, vm.MappingTHP,
	}
}

// Options configure a scratch mapping. The zero value means defaults.
type Options struct {
	// Units is the length in units (see Scratch.Unit). Default 16, minimum 8;
	// always 8 for hugetlb pages.
	Units int
	// Dir is where file mappings have their file. Default os.TempDir.
	Dir string
}

// Scratch is a mapping to try operations on. Every page has been written.
// Its methods, and operations on it, must not run concurrently unless said
// otherwise.
type Scratch struct {
	kind  vm.Mapping
	r     vm.Range
	unit  uintptr
	fd    *os.File // the file behind it; nil if none
	shmid int      // the System V segment; -1 if none
	heap  []byte   // keeps Go heap memory alive
	brk   uintptr  // where the program break was before; 0 if not a brk heap

	mu    sync.Mutex
	owned []vm.Range // guarded by mu
}

// Kind returns the kind of mapping.
func (s *Scratch) Kind() vm.Mapping { return s.kind }

// Range returns where the mapping was made.
func (s *Scratch) Range() vm.Range { return s.r }

// Unit returns the granularity of operations: the page size of the mapping.
func (s *Scratch) Unit() uintptr { return s.unit }

// Slice returns the range of units [from,to).
func (s *Scratch) Slice(from, to int) vm.Range {
	return vm.Range{Start: s.r.Start + uintptr(from)*s.unit, End: s.r.Start + uintptr(to)*s.unit}
}

// Units returns the length in units.
func (s *Scratch) Units() int { return int(s.r.Len() / s.unit) }

// own notes that r is mapped by s; disown that it isn't any more.
func (s *Scratch) own(r vm.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disownLocked(r)
	s.owned = append(s.owned, r)
}

func (s *Scratch) disown(r vm.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disownLocked(r)
}

func (s *Scratch) disownLocked(r vm.Range) {
	var rest []vm.Range
	for _, o := range s.owned {
		if !o.Overlaps(r) {
			rest = append(rest, o)
			continue
		}
		for _, p := range []vm.Range{{Start: o.Start, End: r.Start}, {Start: r.End, End: o.End}} {
			if !p.Empty() {
				rest = append(rest, p)
			}
		}
	}
	s.owned = rest
}

// brkMu is held by the one brk scratch mapping that a process can have: there
// is one program break.
var brkMu sync.Mutex

// New makes a scratch mapping of the given kind and writes every page of it.
// It returns a wrapped ErrUnavailable for a kind that this machine doesn't
// offer, and leaves nothing behind on error.
func New(kind vm.Mapping, o *Options) (*Scratch, error) {
	var opt Options
	if o != nil {
		opt = *o
	}
	if opt.Units == 0 {
		opt.Units = 16
	}
	opt.Units = max(opt.Units, 8)
	if opt.Dir == "" {
		opt.Dir = os.TempDir()
	}
	s := &Scratch{kind: kind, unit: uintptr(os.Getpagesize()), shmid: -1}
	if err := s.create(opt); err != nil {
		return nil, fmt.Errorf("create %v mapping: %w", kind, errors.Join(err, s.Release()))
	}
	if err := s.populate(); err != nil {
		return nil, fmt.Errorf("create %v mapping: %w", kind, errors.Join(err, s.Release()))
	}
	Fill(s.r, s.unit)
	return s, nil
}

// populate makes every page present, so that writing to it can't end in the
// SIGBUS that a limit on huge pages or shared memory would bring.
func (s *Scratch) populate() error {
	if s.kind == vm.MappingGoHeap {
		return nil
	}
	err := madvise(s.r, unix.MADV_POPULATE_WRITE)
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	// Before Linux 5.14: through a file, where a fault is an error.
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	defer func() { _ = mem.Close() }()
	for a := s.r.Start; a < s.r.End; a += s.unit {
		if _, err := mem.WriteAt([]byte{1}, int64(a)); err != nil {
			return fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
	}
	return nil
}

func (s *Scratch) create(o Options) error {
	size := uintptr(o.Units) * s.unit
	const rw = unix.PROT_READ | unix.PROT_WRITE
	switch s.kind {
	case vm.MappingInvalid:
	case vm.MappingAnonPrivate:
		return s.mmap(size, rw, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	case vm.MappingAnonShared:
		return s.mmap(size, rw, unix.MAP_SHARED|unix.MAP_ANONYMOUS, -1)
	case vm.MappingMemfd:
		fd, err := unix.MemfdCreate("pindown-scratch", unix.MFD_CLOEXEC)
		if err != nil {
			return unavailable("memfd_create", err)
		}
		s.fd = os.NewFile(uintptr(fd), "memfd")
		return s.mapFile(size, unix.MAP_SHARED)
	case vm.MappingFilePrivate, vm.MappingFileShared:
		f, err := os.CreateTemp(o.Dir, "pindown-scratch-*")
		if err != nil {
			return fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		s.fd = f
		if err := os.Remove(f.Name()); err != nil {
			return err
		}
		// Blocks, so that direct writes and holes have something to act on,
		// and page by page: a large folio of which other pages are held can't
		// be split, and stays where it is when part of it is truncated.
		page := make([]byte, s.unit)
		for off := uintptr(0); off < size; off += s.unit {
			if _, err := f.WriteAt(page, int64(off)); err != nil {
				return err
			}
		}
		if s.kind == vm.MappingFileShared {
			return s.mapFile(size, unix.MAP_SHARED)
		}
		return s.mapFile(size, unix.MAP_PRIVATE)
	case vm.MappingSysV:
		return s.createSysV(size)
	case vm.MappingHugeTLB:
		huge, err := hugePageSize()
		if err != nil {
			return err
		}
		s.unit = huge
		return s.mmap(8*huge, rw, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB, -1)
	case vm.MappingGoHeap:
		s.createHeap(size)
		return nil
	case vm.MappingBrk:
		return s.createBrk(size)
	case vm.MappingTHP:
		return s.createTHP(o, size)
	}
	return fmt.Errorf("kind %v: %w", s.kind, ErrUnavailable)
}

func (s *Scratch) mmap(size uintptr, prot, flags, fd int) error {
	a, err := mmap(0, size, prot, flags, fd, 0)
	if err != nil {
		return unavailable("mmap", err)
	}
	s.r = vm.Range{Start: a, End: a + size}
	s.own(s.r)
	return nil
}

func (s *Scratch) mapFile(size uintptr, flags int) error {
	if err := s.fd.Truncate(int64(size)); err != nil {
		return err
	}
	return s.mmap(size, unix.PROT_READ|unix.PROT_WRITE, flags, int(s.fd.Fd()))
}

func (s *Scratch) createSysV(size uintptr) error {
	id, err := shmget(size)
	if err != nil {
		return unavailable("shmget", err)
	}
	a, err := shmat(id, 0, 0)
	// A segment marked for removal lives until the last process detaches, and
	// can still be attached by its number until then: nothing is left behind
	// however this process ends.
	err = errors.Join(err, shmrm(id))
	if err != nil {
		return unavailable("shmat", err)
	}
	s.shmid = id
	s.r = vm.Range{Start: a, End: a + size}
	s.own(s.r)
	return nil
}

func (s *Scratch) createHeap(size uintptr) {
	// A large object without pointers has a span to itself: no other object
	// shares its pages.
	s.heap = make([]byte, max(size, 64<<10)+s.unit)
	r := vm.RangeOf(s.heap)
	start := (r.Start + s.unit - 1) &^ (s.unit - 1)
	s.r = vm.Range{Start: start, End: start + size}
}

func (s *Scratch) createBrk(size uintptr) error {
	brkMu.Lock()
	old := brk(0)
	// libc's malloc takes memory by brk and remembers where it ended. A break
	// that has moved belongs to it.
	if start, err := startBrk(); err != nil || start != old {
		brkMu.Unlock()
		return fmt.Errorf("program break in use by others: %w", errors.Join(ErrUnavailable, err))
	}
	s.brk = old
	start := (old + s.unit - 1) &^ (s.unit - 1)
	if got := brk(start + size); got != start+size {
		return fmt.Errorf("grow program break: %w", ErrUnavailable)
	}
	s.r = vm.Range{Start: start, End: start + size}
	return nil
}

// startBrk returns where the program break was at exec: field 47 of
// /proc/self/stat (proc_pid_stat(5)).
func startBrk() (uintptr, error) {
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return 0, err
	}
	return parseStartBrk(string(b))
}

func parseStartBrk(stat string) (uintptr, error) {
	// The second field, the command's name, may hold spaces and brackets.
	i := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[i+1:])
	const at = 47 - 3 // the fields after the name start with the third
	if i < 0 || len(fields) <= at {
		return 0, fmt.Errorf("parse stat: %d fields: %w", len(fields), ErrUnavailable)
	}
	n, err := strconv.ParseUint(fields[at], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("parse stat: %w", err)
	}
	return uintptr(n), nil
}

func (s *Scratch) createTHP(o Options, size uintptr) error {
	mode, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/enabled")
	if err != nil || strings.Contains(string(mode), "[never]") {
		return fmt.Errorf("transparent huge pages are off: %w", ErrUnavailable)
	}
	b, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil || uintptr(n) < size {
		return fmt.Errorf("huge page of %q bytes: %w", b, ErrUnavailable)
	}
	// A window across the border between two huge pages; a short one in the
	// middle of one.
	huge := uintptr(n)
	pages := uintptr(2)
	if o.Units < 16 {
		pages = 1
	}
	if err := s.mmap((pages+1)*huge, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1); err != nil {
		return err
	}
	first := (s.r.Start + huge - 1) &^ (huge - 1)
	if err := madvise(vm.Range{Start: first, End: first + pages*huge}, unix.MADV_HUGEPAGE); err != nil {
		return unavailable("madvise", err)
	}
	Fill(vm.Range{Start: first, End: first + pages*huge}, huge)
	middle := first + pages*huge/2
	s.r = vm.Range{Start: middle - size/2, End: middle + size/2}
	return nil
}

// hugePageSize returns the default size of hugetlb pages.
func hugePageSize() (uintptr, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) == 3 && f[0] == "Hugepagesize:" {
			n, err := strconv.ParseUint(f[1], 10, 64)
			return uintptr(n) << 10, err
		}
	}
	return 0, fmt.Errorf("no hugetlb pages: %w", ErrUnavailable)
}

// Release unmaps what is left of the mapping and gives back all that belongs
// to it. It is idempotent.
func (s *Scratch) Release() error {
	s.mu.Lock()
	owned := s.owned
	s.owned = nil
	s.mu.Unlock()
	var errs []error
	for _, r := range owned {
		errs = append(errs, munmap(r))
	}
	if s.brk != 0 {
		errs = append(errs, s.releaseBrk())
	}
	if s.fd != nil {
		errs = append(errs, s.fd.Close())
		s.fd = nil
	}
	runtime.KeepAlive(s.heap)
	s.heap = nil
	s.shmid = -1
	return errors.Join(errs...)
}

func (s *Scratch) releaseBrk() error {
	defer brkMu.Unlock()
	old := s.brk
	s.brk = 0
	if brk(old) == old {
		return nil
	}
	// The kernel doesn't lower the break over a range in which nothing is
	// mapped; nobody maps there but this package.
	_, err := mmap(s.r.Start, s.r.Len(), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE, -1, 0)
	if err == nil && brk(old) == old {
		return nil
	}
	return fmt.Errorf("restore program break %#x: %w", old, errors.Join(ErrUnavailable, err))
}

// Owned returns the addresses that the mapping still holds, in order. It may
// be called concurrently.
func (s *Scratch) Owned() []vm.Range {
	s.mu.Lock()
	defer s.mu.Unlock()
	owned := slices.Clone(s.owned)
	slices.SortFunc(owned, func(a, b vm.Range) int { return int(int64(a.Start) - int64(b.Start)) })
	return owned
}
