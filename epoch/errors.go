package epoch

import (
	"errors"
	"fmt"
)

// Errors of this package, always returned wrapped.
var (
	// ErrIncompatible is what every [IncompatibleError] matches.
	ErrIncompatible = errors.New("epoch: incompatible table")
	// ErrRange is returned for a range that is empty, inverted, or not wholly
	// below MaxAddress.
	ErrRange = errors.New("epoch: range can't be watched")
	// ErrMemory is returned for memory that is too small, not aligned to 8
	// bytes or, where an empty table is to be written, not zero.
	ErrMemory = errors.New("epoch: unusable memory")
	// ErrInUse is returned for the first watch through a table that another
	// party watches through, or did and ended without taking its interest back.
	ErrInUse = errors.New("epoch: another party watches through the table")
)

// IncompatibleError says which field of a table's header this package can't
// work with. It matches [ErrIncompatible].
type IncompatibleError struct {
	Field string // the header's field
	Have  uint64 // what the table holds
	Want  uint64 // what this side knows, or needs
}

func (e *IncompatibleError) Error() string {
	return fmt.Sprintf("epoch: incompatible table: %s is %#x, this side wants %#x", e.Field, e.Have, e.Want)
}

// Is reports whether target is ErrIncompatible.
func (e *IncompatibleError) Is(target error) bool { return target == ErrIncompatible }
