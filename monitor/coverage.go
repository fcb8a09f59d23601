package monitor

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/pindown/pindown/vm"
)

// Outcome is what a monitor did with one operation on one kind of mapping.
type Outcome uint8

// Outcomes.
const (
	OutcomeInvalid Outcome = iota
	// Caught: the stamp had changed before the operation returned.
	Caught
	// Refused: Cover returned ErrUncovered, so the range is never cached.
	Refused
	// Blind: covered but not seen. Allowed only where it is documented.
	Blind
	// Untested: the operation or the mapping isn't available on this machine.
	Untested
)

var outcomeNames = [...]string{"invalid", "caught", "refused", "blind", "untested"}

// String returns the name that reports and JSON use.
func (o Outcome) String() string { return outcomeNames[o] }

// MarshalJSON encodes the outcome by name.
func (o Outcome) MarshalJSON() ([]byte, error) { return json.Marshal(o.String()) }

// Cell is one operation on one kind of mapping.
type Cell struct {
	Op      vm.Op
	Mapping vm.Mapping
}

// String returns "<operation>/<mapping>".
func (c Cell) String() string { return fmt.Sprintf("%v/%v", c.Op, c.Mapping) }

// Coverage is the outcome by cell.
type Coverage map[Cell]Outcome

// Cells returns the cells in a fixed order.
func (c Coverage) Cells() []Cell {
	return slices.SortedFunc(maps.Keys(c), func(a, b Cell) int {
		if a.Mapping != b.Mapping {
			return int(a.Mapping) - int(b.Mapping)
		}
		return int(a.Op) - int(b.Op)
	})
}

// Blind returns the cells in which an operation on a covered range went
// unseen.
func (c Coverage) Blind() []Cell {
	return slices.DeleteFunc(c.Cells(), func(cell Cell) bool { return c[cell] != Blind })
}

// MarshalJSON encodes the table as an object from "<operation>/<mapping>" to
// outcome.
func (c Coverage) MarshalJSON() ([]byte, error) {
	m := make(map[string]Outcome, len(c))
	for cell, o := range c {
		m[cell.String()] = o
	}
	return json.Marshal(m)
}

// Caches reports whether an operation was caught on any kind of mapping: if
// not, everything is refused and there is nothing to cache.
func (c Coverage) Caches() bool {
	for _, o := range c {
		if o == Caught {
			return true
		}
	}
	return false
}

// Blinded is a monitor that, on memory it covers, doesn't see certain
// operations, and says so in its documentation: the program must not do them on
// memory that it registers, or must tell the cache (Cache.Invalidate).
type Blinded interface {
	Monitor

	// BlindTo returns the operations and kinds of mapping in question.
	BlindTo() []Cell
}
