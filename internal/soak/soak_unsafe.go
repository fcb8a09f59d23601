// Package soak uses a cache the way a busy program would, from several threads
// that change the address space all the time, and compares the physical pages
// of every registration that the cache hands out with those mapped.
//
// It is the test of the guarantee that counts: it knows nothing of stamps or
// monitors. It needs a device that really pins (a page that is free again could
// come back under the same frame number) and CAP_SYS_ADMIN to see frames.
package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// ErrStale is returned for a registration whose pages aren't those mapped.
var ErrStale = errors.New("soak: stale registration handed out")

// Config says what to run. Monitor and Device are required.
type Config struct {
	Monitor monitor.Monitor
	// Device really pins.
	Device device.Device
	// Acquires is the number of acquires to check. Default 10000.
	Acquires int
	// Workers is the number of workers of each kind. Default 2.
	Workers int
	// Seed makes the choice of operations repeatable, though not their
	// interleaving. Default 1.
	Seed uint64
	// GCEvery forces a garbage collection, and every tenth time the return of
	// free memory to the system, after so many acquires. Default: never.
	GCEvery int
	// Options of the cache; Monitor is set from above.
	Options pindown.Options
	// Progress, if not nil, is told the number of acquires from time to time.
	Progress func(done int)
}

// Result counts what was done.
type Result struct {
	Acquires   int64 // checked
	Operations int64 // VM operations carried out
	Stats      pindown.Stats
}

// String returns the counts in one line.
func (r *Result) String() string {
	return fmt.Sprintf("%d acquires checked, %d hits, %d VM operations, %d invalidations, %d registrations, %d per use",
		r.Acquires, r.Stats.Hits, r.Operations, r.Stats.TotalInvalidations(), r.Stats.Register.Count, r.Stats.TotalPerUse())
}

var page = os.Getpagesize()

type soak struct {
	cfg   Config
	cache *pindown.Cache
	dev   *framed
	left  atomic.Int64
	ops   atomic.Int64
	done  atomic.Int64

	shared []*sharedBuf
}

// Run returns the counts and the first error: ErrStale, or that of a call which
// should have worked.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	if err := oracle.CheckPFN(); err != nil {
		return nil, err
	}
	if cfg.Acquires <= 0 {
		cfg.Acquires = 10_000
	}
	if cfg.Workers <= 0 {
		cfg.Workers = 2
	}
	if cfg.Seed == 0 {
		cfg.Seed = 1
	}
	s := &soak{cfg: cfg, dev: &framed{Device: cfg.Device, frames: map[uint64][]oracle.Entry{}}}
	s.left.Store(int64(cfg.Acquires))
	opts := cfg.Options
	opts.Monitor = cfg.Monitor
	var err error
	if s.cache, err = pindown.New(s.dev, &opts); err != nil {
		return nil, err
	}
	for range 4 {
		b := &sharedBuf{}
		if b.mem, err = mapAt(0, 16*page, 0); err != nil {
			return nil, err
		}
		s.shared = append(s.shared, b)
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for i := range cfg.Workers {
		for kind, work := range []func(context.Context, *rand.Rand) error{s.private, s.sharing, s.recycling, s.heap} {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(cfg.Seed, uint64(kind*1000+i)))
				if err := work(ctx, rnd); err != nil {
					cancel(err)
				}
			})
		}
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, errors.Join(err, s.cache.Close())
	}
	r := &Result{Acquires: s.done.Load(), Operations: s.ops.Load(), Stats: s.cache.Stats()}
	for _, b := range s.shared {
		err = errors.Join(err, unmap(b.mem))
	}
	return r, errors.Join(err, s.cache.Close())
}

// more takes one acquire from what is left to do, and forces a collection now
// and then.
func (s *soak) more(ctx context.Context) bool {
	if ctx.Err() != nil || s.left.Add(-1) < 0 {
		return false
	}
	n := int(s.done.Add(1))
	if g := s.cfg.GCEvery; g > 0 && n%g == 0 {
		if n/g%10 == 0 {
			debug.FreeOSMemory()
		} else {
			runtime.GC()
		}
	}
	if s.cfg.Progress != nil && n%100_000 == 0 {
		s.cfg.Progress(n)
	}
	return true
}

// verify acquires b, whose pages have all been written, compares and releases.
func (s *soak) verify(ctx context.Context, b []byte) error {
	r, err := s.cache.Acquire(ctx, b, pindown.LocalWrite)
	if err != nil {
		return err
	}
	want := vm.RangeOf(b)
	now, err := oracle.Frames(want)
	if err != nil {
		return err
	}
	pinned := s.dev.of(r.Registration())
	first := int(want.RoundOut(uintptr(page)).Start-r.Range().RoundOut(uintptr(page)).Start) / page
	for i, e := range now {
		if first+i >= len(pinned) || pinned[first+i].PFN() != e.PFN() || !e.Present() {
			return fmt.Errorf("%w: page %d of %v: mapped %v, registered %v (region %v, key %d, cached %v)",
				ErrStale, i, want, e, pinned, r.Range(), r.LocalKey(), r.Cached())
		}
	}
	return r.Release()
}

// private works on mappings that only one goroutine knows.
func (s *soak) private(ctx context.Context, rnd *rand.Rand) error {
	const pages = 64
	mem, err := mapAt(0, pages*page, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unmap(mem) }()
	for s.more(ctx) {
		if rnd.IntN(4) == 0 {
			first := rnd.IntN(pages)
			n := 1 + rnd.IntN(pages-first)
			if err := s.operate(rnd, mem[first*page:(first+n)*page]); err != nil {
				return err
			}
			write(mem)
		}
		off := rnd.IntN(len(mem) - 1)
		n := 1 + rnd.IntN(min(len(mem)-off, 8*page))
		if err := s.verify(ctx, mem[off:off+n]); err != nil {
			return err
		}
	}
	return nil
}

