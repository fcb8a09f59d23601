package trace

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// Record is one of *[Meta], *[Process], *[Thread], *[Mapping], *[Stack],
// *[Event], *[Lost] and *[Exit].
type Record interface {
	tag() tag
	check() error
	append(b []byte, prev *previous) []byte
	decode(d *decoder, prev *previous)
}

// Meta describes a recording. It comes first; if there are several, the last
// counts.
type Meta struct {
	// Began is when the clock of the recording was zero.
	Began time.Time
	// Command is what was run, or what runs in the process that was attached to.
	Command []string
	// Host is the machine's architecture and the number of its CPUs.
	Arch string
	CPUs int
	// Kernel is the release, as uname -r prints it.
	Kernel string
	// PageSize is that of the machine in bytes, a power of two.
	PageSize int
	// Mode says how it was recorded, e.g. "bpf-syscalls", "synthetic".
	Mode string
	// UseRule says which buffer uses were recorded, for people, e.g. "read,
	// write, send of at least 4096 bytes"; empty if none were.
	UseRule string
	// Tool is the name and version of the recorder.
	Tool string
	// Labels are further facts.
	Labels map[string]string
}

// Process says that a process exists, from Start on.
type Process struct {
	Start     time.Duration
	PID, PPID uint32
	// Comm is the name that the kernel shows, Args the command line if known.
	Comm string
	Args []string
}

// Thread names a thread.
type Thread struct {
	Start    time.Duration
	PID, TID uint32
	Comm     string
}

// Mapping says what is mapped at a range, as far as the recorder knows.
type Mapping struct {
	Start time.Duration
	PID   uint32
	Range vm.Range
	Kind  vm.Mapping
	// Prot is as in mmap(2).
	Prot uint32
	// Path and Offset are those of a file that is mapped.
	Path   string
	Offset uint64
}

// Stack is a call stack in user space, innermost frame first.
type Stack struct {
	// ID is what events refer to; not zero. A later stack with the same ID
	// replaces the former for all events.
	ID     uint32
	Frames []Frame
}

// Frame is a call site. What isn't known is zero.
type Frame struct {
	Addr     uint64 // virtual address
	Function string
	File     string
	Line     uint32
	Module   string // the executable or library
	Offset   uint64 // of Addr in Module
}

// Event is something that happened: an operation on the address space, a
// registration or deregistration, or a use of a buffer.
type Event struct {
	Kind Kind
	// Op is the operation of a KindOp.
	Op Op
	// Via is the interface of a KindRegister or KindDeregister, and of a KindUse
	// that goes through a registration.
	Via Via
	// Use and FD are what a KindUse does, and to what.
	Use UseKind
	FD  FDKind
	// Access is that of a KindRegister.
	Access device.Access

	// PID is the process (thread group) whose address space is concerned, TID
	// the thread that called: of another process with process_madvise(2).
	PID, TID uint32
	// Stack is where it was called from; 0 if that isn't known.
	Stack uint32
	// Pages is how many pages were concerned (freed, moved, pinned), if the
	// recorder knows; 0 otherwise.
	Pages uint32

	// Start is the time of the call's entry since the recording began; Duration
	// the time to its return.
	Start, Duration time.Duration

	// Range is the memory concerned: for OpMremap* the old range, for OpBrk
	// what was freed (Dest is empty) or added (Dest equals Range), for OpExec
	// and OpExit empty, meaning everything.
	Range vm.Range
	// Dest is the new range of OpMremap*, otherwise empty but for OpBrk.
	Dest vm.Range

	// Result is -errno if the call failed. Otherwise it is the number of bytes
	// for a KindUse, and 0.
	Result int64

	// Owner and Handle name a registration in its process: the protection
	// domain and the memory region's address for verbs; the ring (any number
	// that is unique to it) and the index for io_uring. A KindRegister with an
	// Owner and Handle that is registered replaces that registration. Of a
	// KindUse they name the registration it goes through, if Via is set.
	Owner, Handle uint64
	// Key is the local key, if known.
	Key uint64
}

// Lost says that records are missing at this place.
type Lost struct {
	Time  time.Duration
	Cause LostCause
	// Records is how many are missing; 0 if that isn't known.
	Records uint64
}

// Exit says how a process that was run or watched ended, or the recording.
type Exit struct {
	Time time.Duration
	PID  uint32
	// Code is the exit code; Signal the signal that killed it, or 0.
	Code, Signal int
}

// Failed reports whether the call failed.
func (e *Event) Failed() bool { return e.Result < 0 }

// Changed returns the ranges whose pages the event, an operation, changed;
// empty ones if it changed none. An operation that failed changed nothing, but
// for a madvise with ENOMEM, which does its work where memory is mapped
// (madvise(2)). After OpExec and OpExit everything has changed: the first range
// is the whole address space.
func (e *Event) Changed() (a, b vm.Range) {
	if e.Kind != KindOp || e.Op.VM() == vm.OpInvalid {
		return a, b
	}
	if e.Failed() && (e.Result != -int64(unix.ENOMEM) || e.Op.Call() != "madvise" && e.Op != OpProcessMadvise) {
		return a, b
	}
	switch e.Op {
	case OpMremap, OpMremapFixed:
		old, now := e.Range, e.Dest
		if now.Start == old.Start && !now.Empty() {
			// In place: what was cut off.
			return vm.Range{Start: min(now.End, old.End), End: old.End}, b
		}
		if e.Op == OpMremapFixed {
			b = now
		}
		return old, b
	case OpBrk:
		if !e.Dest.Empty() {
			return a, b
		}
	case OpExec, OpExit:
		return vm.Range{End: ^uintptr(0)}, b
	default:
	}
	return e.Range, b
}
