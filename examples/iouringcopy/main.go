// Command iouringcopy copies a file with io_uring's fixed buffers, registered
// through a pindown cache.
//
// README.md says how to run it. It is written to be read and copied from.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// errUsage: the command line is wrong, and it has been said why.
var errUsage = errors.New("usage")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, errUsage):
		os.Exit(2) //nolint:forbidigo // this is main
	case err != nil:
		fmt.Fprintln(os.Stderr, "iouringcopy:", err)
		os.Exit(1) //nolint:forbidigo // this is main
	}
}

func run(ctx context.Context, args []string) (err error) {
	f := flag.NewFlagSet("iouringcopy", flag.ContinueOnError)
	size := f.Int("block", 64<<10, "`bytes` of a block")
	depth := f.Int("depth", 16, "`blocks` under way at a time")
	renew := f.Int("renew", 32, "a buffer is freed and allocated again after this many `uses`; 0: never")
	f.Usage = func() {
		fmt.Fprintln(f.Output(), "usage: iouringcopy [flags] from to")
		f.PrintDefaults()
	}
	if err := f.Parse(args); err != nil || f.NArg() != 2 {
		if err == nil {
			f.Usage()
		}
		return errUsage
	}
	if *size < 1 || *size > iouring.MaxRange || *depth < 1 || *depth > 1024 || *renew < 0 {
		return fmt.Errorf("block of %d bytes, %d blocks, renew after %d", *size, *depth, *renew)
	}
	from, err := os.Open(f.Arg(0))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	if a, err := from.Stat(); err == nil {
		if b, err := os.Stat(f.Arg(1)); err == nil && os.SameFile(a, b) {
			return fmt.Errorf("%s and %s are the same file", f.Arg(0), f.Arg(1))
		}
	}
	to, err := os.Create(f.Arg(1))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()

	// The device is a ring and its table of buffers; the cache decides what is
	// in the table.
	dev, err := iouring.Open(&iouring.Options{Entries: *depth})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	cache, err := pindown.New(dev, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cache.Close()) }()
	fmt.Fprintf(os.Stderr, "monitor %s\n", cache.Monitor())
	if reason := cache.Reason(); reason != "" {
		fmt.Fprintln(os.Stderr, reason)
	}

	c := &copier{cache: cache, ring: dev.Ring(), from: int(from.Fd()), to: int(to.Fd()), renew: *renew}
	begin := time.Now()
	n, err := c.copy(ctx, *size, *depth)
	if err != nil {
		return err
	}
	elapsed := time.Since(begin)
	s := cache.Stats()
	acquires := c.hits + c.misses
	fmt.Fprintf(os.Stdout, "%d bytes in %.2f s, %.1f MiB/s; %d acquires, %.1f %% hits, %d registrations, %d saved\n",
		n, elapsed.Seconds(), float64(n)/(1<<20)/elapsed.Seconds(), acquires, 100*float64(c.hits)/float64(max(acquires, 1)), s.Register.Count, acquires-int(s.Register.Count))
	return nil
}

// copier copies one file to another.
type copier struct {
	cache    *pindown.Cache
	ring     *iouring.Ring
	from, to int
	renew    int
	slots    []slot

	hits, misses int
}

// slot is a buffer and the block that is in it.
type slot struct {
	buf     []byte
	region  pindown.Region
	off     int64
	n       int // bytes of the block
	done    int // bytes of it that were read, or written
	writing bool
	uses    int
}

// copy returns how many bytes there were.
func (c *copier) copy(ctx context.Context, size, depth int) (total int64, err error) {
	end, err := unix.Seek(c.from, 0, io.SeekEnd)
	if err != nil {
		return 0, os.NewSyscallError("lseek", err)
	}
	c.slots = make([]slot, depth)
	defer func() {
		for i := range c.slots {
			if b := c.slots[i].buf; b != nil {
				err = errors.Join(err, os.NewSyscallError("munmap", unix.Munmap(b)))
			}
		}
	}()
	for i := range c.slots {
		b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return 0, os.NewSyscallError("mmap", err)
		}
		c.slots[i].buf = b
	}
	var next int64
	flying := 0
	fill := func(i int) error {
		if next == end {
			return nil
		}
		c.slots[i].off, c.slots[i].n = next, int(min(int64(size), end-next))
		next += int64(c.slots[i].n)
		flying++
		return c.read(ctx, i)
	}
	for i := range c.slots {
		if err := fill(i); err != nil {
			return 0, errors.Join(err, c.drain(flying-1))
		}
	}
	bar := newBar(end)
	defer bar.end()
	done := make([]iouring.Completion, depth)
	for flying > 0 {
		if _, err := c.ring.SubmitAndWait(1); err != nil {
			return 0, err
		}
		n, err := c.ring.Completions(done)
		if err != nil {
			return 0, err
		}
		for k, d := range done[:n] {
			i := int(d.UserData)
			over, err := c.step(i, d)
			if err == nil && over {
				total += int64(c.slots[i].n)
				bar.show(total)
				if err = ctx.Err(); err == nil {
					flying--
					err = fill(i)
				}
			}
			if err != nil {
				// Neither this one is under way nor the rest of what has completed.
				return total, errors.Join(err, c.drain(flying-1-(n-1-k)))
			}
		}
	}
	return total, nil
}

