package vm

import (
	"errors"
	"fmt"
	"unsafe"
)

// Errors of range construction. They are returned wrapped with the offending
// numbers.
var (
	// ErrEmpty is returned for a range of zero or negative length.
	ErrEmpty = errors.New("vm: empty range")
	// ErrOverflow is returned for a range that runs past the end of the
	// address space.
	ErrOverflow = errors.New("vm: range overflows the address space")
)

// Range is the half-open range [Start,End) of virtual addresses.
//
// The zero Range is empty. A Range is a value: it keeps no memory alive.
type Range struct {
	Start, End uintptr
}

// NewRange returns [addr,addr+length). It returns a wrapped [ErrEmpty] if
// length is zero or negative, and a wrapped [ErrOverflow] if the sum wraps.
func NewRange(addr uintptr, length int) (Range, error) {
	if length <= 0 {
		return Range{}, fmt.Errorf("range at %#x of %d bytes: %w", addr, length, ErrEmpty)
	}
	end := addr + uintptr(length)
	if end < addr {
		return Range{}, fmt.Errorf("range at %#x of %d bytes: %w", addr, length, ErrOverflow)
	}
	return Range{Start: addr, End: end}, nil
}

// RangeOf returns the range that the elements of b occupy (up to len, not
// cap). It is empty if b is.
func RangeOf(b []byte) Range {
	p := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return Range{Start: p, End: p + uintptr(len(b))}
}

// Check returns nil if r is a non-empty range, and a wrapped [ErrEmpty] or
// [ErrOverflow] if it isn't.
func (r Range) Check() error {
	switch {
	case r.End == r.Start:
		return fmt.Errorf("range %v: %w", r, ErrEmpty)
	case r.End < r.Start:
		return fmt.Errorf("range %v ends before it starts: %w", r, ErrOverflow)
	}
	return nil
}

// Len returns the length in bytes; 0 for an empty or inverted range.
func (r Range) Len() uintptr {
	if r.End <= r.Start {
		return 0
	}
	return r.End - r.Start
}

// Empty reports whether r holds no address.
func (r Range) Empty() bool { return r.End <= r.Start }

// Contains reports whether every address of o lies in r. An empty o lies in
// every range.
func (r Range) Contains(o Range) bool {
	return o.Empty() || (r.Start <= o.Start && o.End <= r.End)
}

// Overlaps reports whether r and o share an address.
func (r Range) Overlaps(o Range) bool {
	return r.Start < o.End && o.Start < r.End && !r.Empty() && !o.Empty()
}

// Intersect returns the addresses that r and o share; empty if there are none.
func (r Range) Intersect(o Range) Range {
	x := Range{Start: max(r.Start, o.Start), End: min(r.End, o.End)}
	if x.Empty() {
		return Range{}
	}
	return x
}

// Union returns the smallest range that contains r and o, with whatever lies
// between them.
func (r Range) Union(o Range) Range {
	switch {
	case r.Empty():
		return o
	case o.Empty():
		return r
	}
	return Range{Start: min(r.Start, o.Start), End: max(r.End, o.End)}
}

// RoundOut returns the smallest range that contains r and whose ends are
// multiples of size, a power of two. An end that would wrap is clipped to the
// last multiple of size.
func (r Range) RoundOut(size uintptr) Range {
	if r.Empty() {
		return Range{}
	}
	mask := size - 1
	end := (r.End + mask) &^ mask
	if end < r.End {
		end = ^mask
	}
	return Range{Start: r.Start &^ mask, End: end}
}

// Pages returns the number of pages of the given size, a power of two, that r
// touches.
func (r Range) Pages(size uintptr) int {
	return int(r.RoundOut(size).Len() / size)
}

// String returns "[start,end)" in hexadecimal.
func (r Range) String() string { return fmt.Sprintf("[%#x,%#x)", r.Start, r.End) }
