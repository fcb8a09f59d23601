package verbs_test

import (
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/verbs"
)

// plain is a device without the optional interfaces.
type plain struct{ device.Device }

func (p plain) Close() error { return adapter(p).Close() }

// bare hides the methods that this adapter can't carry out.
func bare(d *verbs.Device) device.Device {
	if d.Info().Update {
		return d
	}
	return plain{d}
}

func adapter(dev device.Device) *verbs.Device {
	if p, ok := dev.(plain); ok {
		dev = p.Device
	}
	return dev.(*verbs.Device)
}

func conformance() *devicetest.Options {
	o := &devicetest.Options{
		// The fake works on memory by address, and so do adapters that follow
		// the page tables.
		Simulated:        !realAdapter(),
		MaxRegistrations: 2048,
		Write: func(dev device.Device, reg device.Registration, off int, b []byte) error {
			return move(adapter(dev), reg, off, b, true)
		},
		Read: func(dev device.Device, reg device.Registration, off int, b []byte) error {
			return move(adapter(dev), reg, off, b, false)
		},
	}
	if realAdapter() {
		o.Pinned = pinned
	}
	return o
}

func TestConforms(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		return bare(open(t, nil))
	}, conformance())
}

// A device on the protection domain of somebody else.
func TestConformsCallersDomain(t *testing.T) {
	owner := open(t, nil)
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		d, err := verbs.New(owner.PD(), options(t, &verbs.Options{Exact: true}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		return bare(d)
	}, conformance())
}
