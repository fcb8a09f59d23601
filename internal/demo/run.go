package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
)

const (
	// poolBuffers and poolBytes bound the pool. Many buffers in flight keep
	// the device from drowning the cost of registering.
	poolBuffers = 32
	poolBytes   = 32 << 20
	// maxSlices is how often each mode has its turn, unless a slice would get more
	// than sliceBlocks: who interrupts a long run wants to see all modes.
	maxSlices   = 4
	sliceBlocks = 100_000
	// A buffer is written blocksPerBuffer times or more in a slice, so that
	// what a cache registers at its start doesn't count for much.
	blocksPerBuffer = 100
	// windowBytes is how much is written, at least, before it is read back.
	windowBytes = 4 << 20
	// warmBatches are run in each mode before anything is counted.
	warmBatches = 4
)

// run is the state of Run.
type run struct {
	opts    Options
	dev     *iouring.Device
	buffers int
	window  int // batches between two readings
	file    *target
	back    []byte // what is read back
	res     *Result
	blocks  [modeEnd]uint64 // blocks written so far, for their names
	ids     []blockID       // of a window
	done    int             // blocks, in all modes
}

// Run carries out the demonstration. It stops early, with the context's error,
// when ctx ends, and then returns what it found until then, or nil if that is
// nothing; whatever was opened or mapped is given back before it returns.
// A Result with wrong blocks isn't an error: see [Result.Failure].
//
// Errors: ErrOptions, ErrNotSupported, ErrNotOurs, ErrMemlock, and those of the
// file and the device.
func Run(ctx context.Context, o *Options) (_ *Result, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &run{opts: o.withDefaults()}
	// One device for all: a ring that is closed gives back what it pinned of
	// RLIMIT_MEMLOCK some time later only.
	r.dev, err = iouring.Open(nil)
	if errors.Is(err, device.ErrNotSupported) {
		return nil, fmt.Errorf("%w: %w", ErrNotSupported, err)
	} else if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.dev.Close()) }()
	if err := r.size(r.dev.Limits()); err != nil {
		return nil, err
	}
	if r.file, err = openTarget(&r.opts, int64(r.window)*r.batchBytes()); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.file.close()) }()
	r.back, err = unix.Mmap(-1, 0, int(r.batchBytes())*r.window, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	defer func() { err = errors.Join(err, os.NewSyscallError("munmap", unix.Munmap(r.back))) }()
	r.res = &Result{
		Device: r.dev.Name(), Rounds: r.opts.Rounds, Churn: r.opts.Churn.String(),
		Buffer: r.opts.Buffer, Buffers: r.buffers, Seed: r.opts.Seed,
		File: r.file.name, FileSystem: r.file.fs, Direct: r.file.direct, io: r.file.io(),
	}
	r.ids = make([]blockID, r.window*r.buffers)
	totals, err := r.modes(ctx)
	if err != nil {
		if r.done == 0 || ctx.Err() == nil || !errors.Is(err, ctx.Err()) {
			return nil, err
		}
		r.res.Interrupted = true
	}
	r.res.conclude(totals)
	return r.res, err
}

// batchBytes is what one write of each buffer takes in the file.
func (r *run) batchBytes() int64 { return int64(r.buffers) * int64(r.opts.Buffer) }

// size chooses the number of buffers. A quarter of the limit is enough: beside
// the registrations of a whole pool there may be as many stale ones that are
// yet to go, and the limit is shared with the user's other processes.
func (r *run) size(lim device.Limits) error {
	size := uint64(r.opts.Buffer)
	n := max(2, min(poolBuffers, poolBytes/size, uint64(r.opts.Rounds)/blocksPerBuffer))
	if lim.MaxPinnedBytes > 0 {
		n = min(n, lim.MaxPinnedBytes/4/size)
	}
	if n == 0 {
		return fmt.Errorf("buffers of %s need %s of locked memory, and this process gets %s: %w",
			FormatSize(size), FormatSize(4*size), FormatSize(lim.MaxPinnedBytes), ErrMemlock)
	}
	r.buffers = int(n)
	r.window = int(max(1, min(windowBytes/r.batchBytes(), int64(r.opts.Rounds/r.buffers+1))))
	return nil
}

