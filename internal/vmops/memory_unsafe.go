package vmops

import (
	"unsafe"

	"github.com/pindown/pindown/vm"
)

// Bytes returns the memory at r, which must not be Go memory. An access to an
// address that isn't mapped faults.
func Bytes(r vm.Range) []byte {
	// The detour keeps go vet quiet: the address never was a Go pointer.
	p := *(*unsafe.Pointer)(unsafe.Pointer(&r.Start))
	return unsafe.Slice((*byte)(p), r.Len())
}

// Fill writes its own address to the first word of each step bytes of r.
func Fill(r vm.Range, step uintptr) {
	for a := r.Start; a < r.End; a += step {
		p := *(*unsafe.Pointer)(unsafe.Pointer(&a))
		*(*uintptr)(p) = a
	}
}
