package pindown

import (
	"context"
	"errors"
	"fmt"
)

// Request is one item of a batch.
type Request struct {
	Range  Range
	Access Access
}

// AcquireBatch acquires reqs[i] into regions[i], for all i, or nothing: if an
// item fails, what was acquired before it is released again, regions is left as
// zero Regions, and the error names the item. Registrations that the batch has
// made until then stay cached, idle.
//
// If every item hits, AcquireBatch costs what the hits cost: it takes no lock,
// allocates nothing and makes no system call. regions must be as long as reqs,
// else the error wraps ErrRange. Items may overlap.
//
// With Options.WaitForBudget two batches can each hold what the other waits for,
// and one that is larger than the budget waits for itself; their contexts should
// have deadlines.
func (c *Cache) AcquireBatch(ctx context.Context, reqs []Request, regions []Region) error {
	if len(regions) != len(reqs) {
		return fmt.Errorf("acquire batch of %d into %d regions: %w", len(reqs), len(regions), ErrRange)
	}
	for i, req := range reqs {
		r, err := c.AcquireRange(ctx, req.Range, req.Access)
		if err != nil {
			err = errors.Join(fmt.Errorf("batch item %d: %w", i, err), ReleaseAll(regions[:i]))
			clear(regions)
			return err
		}
		regions[i] = r
	}
	return nil
}

// TryAcquireBatch is AcquireBatch for hits only: it acquires all and reports
// true, or acquires nothing and reports false.
func (c *Cache) TryAcquireBatch(reqs []Request, regions []Region) bool {
	if len(regions) != len(reqs) {
		return false
	}
	for i, req := range reqs {
		r, ok := c.TryAcquireRange(req.Range, req.Access)
		if !ok {
			_ = ReleaseAll(regions[:i]) // of cached regions: can't fail
			clear(regions)
			return false
		}
		regions[i] = r
	}
	return true
}

// ReleaseAll releases every region and sets it to the zero Region. It goes on
// after an error and returns all of them joined.
func ReleaseAll(regions []Region) error {
	var err error
	for i := range regions {
		if e := regions[i].Release(); e != nil {
			err = errors.Join(err, e)
		}
		regions[i] = Region{}
	}
	return err
}

// Prefetch registers r, so that an Acquire soon after is a hit, and reports
// whether it would be one now: false if r is registered per use, in which case
// nothing stays registered, or has been given up already. Errors are those of
// Acquire.
func (c *Cache) Prefetch(ctx context.Context, r Range, access Access) (cached bool, err error) {
	reg, err := c.AcquireRange(ctx, r, access)
	if err != nil {
		return false, err
	}
	cached = reg.Cached() && !reg.e.dead()
	return cached, reg.Release()
}
