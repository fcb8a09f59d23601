package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

// What the fake can be set to, as in testdata/fakeibv.c.
const (
	setRegErrno = iota
	setReregRC
	setReregErrno
	setReregKeys
	setReregDeny
	setDeregErrno
	setODP
	setNoWindows
	setUnbounded
	setNoDevices
	setMaxMR
	setMaxMRSize
	setOpenErrno
)

// What the fake tells.
const (
	getMRs = iota
	getMWs
	getPDs
	getQPs
	getCQs
	getChannels
	getContexts
	getLastAccess
)

// fakeSymbol returns a function of the fake.
func fakeSymbol(name string) uintptr {
	h, err := purego.Dlopen(fakeLib, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		panic(err)
	}
	fn, err := purego.Dlsym(h, name)
	if err != nil {
		panic(err)
	}
	return fn
}

// needFake skips a test that is about what the fake does.
func needFake(t *testing.T) {
	t.Helper()
	if realAdapter() {
		t.Skip("this is about what the fake does")
	}
	options(t, nil) // Or skip.
}

// fakeSet sets what the fake does, for the test's time.
func fakeSet(t *testing.T, what, value int) {
	t.Helper()
	needFake(t)
	fn := fakeSymbol("fake_set")
	purego.SyscallN(fn, uintptr(what), uintptr(value))
	t.Cleanup(func() { purego.SyscallN(fn, uintptr(what), 0) })
}

func fakeGet(what int) int {
	r, _, _ := purego.SyscallN(fakeSymbol("fake_get"), uintptr(what))
	return int(r)
}

// fakeObjects returns what the fake has.
func fakeObjects() []string {
	if fakeLib == "" {
		return nil
	}
	var left []string
	for what, name := range []string{"registrations", "windows", "protection domains", "queues", "completion queues", "channels", "contexts"} {
		if n := fakeGet(what); n != 0 {
			left = append(left, fmt.Sprint(n, " ", name))
		}
	}
	return left
}

// rereg are the calls that re-register.
var rereg = []struct {
	name string
	call func(d *verbs.Device, reg device.Registration) error
}{
	{"update", func(d *verbs.Device, reg device.Registration) error {
		_, err := d.Update(context.Background(), reg)
		return err
	}},
	{"change access", func(d *verbs.Device, reg device.Registration) error {
		_, err := d.ChangeAccess(context.Background(), reg, device.LocalWrite|device.RemoteRead)
		return err
	}},
	{"revoke", func(d *verbs.Device, reg device.Registration) error {
		return d.Revoke(context.Background(), reg)
	}},
}

