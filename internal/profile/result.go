package profile

import (
	"encoding/json"
	"io"
)

// Result is what a run has shown. Times are in seconds; points in time count
// from the beginning.
type Result struct {
	Command []string `json:"command"`
	PID     int      `json:"pid"`
	// ExitCode is the program's, 128 and the signal's number if one ended it; -1
	// if it didn't end, or that wasn't seen.
	ExitCode int     `json:"exit_code"`
	Ended    bool    `json:"ended"`
	Signal   string  `json:"signal,omitempty"`
	Seconds  float64 `json:"seconds"`
	Kernel   string  `json:"kernel"`
	PageSize int     `json:"page_size"`
	// Operations are by the name of the system call.
	Operations map[string]*Operation `json:"operations"`
	// Timeline has the operations per interval.
	Timeline  Timeline   `json:"timeline"`
	Processes int        `json:"processes"`
	Threads   []Thread   `json:"threads"`
	CallSites []CallSite `json:"call_sites"`
	Uses      Uses       `json:"uses"`
	// Registering sums up all registrations.
	Registering Registering `json:"registering"`
	// Registrations are the first ones.
	Registrations []*Registration `json:"registrations"`
	// Stale sums up all stale windows, StaleWindows are the first ones.
	Stale        Stale          `json:"stale"`
	StaleWindows []*StaleWindow `json:"stale_windows"`
	Lost         Lost           `json:"lost"`
	Overhead     Overhead       `json:"overhead"`
	// Notes are for people: what couldn't be seen.
	Notes []string `json:"notes"`
}

// Operation sums up the calls of one kind.
type Operation struct {
	// Count is all calls that returned, Failed those with an error among them.
	// These, Bytes and Seconds are exact even if events were lost.
	Count  uint64 `json:"count"`
	Failed uint64 `json:"failed"`
	// Bytes is the sum of the sizes of the calls that didn't fail; of
	// truncate and ftruncate it isn't known, of brk it is the change.
	Bytes uint64 `json:"bytes"`
	// Seconds is the time from entry to return.
	Seconds float64 `json:"seconds"`
	// Pages is the number of pages that the ranges touch, mapped or not.
	Pages uint64 `json:"pages"`
	// Changes counts the calls that replaced or removed pages that were mapped,
	// by what they asked for: a registration there is stale.
	Changes uint64  `json:"changes"`
	Mean    float64 `json:"mean_seconds"`
	P50     float64 `json:"p50_seconds"`
	P99     float64 `json:"p99_seconds"`
	Max     float64 `json:"max_seconds"`
	// Kinds are those of one call: the advice of madvise, for example.
	Kinds     map[string]uint64 `json:"kinds"`
	Sizes     []SizeBucket      `json:"size_classes"`
	Latencies []LatencyBucket   `json:"latencies"`
}

// SizeBucket counts calls of up to so many bytes, a power of two, and of more
// than half of it.
type SizeBucket struct {
	UpTo  uint64 `json:"up_to_bytes"`
	Count uint64 `json:"count"`
	Bytes uint64 `json:"bytes"`
}

// LatencyBucket counts calls that took less than Below, and not less than the
// bucket before it.
type LatencyBucket struct {
	Below float64 `json:"below_seconds"`
	Count uint64  `json:"count"`
}

// Timeline counts per interval.
type Timeline struct {
	Interval float64         `json:"interval_seconds"`
	Points   []TimelinePoint `json:"points"`
}

// TimelinePoint is an interval's operations.
type TimelinePoint struct {
	Operations    uint64  `json:"operations"`
	Changes       uint64  `json:"changes"`
	Bytes         uint64  `json:"bytes"`
	Seconds       float64 `json:"seconds"`
	Uses          uint64  `json:"uses"`
	Registrations uint64  `json:"registrations"`
}

// Thread sums up one thread's operations.
type Thread struct {
	PID        uint32  `json:"pid"`
	TID        uint32  `json:"tid"`
	Name       string  `json:"name"`
	Operations uint64  `json:"operations"`
	Bytes      uint64  `json:"bytes"`
	Seconds    float64 `json:"seconds"`
}

// CallSite sums up the operations of one kind from one place of one program.
type CallSite struct {
	Operation string  `json:"operation"`
	Program   string  `json:"program"`
	Count     uint64  `json:"count"`
	Bytes     uint64  `json:"bytes"`
	Seconds   float64 `json:"seconds"`
	Stack     []Frame `json:"stack"`
}

