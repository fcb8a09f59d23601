package simhca

import (
	"fmt"
	"sync"
)

// poison fills frames that are free.
const poison = 0xdb

// maxFaults bounds what is remembered of a run gone wrong.
const maxFaults = 32

// frame is one physical page. It is free when nothing maps it and nothing pins
// it. One that is pinned but not mapped is an orphan: a stale registration
// still reaches it, and nobody will ever see what is written there.
type frame struct {
	number uint64
	gen    uint64 // lives so far; odd while in use.
	mapped int    // page-table entries that point here.
	pins   int
	data   []byte // nil reads as zeros.
}

// page is a frame in one of its lives: it doesn't reach the next one.
type page struct {
	f   *frame
	gen uint64
}

// frames are the physical memory of a Space. One lock guards them all, their
// content too: an access to a page is atomic.
type frames struct {
	size  uintptr // immutable.
	limit int     // immutable; zero is none.

	mu     sync.Mutex
	all    []*frame   // guarded by mu.
	free   []*frame   // guarded by mu; a stack, so that pages come back soon.
	stats  SpaceStats // guarded by mu.
	faults []error    // guarded by mu; what must never happen.
}

// alloc returns a page of zeros, mapped once.
func (m *frames) alloc() (page, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var f *frame
	if n := len(m.free); n > 0 {
		f = m.free[n-1]
		m.free = m.free[:n-1]
		m.checkPoisonLocked(f)
	} else {
		if m.limit != 0 && len(m.all) >= m.limit {
			return page{}, fmt.Errorf("%d pages in use: %w", len(m.all), ErrOutOfPages)
		}
		f = &frame{number: uint64(len(m.all) + 1)}
		m.all = append(m.all, f)
	}
	f.gen++
	f.mapped, f.data = 1, nil
	m.stats.Pages++
	return page{f, f.gen}, nil
}

// count adds to the numbers of mappings and pins of a page, and frees it if
// none is left.
func (m *frames) count(p page, mapped, pins int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := p.f
	if f.gen != p.gen || f.mapped+mapped < 0 || f.pins+pins < 0 {
		_ = m.faultLocked("release", f) // Noted; there is no one to tell.
		return
	}
	m.tallyLocked(f, -1)
	f.mapped += mapped
	f.pins += pins
	m.tallyLocked(f, 1)
	if f.mapped > 0 || f.pins > 0 {
		return
	}
	f.gen++
	for i := range f.data {
		f.data[i] = poison
	}
	m.free = append(m.free, f)
	m.stats.Pages--
	m.stats.Freed++
}

// tallyLocked keeps the numbers of pinned pages and orphans.
func (m *frames) tallyLocked(f *frame, n int) {
	if f.pins > 0 {
		m.stats.Pinned += n
		if f.mapped == 0 {
			m.stats.Orphans += n
		}
	}
}

// read copies from a page.
func (m *frames) read(p page, off uintptr, b []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.f.gen != p.gen {
		return m.faultLocked("read", p.f)
	}
	if p.f.data == nil {
		clear(b)
	} else {
		copy(b, p.f.data[off:off+uintptr(len(b))])
	}
	return nil
}

// write copies to a page. Whoever writes to an orphan loses what it writes.
func (m *frames) write(p page, off uintptr, b []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.f.gen != p.gen {
		return m.faultLocked("write", p.f)
	}
	if p.f.data == nil {
		p.f.data = make([]byte, m.size)
	}
	copy(p.f.data[off:off+uintptr(len(b))], b)
	if p.f.mapped == 0 {
		m.stats.OrphanWrites++
	}
	return nil
}

// checkPoisonLocked notes a free frame that was written to.
func (m *frames) checkPoisonLocked(f *frame) {
	for _, c := range f.data {
		if c != poison {
			_ = m.faultLocked("write", f) // Noted; there is no one to tell.
			return
		}
	}
}

func (m *frames) faultLocked(verb string, f *frame) error {
	err := fmt.Errorf("%s page %d: %w", verb, f.number, ErrFreedPage)
	if len(m.faults) < maxFaults {
		m.faults = append(m.faults, err)
	}
	return err
}
