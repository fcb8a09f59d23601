package bpf

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/vm"
)

// ErrBlind is returned, wrapped, when an operation on the monitor's own page
// wasn't seen.
var ErrBlind = errors.New("bpf: operation not seen")

// scratch is two pages of the monitor's own to try operations on.
type scratch struct {
	mu   sync.Mutex
	page uintptr
	r    vm.Range
	gone bool // guarded by mu
}

func newScratch() (*scratch, error) {
	page := uintptr(os.Getpagesize())
	addr, err := mmap(0, 2*page, 0)
	if err != nil {
		return nil, fmt.Errorf("map scratch pages: %w", err)
	}
	return &scratch{page: page, r: vm.Range{Start: addr, End: addr + 2*page}}, nil
}

func (s *scratch) release() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return nil
	}
	s.gone = true
	return munmap(s.r)
}

// tries are the ways in which the kernel changes a mapping, tried on the first
// scratch page, with where each must be seen: at places 0 to 2 of src/monitor.c.
func (m *Monitor) tries() []try {
	s := m.scratch
	a := vm.Range{Start: s.r.Start, End: s.r.Start + s.page}
	zapped, replaced, moved := [places]bool{true, true}, [places]bool{true, true}, [places]bool{true, true}
	if m.mode == ModeSyscalls {
		zapped, replaced, moved = [places]bool{true}, [places]bool{2: true}, [places]bool{1: true, 2: true}
	}
	return []try{
		{"madvise", zapped, func() error {
			poke(a.Start)
			return madvise(a, unix.MADV_DONTNEED)
		}},
		// The page isn't there any more: only the mapping is replaced.
		{"mmap", replaced, func() error {
			_, err := mmap(a.Start, s.page, unix.MAP_FIXED)
			return err
		}},
		// DONTUNMAP (Linux 5.7) leaves no hole that another thread could fill.
		{"mremap", moved, func() error {
			poke(a.Start)
			return mremap(a, a.End)
		}},
	}
}

// places is the number of places where an operation may be seen.
const places = 3

type try struct {
	name string
	at   [places]bool
	do   func() error
}

func (t *try) run() error {
	if err := t.do(); err != nil {
		return fmt.Errorf("try %s: %w", t.name, err)
	}
	return nil
}

// beat makes sure that the programs see operations. It returns a wrapped
// ErrBlind if one isn't seen by the time that it returns.
func (m *Monitor) beat() error {
	s := m.scratch
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return nil
	}
	for _, t := range m.tries() {
		var before, after [places]uint64
		if err := m.probed.Get(&before); err != nil {
			return fmt.Errorf("read probed: %w", err)
		}
		if err := t.run(); err != nil {
			return err
		}
		if err := m.probed.Get(&after); err != nil {
			return fmt.Errorf("read probed: %w", err)
		}
		for i := range places {
			if t.at[i] && before[i] == after[i] {
				return fmt.Errorf("%s at place %d: %w", t.name, i, ErrBlind)
			}
		}
	}
	return nil
}

// tryTouches makes sure that what the programs see reaches the table. It is
// for the start: it adds to the table's interest for a moment.
func (m *Monitor) tryTouches() error {
	s := m.scratch
	s.mu.Lock()
	defer s.mu.Unlock()
	var w epoch.Watch
	if err := m.table.Watch(&w, vm.Range{Start: s.r.Start, End: s.r.Start + s.page}); err != nil {
		return err
	}
	defer m.table.Unwatch(&w)
	for _, t := range m.tries() {
		before := m.table.Stamp(&w)
		if err := t.run(); err != nil {
			return err
		}
		var want uint64
		for _, at := range t.at {
			want += uint64(boolean(at))
		}
		if got := m.table.Stamp(&w) - before; got < want {
			return fmt.Errorf("%s recorded %d times of %d: %w", t.name, got, want, ErrBlind)
		}
	}
	return nil
}

// watchOver makes sure, again and again, that the programs still run. They
// can't be detached as long as the process holds their descriptors, but a
// library may close descriptors that it doesn't know.
func (m *Monitor) watchOver(every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-m.stop:
			return
		case <-tick.C:
		}
		if m.lost.Load() != nil {
			return
		}
		if err := m.beat(); err != nil {
			_ = m.fail(err)
			return
		}
		m.countRecursion()
		m.countLost()
		m.beats.Add(1)
	}
}

// countRecursion looks for programs that the kernel left out because one of
// them was already running on that processor, which happens if the thread that
// ran it was preempted (the programs of functions mode are). Such an operation
// may be recorded half or not at all, so everything becomes suspect.
func (m *Monitor) countRecursion() {
	var sum uint64
	for _, p := range m.coll.Programs {
		stats, err := p.Stats()
		if err != nil {
			_ = m.fail(err)
			return
		}
		sum += stats.RecursionMisses
	}
	if m.recursion.Swap(sum) != sum {
		m.table.Touch(vm.Range{Start: 0, End: epoch.MaxAddress})
		m.SendLost()
	}
}