// modes lets the modes take turns, each at every place in the order.
func (r *run) modes(ctx context.Context) ([modeEnd]Totals, error) {
	var totals, warm [modeEnd]Totals
	for _, m := range Modes() {
		if err := r.slice(ctx, m, 0, min(warmBatches*r.buffers, r.opts.Rounds), true, &warm[m]); err != nil {
			return totals, err
		}
	}
	n := r.slices()
	for i := range n {
		blocks := r.opts.Rounds*(i+1)/n - r.opts.Rounds*i/n
		for j := range Modes() {
			m := Modes()[(i+j)%len(Modes())]
			if err := r.slice(ctx, m, uint64(i+1), blocks, false, &totals[m]); err != nil {
				return totals, err
			}
		}
	}
	return totals, nil
}

// slices returns how often each mode has its turn.
func (r *run) slices() int {
	n := min(maxSlices, max(1, r.opts.Rounds/(blocksPerBuffer*r.buffers)))
	return max(n, (r.opts.Rounds+sliceBlocks-1)/sliceBlocks)
}

// slice writes some blocks in one mode, and reads them back.
func (r *run) slice(ctx context.Context, m Mode, seed uint64, blocks int, warm bool, totals *Totals) (err error) {
	s, err := openSession(r, m, seed, totals)
	if err != nil {
		return fmt.Errorf("mode %v: %w", m, err)
	}
	defer func() {
		if cerr := s.close(); cerr != nil {
			err = errors.Join(err, fmt.Errorf("mode %v: %w", m, cerr))
		}
	}()
	for blocks > 0 {
		ids := r.ids[:min(len(r.ids), blocks)]
		for i := range ids {
			ids[i] = newBlockID(m, warm, r.blocks[m])
			r.blocks[m]++
		}
		n, err := r.fill(ctx, s, ids)
		if err != nil && ctx.Err() == nil {
			return err
		}
		// What was written before an interruption counts.
		if err := errors.Join(err, r.verify(ids[:n], totals)); err != nil {
			if !warm {
				r.done += n
			}
			return err
		}
		blocks -= n
		if !warm {
			r.done += n
			r.opts.Progress(r.done, r.opts.Rounds*len(Modes()))
		}
	}
	return nil
}

// fill writes a window of blocks, in batches, and returns how many it has
// written.
func (r *run) fill(ctx context.Context, s *session, ids []blockID) (n int, err error) {
	off := r.file.header
	for batch := range slices.Chunk(ids, r.buffers) {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		if s.begun {
			if err := s.churn(); err != nil {
				return n, fmt.Errorf("mode %v: %w", s.mode, err)
			}
		}
		s.begun = true
		if err := s.batch(ctx, off, batch); err != nil {
			return n, fmt.Errorf("mode %v, block %d: %w", s.mode, batch[0].number(), err)
		}
		off += r.batchBytes()
		n += len(batch)
	}
	return n, nil
}

// verify reads the blocks back, by plain reads into other memory, and compares
// them.
func (r *run) verify(want []blockID, totals *Totals) error {
	size := r.opts.Buffer
	got := r.back[:len(want)*size]
	for n := 0; n < len(got); {
		m, err := r.file.read.ReadAt(got[n:], r.file.header+int64(n))
		if err != nil {
			return fmt.Errorf("read blocks back from %s: %w", r.file.name, err)
		}
		n += m
	}
	for i, id := range want {
		b := got[i*size : (i+1)*size]
		if id.isIn(b) {
			continue
		}
		totals.WrongBlocks++
		// An earlier block of the same mode, complete: the registration led to
		// a page that the program no longer has.
		if f := found(b); f.mode() == id.mode() && f.number() < id.number() && f.isIn(b) {
			totals.StaleBlocks++
		}
	}
	return nil
}
