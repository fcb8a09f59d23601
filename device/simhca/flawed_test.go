package simhca_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// flawedEnv names the flaw of the device that a child process tests.
const flawedEnv = "PINDOWN_FLAWED"

// flawed is a device with one flaw in an optional interface.
type flawed struct {
	*simhca.Device
	flaw string
}

// under returns the simulated adapter that a tested device is.
func under(dev device.Device) *simhca.Device {
	if f, ok := dev.(*flawed); ok {
		return f.Device
	}
	return dev.(*simhca.Device)
}

func (d *flawed) Revoke(ctx context.Context, reg device.Registration) error {
	switch d.flaw {
	case "revoke does nothing":
		return nil
	case "revoke ignores the context":
		ctx = context.Background()
	case "revoke of what isn't registered succeeds":
		_ = d.Device.Revoke(ctx, reg)
		return nil
	case "revoke moves to the next key":
		if err := d.Deregister(reg); err != nil {
			return err
		}
		_, err := d.Register(ctx, reg.Range, reg.Access)
		return err
	}
	return d.Device.Revoke(ctx, reg)
}

func (d *flawed) Load(ctx context.Context, reg device.Registration) (device.Registration, error) {
	switch d.flaw {
	case "load of what isn't revoked succeeds":
		if got, err := d.Device.Load(ctx, reg); !errors.Is(err, device.ErrNotRevoked) {
			return got, err
		}
		return reg, nil
	case "load does nothing":
		return reg, nil
	case "load changes the key":
		got, err := d.Device.Load(ctx, reg)
		got.LocalKey = device.NextKey(got.LocalKey)
		return got, err
	case "load ignores the context":
		ctx = context.Background()
	}
	return d.Device.Load(ctx, reg)
}

func (d *flawed) Flush(ctx context.Context, reg device.Registration) error {
	err := d.Device.Flush(ctx, reg)
	if d.flaw == "flush of what isn't registered succeeds" && errors.Is(err, device.ErrNotRegistered) {
		return nil
	}
	if d.flaw == "flush revokes" && err == nil {
		return d.Device.Revoke(ctx, reg)
	}
	return err
}

func (d *flawed) Expose(ctx context.Context, reg device.Registration, r vm.Range, access device.Access) (device.Exposure, error) {
	real, may := r, access
	switch d.flaw {
	case "an exposure reaches everything":
		if reg.Range.Contains(r) && !r.Empty() {
			real = reg.Range
		}
	case "an exposure allows everything":
		if access != 0 && access&device.LocalWrite == 0 {
			may |= device.RemoteRead | device.RemoteWrite
		}
	case "expose takes any access":
		if access = access & (device.RemoteRead | device.RemoteWrite); access == 0 {
			access = device.RemoteRead
		}
		may = access
	case "expose ignores the context":
		ctx = context.Background()
	}
	x, err := d.Device.Expose(ctx, reg, real, may)
	if err == nil {
		x.Range, x.Access = r, access
	}
	if d.flaw == "expose hands the registration's key out" {
		x.RemoteKey = reg.LocalKey
	}
	return x, err
}

func (d *flawed) Withdraw(ctx context.Context, x device.Exposure) error {
	switch d.flaw {
	case "withdraw does nothing":
		return nil
	case "withdraw of what isn't exposed succeeds":
		_ = d.Device.Withdraw(ctx, x)
		return nil
	}
	return d.Device.Withdraw(ctx, x)
}

func (d *flawed) AllocFastKey(ctx context.Context, n uint64) (device.FastKey, error) {
	if d.flaw == "a fast key is too short" && n > 1 {
		n = 1
	}
	if d.flaw == "a fast key for nothing" {
		n = max(n, 1)
	}
	return d.Device.AllocFastKey(ctx, n)
}

func (d *flawed) FreeFastKey(k device.FastKey) error {
	err := d.Device.FreeFastKey(k)
	if d.flaw == "what is lent is freed" && errors.Is(err, device.ErrBusy) ||
		d.flaw == "a fast key is freed twice" && errors.Is(err, device.ErrNotRegistered) {
		return nil
	}
	return err
}

