package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// The ways to have memory registered for a transfer.
const (
	wayCache    = "cache"    // by pindown
	wayRegister = "register" // before each transfer, and deregistered after
	wayBounce   = "bounce"   // once, a buffer that data is copied through
)

var ways = []string{wayCache, wayRegister, wayBounce}

// pool are the buffers of one end of a copy, as an application has them: it
// allocates them, uses them for some time and gives them back, and the next one
// comes to the same address.
type pool struct {
	way    string
	a      *adapter
	bufs   [][]byte
	renew  int // after how many uses a buffer gets new memory
	uses   []int
	bounce []byte
	fixed  device.Registration // of bounce
	stats  wayStats
}

// wayStats are what a way has done.
type wayStats struct {
	Acquires      int `json:"acquires"`
	Hits          int `json:"hits"`
	Registrations int `json:"registrations"`
	Copied        int `json:"copied"` // bytes, to or from the bounce buffer
}

// bounceAccess serves either end.
const bounceAccess = device.LocalWrite | device.RemoteWrite

func newPool(ctx context.Context, a *adapter, way string, n, size, renew int) (*pool, error) {
	p := &pool{way: way, a: a, renew: renew, uses: make([]int, n)}
	var errs []error
	for range n {
		b, err := allocate(size)
		p.bufs, errs = append(p.bufs, b), append(errs, err)
	}
	if way == wayBounce {
		b, err := allocate(n * size)
		if err == nil {
			p.bounce = b
			p.fixed, err = a.dev.Register(ctx, vm.RangeOf(b), bounceAccess)
			p.stats.Registrations++
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// allocate maps memory. What Go's allocator returns would do as well, but not
// every monitor can watch it, and then it is registered for each use.
func allocate(size int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return b, nil
}

// transfer is a buffer that is ready for the adapter.
type transfer struct {
	mem     vm.Range // what the adapter works on
	local   uint32
	remote  uint32
	buf     []byte // the application's
	staged  []byte // what the adapter works on instead, or nil
	release func() error
}

// prepare makes the first n bytes of a buffer ready. This is the place where the
// three ways differ.
func (p *pool) prepare(ctx context.Context, i, n int, access device.Access) (transfer, error) {
	t := transfer{buf: p.bufs[i][:n]}
	t.mem = vm.RangeOf(t.buf)
	p.stats.Acquires++
	switch p.way {
	case wayCache:
		if r, ok := p.a.cache.TryAcquire(t.buf, access); ok {
			p.stats.Hits++
			t.local, t.remote, t.release = r.LocalKey(), r.RemoteKey(), r.Release
			return t, nil
		}
		r, err := p.a.cache.Acquire(ctx, t.buf, access)
		if err != nil {
			return t, err
		}
		p.stats.Registrations++
		t.local, t.remote, t.release = r.LocalKey(), r.RemoteKey(), r.Release
	case wayRegister:
		reg, err := p.a.dev.Register(ctx, t.mem, access)
		if err != nil {
			return t, err
		}
		p.stats.Registrations++
		t.local, t.remote, t.release = reg.LocalKey, reg.RemoteKey, func() error { return p.a.dev.Deregister(reg) }
	case wayBounce:
		size := len(p.bufs[i])
		t.staged = p.bounce[i*size : i*size+n]
		t.mem = vm.RangeOf(t.staged)
		t.local, t.remote, t.release = p.fixed.LocalKey, p.fixed.RemoteKey, func() error { return nil }
	}
	return t, nil
}

// out moves the application's data to where the adapter finds it.
func (p *pool) out(t transfer) {
	if t.staged != nil {
		p.stats.Copied += copy(t.staged, t.buf)
	}
}

// in moves what has arrived to the application.
func (p *pool) in(t transfer, n int) []byte {
	if t.staged != nil {
		p.stats.Copied += copy(t.buf[:n], t.staged)
	}
	return t.buf[:n]
}

// done ends a transfer. Now and then the application frees the buffer and
// allocates another, at the same address: the moment at which a cache that
// doesn't watch goes wrong.
func (p *pool) done(i int, t transfer) error {
	if err := t.release(); err != nil {
		return err
	}
	p.uses[i]++
	if p.renew == 0 || p.uses[i]%p.renew != 0 {
		return nil
	}
	r := vm.RangeOf(p.bufs[i])
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_FIXED | unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Start, r.Len(), prot, flags, ^uintptr(0), 0); errno != 0 {
		return os.NewSyscallError("mmap", errno)
	}
	return nil
}

// Close frees the buffers. No transfer may be under way.
func (p *pool) Close() error {
	var errs []error
	if p.fixed != (device.Registration{}) {
		errs = append(errs, p.a.dev.Deregister(p.fixed))
	}
	for _, b := range append(p.bufs, p.bounce) {
		if b != nil {
			errs = append(errs, os.NewSyscallError("munmap", unix.Munmap(b)))
		}
	}
	return errors.Join(errs...)
}

// checkWay refuses what isn't a way.
func checkWay(way string) error {
	switch way {
	case wayCache, wayRegister, wayBounce:
		return nil
	}
	return fmt.Errorf("no such way: %q", way)
}
