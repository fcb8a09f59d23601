package update

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// readsBetween is how many reads there are between two replacements.
const readsBetween = 5

// local is the half without a peer.
func local(ctx context.Context, o *Options) (Local, error) {
	probe, err := iouring.Open(nil)
	if errors.Is(err, device.ErrNotSupported) {
		return Local{Device: "none", Reason: err.Error(), Policies: []LocalTotals{}}, nil
	}
	if err != nil {
		return Local{}, err
	}
	res := Local{Device: probe.Name(), Policies: []LocalTotals{}}
	if err := probe.Close(); err != nil {
		return Local{}, err
	}
	for p := None; p < policyEnd; p++ {
		t, err := localPolicy(ctx, o, p)
		if err == nil || t.Reads > 0 {
			res.Policies = append(res.Policies, t)
		}
		if err != nil {
			return res, fmt.Errorf("policy %v: %w", p, err)
		}
	}
	return res, nil
}

// localRun is the local half under one policy.
type localRun struct {
	*owner
	dev    *iouring.Device
	bytes  []byte
	file   int // in memory, with what is read
	n      uint64
	totals LocalTotals
}

func localPolicy(ctx context.Context, o *Options, p Policy) (_ LocalTotals, err error) {
	r := &localRun{totals: LocalTotals{Name: p}}
	mon, err := manual.New(nil)
	if err != nil {
		return r.totals, err
	}
	defer func() { err = errors.Join(err, mon.Close()) }()
	if r.file, err = unix.MemfdCreate("pindown-demo", unix.MFD_CLOEXEC); err != nil {
		return r.totals, os.NewSyscallError("memfd_create", err)
	}
	defer func() { err = errors.Join(err, unix.Close(r.file)) }()
	if r.bytes, err = unix.Mmap(-1, 0, o.Pages*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return r.totals, os.NewSyscallError("mmap", err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(r.bytes)) }()
	if r.dev, err = iouring.Open(nil); err != nil {
		return r.totals, err
	}
	defer func() { err = errors.Join(err, r.dev.Close()) }()
	if r.owner, err = newOwner(p, r.dev, mon, vm.RangeOf(r.bytes), device.LocalWrite); err != nil {
		return r.totals, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	err = r.serve(ctx, o)
	r.totals.Registrations = r.cache.Stats().Register.Count
	return r.totals, err
}

func (r *localRun) serve(ctx context.Context, o *Options) error {
	for i := range o.Replacements + 1 {
		if i > 0 {
			if err := r.renew(ctx); err != nil {
				return err
			}
		}
		for range readsBetween {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := r.read(r.reg.LocalKey()); err != nil {
				return err
			}
		}
	}
	return nil
}

// renew replaces the pages, has the policy carried out, and tries the key of before.
func (r *localRun) renew(ctx context.Context) error {
	change := func() error {
		return os.NewSyscallError("madvise", unix.Madvise(r.bytes, unix.MADV_DONTNEED))
	}
	if r.policy != None {
		plain := change
		change = func() error { return r.mon.Do(r.mem, plain) }
	}
	if err := change(); err != nil {
		return err
	}
	key := r.reg.LocalKey()
	if err := r.replaced(ctx); err != nil {
		return err
	}
	if r.reg.LocalKey() == key {
		return nil
	}
	r.totals.KeyChanges++
	// Whoever wasn't told.
	return r.read(key)
}

// read reads a number into the buffer under key.
func (r *localRun) read(key uint32) error {
	r.n++
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], r.n)
	if _, err := unix.Pwrite(r.file, b[:], 0); err != nil {
		return os.NewSyscallError("pwrite", err)
	}
	words := uint64(len(r.bytes) / 8)
	off := uintptr(r.n * (words/2 + 1) % words * 8)
	ring := r.dev.Ring()
	at := vm.Range{Start: r.mem.Start + off, End: r.mem.Start + off + 8}
	if err := ring.ReadFixed(r.file, at, 0, key, r.n); err != nil {
		return err
	}
	var done [1]iouring.Completion
	if err := ring.Do(done[:]); err != nil {
		return err
	}
	if err := done[0].Err(); err != nil {
		if !errors.Is(err, unix.EFAULT) {
			return err
		}
		r.totals.Errors++
		return nil
	}
	r.totals.Reads++
	if binary.LittleEndian.Uint64(r.bytes[off:]) != r.n {
		r.totals.Lost++
	}
	return nil
}
