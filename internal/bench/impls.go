package bench

import (
	"context"
	"fmt"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/vm"
)

// Ways to use pindown's cache.
const (
	implPindown = "pindown"
	implLane    = "lane"
)

var cacheImpls = []string{implPindown, implLane}

func (s *cacheSubject) Worker(impl string) (Worker, error) {
	switch impl {
	case implPindown:
		return cacheWorker{s.cache}, nil
	case implLane:
		l, err := s.cache.NewLane()
		if err != nil {
			return nil, err
		}
		return laneWorker{l}, nil
	}
	return nil, fmt.Errorf("%s: %w", impl, ErrUnfit)
}

// cacheWorker uses a cache as everybody does.
type cacheWorker struct{ c *pindown.Cache }

func (w cacheWorker) Run(base, length uintptr, pages []uint32) error {
	ctx := context.Background()
	for _, p := range pages {
		start := base + uintptr(p)*PageSize
		r, err := w.c.AcquireRange(ctx, vm.Range{Start: start, End: start + length}, access)
		if err != nil {
			return err
		}
		if err := r.Release(); err != nil {
			return err
		}
	}
	return nil
}

func (w cacheWorker) Close() error { return nil }

// laneWorker uses a lane of its own.
type laneWorker struct{ l *pindown.Lane }

func (w laneWorker) Run(base, length uintptr, pages []uint32) error {
	ctx := context.Background()
	for _, p := range pages {
		start := base + uintptr(p)*PageSize
		r, err := w.l.AcquireRange(ctx, vm.Range{Start: start, End: start + length}, access)
		if err != nil {
			return err
		}
		if err := r.Release(); err != nil {
			return err
		}
	}
	return nil
}

func (w laneWorker) Close() error { return w.l.Close() }
