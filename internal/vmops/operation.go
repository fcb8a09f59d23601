package vmops

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/vm"
)

// Actor is who carries out an operation.
type Actor uint8

// Actors.
const (
	ActorInvalid Actor = iota
	// ThisThread is the calling goroutine.
	ThisThread
	// OtherThread is another thread of this process.
	OtherThread
	// Ring is an io_uring of this process: a kernel worker makes the change
	// and no system call of that name is seen.
	Ring
	// OtherProcess is another process that shares the file or memory object,
	// or that acts on this one.
	OtherProcess
)

var actorNames = [...]string{"invalid", "this-thread", "other-thread", "io_uring", "other-process"}

// String returns the name that reports use.
func (a Actor) String() string { return actorNames[a] }

// Reach is how much an operation affects beyond the range it is given.
type Reach uint8

// Reaches.
const (
	ReachInvalid Reach = iota
	ReachExact         // the range
	ReachTail          // from the range's start to the end of the mapping
	ReachAll           // the whole mapping
)

// kinds is a set of vm.Mapping.
type kinds uint32

func set(ms ...vm.Mapping) kinds {
	var k kinds
	for _, m := range ms {
		k |= 1 << m
	}
	return k
}

func (k kinds) has(m vm.Mapping) bool { return k&(1<<m) != 0 }

// Sets of kinds that behave alike.
var (
	kindsAnon   = set(vm.MappingAnonPrivate, vm.MappingBrk, vm.MappingTHP)
	kindsShared = set(vm.MappingAnonShared, vm.MappingMemfd, vm.MappingFileShared, vm.MappingSysV)
	kindsFile   = set(vm.MappingFilePrivate, vm.MappingFileShared)
	kindsGo     = set(vm.MappingGoHeap)
	kindsHuge   = set(vm.MappingHugeTLB)
	kindsMapped = kindsAnon | kindsShared | kindsFile | kindsHuge
)

// Operation is something that a program can do to a range of its memory.
type Operation struct {
	// Name is unique. Several operations may share an Op.
	Name string
	// Op is the kind of operation as reports name it; OpUnknown for those that
	// have no kind of their own.
	Op vm.Op
	// Reach is what the operation affects beyond the range.
	Reach Reach
	// Heavy operations affect the whole process (a garbage collection, say)
	// and are left out of the self-test.
	Heavy bool

	kinds   kinds // on which it makes sense
	changes kinds // of those, where it changes the pages behind the range

	do    func(s *Scratch, r vm.Range) error
	ring  func(s *Scratch, r vm.Range) sqe
	file  func(f *os.File, off, n, size int64) error // by whoever has the file
	other kinds                                      // on which another process can do it
}

// String returns the name.
func (o *Operation) String() string { return o.Name }

// On reports whether the operation makes sense on a kind of mapping.
func (o *Operation) On(kind vm.Mapping) bool { return o.kinds.has(kind) }

// Changes reports whether other pages, or none, are behind the range after the
// operation, given that the old ones were held as by a registration.
func (o *Operation) Changes(kind vm.Mapping) bool { return o.changes.has(kind) }

// Actors returns who can carry the operation out on a kind of mapping.
func (o *Operation) Actors(kind vm.Mapping) []Actor {
	var a []Actor
	if o.On(kind) {
		if o.do != nil || o.file != nil && hasFile(kind) {
			a = append(a, ThisThread, OtherThread)
		}
		if o.ring != nil {
			a = append(a, Ring)
		}
	}
	if o.other.has(kind) {
		a = append(a, OtherProcess)
	}
	return a
}

func hasFile(kind vm.Mapping) bool {
	return kind == vm.MappingMemfd || kind == vm.MappingFilePrivate || kind == vm.MappingFileShared
}

