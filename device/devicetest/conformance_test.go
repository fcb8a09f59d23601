package devicetest_test

import (
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
)

func TestFakeConforms(t *testing.T) {
	for _, c := range []struct {
		name string
		opts devicetest.FakeOptions
	}{
		{"unlimited", devicetest.FakeOptions{}},
		{"limited", devicetest.FakeOptions{Limits: device.Limits{MaxRegistrations: 100, MaxPinnedBytes: 64 << 12, MaxRange: 1 << 20, PageSize: 4096}}},
		{"counted", devicetest.FakeOptions{Limits: device.Limits{MaxRegistrations: 100}}},
		{"rounding", devicetest.FakeOptions{Round: true, Limits: device.Limits{PageSize: 1 << 16}}},
		{"local", devicetest.FakeOptions{Grant: device.LocalWrite, Forbid: device.RemoteRead | device.RelaxedOrdering}},
		{"counts only", devicetest.FakeOptions{CountsOnly: true}},
		{"backed", devicetest.FakeOptions{Backing: devicetest.NewFake(nil).Updater()}},
	} {
		t.Run(c.name, func(t *testing.T) {
			devicetest.Run(t, func(*testing.T) device.Device {
				return devicetest.NewFake(&c.opts).Updater()
			}, &devicetest.Options{Simulated: true})
		})
	}
}
