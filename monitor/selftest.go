package monitor

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/vmops"
	"github.com/pindown/pindown/vm"
)

// ErrSelfTest is what every error of a self-test wraps: it could not be
// carried out, and the monitor must not be used.
var ErrSelfTest = errors.New("monitor: self-test failed")

const (
	// selfTestLimit is how long one operation may take. An operation that
	// takes longer is blocked for ever: nobody reads the monitor's events.
	selfTestLimit = 5 * time.Second
	// settleLimit is how long a condition that passes by itself is waited for,
	// such as an earlier operation's event that is still to be read.
	settleLimit = 200 * time.Millisecond
)

// Trial is one way to do an operation on one kind of mapping, and what became
// of it in a self-test.
type Trial struct {
	Cell
	// Operation names the way; several may share an Op, as mremap-move and
	// mremap-shrink do.
	Operation string
	// By says who did it: "this-thread", or "io_uring" for a kernel worker.
	By      string
	Outcome Outcome
	// Reason says why the trial is Untested.
	Reason error
}

// SelfTest carries out real VM operations on scratch mappings of every kind
// that this machine offers, and returns which of them m saw before they
// returned. Only operations that change pages are tried, by raw system calls
// of the calling process; operations with a heavy price for the process, such
// as a garbage collection, aren't.
//
// A cell that stands for several ways to do the operation shows the worst;
// Trials returns each. Blind cells are not an error: the caller decides what to
// do about them. An error, which wraps ErrSelfTest, means that m can't be used
// at all; if an operation blocks for 5 seconds the table is also marked lost,
// and the operation, which still hangs, cleans up after itself once m is
// closed.
//
// It takes some tens of milliseconds and leaves nothing behind. A Teller is
// told each operation.
func SelfTest(m Monitor) (Coverage, error) {
	trials, err := Trials(m)
	cov := Coverage{}
	for _, t := range trials {
		cov[t.Cell] = worse(cov[t.Cell], t.Outcome)
	}
	return cov, err
}

// Trials is SelfTest in detail. On error it returns the trials made so far.
func Trials(m Monitor) ([]Trial, error) {
	var trials []Trial
	for _, kind := range vmops.Kinds() {
		for _, o := range vmops.Operations() {
			if o.Heavy || !o.Changes(kind) || kind == vm.MappingGoHeap && o.Op == vm.OpMmapFixed {
				// The last would leave a mapping of its own in the Go heap.
				continue
			}
			for _, by := range []vmops.Actor{vmops.ThisThread, vmops.Ring} {
				if !slices.Contains(o.Actors(kind), by) {
					continue
				}
				t := Trial{Cell: Cell{Op: o.Op, Mapping: kind}, Operation: o.Name, By: by.String()}
				err := t.run(m, o, by)
				if err == nil && m.Table().Word().Lost() {
					err = ErrLost
				}
				if err != nil {
					return trials, fmt.Errorf("%w: %s on %v by %v: %w", ErrSelfTest, o.Name, kind, by, err)
				}
				trials = append(trials, t)
			}
		}
	}
	return trials, nil
}

// worse returns the outcome that stands for both.
func worse(a, b Outcome) Outcome {
	rank := [...]int{OutcomeInvalid: 0, Untested: 1, Caught: 2, Refused: 3, Blind: 4}
	if rank[a] > rank[b] {
		return a
	}
	return b
}

// run tries one operation in a goroutine of its own, so that a monitor that
// never lets it go doesn't hang the caller.
func (t *Trial) run(m Monitor, o *vmops.Operation, by vmops.Actor) error {
	type result struct {
		trial Trial
		err   error
	}
	// Buffered: the goroutine ends even if nobody waits any more.
	done := make(chan result, 1)
	go func(t Trial) {
		err := t.try(m, o, by)
		done <- result{t, err}
	}(*t)
	limit := time.NewTimer(selfTestLimit)
	defer limit.Stop()
	select {
	case r := <-done:
		*t = r.trial
		return r.err
	case <-limit.C:
		m.Table().SetLost()
		return fmt.Errorf("blocked for %v: %w", selfTestLimit, ErrLost)
	}
}

// try sets the outcome. An error is m's fault, not the machine's.
func (t *Trial) try(m Monitor, o *vmops.Operation, by vmops.Actor) (err error) {
	s, err := vmops.New(t.Mapping, &vmops.Options{Units: 8})
	if err != nil {
		t.Outcome, t.Reason = Untested, err
		return nil
	}
	defer func() { err = errors.Join(err, s.Release()) }()

	// The middle half is watched, and the operation acts on one page in it.
	n := s.Units()
	p := probe{m: m}
	defer p.end()
	switch err := p.begin(s.Slice(n/4, 3*n/4)); {
	case errors.Is(err, ErrUncovered), errors.Is(err, ErrPending):
		t.Outcome = Refused
		return nil
	case err != nil:
		return err
	}
	r := s.Slice(n/2, n/2+1)
	perform := func() error { return vmops.Perform(s, o, r, by, nil) }
	if teller, ok := m.(Teller); ok {
		err = teller.Do(o.Affected(s, r), perform)
	} else {
		err = perform()
	}
	valid := p.valid()
	if err != nil {
		t.Outcome, t.Reason = Untested, err
		return nil
	}
	// A hit check that said no is an announcement, not yet a record.
	if !valid && !settle(func() bool { return p.check == nil || p.check() }) {
		return fmt.Errorf("operation announced but never recorded: %w", ErrLost)
	}
	if valid || p.valid() {
		t.Outcome = Blind
	} else {
		t.Outcome = Caught
	}
	return nil
}

// probe is a registration as a cache would make it, without a device.
type probe struct {
	m     Monitor
	check func() bool
	watch epoch.Watch
	on    bool
	word  atomic.Uint64
	stamp uint64
}

// begin watches r and returns once the watch is covered and valid.
func (p *probe) begin(r vm.Range) error {
	t := p.m.Table()
	p.check = p.m.HitCheck()
	if err := t.Watch(&p.watch, r); err != nil {
		return err
	}
	p.on = true
	var err error
	// An operation on memory that was at these addresses earlier may still be
	// on its way into the table. It mustn't be taken for the one to come.
	if !settle(func() bool {
		word, stamp := t.Take(&p.watch)
		p.word.Store(uint64(word))
		p.stamp = stamp
		if err = p.m.Cover(r); err != nil {
			return !errors.Is(err, ErrPending)
		}
		return p.valid()
	}) && err == nil {
		return fmt.Errorf("range is never valid: %w", ErrLost)
	}
	return err
}

// valid is what a hit asks.
func (p *probe) valid() bool {
	if p.check != nil && !p.check() {
		return false
	}
	t := p.m.Table()
	return uint64(t.Word()) == p.word.Load() || t.Check(&p.watch, p.stamp, &p.word) == epoch.VerdictValid
}

func (p *probe) end() {
	if p.on {
		p.m.Table().Unwatch(&p.watch)
	}
}

// settle reports whether cond came true within settleLimit.
func settle(cond func() bool) bool {
	for start := time.Now(); ; {
		if cond() {
			return true
		}
		if time.Since(start) > settleLimit {
			return false
		}
		runtime.Gosched()
	}
}