// drain waits for what is under way after an error, since the buffers are about
// to be freed.
func (c *copier) drain(flying int) error {
	done := make([]iouring.Completion, len(c.slots))
	for flying > 0 {
		if _, err := c.ring.SubmitAndWait(1); err != nil {
			return err
		}
		n, err := c.ring.Completions(done)
		if err != nil {
			return err
		}
		flying -= n
	}
	for i := range c.slots {
		if c.slots[i].region != (pindown.Region{}) {
			if err := c.slots[i].region.Release(); err != nil {
				return err
			}
		}
	}
	return nil
}

// read has a slot's block read. This is where the cache is used: the buffer is
// registered now, whatever became of it since the last time.
func (c *copier) read(ctx context.Context, i int) error {
	s := &c.slots[i]
	r, ok := c.cache.TryAcquire(s.buf[:s.n], pindown.LocalWrite)
	if ok {
		c.hits++
	} else {
		c.misses++
		var err error
		if r, err = c.cache.Acquire(ctx, s.buf[:s.n], pindown.LocalWrite); err != nil {
			return err
		}
	}
	s.region, s.done, s.writing = r, 0, false
	return c.queue(i)
}

// queue queues the next part of what is to do with a slot.
func (c *copier) queue(i int) error {
	s := &c.slots[i]
	mem, off := vm.RangeOf(s.buf[s.done:s.n]), s.off+int64(s.done)
	if s.writing {
		return c.ring.WriteFixed(c.to, mem, off, s.region.LocalKey(), uint64(i))
	}
	return c.ring.ReadFixed(c.from, mem, off, s.region.LocalKey(), uint64(i))
}

// step goes on with a slot after a completion. over says that its block is
// copied.
func (c *copier) step(i int, d iouring.Completion) (over bool, err error) {
	s := &c.slots[i]
	if err := d.Err(); err != nil {
		return false, err
	}
	if d.Res == 0 {
		return false, fmt.Errorf("%d of %d bytes at %d: %w", s.done, s.n, s.off, io.ErrUnexpectedEOF)
	}
	s.done += int(d.Res)
	switch {
	case s.done < s.n: // A short read or write.
		return false, c.queue(i)
	case !s.writing:
		s.writing, s.done = true, 0
		return false, c.queue(i)
	}
	if err := s.region.Release(); err != nil {
		return false, err
	}
	s.uses++
	if c.renew == 0 || s.uses%c.renew != 0 {
		return true, nil
	}
	// The application frees the buffer and allocates another, which comes to
	// the same address: the moment at which a cache that doesn't watch goes wrong.
	r := vm.RangeOf(s.buf)
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_FIXED | unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Start, r.Len(), prot, flags, ^uintptr(0), 0); errno != 0 {
		return false, os.NewSyscallError("mmap", errno)
	}
	return true, nil
}

// bar is a progress bar on a terminal; elsewhere it shows nothing.
type bar struct {
	total int64
	shown time.Time
	tty   bool
}

func newBar(total int64) *bar {
	_, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS)
	return &bar{total: total, tty: err == nil}
}

// show draws the bar, ten times a second at most.
func (b *bar) show(n int64) {
	now := time.Now()
	if !b.tty || now.Sub(b.shown) < 100*time.Millisecond && n < b.total {
		return
	}
	b.shown = now
	const width = 50
	full := int(n * width / max(b.total, 1))
	fmt.Fprintf(os.Stderr, "\r\033[K[%s%s] %3d %%", strings.Repeat("=", full), strings.Repeat(" ", width-full), 100*n/max(b.total, 1))
}

func (b *bar) end() {
	if b.tty {
		fmt.Fprint(os.Stderr, "\r\033[K")
	}
}
