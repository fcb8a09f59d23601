package oracle

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/pindown/pindown/vm"
)

// Errors of this package, always returned wrapped.
var (
	// ErrNoPFN: the kernel hides frame numbers from this process.
	ErrNoPFN = errors.New("oracle: no frame numbers: CAP_SYS_ADMIN needed")
	// ErrShort: pagemap data that doesn't hold whole entries for the range.
	ErrShort = errors.New("oracle: short pagemap data")
)

// PageSize is the size of a page of /proc/self/pagemap.
var PageSize = uintptr(os.Getpagesize())

// Entry is one page's entry of /proc/PID/pagemap, as described in the kernel's
// Documentation/admin-guide/mm/pagemap.rst.
type Entry uint64

const (
	entryPFN     = 1<<55 - 1
	entryFile    = 1 << 61
	entrySwapped = 1 << 62
	entryPresent = 1 << 63
	entrySize    = 8
)

// Present reports whether a page is mapped.
func (e Entry) Present() bool { return e&entryPresent != 0 }

// Swapped reports whether the page is in swap, or the entry is another kind
// that isn't a page, such as a guard region's.
func (e Entry) Swapped() bool { return e&entrySwapped != 0 }

// File reports whether the page belongs to a file or to shared memory.
func (e Entry) File() bool { return e&entryFile != 0 }

// PFN returns the frame number; zero if no page is mapped or the kernel hides
// it.
func (e Entry) PFN() uint64 {
	if !e.Present() {
		return 0
	}
	return uint64(e) & entryPFN
}

// String returns the frame number in hexadecimal, or what is there instead.
func (e Entry) String() string {
	switch {
	case e.Swapped():
		return "swapped"
	case !e.Present():
		return "none"
	}
	return fmt.Sprintf("%#x", e.PFN())
}

// ParseEntries decodes pagemap data: 8 bytes a page in little endian. It
// returns a wrapped ErrShort if data doesn't end at an entry's end.
func ParseEntries(data []byte) ([]Entry, error) {
	if len(data)%entrySize != 0 {
		return nil, fmt.Errorf("parse %d bytes: %w", len(data), ErrShort)
	}
	entries := make([]Entry, 0, len(data)/entrySize)
	for ; len(data) > 0; data = data[entrySize:] {
		entries = append(entries, Entry(binary.LittleEndian.Uint64(data)))
	}
	return entries, nil
}

// Frames returns an entry for each page that r touches, as the page tables are
// now. It faults nothing in. Without CAP_SYS_ADMIN the entries say only which
// pages are present; see CheckPFN.
func Frames(r vm.Range) ([]Entry, error) {
	if err := r.Check(); err != nil {
		return nil, err
	}
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, fmt.Errorf("frames of %v: %w", r, err)
	}
	defer func() { _ = f.Close() }()
	buf := make([]byte, r.Pages(PageSize)*entrySize)
	n, err := f.ReadAt(buf, int64(r.Start/PageSize*entrySize))
	if n < len(buf) {
		return nil, fmt.Errorf("frames of %v: %w", r, errors.Join(ErrShort, err))
	}
	return ParseEntries(buf)
}

// CheckPFN returns nil if this process can see frame numbers, and a wrapped
// ErrNoPFN if it can't.
func CheckPFN() error {
	b := []byte{1}
	entries, err := Frames(vm.RangeOf(b))
	if err != nil {
		return fmt.Errorf("probe pagemap: %w", errors.Join(ErrNoPFN, err))
	}
	// b has just been written: its page is present.
	if entries[0].PFN() == 0 {
		return fmt.Errorf("probe pagemap: %w", ErrNoPFN)
	}
	return nil
}
