package bench

import (
	"errors"
	"fmt"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// Factory makes subjects of one kind.
type Factory struct {
	// Impls are the names of the ways to use a subject: "pindown" and "lane"
	// are two ways to use one cache.
	Impls []string
	// New returns an empty subject that can hold that many regions, and no
	// more: beyond it evicts.
	New func(regions int) (Subject, error)
	// Registers says that it is no cache: each acquire registers.
	Registers bool
	// Unfit says why an implementation can't run a workload; "" if it can. Nil:
	// all can.
	Unfit func(Case) string
}

// Subject is a cache that is measured, on a device that does nothing.
type Subject interface {
	// Worker returns the loop of one thread that uses the subject as impl. It
	// is used by one thread at a time.
	Worker(impl string) (Worker, error)
	// Registrations returns how often the device was asked to register, and
	// how many registrations exist.
	Registrations() (made uint64, live int)
	// Invalidate carries out a VM operation on r, which lies in reserved address
	// space, and returns once the subject may know of it.
	Invalidate(r vm.Range) error
	// Close gives everything back.
	Close() error
}

// Worker acquires and releases.
type Worker interface {
	// Run acquires, for each page number in turn, the range of that length at
	// base + page*4096, registering it if need be, and releases it.
	Run(base, length uintptr, pages []uint32) error
	// Close ends the worker's use of its subject.
	Close() error
}

// Unfitness of subjects in general, returned wrapped.
var (
	// ErrUnfit: the subject has no such operation.
	ErrUnfit = errors.New("bench: not applicable")
	// ErrNotCached: the cache registers per use what should be resident.
	ErrNotCached = errors.New("bench: not cached")
)

// access is what every subject is asked for.
const access = pindown.LocalWrite

// pindownFactory makes pindown's caches under the given monitor.
func pindownFactory(mon *Monitor) Factory {
	return Factory{
		Impls: cacheImpls,
		New:   func(regions int) (Subject, error) { return newCacheSubject(mon, regions) },
	}
}

// Monitor is how to get the monitor of pindown's caches.
type Monitor struct {
	// Name is for the report.
	Name string
	// Open starts the monitor; nil means the manual one, of the table size that
	// suits the regions.
	Open func() (monitor.Monitor, error)
}

func (m *Monitor) open(regions int) (monitor.Monitor, error) {
	if m.Open != nil {
		return m.Open()
	}
	return manual.New(&manual.Options{Regions: regions})
}

// cacheSubject is pindown's cache.
type cacheSubject struct {
	dev   *Device
	mon   monitor.Monitor
	cache *pindown.Cache
}

func newCacheSubject(m *Monitor, regions int) (*cacheSubject, error) {
	mon, err := m.open(regions)
	if err != nil {
		return nil, err
	}
	dev := NewDevice()
	cache, err := pindown.New(dev, &pindown.Options{
		Monitor:    mon,
		MaxRegions: regions,
		MaxBytes:   1 << 47,
		MergeBytes: -1,
	})
	if err != nil {
		return nil, errors.Join(err, mon.Close())
	}
	return &cacheSubject{dev: dev, mon: mon, cache: cache}, nil
}

func (s *cacheSubject) Registrations() (made uint64, live int) {
	return s.dev.Registrations()
}

func (s *cacheSubject) Invalidate(r vm.Range) error {
	change := func() error { return remap(r, s.dev.populate) }
	if m, ok := s.mon.(*manual.Monitor); ok {
		return m.Do(r, change)
	}
	return change()
}

func (s *cacheSubject) Close() error {
	return errors.Join(s.cache.Close(), s.mon.Close())
}

// cached returns an error unless nothing has been registered per use.
func (s *cacheSubject) cached() error {
	st := s.cache.Stats()
	for cause, n := range st.PerUse {
		if n > 0 {
			return fmt.Errorf("%w: %d times per use (%v) under monitor %s", ErrNotCached, n, cause, st.Monitor)
		}
	}
	return nil
}
