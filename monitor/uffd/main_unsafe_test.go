package uffd

import (
	"unsafe"

	"github.com/pindown/pindown/vm"
)

// fill writes to each page of r.
func fill(r vm.Range) {
	for a := r.Start; a < r.End; a += pageSize {
		*(*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&a))) = 1
	}
}
