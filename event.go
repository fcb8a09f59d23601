package pindown

import (
	"fmt"

	"github.com/pindown/pindown/vm"
)

//go:generate go tool stringer -type EventKind,MissCause,EvictCause,PerUseCause,StalePolicy,UpdatePolicy,UpdateOutcome -linecomment -output enum_string.go

// EventKind says what an [Event] is about.
type EventKind uint8

// Kinds of event.
const (
	EventInvalid         EventKind = iota // invalid
	EventInvalidated                      // invalidated
	EventEvicted                          // evicted
	EventBudgetFreed                      // budget-freed
	EventMonitorLost                      // monitor-lost
	EventBackgroundError                  // background-error
	EventLeaked                           // leaked
	// EventUpdated: a region was updated, and its keys are the same.
	EventUpdated // updated
	// EventKeyChanged: an update couldn't keep a region's keys, and peers must be
	// told NewRemoteKey. If that and NewLocalKey are zero the region is gone.
	EventKeyChanged // key-changed
)

// Event tells a program what happened to a region.
type Event struct {
	Kind EventKind
	// Range is the region's range; empty for EventBudgetFreed and
	// EventMonitorLost.
	Range Range
	// Op is the VM operation that invalidated the region. It is OpUnknown
	// where the news was lost or the region was found stale before it came.
	Op vm.Op
	// InUse says that the region still has holders: its registration lives
	// until the last release.
	InUse bool
	// LocalKey and RemoteKey are the keys that are or will be dead; of
	// EventUpdated, those that live on.
	LocalKey, RemoteKey uint32
	// NewLocalKey and NewRemoteKey are the keys after an update.
	NewLocalKey, NewRemoteKey uint32
	// Cause says why a region was evicted.
	Cause EvictCause
	// Err is what went wrong, for EventBackgroundError (a deregistration that is
	// tried again unless EventLeaked follows), EventLeaked, EventMonitorLost, and
	// for updates that were not what was asked for.
	Err error
}

// String returns the event in one line.
func (e Event) String() string {
	s := e.Kind.String()
	if !e.Range.Empty() {
		s += " " + e.Range.String()
	}
	switch e.Kind {
	case EventInvalidated:
		s += " by " + e.Op.String()
	case EventEvicted:
		s += " for " + e.Cause.String()
	case EventKeyChanged:
		s += fmt.Sprintf(" from %#x, %#x to %#x, %#x", e.LocalKey, e.RemoteKey, e.NewLocalKey, e.NewRemoteKey)
	default:
	}
	if e.InUse {
		s += " in use"
	}
	if e.Err != nil {
		s += fmt.Sprintf(": %v", e.Err)
	}
	return s
}

// MissCause says why an acquire was not a hit.
type MissCause uint8

// Causes of a miss.
const (
	MissInvalid MissCause = iota // invalid
	MissAbsent                   // absent
	MissStale                    // stale
	MissAccess                   // access
	MissPartial                  // partial
	missCauses
)

// EvictCause says why a region was given up although it was valid.
type EvictCause uint8

// Causes of an eviction.
const (
	EvictInvalid  EvictCause = iota // invalid
	EvictRegions                    // regions-limit
	EvictBytes                      // bytes-limit
	EvictDevice                     // device-limit
	EvictMerge                      // merge
	EvictClose                      // close
	EvictPressure                   // memory-pressure
	evictCauses
)

// PerUseCause says why a registration was made for one use instead of cached.
type PerUseCause uint8

// Causes of a registration per use.
const (
	PerUseInvalid   PerUseCause = iota // invalid
	PerUseNoMonitor                    // no-monitor
	PerUseUncovered                    // uncovered
	PerUsePending                      // pending
	PerUseBudget                       // budget
	PerUseLost                         // monitor-lost
	perUseCauses
)
