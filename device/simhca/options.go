package simhca

import (
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// Capability is a set of optional interfaces of package device.
type Capability uint8

// Capabilities.
const (
	CanUpdate       Capability = 1 << iota // device.Updater
	CanRevoke                              // device.RevokingUpdater
	CanFlush                               // device.Flusher
	CanExpose                              // device.Exposer
	CanFastRegister                        // device.FastRegistrar
)

// Options configure a device. The zero value, or nil, is a device without
// cost and without faults, that executes work in its own goroutines.
type Options struct {
	// Name is the device's name; "simhca" if empty.
	Name string
	// Limits of the device. Zero means 65536 registrations (fast keys and
	// exposures count), 1 GiB for a range, no limit on pinned bytes; or what
	// the memory can hold if that is less. PageSize is always the memory's.
	Limits device.Limits
	// Without takes capabilities away: the methods then return a wrapped
	// device.ErrNotSupported.
	Without Capability
	// KeepPages says that a request which has begun keeps the pages that it
	// first met under each key when the key is updated, as an io_uring does.
	// Without, it keeps the page that it is in the middle of, and looks the
	// next one up afresh. Revoke and Deregister end that in either case.
	KeepPages bool
	// HoldRevoked says that peers' requests under a revoked key are answered
	// "receiver not ready" and wait until Load. Without, they fail.
	HoldRevoked bool
	// Costs is what calls and packets cost in simulated time.
	Costs Costs
	// Sleep makes calls take their cost in real time as well.
	Sleep bool
	// Fault, if set, is asked at each step of each verb whether it fails; see
	// Fault for what an error does. It is called from whatever goroutine does
	// the step, with no lock held, and may block; but at StepMoving a page is
	// in use, and whatever waits for that (Deregister, Revoke, Withdraw) must
	// not be called from there.
	Fault func(Fault) error
	// Stepper, if set, executes the work instead of the device's goroutines:
	// nothing happens but in its Step. Devices may share one.
	Stepper *Stepper
	// Seed decides, without a Stepper, in which order each queue executes
	// packets that it may execute in any order.
	Seed uint64
}

// Verb is something that the device does.
type Verb uint8

// Verbs.
const (
	VerbInvalid      Verb = iota // invalid
	VerbRegister                 // register
	VerbDeregister               // deregister
	VerbUpdate                   // update
	VerbRevoke                   // revoke
	VerbLoad                     // load
	VerbFlush                    // flush
	VerbExpose                   // expose
	VerbWithdraw                 // withdraw
	VerbAllocFastKey             // alloc-fast-key
	VerbFreeFastKey              // free-fast-key
	VerbPost                     // post
	VerbExecute                  // execute

	verbs
)

// Step is a place in a verb where it can fail.
type Step uint8

// Steps.
const (
	StepInvalid Step = iota // invalid
	// StepBegin is before anything is done. Every verb has it. For VerbExecute
	// it is before each packet of a data request, and before any other request.
	StepBegin // begin
	// StepPinned is after new pages were pinned and before the table is
	// written: Register, Update, Load.
	StepPinned // pinned
	// StepMoving is when a packet's pages were looked up and are in use, before
	// its bytes move: VerbExecute.
	StepMoving // moving
)

// Fault is a place where an error can be injected.
//
// What the error does: the verb fails with it (wrapped) and leaves the state
// that the package comment lists. One that wraps device.ErrRegistrationLost
// takes the registration with it, for Update, Revoke and Load. For VerbExecute
// the request completes with the status of a StatusError that it wraps, and
// StatusGeneral if it wraps none.
type Fault struct {
	Verb Verb
	Step Step
	// N counts the times that this verb has come to this step, from 1.
	N int
	// Key is the key that the verb is about, if it has one yet; for
	// VerbExecute, a request's remote key, or the key that it changes.
	Key uint32
	// Range is the range that the verb is about, if any.
	Range vm.Range
	// ID and Op are the request's; for VerbPost and VerbExecute.
	ID uint64
	Op Opcode
}

// Cost is what a verb costs: something for the call and something for each
// page that it pins, unpins or loads.
type Cost struct{ Call, Page time.Duration }

// Costs are a device's. The zero Costs are none.
type Costs struct {
	// Register, Deregister, Update, Revoke, Load are the verbs'.
	Register, Deregister, Update, Revoke, Load Cost
	// Expose and Withdraw are per exposure.
	Expose, Withdraw time.Duration
	// FastRegister and LocalInvalidate are those of the work requests; so are
	// window binds, which cost as a FastRegister without pages.
	FastRegister, LocalInvalidate Cost
	// Shootdown is what it costs to make the adapter forget translations that
	// it has cached. Each Deregister, Update, Revoke, Withdraw and
	// LocalInvalidate pays it.
	Shootdown time.Duration
	// Packet is what moving up to a page costs.
	Packet time.Duration
}
