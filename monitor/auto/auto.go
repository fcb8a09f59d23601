// Package auto picks the monitor for a process: the best one that proves
// itself on this machine by [monitor.SelfTest]. Callers in one process share
// it, and so its table and whatever it has attached to the kernel.
package auto

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/pindown/pindown/monitor"
)

// Opener is one way to a monitor.
type Opener struct {
	// Name is the monitor's name, such as "uffd".
	Name string
	// Mode tells apart several openers of one monitor; empty for the only one.
	Mode string
	// Open starts the monitor. Its error says why it can't run here.
	Open func() (monitor.Monitor, error)
}

// Candidate says what became of one opener.
type Candidate struct {
	Name, Mode string
	// Usable says that the monitor started and passed its self-test.
	Usable bool
	// Reason says why it isn't usable, or what it is limited to.
	Reason string
	// Coverage is the self-test's table; nil if it didn't get that far.
	Coverage monitor.Coverage
}

// String returns the name, and the mode if there is one: "bpf (functions)".
func (c Candidate) String() string {
	if c.Mode == "" {
		return c.Name
	}
	return fmt.Sprintf("%s (%s)", c.Name, c.Mode)
}

// ErrBlind is why a monitor that misses an operation on memory that it says it
// covers, without having said so ([monitor.Blinded]), is not used.
var ErrBlind = errors.New("auto: self-test failed")

// Try starts one monitor and puts it to the test. The monitor is nil if the
// candidate isn't usable, and else the caller's to close.
func Try(ctx context.Context, o Opener) (monitor.Monitor, Candidate) {
	c := Candidate{Name: o.Name, Mode: o.Mode}
	m, err := o.Open()
	if err != nil {
		c.Reason = err.Error()
		return nil, c
	}
	c.Coverage, err = monitor.SelfTest(m)
	blind := c.Coverage.Blind()
	if b, ok := m.(monitor.Blinded); ok {
		known := b.BlindTo()
		blind = slices.DeleteFunc(blind, func(cell monitor.Cell) bool { return slices.Contains(known, cell) })
	}
	if err == nil && len(blind) > 0 {
		err = fmt.Errorf("%w: blind to %v", ErrBlind, blind)
	}
	if err == nil && !c.Coverage.Caches() {
		err = fmt.Errorf("%w: no kind of mapping is covered", ErrBlind)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		c.Reason = errors.Join(err, m.Close()).Error()
		return nil, c
	}
	c.Usable = true
	return m, c
}

// current is the monitor that new callers share, if any.
var current struct {
	mu  sync.Mutex
	sel *state // guarded by mu
}

type state struct {
	mon        monitor.Monitor
	candidates []Candidate
	refs       int // guarded by current.mu
}

// Selection is a caller's share in the process's monitor. The nil Selection
// has no monitor.
type Selection struct {
	state *state
	once  sync.Once
}

// Open returns a share in the process's monitor. The first call, and one after
// the monitor was lost, opens and tests the candidates best first, until one is
// usable. It always returns a Selection; its Monitor is nil if none is.
func Open(ctx context.Context) *Selection { return OpenFor(ctx, 0) }

// OpenFor is Open for a caller with so many regions: the first call decides how
// large the table is, and later ones share it. More regions than it was made
// for are watched less precisely. Zero is the monitors' default.
func OpenFor(ctx context.Context, regions int) *Selection { return open(ctx, OpenersFor(regions)) }

func open(ctx context.Context, openers []Opener) *Selection {
	current.mu.Lock()
	defer current.mu.Unlock()
	if s := current.sel; s != nil && !s.mon.Table().Word().Lost() {
		s.refs++
		return &Selection{state: s}
	}
	s := &state{refs: 1}
	for _, o := range openers {
		m, c := Try(ctx, o)
		s.candidates = append(s.candidates, c)
		if m != nil {
			s.mon = m
			current.sel = s // one that was lost before goes with its last user
			break
		}
	}
	return &Selection{state: s}
}

// Monitor returns the monitor, or nil if none is usable.
func (s *Selection) Monitor() monitor.Monitor {
	if s == nil {
		return nil
	}
	return s.state.mon
}

// Candidates returns what became of each monitor that was tried, best first.
func (s *Selection) Candidates() []Candidate {
	if s == nil {
		return nil
	}
	return s.state.candidates
}

// Reason says in one line why no monitor is usable; empty if one is.
func (s *Selection) Reason() string {
	if s == nil || s.state.mon != nil {
		return ""
	}
	var why []string
	for _, c := range s.state.candidates {
		why = append(why, c.String()+": "+strings.ReplaceAll(c.Reason, "\n", "; "))
	}
	return strings.Join(why, "; ")
}

// Close gives the share back. The monitor is closed with its last share. It is
// idempotent.
func (s *Selection) Close() error {
	if s == nil {
		return nil
	}
	var err error
	s.once.Do(func() { err = s.release() })
	return err
}

func (s *Selection) release() error {
	current.mu.Lock()
	defer current.mu.Unlock()
	if s.state.refs--; s.state.refs > 0 || s.state.mon == nil {
		return nil
	}
	if current.sel == s.state {
		current.sel = nil
	}
	return s.state.mon.Close()
}
