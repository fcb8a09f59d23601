package baseline

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/internal/bench"
	"github.com/pindown/pindown/vm"
)

// PerUse returns the factory of no cache at all: register, deregister, with
// io_uring and a page of real memory, since with a device that does nothing it
// would be nothing. What addresses it is asked for doesn't matter.
func PerUse() bench.Factory {
	why := "" // once it has been tried
	return bench.Factory{
		Impls:     []string{"per-use"},
		Registers: true,
		New:       func(int) (bench.Subject, error) { return openPerUse() },
		Unfit: func(c bench.Case) string {
			if c.Workload != bench.Hit {
				return "it holds nothing"
			}
			if why == "" {
				switch s, err := openPerUse(); {
				case err != nil:
					why = err.Error()
				default:
					_ = s.Close()
					why = "fits"
				}
			}
			if why == "fits" {
				return ""
			}
			return why
		},
	}
}

type perUse struct {
	dev *iouring.Device
	buf []byte
}

func openPerUse() (*perUse, error) {
	dev, err := iouring.Open(nil)
	if err != nil {
		return nil, err
	}
	buf, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map a buffer: %w", os.NewSyscallError("mmap", err)), dev.Close())
	}
	return &perUse{dev, buf}, nil
}

func (p *perUse) Worker(string) (bench.Worker, error) {
	return perUseWorker{p.dev, vm.RangeOf(p.buf)}, nil
}

func (p *perUse) Registrations() (made uint64, live int) { return 0, 0 }

func (p *perUse) Invalidate(vm.Range) error { return nil }

func (p *perUse) Close() error { return errors.Join(p.dev.Close(), unix.Munmap(p.buf)) }

type perUseWorker struct {
	dev *iouring.Device
	buf vm.Range
}

func (w perUseWorker) Run(_, _ uintptr, pages []uint32) error {
	ctx := context.Background()
	for range pages {
		reg, err := w.dev.Register(ctx, w.buf, device.LocalWrite)
		if err != nil {
			return err
		}
		if err := w.dev.Deregister(reg); err != nil {
			return err
		}
	}
	return nil
}

func (perUseWorker) Close() error { return nil }