// Affected returns the addresses of s whose pages the operation on r may
// change.
func (o *Operation) Affected(s *Scratch, r vm.Range) vm.Range {
	switch o.Reach {
	case ReachTail:
		return vm.Range{Start: r.Start, End: max(r.End, s.r.End)}
	case ReachAll:
		return s.r
	default:
		return r
	}
}

// Operations returns the table of operations.
func Operations() []*Operation { return slices.Clone(operations) }

// Lookup returns the operation of that name.
func Lookup(name string) (*Operation, bool) {
	i := slices.IndexFunc(operations, func(o *Operation) bool { return o.Name == name })
	if i < 0 {
		return nil, false
	}
	return operations[i], true
}

func advise(advice int) func(*Scratch, vm.Range) error {
	return func(_ *Scratch, r vm.Range) error { return madvise(r, advice) }
}

func ringAdvise(advice int) func(*Scratch, vm.Range) sqe {
	return func(_ *Scratch, r vm.Range) sqe {
		return sqe{opcode: ringOpMadvise, addr: uint64(r.Start), len: uint32(r.Len()), opFlags: uint32(advice)}
	}
}

func fallocate(mode uint32) func(*os.File, int64, int64, int64) error {
	return func(f *os.File, off, n, size int64) error {
		if err := unix.Fallocate(int(f.Fd()), mode, off, n); err != nil {
			return os.NewSyscallError("fallocate", err)
		}
		return unix.Ftruncate(int(f.Fd()), size)
	}
}

