package oracle

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

func mapPages(t *testing.T, n int) ([]byte, vm.Range) {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n*int(PageSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	})
	return b, vm.RangeOf(b)
}

func TestFramesFollowsPages(t *testing.T) {
	b, r := mapPages(t, 4)
	b[PageSize] = 1
	b[3*PageSize] = 1
	got, err := Frames(vm.Range{Start: r.Start + 1, End: r.End - 1})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{false, true, false, true} {
		if got[i].Present() != want || got[i].File() || got[i].Swapped() {
			t.Errorf("page %d: %v", i, got[i])
		}
	}
	if err := CheckPFN(); err != nil {
		if !errors.Is(err, ErrNoPFN) {
			t.Error(err)
		}
		if os.Getenv("CI") == "true" {
			t.Error(err)
		}
		t.Skip(err)
	}
	if got[1].PFN() == 0 || got[1].PFN() == got[3].PFN() {
		t.Errorf("frames %v", got)
	}
}

func TestFramesRejects(t *testing.T) {
	if _, err := Frames(vm.Range{}); !errors.Is(err, vm.ErrEmpty) {
		t.Error(err)
	}
	// Beyond what a process can map: pagemap ends.
	if _, err := Frames(vm.Range{Start: 1 << 62, End: 1<<62 + 1}); err == nil {
		t.Error("no error beyond the address space")
	}
}

func testWitness(t *testing.T, pfn bool) {
	t.Helper()
	b, r := mapPages(t, 40)
	for i := range b {
		b[i] = 1
	}
	hold := func() *Witness {
		w, err := Hold(r, 0)
		if err != nil {
			t.Fatal(err)
		}
		w.pfn = w.pfn && pfn
		t.Cleanup(func() {
			if err := errors.Join(w.Close(), w.Close()); err != nil {
				t.Error(err)
			}
		})
		return w
	}
	if d, err := hold().Compare(); err != nil || d.Any() {
		t.Errorf("untouched: %v, %v", d, err)
	}
	w := hold()
	// Twice: a frame that is let go could come straight back.
	for range 2 {
		if err := unix.Madvise(b[5*PageSize:7*PageSize], unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		b[5*PageSize] = 2
	}
	d, err := w.Compare()
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Changed) != 2 || d.Changed[0] != r.Start+5*PageSize {
		t.Errorf("difference %v of %v", d, r)
	}
	if len(w.Frames()) != 40 || len(w.Pages()) != 40 {
		t.Errorf("%d frames", len(w.Frames()))
	}
}

func TestWitnessByFrame(t *testing.T) {
	if err := CheckPFN(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	testWitness(t, true)
}

func TestWitnessByContent(t *testing.T) { testWitness(t, false) }

func TestHoldRejects(t *testing.T) {
	if _, err := Hold(vm.Range{}, 0); !errors.Is(err, vm.ErrEmpty) {
		t.Error(err)
	}
	if _, err := Hold(vm.Range{Start: PageSize, End: 1 << 30}, 0); !errors.Is(err, unix.ENOSPC) {
		t.Error(err)
	}
	b, r := mapPages(t, 2)
	if err := unix.Mprotect(b, unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	if _, err := Hold(r, 0); !errors.Is(err, unix.EFAULT) {
		t.Errorf("hold what can't be read: %v", err)
	}
}

func FuzzParseEntries(f *testing.F) {
	f.Add(make([]byte, 8))
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 0x80, 9})
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, err := ParseEntries(data)
		if (err != nil) != (len(data)%8 != 0) {
			t.Fatalf("%d bytes: %v", len(data), err)
		}
		for i, e := range entries {
			if uint64(e) != binary.LittleEndian.Uint64(data[i*8:]) {
				t.Fatalf("entry %d: %#x", i, uint64(e))
			}
			if e.PFN() != 0 && !e.Present() {
				t.Fatalf("%v has a frame", e)
			}
			_ = e.String()
		}
	})
}