// sharedBuf is memory that several goroutines use and change. The lock orders
// operations and acquires, as a correct program would.
type sharedBuf struct {
	mu  sync.RWMutex
	mem []byte
}

func (s *soak) sharing(ctx context.Context, rnd *rand.Rand) error {
	for s.more(ctx) {
		b := s.shared[rnd.IntN(len(s.shared))]
		if rnd.IntN(16) == 0 {
			b.mu.Lock()
			err := s.operate(rnd, b.mem)
			write(b.mem)
			b.mu.Unlock()
			if err != nil {
				return err
			}
		}
		b.mu.RLock()
		first := rnd.IntN(15)
		err := s.verify(ctx, b.mem[first*page+rnd.IntN(page):(first+1)*page+rnd.IntN(page)+1])
		b.mu.RUnlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// recycling maps and unmaps without a lock: the kernel gives an address that
// one goroutine unmaps to another, possibly before the first one's munmap has
// returned.
func (s *soak) recycling(ctx context.Context, rnd *rand.Rand) error {
	for s.more(ctx) {
		mem, err := mapAt(0, 3*page, 0)
		if err != nil {
			return err
		}
		write(mem)
		if err := s.verify(ctx, mem); err != nil {
			return err
		}
		if rnd.IntN(2) == 0 && s.more(ctx) {
			if err := s.verify(ctx, mem[page:2*page]); err != nil {
				return err
			}
		}
		s.ops.Add(1)
		if err := unmap(mem); err != nil {
			return err
		}
	}
	return nil
}

// heap uses memory of the Go heap, which the runtime gives back and reuses.
func (s *soak) heap(ctx context.Context, rnd *rand.Rand) error {
	var keep [8][]byte
	for s.more(ctx) {
		b := make([]byte, page*(1+rnd.IntN(32)))
		write(b)
		keep[rnd.IntN(len(keep))] = b
		if err := s.verify(ctx, b); err != nil {
			return err
		}
		runtime.KeepAlive(b)
	}
	runtime.KeepAlive(keep)
	return nil
}

// operate carries out one VM operation on b, whole pages, after which b is
// mapped again.
func (s *soak) operate(rnd *rand.Rand, b []byte) error {
	s.ops.Add(1)
	r := vm.RangeOf(b)
	switch rnd.IntN(5) {
	case 0:
		return os.NewSyscallError("madvise", unix.Madvise(b, unix.MADV_DONTNEED))
	case 1:
		_, err := mapAt(r.Start, len(b), unix.MAP_FIXED)
		return err
	case 2:
		// A hole for a moment. Another thread of the process may map there in
		// between, so it must not be unmapped, only replaced.
		if err := unix.Mprotect(b, unix.PROT_NONE); err != nil {
			return os.NewSyscallError("mprotect", err)
		}
		_, err := mapAt(r.Start, len(b), unix.MAP_FIXED)
		return err
	case 3:
		// Other pages move in from elsewhere.
		src, err := mapAt(0, len(b), 0)
		if err != nil {
			return err
		}
		write(src)
		return remap(src, r.Start, 0)
	default:
		// The pages move away; the mapping stays, empty (MREMAP_DONTUNMAP,
		// Linux 5.7), so that nobody else can be given the address.
		away, err := mapAt(0, len(b), 0)
		if err != nil {
			return err
		}
		// Page by page, for b may have become several mappings, which mremap
		// refuses; and it may refuse them after it has unmapped the destination
		// (mremap_to in Linux 6.1), which somebody else may then be given.
		for off := 0; off < len(b); off += page {
			if err := remap(b[off:off+page], vm.RangeOf(away).Start+uintptr(off), unix.MREMAP_DONTUNMAP); err != nil {
				return err
			}
		}
		return unmap(away)
	}
}

// write makes a page of its own be behind every page of b.
func write(b []byte) {
	for i := 0; i < len(b); i += page {
		b[i]++
	}
	b[len(b)-1]++
}

func mapAt(addr uintptr, n int, flags int) ([]byte, error) {
	p, err := unix.MmapPtr(-1, 0, pointer(addr), uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes at %#x: %w", n, addr, os.NewSyscallError("mmap", err))
	}
	return unsafe.Slice((*byte)(p), n), nil
}

func unmap(b []byte) error {
	return os.NewSyscallError("munmap", unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b))))
}

func remap(b []byte, to uintptr, flags int) error {
	_, err := unix.MremapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), pointer(to), uintptr(len(b)),
		unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED|flags)
	return os.NewSyscallError("mremap", err)
}

// pointer returns addr as a pointer: an address that the kernel gave us, or
// nil, never of Go memory.
func pointer(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }

// framed remembers which frames each registration pinned.
type framed struct {
	device.Device
	mu     sync.Mutex
	frames map[uint64][]oracle.Entry // by handle; guarded by mu
}

func frameKey(reg device.Registration) uint64 { return reg.Handle<<20 ^ uint64(reg.LocalKey) }

func (d *framed) Register(ctx context.Context, r vm.Range, a device.Access) (device.Registration, error) {
	reg, err := d.Device.Register(ctx, r, a)
	if err != nil {
		return reg, err
	}
	frames, err := oracle.Frames(r)
	if err != nil {
		return reg, errors.Join(err, d.Device.Deregister(reg))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.frames[frameKey(reg)] = frames
	return reg, nil
}

func (d *framed) Deregister(reg device.Registration) error {
	d.mu.Lock()
	delete(d.frames, frameKey(reg))
	d.mu.Unlock()
	return d.Device.Deregister(reg)
}

func (d *framed) of(reg device.Registration) []oracle.Entry {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.frames[frameKey(reg)]
}
