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

// ErrBlind: an operation on a watched page wasn't seen.
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

// holds reports whether r is news of the heartbeat's own making.
func (s *scratch) holds(r vm.Range) bool { return s.r.Contains(r) }

func (s *scratch) release() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return nil
	}
	s.gone = true
	return munmap(s.r)
}

// beat carries out one operation for each way in which the kernel changes a
// mapping, and returns a wrapped ErrBlind if one isn't on record when it
// returns. Each must be recorded at least twice, before and after; a page that
// leaves the page tables in system-call mode, under their lock, once.
func (m *Monitor) beat() error {
	s := m.scratch
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return nil
	}
	a := vm.Range{Start: s.r.Start, End: s.r.Start + s.page}
	b := vm.Range{Start: a.End, End: s.r.End}
	var w epoch.Watch
	if err := m.table.Watch(&w, a); err != nil {
		return err
	}
	defer m.table.Unwatch(&w)

	zapped := uint64(2)
	if m.mode == ModeSyscalls {
		zapped = 1
	}
	for _, op := range []struct {
		name    string
		do      func() error
		touches uint64
	}{
		{"madvise", func() error {
			poke(a.Start)
			return madvise(a, unix.MADV_DONTNEED)
		}, zapped},
		// The page isn't there any more: only the mapping is replaced.
		{"mmap", func() error {
			_, err := mmap(a.Start, s.page, unix.MAP_FIXED)
			return err
		}, 2},
		// DONTUNMAP (Linux 5.7) leaves no hole that another thread could fill.
		{"mremap", func() error {
			poke(a.Start)
			return mremap(a, b.Start)
		}, 2},
	} {
		before := m.table.Stamp(&w)
		if err := op.do(); err != nil {
			return fmt.Errorf("try %s: %w", op.name, err)
		}
		if got := m.table.Stamp(&w) - before; got < op.touches {
			return fmt.Errorf("%s recorded %d times of %d: %w", op.name, got, op.touches, ErrBlind)
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
