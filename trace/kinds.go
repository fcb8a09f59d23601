package trace

import "github.com/pindown/pindown/vm"

//go:generate go tool stringer -type Kind,Op,Via,UseKind,FDKind,LostCause -linecomment -output kinds_string.go

// The numbers of all enumerations here are part of the format: append, never
// renumber.

// Kind is what an [Event] is about.
type Kind uint8

// Kinds of event.
const (
	KindInvalid    Kind = iota // invalid
	KindOp                     // operation
	KindRegister               // register
	KindDeregister             // deregister
	KindUse                    // use
	kindEnd                    // unknown
)

// Op is an operation on an address space. Unlike [vm.Op] it also has those that
// leave every page that was mapped where it is, since recordings count them.
type Op uint8

// Operations.
const (
	OpInvalid        Op = iota // invalid
	OpMmap                     // mmap
	OpMmapFixed                // mmap-fixed
	OpMunmap                   // munmap
	OpMremap                   // mremap
	OpMremapFixed              // mremap-fixed
	OpBrk                      // brk
	OpDontneed                 // madvise-dontneed
	OpFree                     // madvise-free
	OpRemove                   // madvise-remove
	OpGuard                    // madvise-guard
	OpMadvise                  // madvise-other
	OpProcessMadvise           // process-madvise
	OpShmat                    // shmat
	OpShmatRemap               // shmat-remap
	OpShmdt                    // shmdt
	OpTruncate                 // truncate
	OpPunchHole                // punch-hole
	OpMprotect                 // mprotect
	OpExec                     // exec
	OpExit                     // exit
	OpUnknown                  // unknown
	opEnd                      // unknown
)

// ops says of each operation which system call it is, and what it is as a VM
// operation: OpInvalid if it changes no page that was mapped.
var ops = [opEnd]struct {
	call string
	vm   vm.Op
}{
	OpMmap:           {"mmap", vm.OpInvalid},
	OpMmapFixed:      {"mmap", vm.OpMmapFixed},
	OpMunmap:         {"munmap", vm.OpMunmap},
	OpMremap:         {"mremap", vm.OpMremap},
	OpMremapFixed:    {"mremap", vm.OpMremapFixed},
	OpBrk:            {"brk", vm.OpBrk},
	OpDontneed:       {"madvise", vm.OpDontneed},
	OpFree:           {"madvise", vm.OpFree},
	OpRemove:         {"madvise", vm.OpRemove},
	OpGuard:          {"madvise", vm.OpGuard},
	OpMadvise:        {"madvise", vm.OpInvalid},
	OpProcessMadvise: {"process_madvise", vm.OpProcessMadvise},
	OpShmat:          {"shmat", vm.OpInvalid},
	OpShmatRemap:     {"shmat", vm.OpShmat},
	OpShmdt:          {"shmdt", vm.OpShmdt},
	OpTruncate:       {"truncate", vm.OpTruncate},
	OpPunchHole:      {"fallocate", vm.OpPunchHole},
	OpMprotect:       {"mprotect", vm.OpInvalid},
	OpExec:           {"execve", vm.OpUnknown},
	OpExit:           {"exit", vm.OpUnknown},
	OpUnknown:        {"unknown", vm.OpUnknown},
}

// Call returns the name of the system call that does o: several operations are
// one call ("madvise"). It is "truncate" for ftruncate(2) too.
func (o Op) Call() string {
	if o == OpInvalid || o >= opEnd {
		return "unknown"
	}
	return ops[o].call
}

// VM returns o as a VM operation: vm.OpInvalid if o changes no page that was
// mapped, vm.OpUnknown if it isn't known or ends the whole address space.
func (o Op) VM() vm.Op {
	if o >= opEnd {
		return vm.OpUnknown
	}
	return ops[o].vm
}

// Via is the interface that a registration is made through.
type Via uint8

// Interfaces of registration.
const (
	ViaInvalid Via = iota // invalid
	ViaVerbs              // verbs
	ViaIOUring            // iouring
	ViaOther              // other
	viaEnd                // unknown
)

// UseKind is what is done with a buffer.
type UseKind uint8

// Kinds of use. Vectored calls have an event for each element.
const (
	UseInvalid    UseKind = iota // invalid
	UseRead                      // read
	UseWrite                     // write
	UseSend                      // send
	UseRecv                      // recv
	UseReadFixed                 // read-fixed
	UseWriteFixed                // write-fixed
	UseRDMA                      // rdma
	UseOther                     // other
	useEnd                       // unknown
)

// Writes reports whether the use writes to the buffer, so that a registration
// for it needs local write access.
func (k UseKind) Writes() bool {
	switch k {
	case UseWrite, UseSend, UseWriteFixed:
		return false
	default:
		return true
	}
}

// FDKind is what the file descriptor of a use refers to.
type FDKind uint8

// Kinds of file descriptor.
const (
	FDInvalid FDKind = iota // none
	FDFile                  // file
	FDBlock                 // block
	FDChar                  // char
	FDPipe                  // pipe
	FDSocket                // socket
	FDOther                 // other
	fdEnd                   // unknown
)

// LostCause is why records are missing.
type LostCause uint8

// Causes of loss.
const (
	LostInvalid LostCause = iota // invalid
	// LostBuffer: the recorder's buffer in the kernel was full.
	LostBuffer // buffer-full
	// LostTable: a table of the recorder (of calls in flight, of stacks) was
	// full.
	LostTable // table-full
	// LostDamage: a part of the file is damaged or missing. Readers make these;
	// no file holds them.
	LostDamage // damage
	// LostLimit: the recorder was told to keep no more.
	LostLimit // limit
	lostEnd   // unknown
)