// What ibv_rereg_mr(3) says of each result is what becomes of the registration.
func TestReregFails(t *testing.T) {
	needFake(t)
	const input, dontForkNew, doForkOld, cmd, cmdAndDoForkNew = -1, -2, -3, -4, -5
	for _, c := range []struct {
		name  string
		rc    int
		errno unix.Errno
		want  error // nil: it counts as success
		lost  bool
	}{
		{"input", input, unix.EINVAL, device.ErrInvalid, false},
		{"don't fork new", dontForkNew, unix.ENOMEM, device.ErrNoMemory, false},
		{"do fork old", doForkOld, unix.ENOMEM, nil, false},
		{"command", cmd, unix.EFAULT, device.ErrFault, true},
		{"command, busy", cmd, unix.EBUSY, device.ErrBusy, true},
		{"command and do fork new", cmdAndDoForkNew, unix.ENOMEM, device.ErrNoMemory, true},
		{"a code that isn't documented", -9, unix.EIO, device.ErrClosed, true},
	} {
		for _, r := range rereg {
			t.Run(c.name+"/"+r.name, func(t *testing.T) {
				d := open(t, nil)
				b := mapMemory(t, 1)
				reg := register(t, d, b, device.LocalWrite)
				fakeSet(t, setReregRC, c.rc)
				fakeSet(t, setReregErrno, int(c.errno))
				err := r.call(d, reg)
				if (c.want == nil) != (err == nil) || c.want != nil && !errors.Is(err, c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
				if errors.Is(err, device.ErrRegistrationLost) != c.lost {
					t.Errorf("lost: %v", err)
				}
				if c.lost {
					if d.Live() != 0 || fakeGet(getMRs) != 0 {
						t.Errorf("%d registrations, %d with the adapter", d.Live(), fakeGet(getMRs))
					}
					if err := d.Deregister(reg); !errors.Is(err, device.ErrNotRegistered) {
						t.Errorf("deregister what is lost: %v", err)
					}
					return
				}
				must(t, d.Deregister(reg))
			})
		}
	}
}

// What is lost and can't even be deregistered is out of reach, until Close.
func TestReregLostAndStuck(t *testing.T) {
	needFake(t)
	d := open(t, nil)
	reg := register(t, d, mapMemory(t, 1), device.LocalWrite)
	t.Run("stuck", func(t *testing.T) {
		fakeSet(t, setReregRC, -4)
		fakeSet(t, setReregErrno, int(unix.EFAULT))
		fakeSet(t, setDeregErrno, int(unix.EBUSY))
		if _, err := d.Update(t.Context(), reg); !errors.Is(err, device.ErrRegistrationLost) || !errors.Is(err, unix.EBUSY) {
			t.Errorf("%v", err)
		}
		if err := d.Deregister(reg); !errors.Is(err, device.ErrNotRegistered) {
			t.Errorf("deregister what is lost: %v", err)
		}
		if err := d.Close(); !errors.Is(err, device.ErrBusy) {
			t.Errorf("close: %v", err)
		}
	})
	must(t, d.Close())
	if fakeGet(getMRs) != 0 {
		t.Error("a registration is left")
	}
}

// A provider that gives other keys, or refuses some of the flags, is found out
// when the device is opened.
func TestProbe(t *testing.T) {
	needFake(t)
	const translation, pd, access = 1, 2, 4
	for _, c := range []struct {
		name                 string
		set, value           int
		update, revoke, chng bool
	}{
		{"all", setReregDeny, 0, true, true, true},
		{"none", setReregDeny, translation | pd | access, false, false, false},
		{"like soft-RoCE of Linux 6.3", setReregDeny, translation, false, false, true},
		{"no protection domains", setReregDeny, pd, true, false, true},
		{"no access", setReregDeny, access, true, true, false},
		{"other keys", setReregKeys, 1, false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			fakeSet(t, c.set, c.value)
			d := open(t, nil)
			if i := d.Info(); i.Update != c.update || i.Revoke != c.revoke || i.ChangeAccess != c.chng {
				t.Errorf("%+v", i)
			}
			reg := register(t, d, mapMemory(t, 1), device.LocalWrite)
			for _, r := range rereg {
				able := map[string]bool{"update": c.update, "revoke": c.revoke, "change access": c.chng}[r.name]
				if err := r.call(d, reg); able != (err == nil) || !able && !errors.Is(err, device.ErrNotSupported) {
					t.Errorf("%s: %v", r.name, err)
				}
			}
			must(t, d.Deregister(reg)) // Intact.
		})
	}
}

// An adapter that gives other keys only later.
func TestReregOtherKeys(t *testing.T) {
	needFake(t)
	d := open(t, nil)
	reg := register(t, d, mapMemory(t, 1), device.LocalWrite)
	fakeSet(t, setReregKeys, 1)
	if _, err := d.Update(t.Context(), reg); !errors.Is(err, device.ErrRegistrationLost) {
		t.Errorf("%v", err)
	}
	if fakeGet(getMRs) != 0 {
		t.Error("a registration is left")
	}
}

func TestRevoke(t *testing.T) {
	d := open(t, nil)
	if !d.Info().Revoke {
		t.Skipf("%s can't revoke", d.Info().Name)
	}
	ctx := t.Context()
	src, dst := mapMemory(t, 1), mapMemory(t, 1)
	from, to := register(t, d, src, device.LocalWrite), register(t, d, dst, device.LocalWrite|device.RemoteWrite)
	write := func() error {
		p := connected(t, d)
		must(t, p.a.Write(1, vm.RangeOf(src), from.LocalKey, addr(dst), to.RemoteKey))
		return p.a.Do(ctx)
	}
	must(t, write())
	if _, err := d.Load(ctx, to); !errors.Is(err, device.ErrNotRevoked) {
		t.Errorf("load of what isn't revoked: %v", err)
	}
	must(t, d.Revoke(ctx, to), d.Revoke(ctx, to))
	if err := write(); !errors.Is(err, verbs.ErrCompletion) {
		t.Errorf("write under a revoked key: %v", err)
	}
	if _, err := d.Update(ctx, to); !errors.Is(err, device.ErrRevoked) {
		t.Errorf("update of what is revoked: %v", err)
	}
	got, err := d.Load(ctx, to)
	if err != nil || got != to {
		t.Errorf("load: %+v, %v, want %+v", got, err, to)
	}
	must(t, write(), d.Revoke(ctx, to), d.Deregister(to))
}

// Exposed registrations aren't re-registered.
func TestReregExposed(t *testing.T) {
	d := open(t, nil)
	b := mapMemory(t, 1)
	reg := register(t, d, b, bindable)
	x, err := d.Expose(t.Context(), reg, vm.RangeOf(b), device.RemoteRead)
	must(t, err)
	for _, r := range rereg {
		if err := r.call(d, reg); !errors.Is(err, device.ErrBusy) && !errors.Is(err, device.ErrNotSupported) {
			t.Errorf("%s: %v", r.name, err)
		}
	}
	must(t, d.Withdraw(t.Context(), x))
	if d.Info().Update {
		_, err := d.Update(t.Context(), reg)
		must(t, err)
	}
}

