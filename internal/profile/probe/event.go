package probe

import (
	"encoding/binary"
	"time"
)

// What is what an event is about. Enum what of src/profile.c has the same numbers.
type What uint16

// System calls on address spaces, as they return.
const (
	Nothing What = iota
	Munmap
	Mmap
	Mremap
	Madvise
	Brk // Args[1] is the break before
	Shmat
	Shmdt
	Mprotect
	ProcessMadvise
	Fallocate
	Ftruncate
	Truncate
	RemapFilePages
	operations // their number
)

// Transfers, by system call or by request to io_uring.
const (
	Read What = 16 + iota
	Write
	Recv
	Send
	ReadFixed
	WriteFixed
)

// Everything else.
const (
	// RingRegister is io_uring_register(2) with Args as there, of operations on
	// buffers. RingBuffer, after it, is one of its buffers: Args[0] and [2] the
	// address and the length, [4] the index.
	RingRegister What = 128 + iota
	RingBuffer
	// RingClose is close(2) of a ring.
	RingClose
	// Process is a process that is seen for the first time, Exec the execution
	// of a program.
	Process
	Exec
	// Exit is the end of a process; Result is as from wait(2), Args[0] the
	// processor time that it used, in nanoseconds.
	Exit
	_
	// VerbsRegister has as Args the protection domain, address, length, access
	// and local key; as Result the region. VerbsDeregister has the region as
	// Args[0]. VerbsReregister has as Args the region, address, length, and what
	// to change.
	VerbsRegister
	VerbsDeregister
	VerbsReregister
)

// Operation reports whether w is a call on an address space.
func (w What) Operation() bool { return w > Nothing && w < operations }

// names of operations are those of the system calls.
var names = [operations]string{
	"", "munmap", "mmap", "mremap", "madvise", "brk", "shmat", "shmdt", "mprotect",
	"process_madvise", "fallocate", "ftruncate", "truncate", "remap_file_pages",
}

// String returns the name of the system call of an operation, and of a transfer
// what it does.
func (w What) String() string {
	if w < operations {
		return names[w]
	}
	switch w {
	case Read:
		return "read"
	case Write:
		return "write"
	case Recv:
		return "recv"
	case Send:
		return "send"
	case ReadFixed:
		return "read-fixed"
	case WriteFixed:
		return "write-fixed"
	default:
		return "other"
	}
}

// Event is something that a followed task did.
type Event struct {
	What     What
	PID, TID uint32
	// Time is that of the entry, by CLOCK_MONOTONIC; Took the time to the return.
	Time, Took time.Duration
	Args       [5]uint64
	Result     int64
	// Ring names an io_uring context, while it lives.
	Ring uint64
	// Stack is the key of a stack for [Probe.Stack]; 0 if there is none. Top has
	// the caller of a function without a frame, perhaps: the topmost words of
	// the user's stack, or the link register.
	Stack uint64
	Top   [topWords]uint64
	// Part is the index of a vectored transfer's part, and of a transfer by
	// io_uring 1: it was submitted, and isn't done.
	Part uint16
}

// Comm returns the name of a Process or Exec event.
func (e *Event) Comm() string {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], e.Args[0])
	binary.LittleEndian.PutUint64(b[8:], e.Args[1])
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b[:])
}

// Parent returns the parent's process number of a Process or Exec event; 0 if
// it isn't one of this pid namespace.
func (e *Event) Parent() uint32 {
	if uint32(e.Args[3]) != e.PID {
		return 0
	}
	return uint32(e.Args[2])
}

const (
	topWords  = 3
	eventSize = 8*(2+5+2+topWords+1) + 16
)

// decode decodes a struct event of src/profile.c.
func (e *Event) decode(b []byte) bool {
	if len(b) < eventSize {
		return false
	}
	next := func() uint64 {
		v := binary.LittleEndian.Uint64(b)
		b = b[8:]
		return v
	}
	e.Time, e.Took = time.Duration(next()), time.Duration(next())
	for i := range e.Args {
		e.Args[i] = next()
	}
	e.Result, e.Ring = int64(next()), next()
	for i := range e.Top {
		e.Top[i] = next()
	}
	e.Stack = next()
	ids := next()
	e.PID, e.TID = uint32(ids), uint32(ids>>32)
	last := next()
	e.What, e.Part = What(last), uint16(last>>16)
	return true
}
