package uffd

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// TestOperations: each operation that changes pages behind armed memory is on
// record when its call returns, and no other range is touched.
func TestOperations(t *testing.T) {
	m := open(t, nil)
	const n = 16
	for _, c := range []struct {
		name string
		do   func(r, part vm.Range) error
	}{
		{"munmap", func(_, part vm.Range) error { return munmap(part) }},
		{"mmap-fixed", func(_, part vm.Range) error { return mmapAt(part, unix.MAP_FIXED) }},
		{"dontneed", func(_, part vm.Range) error { return madvise(part, unix.MADV_DONTNEED) }},
		{"dontneed-locked", func(_, part vm.Range) error { return madvise(part, 24) }},
		{"free", func(_, part vm.Range) error { return madvise(part, unix.MADV_FREE) }},
		{"mremap-move", func(_, part vm.Range) error {
			to := mapPages(t, 32)
			return mremap(part, part.Len(), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to.Start)
		}},
		{"mremap-dontunmap", func(_, part vm.Range) error {
			return mremap(part, part.Len(), unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP, 0)
		}},
		{"mremap-onto", func(_, part vm.Range) error {
			from := mapPages(t, 32)
			from.End = from.Start + part.Len()
			return mremap(from, from.Len(), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, part.Start)
		}},
		{"mremap-shrink", func(r, part vm.Range) error {
			return mremap(vm.Range{Start: part.Start, End: r.End}, pageSize, 0, 0)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, part := range []struct {
				name     string
				from, to uintptr // of n pages
				shrinks  bool
			}{{"one page", 8, 9, false}, {"inside", 4, 12, false}, {"whole", 0, n, false}, {"head", 0, 8, false}, {"tail", 8, n, true}} {
				if c.name == "mremap-shrink" && !part.shrinks {
					continue
				}
				r := mapPages(t, n)
				var pages [n]*watched
				for i := range pages {
					at := r.Start + uintptr(i)*pageSize
					x, err := watch(t, m, vm.Range{Start: at, End: at + pageSize})
					must(t, err)
					pages[i] = x
				}
				whole, err := watch(t, m, r)
				must(t, err)
				p := vm.Range{Start: r.Start + part.from*pageSize, End: r.Start + part.to*pageSize}
				must(t, c.do(r, p))
				if whole.valid() {
					t.Errorf("%s: whole range still valid", part.name)
				}
				for i, x := range pages {
					hit := uintptr(i) >= part.from && uintptr(i) < part.to
					if c.name == "mremap-shrink" {
						hit = uintptr(i) > part.from
					}
					if x.valid() == hit {
						t.Errorf("%s: page %d valid %v", part.name, i, !hit)
					}
				}
			}
		})
	}
}

// TestRefused: what can't be seen is not covered.
func TestRefused(t *testing.T) {
	m := open(t, nil)
	heap := make([]byte, 1<<20)
	hole := mapPages(t, 16)
	must(t, munmap(vm.Range{Start: hole.Start + 4*pageSize, End: hole.Start + 5*pageSize}))
	memfd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC)
	must(t, err)
	defer unix.Close(memfd)
	must(t, unix.Ftruncate(memfd, 1<<20))
	mapFd := func(flags int) vm.Range {
		mem, err := unix.Mmap(memfd, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, flags)
		must(t, err)
		t.Cleanup(func() { unix.Munmap(mem) })
		return vm.RangeOf(mem)
	}
	anonShared, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	must(t, err)
	defer unix.Munmap(anonShared)
	mixed := mapPages(t, 16)
	must(t, sysErr(unix.SYS_MMAP, mixed.Start+8*pageSize, pageSize, unix.PROT_READ, unix.MAP_SHARED|unix.MAP_FIXED, uintptr(memfd), 0))
	for _, c := range []struct {
		name string
		r    vm.Range
	}{
		{"empty", vm.Range{}},
		{"go heap", vm.RangeOf(heap)},
		{"go heap inside", vm.RangeOf(heap[5000:9000])},
		{"hole", hole},
		{"nothing", vm.Range{Start: pageSize, End: 2 * pageSize}},
		{"kernel", vm.Range{Start: ^uintptr(0) - 2*pageSize, End: ^uintptr(0) - pageSize}},
		{"memfd shared", mapFd(unix.MAP_SHARED)},
		{"memfd private", mapFd(unix.MAP_PRIVATE)},
		{"anonymous shared", vm.RangeOf(anonShared)},
		{"mixed", mixed},
	} {
		if err := m.Cover(c.r); !errors.Is(err, monitor.ErrUncovered) {
			t.Errorf("%s: %v, want ErrUncovered", c.name, err)
		} else {
			t.Logf("%s: %v", c.name, err)
		}
	}
}

// TestCovered: kinds of private anonymous memory that are covered.
func TestCovered(t *testing.T) {
	m := open(t, nil)
	none := mapPages(t, 16)
	must(t, sysErr(unix.SYS_MPROTECT, none.Start, none.Len(), unix.PROT_NONE, 0, 0, 0))
	split := mapPages(t, 16)
	must(t, sysErr(unix.SYS_MPROTECT, split.Start+4*pageSize, pageSize, unix.PROT_READ, 0, 0, 0))
	locked := mapPages(t, 4)
	if err := sysErr(unix.SYS_MLOCK, locked.Start, locked.Len(), 0, 0, 0, 0); err != nil {
		t.Logf("mlock: %v", err)
	}
	for _, c := range []struct {
		name string
		r    vm.Range
	}{
		{"plain", mapPages(t, 4)},
		{"unaligned", vm.Range{Start: split.Start + 10*pageSize + 5, End: split.Start + 12*pageSize + 7}},
		{"no access", none},
		{"several mappings", split},
		{"locked", locked},
	} {
		for range 2 { // armed, and known to be armed
			if err := m.Cover(c.r); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
	}
}