func TestUnboundedWindows(t *testing.T) {
	needFake(t)
	fakeSet(t, setUnbounded, 1)
	d := open(t, nil)
	if bounded, err := d.WindowsBounded(t.Context()); err != nil || bounded {
		t.Errorf("%t, %v", bounded, err)
	}
	b := mapMemory(t, 2)
	reg := register(t, d, b, bindable)
	if _, err := d.Expose(t.Context(), reg, part(b, 0, len(b)-1), device.RemoteRead); !errors.Is(err, device.ErrNotSupported) {
		t.Errorf("a part: %v", err)
	}
	x, err := d.Expose(t.Context(), reg, vm.RangeOf(b), device.RemoteRead)
	must(t, err, d.Withdraw(t.Context(), x))
}

func TestNoWindows(t *testing.T) {
	needFake(t)
	fakeSet(t, setNoWindows, 1)
	d := open(t, nil)
	b := mapMemory(t, 1)
	if _, err := d.Register(t.Context(), vm.RangeOf(b), bindable); !errors.Is(err, device.ErrAccess) {
		t.Errorf("register: %v", err)
	}
	reg := register(t, d, b, device.LocalWrite)
	if _, err := d.Expose(t.Context(), reg, vm.RangeOf(b), device.RemoteRead); !errors.Is(err, device.ErrNotSupported) {
		t.Errorf("expose: %v", err)
	}
	if _, err := d.AllocFastKey(t.Context(), 1); !errors.Is(err, device.ErrNotSupported) {
		t.Errorf("fast key: %v", err)
	}
}

func TestOnDemand(t *testing.T) {
	needFake(t)
	_, err := verbs.Open(options(t, &verbs.Options{OnDemand: true}))
	if !errors.Is(err, device.ErrNotSupported) || !strings.Contains(err.Error(), "On-Demand") {
		t.Errorf("without: %v", err)
	}
	const explicit, implicit, flag = 1, 2, 1 << 6
	fakeSet(t, setODP, explicit)
	d := open(t, &verbs.Options{OnDemand: true})
	if i := d.Info(); !i.OnDemand || i.OnDemandImplicit {
		t.Errorf("%+v", i)
	}
	register(t, d, mapMemory(t, 1), device.LocalWrite)
	if fakeGet(getLastAccess)&flag == 0 {
		t.Error("registered without the flag")
	}
	if _, err := d.RegisterImplicit(t.Context(), device.LocalWrite); !errors.Is(err, device.ErrNotSupported) {
		t.Errorf("implicit: %v", err)
	}
	fakeSet(t, setODP, explicit|implicit)
	all := open(t, nil) // The option is for explicit registrations.
	reg, err := all.RegisterImplicit(t.Context(), device.LocalWrite)
	if err != nil || fakeGet(getLastAccess)&flag == 0 {
		t.Fatalf("implicit: %v", err)
	}
	// Its key reaches everything.
	b := mapMemory(t, 2)
	p := connected(t, all)
	fill(b[:len(b)/2], 'o')
	far := register(t, all, b, device.LocalWrite|device.RemoteWrite)
	must(t, p.a.Write(1, part(b, 0, 100), reg.LocalKey, addr(b)+200, far.RemoteKey), p.a.Do(t.Context()))
	must(t, all.Deregister(reg))
}

func TestErrors(t *testing.T) {
	needFake(t)
	for errno, want := range map[unix.Errno]error{
		unix.ENOMEM: device.ErrNoMemory, unix.EAGAIN: device.ErrBusy, unix.EFAULT: device.ErrFault, unix.EPERM: device.ErrPermission,
		unix.EACCES: device.ErrPermission, unix.ENOSPC: device.ErrNoSlots, unix.EFBIG: device.ErrTooLarge, unix.EOPNOTSUPP: device.ErrUnsupportedMemory,
		unix.EINVAL: device.ErrInvalid, unix.EIO: device.ErrClosed, unix.ENODEV: device.ErrNotSupported,
	} {
		t.Run(errno.Error(), func(t *testing.T) {
			d := open(t, nil)
			b := mapMemory(t, 1)
			fakeSet(t, setRegErrno, int(errno))
			_, err := d.Register(t.Context(), vm.RangeOf(b), device.LocalWrite)
			if !errors.Is(err, want) || !errors.Is(err, errno) || !strings.Contains(err.Error(), "ibv_reg_mr") {
				t.Errorf("%v, want %v", err, want)
			}
			if d.Live() != 0 {
				t.Error("counted")
			}
		})
	}
	t.Run("open", func(t *testing.T) {
		fakeSet(t, setRegErrno, int(unix.ENOMEM))
		if _, err := verbs.Open(options(t, nil)); !errors.Is(err, device.ErrNotSupported) || !errors.Is(err, device.ErrNoMemory) {
			t.Errorf("%v", err)
		}
	})
	t.Run("node", func(t *testing.T) {
		fakeSet(t, setOpenErrno, int(unix.EACCES))
		if _, err := verbs.Open(options(t, nil)); !errors.Is(err, device.ErrNotSupported) || !strings.Contains(err.Error(), "/dev/infiniband/uverbs-fake0") {
			t.Errorf("%v", err)
		}
	})
}

