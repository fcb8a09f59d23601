package trace

import (
	"errors"
	"fmt"
)

// Errors, to be tested for with errors.Is.
var (
	// ErrFormat: what was read is not a trace, or empty.
	ErrFormat = errors.New("not a trace")
	// ErrVersion: the trace was written in a format that this package doesn't
	// know.
	ErrVersion = errors.New("unknown trace version")
	// ErrTruncated: the end of the trace is missing: it was cut, or its writer
	// died.
	ErrTruncated = errors.New("trace is truncated")
	// ErrCorrupt: parts of the trace are damaged.
	ErrCorrupt = errors.New("trace is damaged")
	// ErrRecord: a record can't be written because it makes no sense or is too
	// large.
	ErrRecord = errors.New("bad record")
	// ErrClosed: the writer was closed.
	ErrClosed = errors.New("trace writer is closed")
)

// DamageError says what is missing of a trace whose intact parts have all been
// read. It is [ErrTruncated], [ErrCorrupt], or both.
type DamageError struct {
	// Truncated: the trace doesn't end as a whole one does.
	Truncated bool
	// Places is how many damaged places there are, not counting the missing
	// end.
	Places int
	// Offset is where in the file the first damage begins.
	Offset int64
	// Records is how many records are missing as far as that is known.
	Records uint64
}

// Error describes the damage.
func (e *DamageError) Error() string {
	s := ErrTruncated.Error()
	switch {
	case e.Places > 0 && e.Truncated:
		s = fmt.Sprintf("%v in %d places and truncated", ErrCorrupt, e.Places)
	case e.Places > 0:
		s = fmt.Sprintf("%v in %d places", ErrCorrupt, e.Places)
	}
	s += fmt.Sprintf(", first at byte %d", e.Offset)
	if e.Records > 0 {
		s += fmt.Sprintf("; at least %d records are missing", e.Records)
	}
	return s
}

// Is reports whether target is one of the errors that e is.
func (e *DamageError) Is(target error) bool {
	return target == ErrTruncated && e.Truncated || target == ErrCorrupt && e.Places > 0
}
