package demo

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/vmops"
	"github.com/pindown/pindown/vm"
)

// pool is a few buffers in anonymous memory, apart from the Go heap. A page
// without access stands on either side of each, so that the kernel never makes
// one mapping, or a huge page, of two buffers.
type pool struct {
	size   uintptr
	bufs   []vm.Range
	guards []vm.Range
}

func newPool(n int, size uintptr) (_ *pool, err error) {
	page := uintptr(os.Getpagesize())
	p := &pool{size: size}
	defer func() {
		if err != nil {
			err = fmt.Errorf("map %d buffers: %w", n, errors.Join(err, p.close()))
		}
	}()
	for range n {
		a, err := mmap(0, size+2*page, unix.PROT_NONE, 0)
		if err != nil {
			return nil, err
		}
		p.guards = append(p.guards, vm.Range{Start: a, End: a + size + 2*page})
		if _, err := mmap(a+page, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_FIXED); err != nil {
			return nil, err
		}
		p.guards[len(p.guards)-1].End = a + page
		p.guards = append(p.guards, vm.Range{Start: a + page + size, End: a + 2*page + size})
		p.bufs = append(p.bufs, vm.Range{Start: a + page, End: a + page + size})
	}
	return p, nil
}

// bytes returns the memory of buffer i.
func (p *pool) bytes(i int) []byte { return vmops.Bytes(p.bufs[i]) }

// renew puts other pages behind buffer i. Their content is undefined.
func (p *pool) renew(i int, how Churn, rng *rand.Rand) error {
	if how == ChurnMixed {
		how = ChurnUnmap + Churn(rng.IntN(int(ChurnMixed-ChurnUnmap)))
	}
	switch how {
	case ChurnUnmap:
		return p.unmap(i)
	case ChurnDontneed:
		return call("madvise", unix.SYS_MADVISE, p.bufs[i].Start, p.size, unix.MADV_DONTNEED, 0, 0)
	case ChurnRemap:
		if rng.IntN(2) == 0 {
			_, err := mmap(p.bufs[i].Start, p.size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_FIXED)
			return err
		}
		return p.moveOnto(i)
	default:
		return nil
	}
}

// unmap unmaps buffer i and maps it again at the same address. Should another
// thread have been given the address in between, the buffer moves.
func (p *pool) unmap(i int) error {
	if err := munmap(p.bufs[i]); err != nil {
		return err
	}
	const prot = unix.PROT_READ | unix.PROT_WRITE
	a, err := mmap(p.bufs[i].Start, p.size, prot, unix.MAP_FIXED_NOREPLACE)
	if errors.Is(err, unix.EEXIST) {
		a, err = mmap(0, p.size, prot, 0)
	}
	if err != nil {
		p.bufs[i] = vm.Range{}
		return err
	}
	p.bufs[i] = vm.Range{Start: a, End: a + p.size}
	return nil
}

// moveOnto moves written pages from elsewhere onto buffer i.
func (p *pool) moveOnto(i int) error {
	a, err := mmap(0, p.size, unix.PROT_READ|unix.PROT_WRITE, 0)
	if err != nil {
		return err
	}
	src := vm.Range{Start: a, End: a + p.size}
	vmops.Fill(src, uintptr(os.Getpagesize()))
	err = call("mremap", unix.SYS_MREMAP, a, p.size, p.size, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, p.bufs[i].Start)
	if err != nil {
		return errors.Join(err, munmap(src))
	}
	return nil
}

func (p *pool) close() error {
	var errs []error
	for _, list := range [][]vm.Range{p.bufs, p.guards} {
		for _, r := range list {
			if !r.Empty() {
				errs = append(errs, munmap(r))
			}
		}
	}
	p.bufs, p.guards = nil, nil
	return errors.Join(errs...)
}

// mmap maps private anonymous memory.
func mmap(addr, size uintptr, prot, flags int) (uintptr, error) {
	flags |= unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	a, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, size, uintptr(prot), uintptr(flags), ^uintptr(0), 0)
	if errno != 0 {
		return 0, os.NewSyscallError("mmap", errno)
	}
	return a, nil
}

func munmap(r vm.Range) error {
	return call("munmap", unix.SYS_MUNMAP, r.Start, r.Len(), 0, 0, 0)
}

func call(name string, trap, a, b, c, d, e uintptr) error {
	if _, _, errno := unix.Syscall6(trap, a, b, c, d, e, 0); errno != 0 {
		return os.NewSyscallError(name, errno)
	}
	return nil
}
