package simhca

import "github.com/pindown/pindown/vm"

// Memory is what an adapter registers: something that resolves virtual
// addresses to pages and holds them. [Space] is simulated memory, [Process]
// the memory of this process.
type Memory interface {
	// PageSize returns the size of a page, a power of two.
	PageSize() uintptr
	// Pin resolves r, for writing as well if write is set, and holds the pages
	// until Unpin. It fails as a whole, with errors of package device.
	Pin(r vm.Range, write bool) (Pages, error)
}

// Pages are the pages that backed a range when they were pinned.
type Pages interface {
	// Read and Write move bytes between b and page number i, counted from the
	// page that holds the range's start, at off bytes from the page's start.
	// They stay within one page.
	Read(i int, off uintptr, b []byte) error
	Write(i int, off uintptr, b []byte) error
	// Frame returns the number of the physical page, zero if it isn't known.
	Frame(i int) uint64
	// Unpin gives the pages back. It is called once, after all else.
	Unpin() error
}