// Frame is a place in a program. What isn't known is empty.
type Frame struct {
	Address  uint64 `json:"address"`
	Function string `json:"function,omitempty"`
	File     string `json:"file,omitempty"`
	Line     int    `json:"line,omitempty"`
	Module   string `json:"module,omitempty"`
	Offset   uint64 `json:"offset,omitempty"`
}

// Uses sums up the transfers.
type Uses struct {
	// Rule says what counts as one.
	Rule  string            `json:"rule"`
	Count uint64            `json:"count"`
	Bytes uint64            `json:"bytes"`
	Kinds map[string]uint64 `json:"kinds"`
}

// Registering sums up registrations. A call that registers several buffers has
// its time once.
type Registering struct {
	Registrations     uint64  `json:"registrations"`
	RegisteredBytes   uint64  `json:"registered_bytes"`
	RegisterSeconds   float64 `json:"register_seconds"`
	RegisterFailed    uint64  `json:"register_failed"`
	Deregistrations   uint64  `json:"deregistrations"`
	DeregisterSeconds float64 `json:"deregister_seconds"`
	Uses              uint64  `json:"uses"`
	MostBytes         uint64  `json:"most_bytes_at_once"`
}

// Registration is one that the program made.
type Registration struct {
	Number int    `json:"number"`
	Via    string `json:"via"` // "io_uring" or "verbs"
	PID    uint32 `json:"pid"`
	// Handle is the index of the ring's buffer, or the region's address.
	Ring   int     `json:"ring,omitempty"`
	Handle uint64  `json:"handle"`
	Start  uint64  `json:"start"`
	Length uint64  `json:"length"`
	At     float64 `json:"registered_at"`
	// Seconds is the share of the call's time.
	Seconds float64 `json:"register_seconds"`
	// Ended says how it ended; empty if it didn't.
	Ended             string  `json:"ended,omitempty"`
	EndedAt           float64 `json:"ended_at,omitempty"`
	DeregisterSeconds float64 `json:"deregister_seconds,omitempty"`
	Uses              uint64  `json:"uses"`
	Changes           uint64  `json:"changes"`
	Stack             []Frame `json:"stack"`
}

// Stale sums up stale windows.
type Stale struct {
	Windows   uint64 `json:"windows"`
	UsedAgain uint64 `json:"used_again"`
}

// StaleWindow is a change to the memory of a registration while it was
// registered: from then on the device and the program may see different pages.
type StaleWindow struct {
	// Registration is its number.
	Registration int     `json:"registration"`
	Operation    string  `json:"operation"`
	PID          uint32  `json:"pid"`
	TID          uint32  `json:"tid"`
	At           float64 `json:"at"`
	Start        uint64  `json:"start"`
	Length       uint64  `json:"length"`
	// UsedAgain says that the registration was used for that memory afterwards.
	// Uses of verbs aren't seen.
	UsedAgain  bool    `json:"used_again"`
	Uses       uint64  `json:"uses"`
	FirstUseAt float64 `json:"first_use_at,omitempty"`
	// EndedAt is when the registration ended; 0 if it didn't.
	EndedAt float64 `json:"ended_at,omitempty"`
	Stack   []Frame `json:"stack"`
	// UseStack is where the first use afterwards was submitted; empty if a thread
	// of the kernel polls for submissions.
	UseStack          []Frame `json:"use_stack,omitempty"`
	RegistrationStack []Frame `json:"registration_stack"`
}

// Lost counts what is missing in all but the counts of operations.
type Lost struct {
	Events   uint64 `json:"events"`
	Stacks   uint64 `json:"stacks"`
	Tasks    uint64 `json:"tasks"`
	Mappings uint64 `json:"mappings"`
}

// Overhead is what the profile cost.
type Overhead struct {
	// Measured says that the BPF programs' time is known.
	Measured bool   `json:"measured"`
	Runs     uint64 `json:"bpf_runs"`
	// Seconds is the time in BPF programs for the program's tasks, MachineSeconds
	// that for all tasks of the machine: the programs look at every system call
	// for whose it is. ReaderSeconds is the processor time of the profiler
	// meanwhile.
	Seconds        float64 `json:"bpf_seconds"`
	MachineSeconds float64 `json:"bpf_machine_seconds"`
	ReaderSeconds  float64 `json:"reader_seconds"`
	// ProgramSeconds is the processor time of the program and all that it made
	// and that ended; 0 if it isn't known.
	ProgramSeconds float64 `json:"program_seconds"`
	// Share is Seconds in ProgramSeconds.
	Share float64 `json:"share"`
}

// WriteJSON writes the result, indented.
func (r *Result) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
