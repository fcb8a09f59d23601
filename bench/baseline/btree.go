// Package baseline has what a program might do without a cache of its kind: a
// mutex and a B-tree, or no cache at all.
package baseline

import (
	"context"
	"errors"
	"sync"

	"github.com/google/btree"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/internal/bench"
	"github.com/pindown/pindown/vm"
)

// MutexBTree returns the factory of the cache that one would write first: a
// B-tree of registrations under a mutex. It learns of no VM operation but those
// it is told, and evicts nothing.
func MutexBTree() bench.Factory {
	return bench.Factory{
		Impls: []string{"mutex-btree"},
		New: func(int) (bench.Subject, error) {
			return &tree{dev: bench.NewDevice(), t: btree.NewG(32, func(a, b *region) bool { return a.r.Start < b.r.Start })}, nil
		},
		Unfit: func(c bench.Case) string {
			if c.Workload == bench.Miss && c.Pattern == "evict" {
				return "it evicts nothing"
			}
			return ""
		},
	}
}

type region struct {
	r    vm.Range
	reg  device.Registration
	refs int
	dead bool
}

type tree struct {
	dev *bench.Device
	mu  sync.Mutex
	t   *btree.BTreeG[*region] // guarded by mu
}

// covering returns the region that contains r, or nil. mu must be held.
func (t *tree) covering(r vm.Range) (found *region) {
	t.t.DescendLessOrEqual(&region{r: r}, func(x *region) bool {
		if x.r.End >= r.End {
			found = x
		}
		return false
	})
	return found
}

func (t *tree) acquire(r vm.Range) (*region, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if x := t.covering(r); x != nil {
		x.refs++
		return x, nil
	}
	reg, err := t.dev.Register(context.Background(), r, device.LocalWrite)
	if err != nil {
		return nil, err
	}
	x := &region{r: r, reg: reg, refs: 1}
	t.t.ReplaceOrInsert(x)
	return x, nil
}

func (t *tree) release(x *region) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if x.refs--; x.refs == 0 && x.dead {
		return t.dev.Deregister(x.reg)
	}
	return nil
}

func (t *tree) Worker(string) (bench.Worker, error) { return treeWorker{t}, nil }

func (t *tree) Registrations() (made uint64, live int) { return t.dev.Registrations() }

func (t *tree) Invalidate(r vm.Range) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var gone []*region
	t.t.AscendRange(&region{r: r}, &region{r: vm.Range{Start: r.End}}, func(x *region) bool {
		gone = append(gone, x)
		return true
	})
	var errs []error
	for _, x := range gone {
		t.t.Delete(x)
		if x.dead = true; x.refs == 0 {
			errs = append(errs, t.dev.Deregister(x.reg))
		}
	}
	return errors.Join(errs...)
}

func (t *tree) Close() error { return nil }

type treeWorker struct{ t *tree }

func (w treeWorker) Run(base, length uintptr, pages []uint32) error {
	for _, p := range pages {
		start := base + uintptr(p)*bench.PageSize
		x, err := w.t.acquire(vm.Range{Start: start, End: start + length})
		if err != nil {
			return err
		}
		if err := w.t.release(x); err != nil {
			return err
		}
	}
	return nil
}

func (treeWorker) Close() error { return nil }