var operations = []*Operation{
	{
		Name: "munmap", Op: vm.OpMunmap, Reach: ReachExact, kinds: kindsMapped, changes: kindsMapped,
		do: func(s *Scratch, r vm.Range) error {
			s.disown(r)
			return munmap(r)
		},
	},
	{
		Name: "mmap-fixed", Op: vm.OpMmapFixed, Reach: ReachExact, kinds: kindsMapped | kindsGo, changes: kindsMapped | kindsGo,
		do: func(_ *Scratch, r vm.Range) error {
			return mapAnon(r, unix.MAP_FIXED)
		},
	},
	{
		// Emulated by mmap inside the kernel since Linux 4.0.
		Name: "remap-file-pages", Op: vm.OpMmapFixed, Reach: ReachExact, kinds: kindsShared, changes: kindsShared,
		do: func(s *Scratch, r vm.Range) error {
			page := uintptr(0)
			if r.Start == s.r.Start {
				page = r.Len() / s.unit
			}
			return remapFilePages(r, page)
		},
	},
	{
		Name: "mremap-shrink", Op: vm.OpMremap, Reach: ReachExact, kinds: kindsMapped, changes: kindsMapped,
		do: func(s *Scratch, r vm.Range) error {
			if r.Start == s.r.Start {
				return fmt.Errorf("nothing to shrink to: %w", ErrUnavailable)
			}
			s.disown(r)
			_, err := mremap(vm.Range{Start: r.Start - s.unit, End: r.End}, s.unit, 0, 0)
			if err != nil && s.brk == 0 {
				s.own(r)
			}
			return err
		},
	},
	{
		Name: "mremap-move", Op: vm.OpMremap, Reach: ReachExact, kinds: kindsMapped, changes: kindsMapped,
		do: func(s *Scratch, r vm.Range) error {
			dst, err := s.reserve(r.Len(), s.unit)
			if err != nil {
				return err
			}
			s.disown(r)
			_, err = mremap(r, r.Len(), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, dst.Start)
			if err != nil && s.brk == 0 {
				s.own(r)
			}
			return err
		},
	},
	{
		// Linux 5.7; on shared mappings 5.13. The mapping stays, without pages.
		Name: "mremap-dontunmap", Op: vm.OpMremap, Reach: ReachExact,
		kinds: kindsAnon | kindsShared | kindsFile, changes: kindsAnon | set(vm.MappingFilePrivate),
		do: func(s *Scratch, r vm.Range) error {
			a, err := mremap(r, r.Len(), unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP, 0)
			if err == nil {
				s.own(vm.Range{Start: a, End: a + r.Len()})
			}
			return err
		},
	},
	{
		Name: "mremap-onto", Op: vm.OpMremapFixed, Reach: ReachExact, kinds: kindsMapped, changes: kindsMapped,
		do: func(s *Scratch, r vm.Range) error {
			a, err := mmap(0, r.Len(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
			if err != nil {
				return err
			}
			src := vm.Range{Start: a, End: a + r.Len()}
			s.own(src)
			Fill(src, s.unit)
			s.disown(src)
			if _, err = mremap(src, r.Len(), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Start); err != nil {
				s.own(src)
			}
			return err
		},
	},
	{
		Name: "madvise-dontneed", Op: vm.OpDontneed, Reach: ReachExact,
		kinds: kindsMapped | kindsGo, changes: kindsAnon | kindsGo | kindsHuge | set(vm.MappingFilePrivate),
		do: advise(unix.MADV_DONTNEED), ring: ringAdvise(unix.MADV_DONTNEED),
	},
	{
		// Linux 5.18.
		Name: "madvise-dontneed-locked", Op: vm.OpDontneed, Reach: ReachExact,
		kinds: kindsAnon | kindsShared | kindsFile, changes: kindsAnon | set(vm.MappingFilePrivate),
		do: advise(unix.MADV_DONTNEED_LOCKED),
	},
	{
		// Pages that are held aren't freed.
		Name: "madvise-free", Op: vm.OpFree, Reach: ReachExact, kinds: kindsAnon | kindsGo,
		do: advise(unix.MADV_FREE), ring: ringAdvise(unix.MADV_FREE),
	},
	{
		Name: "madvise-remove", Op: vm.OpRemove, Reach: ReachExact, kinds: kindsShared, changes: kindsShared,
		do: advise(unix.MADV_REMOVE), ring: ringAdvise(unix.MADV_REMOVE),
		other: set(vm.MappingMemfd, vm.MappingFileShared, vm.MappingSysV),
	},
	{
		// Linux 6.13; on file mappings 6.15.
		Name: "madvise-guard", Op: vm.OpGuard, Reach: ReachExact,
		kinds: kindsAnon | kindsShared | kindsFile, changes: kindsAnon | kindsShared | kindsFile,
		do: advise(unix.MADV_GUARD_INSTALL), ring: ringAdvise(unix.MADV_GUARD_INSTALL),
	},
	{
		// Advice that frees is allowed on oneself only, since Linux 6.13.
		Name: "process-madvise", Op: vm.OpProcessMadvise, Reach: ReachExact,
		kinds: kindsAnon | kindsGo, changes: kindsAnon | kindsGo,
		do: func(_ *Scratch, r vm.Range) error {
			return processMadvise(os.Getpid(), r, unix.MADV_DONTNEED)
		},
	},
	{
		// What another process may advise leaves held pages in place.
		Name: "process-madvise-pageout", Op: vm.OpProcessMadvise, Reach: ReachExact,
		kinds: kindsAnon | kindsShared | kindsFile | kindsGo, other: kindsAnon | kindsShared | kindsFile,
		do: func(_ *Scratch, r vm.Range) error {
			return processMadvise(os.Getpid(), r, unix.MADV_PAGEOUT)
		},
	},
	{
		Name: "brk-shrink", Op: vm.OpBrk, Reach: ReachTail, kinds: set(vm.MappingBrk), changes: set(vm.MappingBrk),
		do: func(s *Scratch, r vm.Range) error {
			if got := brk(r.Start); got != r.Start {
				return fmt.Errorf("brk %#x: still at %#x: %w", r.Start, got, unix.ENOMEM)
			}
			if got := brk(s.r.End); got != s.r.End {
				return fmt.Errorf("brk %#x: still at %#x: %w", s.r.End, got, unix.ENOMEM)
			}
			return nil
		},
	},
	{
		Name: "shmat-remap", Op: vm.OpShmat, Reach: ReachExact, kinds: kindsMapped, changes: kindsMapped,
		do: func(_ *Scratch, r vm.Range) error {
			id, err := shmget(r.Len())
			if err != nil {
				return err
			}
			_, err = shmat(id, r.Start, shmRemap)
			return errors.Join(err, shmrm(id))
		},
	},
	{
		Name: "shmdt", Op: vm.OpShmdt, Reach: ReachAll, kinds: set(vm.MappingSysV), changes: set(vm.MappingSysV),
		do: func(s *Scratch, _ vm.Range) error {
			s.disown(s.r)
			return shmdt(s.r.Start)
		},
	},
	{
		// Down and up again: the file is as long as before, with other pages.
		Name: "truncate", Op: vm.OpTruncate, Reach: ReachTail,
		kinds:   kindsFile | set(vm.MappingMemfd),
		changes: kindsFile | set(vm.MappingMemfd, vm.MappingAnonShared, vm.MappingSysV),
		other:   kindsFile | set(vm.MappingMemfd, vm.MappingAnonShared, vm.MappingSysV),
		file: func(f *os.File, off, _, size int64) error {
			if err := unix.Ftruncate(int(f.Fd()), off); err != nil {
				return os.NewSyscallError("ftruncate", err)
			}
			return unix.Ftruncate(int(f.Fd()), size)
		},
		ring: func(s *Scratch, r vm.Range) sqe {
			return sqe{opcode: ringOpFtruncate, fd: int32(s.fd.Fd()), off: uint64(r.Start - s.r.Start)}
		},
	},
	{
		// A hole leaves private copies in place.
		Name: "punch-hole", Op: vm.OpPunchHole, Reach: ReachExact,
		kinds:   kindsFile | set(vm.MappingMemfd),
		changes: set(vm.MappingFileShared, vm.MappingMemfd, vm.MappingAnonShared, vm.MappingSysV),
		other:   kindsFile | set(vm.MappingMemfd, vm.MappingAnonShared, vm.MappingSysV),
		file:    fallocate(unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE),
		ring: func(s *Scratch, r vm.Range) sqe {
			return sqe{
				opcode: ringOpFallocate, fd: int32(s.fd.Fd()), off: uint64(r.Start - s.r.Start),
				addr: uint64(r.Len()), len: unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
			}
		},
	},
	{
		Name: "zero-range", Op: vm.OpPunchHole, Reach: ReachExact,
		kinds: kindsFile, changes: set(vm.MappingFileShared), other: kindsFile,
		file: fallocate(unix.FALLOC_FL_ZERO_RANGE),
	},
	{
		Name: "collapse-range", Op: vm.OpPunchHole, Reach: ReachTail,
		kinds: kindsFile, changes: kindsFile, other: kindsFile,
		file: fallocate(unix.FALLOC_FL_COLLAPSE_RANGE),
	},
	{
		Name: "insert-range", Op: vm.OpPunchHole, Reach: ReachTail,
		kinds: kindsFile, changes: kindsFile, other: kindsFile,
		file: fallocate(unix.FALLOC_FL_INSERT_RANGE),
	},
	{
		// A direct write drops the page cache under it, mapped or held.
		Name: "direct-write", Op: vm.OpUnknown, Reach: ReachExact,
		kinds: kindsFile, changes: set(vm.MappingFileShared), other: kindsFile,
		file: directWrite,
	},
	{
		Name: "go-scavenge", Op: vm.OpDontneed, Reach: ReachAll, Heavy: true, kinds: kindsGo, changes: kindsGo,
		do: scavenge,
	},

	// Not VM operations: pages that are held stay where they are.
	{
		Name: "madvise-pageout", Op: vm.OpUnknown, Reach: ReachExact, kinds: kindsAnon | kindsShared | kindsFile | kindsGo,
		do: advise(unix.MADV_PAGEOUT),
	},
	{
		Name: "madvise-collapse", Op: vm.OpUnknown, Reach: ReachExact, kinds: set(vm.MappingTHP),
		do: func(_ *Scratch, r vm.Range) error {
			err := madvise(r, unix.MADV_COLLAPSE)
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EBUSY) {
				return nil // pages that are held aren't collapsed
			}
			return err
		},
	},
	{
		Name: "mprotect", Op: vm.OpUnknown, Reach: ReachExact, kinds: kindsMapped,
		do: func(_ *Scratch, r vm.Range) error {
			for _, prot := range []uintptr{unix.PROT_NONE, unix.PROT_READ | unix.PROT_WRITE} {
				if _, err := call("mprotect", unix.SYS_MPROTECT, r.Start, r.Len(), prot, 0, 0, 0); err != nil {
					return err
				}
			}
			return nil
		},
	},
}

// mapAnon maps fresh private anonymous memory at r.
func mapAnon(r vm.Range, flags int) error {
	_, err := mmap(r.Start, r.Len(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags, -1, 0)
	return err
}

// reserve maps size bytes without access, aligned to align, that s owns.
func (s *Scratch) reserve(size, align uintptr) (vm.Range, error) {
	a, err := mmap(0, size+align, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE, -1, 0)
	if err != nil {
		return vm.Range{}, err
	}
	s.own(vm.Range{Start: a, End: a + size + align})
	start := (a + align - 1) &^ (align - 1)
	return vm.Range{Start: start, End: start + size}, nil
}

func directWrite(f *os.File, off, n, _ int64) error {
	d, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	_, err = d.WriteAt(alignedBlock(int(n), os.Getpagesize()), off)
	return err
}

// scavenge drops the memory and has the Go runtime give it back to the kernel.
func scavenge(s *Scratch, _ vm.Range) error {
	s.heap = nil
	for range 5 {
		// The first collection may find the memory in a stale stack slot.
		debug.FreeOSMemory()
		entries, err := oracle.Frames(s.r)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(entries, oracle.Entry.Present) {
			return nil
		}
	}
	return fmt.Errorf("go runtime keeps %v: %w", s.r, ErrUnavailable)
}

// Perform carries out o on r, a range of whole units of s, by the given actor,
// and returns when it is done. The helper is needed for OtherProcess only. An
// error for which Unavailable holds means that nothing was changed, or that
// this machine doesn't have it.
func Perform(s *Scratch, o *Operation, r vm.Range, by Actor, helper *Helper) error {
	err := perform(s, o, r, by, helper)
	if err != nil {
		return fmt.Errorf("%s on %v %v by %v: %w", o.Name, s.kind, r, by, err)
	}
	return nil
}

func perform(s *Scratch, o *Operation, r vm.Range, by Actor, helper *Helper) error {
	if !slices.Contains(o.Actors(s.kind), by) {
		return ErrUnavailable
	}
	switch by {
	case ThisThread:
		return o.run(s, r)
	case OtherThread:
		errc := make(chan error)
		// The caller keeps its thread, so that the goroutine gets another.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			errc <- o.run(s, r)
		}()
		return <-errc
	case Ring:
		if err := ringDo(o.ring(s, r)); err != nil {
			return err
		}
		if o.Op == vm.OpTruncate {
			return s.fd.Truncate(int64(s.r.Len()))
		}
		return nil
	case OtherProcess:
		if helper == nil {
			return fmt.Errorf("no helper process: %w", ErrUnavailable)
		}
		return helper.do(s, o, r)
	default:
		return ErrUnavailable
	}
}

func (o *Operation) run(s *Scratch, r vm.Range) error {
	if o.do != nil {
		return o.do(s, r)
	}
	return o.file(s.fd, int64(r.Start-s.r.Start), int64(r.Len()), int64(s.r.Len()))
}