// flawedQueue is a queue with the device's flaw.
type flawedQueue struct {
	device.WorkQueue
	flaw string
}

func (q *flawedQueue) PostFastRegister(wr device.FastRegister) error {
	done := wr.Done
	switch q.flaw {
	case "an outcome is told twice":
		wr.Done = func(err error) { done(err); done(err) }
	case "a lie about the outcome":
		wr.Done = func(error) { done(nil) }
	case "no outcome is told":
		wr.Done = nil
	}
	err := q.WorkQueue.PostFastRegister(wr)
	if q.flaw == "what isn't posted has an outcome" && err != nil {
		done(err)
	}
	return err
}

func (q *flawedQueue) PostLocalInvalidate(wr device.LocalInvalidate) error {
	if q.flaw == "invalidate does nothing" {
		wr.Done(nil)
		return nil
	}
	return q.WorkQueue.PostLocalInvalidate(wr)
}

var flaws = []string{
	"revoke does nothing", "revoke ignores the context", "revoke of what isn't registered succeeds",
	"revoke moves to the next key", "load of what isn't revoked succeeds", "load does nothing", "load changes the key",
	"load ignores the context", "flush of what isn't registered succeeds", "flush revokes",
	"an exposure reaches everything", "an exposure allows everything", "expose takes any access",
	"expose ignores the context", "expose hands the registration's key out", "withdraw does nothing",
	"withdraw of what isn't exposed succeeds", "a fast key is too short", "a fast key for nothing",
	"what is lent is freed", "a fast key is freed twice", "an outcome is told twice", "a lie about the outcome",
	"no outcome is told", "what isn't posted has an outcome", "invalidate does nothing",
}

// TestFlawedConforms runs the suite on the device with the flaw in the environment.
func TestFlawedConforms(t *testing.T) {
	flaw, child := os.LookupEnv(flawedEnv)
	if !child {
		t.Skip("it runs in the child processes of TestFlawsAreFound")
	}
	o := remotely(&devicetest.Options{Simulated: true, Write: mover(simhca.OpRead), Read: mover(simhca.OpWrite)})
	newQueue := o.NewQueue
	o.NewQueue = func(t *testing.T, dev device.Device) devicetest.Queue {
		t.Helper()
		q := newQueue(t, dev)
		q.WorkQueue = &flawedQueue{q.WorkQueue, flaw}
		return q
	}
	devicetest.Run(t, func(t *testing.T) device.Device {
		t.Helper()
		d := simhca.Open(simhca.NewSpace(&simhca.SpaceOptions{Everywhere: true}), nil)
		t.Cleanup(func() { _ = d.Close() })
		return &flawed{d, flaw}
	}, o)
}

// TestFlawsAreFound: the suite finds each flaw, and passes the device without any.
func TestFlawsAreFound(t *testing.T) {
	if raceEnabled {
		t.Skip("the children would take long with the race detector, and are no goroutines of ours")
	}
	list := flaws
	if testing.Short() {
		list = flaws[:1]
	}
	const part = "^TestFlawedConforms$/^(Revoke|RevokeConcurrent|Flush|Expose|ExposeUpdate|DataExposed|FastKey|FastRotation|FastErrors|FastMisuse|DataFast|CloseOptional)$"
	for _, flaw := range append([]string{""}, list...) {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", part, "-test.short", "-test.timeout", "30s")
		cmd.Env = append(os.Environ(), flawedEnv+"="+flaw)
		out, err := cmd.CombinedOutput()
		switch {
		case flaw == "" && err != nil:
			t.Errorf("a device without flaw: %v\n%s", err, out)
		case flaw != "" && err == nil:
			t.Errorf("not found: %s", flaw)
		case flaw != "" && !strings.Contains(string(out), "--- FAIL"):
			t.Errorf("%s: found by accident\n%s", flaw, out)
		}
	}
}
