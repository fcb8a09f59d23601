package pindown

import "unsafe"

// id is what names e in a hold: its address, which on the architectures that
// Go has fits 48 bits, shifted left by 16. It keeps nothing alive: whoever looks
// for the id has the entry.
func (e *entry) id() uint64 { return uint64(uintptr(unsafe.Pointer(e))) << 16 }

// stackAddress returns an address on the calling goroutine's stack.
func stackAddress() uintptr {
	var here byte
	return uintptr(unsafe.Pointer(&here))
}

const holdSize = uint64(unsafe.Sizeof(hold{}))

// try returns the hold that was tried longest ago. Rounding down changes nothing,
// but lets the compiler compute the address once: see match.
func (l *Lane) try() *hold {
	l.next = (l.next + holdSize) % (LaneHolds * holdSize)
	return (*hold)(unsafe.Pointer((uintptr(unsafe.Pointer(&l.hold)) + uintptr(l.next)) &^ 7))
}
