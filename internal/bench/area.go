package bench

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// PageSize is the unit in which places in an area are counted, whatever the
// system's page size.
const PageSize = 1 << pageShift

const pageShift = 12

// reservation is address space without memory behind it.
type reservation struct {
	mem   []byte
	start uintptr
}

// alignment is that of an area's first page: a block of the epoch table with
// 4096 pages, so that areas of all sizes are cut alike.
const alignment = 16 << 20

// reserve returns address space of that many pages: not accessible, or, for
// pages behind it, readable and writable.
func reserve(pages int, populated bool) (*reservation, error) {
	prot := unix.PROT_NONE
	if populated {
		prot = unix.PROT_READ | unix.PROT_WRITE
	}
	mem, err := unix.Mmap(-1, 0, pages<<pageShift+alignment, prot, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("reserve %d pages of address space: %w", pages, os.NewSyscallError("mmap", err))
	}
	// Refused by kernels without transparent huge pages, where it isn't needed.
	_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	return &reservation{mem: mem, start: vm.RangeOf(mem).RoundOut(alignment).Start + alignment}, nil
}

// Reserve returns the address of that many pages of address space without memory,
// for tests of subjects, and what gives it back.
func Reserve(pages int) (start uintptr, release func() error, err error) {
	r, err := reserve(pages, false)
	if err != nil {
		return 0, nil, err
	}
	return r.start, r.release, nil
}

func (r *reservation) release() error {
	if err := unix.Munmap(r.mem); err != nil {
		return fmt.Errorf("release address space: %w", os.NewSyscallError("munmap", err))
	}
	return nil
}

// remap puts a fresh mapping over r, which lies in a reservation: what a monitor
// that watches the kernel sees as an operation.
func remap(r vm.Range, populated bool) error {
	prot := uintptr(unix.PROT_NONE)
	if populated {
		prot = unix.PROT_READ | unix.PROT_WRITE
	}
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Start, r.Len(), prot,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED, ^uintptr(0), 0)
	if errno != 0 {
		return os.NewSyscallError("mmap", errno)
	}
	return nil
}

// Area is where regions lie: Regions of them, of Pages pages each, at the
// multiples of Stride pages above Base. A page is 4 KiB here.
type Area struct {
	Base          uintptr
	Regions       int
	Pages, Stride uint32
}

// Length returns the length of a region in bytes.
func (a *Area) Length() uintptr { return uintptr(a.Pages) << pageShift }

// Range returns the range of region i.
func (a *Area) Range(i int) vm.Range {
	start := a.Base + uintptr(i)*uintptr(a.Stride)<<pageShift
	return vm.Range{Start: start, End: start + a.Length()}
}

// Span returns the range from the first of n regions from i on to the end of
// the last.
func (a *Area) Span(i, n int) vm.Range {
	return vm.Range{Start: a.Range(i).Start, End: a.Range(i + n - 1).End}
}

// first returns the number of region i's first page.
func (a *Area) first(i int) uint32 { return uint32(i) * a.Stride }

// Patterns of hits.
const (
	patternHot     = "hot"
	patternUniform = "uniform"
	patternZipf    = "zipf"
	subSuffix      = "-sub"
)

const (
	hotRegions = 16  // of the pattern hot
	zipfS      = 1.1 // exponent of the pattern zipf
)

// chunk is how many acquires a Worker makes in one call.
const chunk = 1024

// shortChunk is chunk where several threads are measured, divides it, and still
// makes a call into C cheap.
const shortChunk = 128

// orderLen is the length of the list of what to acquire: several times the
// regions, so that going round doesn't make a smaller working set of them. It is
// read in sequence, four bytes an acquire.
func orderLen(regions int) int {
	return min(max(1<<bits.Len(uint(4*regions-1)), 1<<16), 1<<22)
}

// order returns page numbers to acquire: regions of a chosen by pattern, and
// with sub a page of each at random.
func (a *Area) order(pattern string, sub bool, rng *rand.Rand) []uint32 {
	list := make([]uint32, orderLen(a.Regions))
	n := uint32(a.Regions)
	var zipf *rand.Zipf
	var place []int
	if pattern == patternZipf && n > 1 {
		zipf = rand.NewZipf(rng, zipfS, 1, uint64(n-1))
		place = rng.Perm(int(n)) // so that popular regions aren't neighbours
	}
	for i := range list {
		var at uint32
		switch {
		case zipf != nil:
			at = uint32(place[zipf.Uint64()])
		case pattern == patternHot:
			hot := min(n, hotRegions)
			at = uint32(uint64(rng.Uint32N(hot)) * uint64(n) / uint64(hot))
		default:
			at = rng.Uint32N(n)
		}
		list[i] = at * a.Stride
		if sub {
			list[i] += rng.Uint32N(a.Pages)
		}
	}
	return list
}