func TestLimits(t *testing.T) {
	needFake(t)
	fakeSet(t, setMaxMR, 3)
	fakeSet(t, setMaxMRSize, 1<<20)
	d := open(t, nil)
	if l := d.Limits(); l.MaxRegistrations != 3 || l.MaxRange != 1<<20 {
		t.Errorf("%+v", l)
	}
	b := mapMemory(t, 1)
	for range 3 {
		register(t, d, b, device.LocalWrite)
	}
	if _, err := d.Register(t.Context(), vm.RangeOf(b), device.LocalWrite); !errors.Is(err, device.ErrNoSlots) {
		t.Errorf("one more: %v", err)
	}
	if l := open(t, &verbs.Options{MaxRegistrations: 2, Exact: true, MaxPinnedBytes: 1 << 30}).Limits(); l.MaxRegistrations != 2 || l.PageSize != 0 || l.MaxPinnedBytes != 1<<30 {
		t.Errorf("%+v", l)
	}
	if l := open(t, &verbs.Options{MaxRegistrations: 5}).Limits(); l.MaxRegistrations != 3 {
		t.Errorf("%+v", l)
	}
}

func TestDMABuf(t *testing.T) {
	needFake(t)
	d := open(t, nil)
	if _, err := d.RegisterDMABuf(t.Context(), 0, 0, 4096, 0x10000, device.LocalWrite); !errors.Is(err, device.ErrNotSupported) {
		t.Errorf("what isn't one: %v", err)
	}
	if _, err := d.RegisterDMABuf(t.Context(), -1, 0, 4096, 0x10000, device.LocalWrite); !errors.Is(err, device.ErrInvalid) {
		t.Errorf("no descriptor: %v", err)
	}
	reg, err := d.RegisterDMABuf(t.Context(), 7, 4096, 8192, 0x10000, device.LocalWrite|device.RemoteWrite)
	if err != nil || reg.Range != (vm.Range{Start: 0x10000, End: 0x12000}) {
		t.Fatalf("%+v, %v", reg, err)
	}
	must(t, d.Deregister(reg))
}

// Where something is missing, opening says what.
func TestMissing(t *testing.T) {
	_, err := verbs.Open(&verbs.Options{Library: "libibverbs-that-is-not-there.so.1"})
	if !errors.Is(err, device.ErrNotSupported) || !strings.Contains(err.Error(), "libibverbs-that-is-not-there.so.1") {
		t.Errorf("no library: %v", err)
	}
	_, err = verbs.Open(&verbs.Options{Library: "libc.so.6"})
	if !errors.Is(err, device.ErrNotSupported) || !strings.Contains(err.Error(), "ibv_get_device_list") {
		t.Errorf("another library: %v", err)
	}
	if _, err := verbs.New(0, nil); !errors.Is(err, device.ErrInvalid) {
		t.Errorf("no protection domain: %v", err)
	}
	o := options(t, nil)
	o.Name = "no-such-adapter"
	names, err := verbs.Names(o.Library)
	if err != nil || len(names) == 0 {
		t.Fatalf("%q, %v", names, err)
	}
	if _, err := verbs.Open(o); !errors.Is(err, device.ErrNotSupported) || !strings.Contains(err.Error(), names[0]) {
		t.Errorf("no such adapter: %v", err)
	}
	if realAdapter() {
		return
	}
	fakeSet(t, setNoDevices, 1)
	if _, err := verbs.Open(options(t, nil)); !errors.Is(err, device.ErrNotSupported) || !strings.Contains(err.Error(), "adapter") {
		t.Errorf("no adapter: %v", err)
	}
}

// The system's library, whatever there is on this machine.
func TestSystem(t *testing.T) {
	d, err := verbs.Open(nil)
	if errors.Is(err, device.ErrNotSupported) {
		t.Logf("here: %v", err)
		return
	}
	must(t, err, d.Close())
}
