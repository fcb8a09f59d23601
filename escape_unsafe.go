package pindown

import "unsafe"

// escapeSink is never written: escapeAlways is always false, which the
// compiler can't know. See escape.
var (
	escapeSink   unsafe.Pointer //nolint:unused // only the assignment matters
	escapeAlways bool
)

// escape makes the compiler allocate b's array on the heap. A buffer on a
// goroutine's stack would move when the stack grows, and the device go on with
// the old copy.
func escape(b []byte) {
	if escapeAlways {
		escapeSink = unsafe.Pointer(unsafe.SliceData(b))
	}
}
