package iouring_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// pinned returns VmPin of /proc/self/status, in KiB: what rings of this process
// hold. The kernel counts it whatever the limits are.
func pinned() (uint64, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmPin:"); ok {
			return strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
		}
	}
	return 0, errors.New("no VmPin in /proc/self/status")
}

// dataPath moves bytes through a ring's buffers by a file in memory.
type dataPath struct {
	ring func(dev device.Device) *iouring.Ring
}

func (p dataPath) move(dev device.Device, reg device.Registration, off int, b []byte, write bool) error {
	fd, err := unix.MemfdCreate("iouring-data", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	mem := vm.Range{Start: reg.Range.Start + uintptr(off), End: reg.Range.Start + uintptr(off+len(b))}
	ring := p.ring(dev)
	if write {
		if _, err := unix.Pwrite(fd, b, 0); err != nil {
			return err
		}
		err = ring.ReadFixed(fd, mem, 0, reg.LocalKey, 1)
	} else {
		err = ring.WriteFixed(fd, mem, 0, reg.LocalKey, 1)
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
		return fmt.Errorf("%d bytes moved of %d: %w", done[0].Res, len(b), io.ErrUnexpectedEOF)
	}
	if !write {
		_, err = unix.Pread(fd, b, 0)
	}
	return err
}

func (p dataPath) options() *devicetest.Options {
	return &devicetest.Options{
		Write: func(dev device.Device, reg device.Registration, off int, b []byte) error {
			return p.move(dev, reg, off, b, true)
		},
		Read: func(dev device.Device, reg device.Registration, off int, b []byte) error {
			return p.move(dev, reg, off, b, false)
		},
		Pinned: pinned,
	}
}

func TestConformsOwnRing(t *testing.T) {
	p := dataPath{func(dev device.Device) *iouring.Ring { return dev.(*iouring.Device).Ring() }}
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		return open(t, nil)
	}, p.options())
}

func TestConformsCallersRing(t *testing.T) {
	rings := map[device.Device]*iouring.Ring{}
	p := dataPath{func(dev device.Device) *iouring.Ring { return rings[dev] }}
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		ring, err := iouring.NewRing(nil)
		needRing(t, err)
		d, err := iouring.New(ring.Fd(), &iouring.Options{First: 3, Slots: 77})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = errors.Join(d.Close(), ring.Close()) })
		rings[d] = ring
		return d
	}, p.options())
}

// A fake over a real device is still a device.
func TestConformsUnderFake(t *testing.T) {
	inner := map[device.Device]*iouring.Device{}
	p := dataPath{func(dev device.Device) *iouring.Ring { return inner[dev].Ring() }}
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		d := open(t, nil)
		f := devicetest.NewFake(&devicetest.FakeOptions{
			Backing: d, Limits: d.Limits(), Forbid: ^device.LocalWrite, Grant: device.LocalWrite,
		}).Updater()
		inner[f] = d
		return f
	}, p.options())
}
