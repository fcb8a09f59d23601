package simhca

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// Process is the memory of this process.
//
// Nothing but a device can pin a process's pages, and reaching them by address
// would find whatever is mapped now, or nothing. So Process has an io_uring pin
// them as fixed buffers, and moves bytes through that ring: an access finds the
// page that was pinned, mapped or not, and can't fault. What this asks of the
// machine is what [iouring] does. Memory must be writable, even to register it
// for reading, and pinned pages count against RLIMIT_MEMLOCK.
//
// The simulated adapter's keys, queues and checks are the same over either
// memory. An access takes some microseconds, one at a time.
type Process struct {
	dev *iouring.Device

	mu      sync.Mutex // one access at a time.
	scratch int        // guarded by mu; a file in memory, through which bytes pass.
	closed  bool       // guarded by mu.
}

var _ Memory = (*Process)(nil)

// OpenProcess returns the memory of this process. It returns a wrapped
// [device.ErrNotSupported] where io_uring isn't available. Close it after the
// adapters that use it.
func OpenProcess() (*Process, error) {
	fd, err := unix.MemfdCreate("simhca", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("simhca: open process memory: %w", os.NewSyscallError("memfd_create", err))
	}
	dev, err := iouring.Open(nil)
	if err != nil {
		return nil, fmt.Errorf("simhca: open process memory: %w", errors.Join(err, unix.Close(fd)))
	}
	return &Process{dev: dev, scratch: fd}, nil
}

// Close gives everything back. It is idempotent.
func (p *Process) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	if err := errors.Join(p.dev.Close(), os.NewSyscallError("close", unix.Close(p.scratch))); err != nil {
		return fmt.Errorf("simhca: close process memory: %w", err)
	}
	return nil
}

// PageSize returns the system's page size.
func (p *Process) PageSize() uintptr { return uintptr(os.Getpagesize()) }

// limits returns what the ring can hold.
func (p *Process) limits() device.Limits { return p.dev.Limits() }

// Pin implements [Memory].
func (p *Process) Pin(r vm.Range, _ bool) (Pages, error) {
	reg, err := p.dev.Register(context.Background(), r, device.LocalWrite)
	if err != nil {
		return nil, err
	}
	return &processPages{p: p, reg: reg}, nil
}

// processPages are pages in a slot of the ring.
type processPages struct {
	p   *Process
	reg device.Registration
}

// move has the ring move bytes between the file and a page, and b in or out of
// the file.
func (g *processPages) move(i int, off uintptr, b []byte, write bool) error {
	size := g.p.PageSize()
	start := g.reg.Range.Start&^(size-1) + uintptr(i)*size + off
	mem := vm.Range{Start: start, End: start + uintptr(len(b))}
	g.p.mu.Lock()
	defer g.p.mu.Unlock()
	if g.p.closed {
		return fmt.Errorf("access page %d: %w", i, device.ErrClosed)
	}
	ring := g.p.dev.Ring()
	var err error
	if write {
		if _, err = unix.Pwrite(g.p.scratch, b, 0); err != nil {
			return os.NewSyscallError("pwrite", err)
		}
		err = ring.ReadFixed(g.p.scratch, mem, 0, g.reg.LocalKey, 0)
	} else {
		err = ring.WriteFixed(g.p.scratch, mem, 0, g.reg.LocalKey, 0)
	}
	if err != nil {
		return err
	}
	var done [1]iouring.Completion
	if err := ring.Do(done[:]); err != nil {
		return err
	}
	if err := done[0].Err(); err != nil {
		return err
	}
	if int(done[0].Res) != len(b) {
		return fmt.Errorf("access page %d: %d bytes of %d", i, done[0].Res, len(b))
	}
	if write {
		return nil
	}
	_, err = unix.Pread(g.p.scratch, b, 0)
	return os.NewSyscallError("pread", err)
}

func (g *processPages) Read(i int, off uintptr, b []byte) error  { return g.move(i, off, b, false) }
func (g *processPages) Write(i int, off uintptr, b []byte) error { return g.move(i, off, b, true) }

// Frame returns zero: physical addresses take privileges.
func (g *processPages) Frame(int) uint64 { return 0 }

func (g *processPages) Unpin() error { return g.p.dev.Deregister(g.reg) }
