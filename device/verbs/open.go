package verbs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
	"github.com/pindown/pindown/vm"
)

// DefaultLibrary is what is loaded unless Options.Library names another.
const DefaultLibrary = ibv.DefaultLibrary

// Options configure a device. The zero value, or nil, means the defaults.
type Options struct {
	// Name is the kernel's name of the adapter, such as "mlx5_0". Default: the
	// first adapter with an active port, else the first. New ignores it.
	Name string
	// Library is the path of libibverbs. Default: DefaultLibrary, found as the
	// dynamic linker finds libraries. It must be the library that a protection
	// domain given to New comes from.
	Library string
	// OnDemand registers with On-Demand Paging: nothing is pinned, the adapter
	// follows the page tables, and no registration goes stale. Opening fails
	// with a wrapped device.ErrNotSupported if the adapter hasn't got it.
	OnDemand bool
	// Exact has ranges registered from byte to byte as asked for. By default
	// the cache may round them outward to whole pages, which are pinned anyway;
	// then a remote key reaches the rest of these pages too.
	Exact bool
	// MaxRegistrations lowers the adapter's limit, which all its users share.
	MaxRegistrations int
	// MaxPinnedBytes replaces the limit that is derived from RLIMIT_MEMLOCK.
	MaxPinnedBytes uint64
}

// Names returns the names of the adapters that the library knows how to drive;
// none is no error. library is Options.Library.
func Names(library string) ([]string, error) {
	lib, list, err := devices(library)
	if err != nil {
		return nil, fmt.Errorf("verbs: list adapters: %w", err)
	}
	defer lib.Free(list)
	return names(list), nil
}

func names(list *ibv.DeviceList) []string {
	var out []string
	for _, d := range list.Devs {
		out = append(out, ibv.DeviceName(d))
	}
	return out
}

// load loads the library.
func load(path string) (*ibv.Lib, error) {
	if path == "" {
		path = DefaultLibrary
	}
	lib, err := ibv.Load(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", device.ErrNotSupported, err)
	}
	return lib, nil
}

func devices(library string) (*ibv.Lib, *ibv.DeviceList, error) {
	lib, err := load(library)
	if err != nil {
		return nil, nil, err
	}
	list, err := lib.Devices()
	if errnoOf(err) == unix.ENOSYS {
		return nil, nil, fmt.Errorf("%w: the kernel has no RDMA device, or the module ib_uverbs isn't loaded: %w", device.ErrNotSupported, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", device.ErrNotSupported, os.NewSyscallError("ibv_get_device_list", err))
	}
	return lib, list, nil
}

// Open opens an adapter and makes a protection domain on it.
//
// It returns a wrapped [device.ErrNotSupported] with the reason if the library,
// the adapter, its provider or the permission to use it is missing, if
// RLIMIT_MEMLOCK doesn't admit a single page (which wraps [device.ErrNoMemory]
// too), or if the adapter lacks what an option needs.
func Open(opts *Options) (*Device, error) {
	o := optionsOf(opts)
	d, err := open(&o)
	if err != nil {
		return nil, fmt.Errorf("verbs: open %s: %w", orAny(o.Name), err)
	}
	return d, nil
}

func orAny(name string) string {
	if name == "" {
		return "an adapter"
	}
	return name
}

func optionsOf(opts *Options) Options {
	if opts == nil {
		return Options{}
	}
	return *opts
}

func open(o *Options) (*Device, error) {
	lib, list, err := devices(o.Library)
	if err != nil {
		return nil, err
	}
	defer lib.Free(list)
	if len(list.Devs) == 0 {
		return nil, notSupported(missingProvider("/sys"))
	}
	if o.Name != "" {
		i := slices.Index(names(list), o.Name)
		if i < 0 {
			return nil, notSupported(fmt.Sprintf("no adapter of that name, there is %s", strings.Join(names(list), ", ")))
		}
		list.Devs = list.Devs[i : i+1]
	}
	ctx, err := openFirst(lib, list.Devs)
	if err != nil {
		return nil, err
	}
	pd, err := lib.AllocPD(ctx)
	if err != nil {
		return nil, errors.Join(callError("ibv_alloc_pd", err), lib.CloseDevice(ctx))
	}
	d, err := newDevice(lib, pd, o)
	if err != nil {
		return nil, errors.Join(err, lib.DeallocPD(pd), lib.CloseDevice(ctx))
	}
	d.own = true
	return d, nil
}

// openFirst opens the first of devs that has an active port, or else the first.
func openFirst(lib *ibv.Lib, devs []*ibv.Device) (*ibv.Context, error) {
	var first *ibv.Context
	var firstErr error
	for _, dev := range devs {
		ctx, err := lib.OpenDevice(dev)
		if err != nil {
			if firstErr == nil {
				firstErr = openError(dev, err)
			}
			continue
		}
		port, err := lib.QueryPort(ctx, 1)
		active := err == nil && port.State == ibv.PortActive
		switch {
		case active && first != nil:
			_ = lib.CloseDevice(first) // Nothing was made on it.
			return ctx, nil
		case active:
			return ctx, nil
		case first == nil:
			first = ctx
		default:
			_ = lib.CloseDevice(ctx)
		}
	}
	if first == nil {
		return nil, firstErr
	}
	return first, nil
}

func openError(dev *ibv.Device, err error) error {
	path := "/dev/infiniband/" + ibv.UverbsName(dev)
	switch errnoOf(err) {
	case unix.EPERM, unix.EACCES:
		return fmt.Errorf("%w: %s can't be opened: %w", device.ErrNotSupported, path, err)
	case unix.ENOENT:
		return fmt.Errorf("%w: %s isn't there: %w", device.ErrNotSupported, path, err)
	default:
		return fmt.Errorf("%w: %s: %w", device.ErrNotSupported, ibv.DeviceName(dev), os.NewSyscallError("ibv_open_device", err))
	}
}

// missingProvider says why the library lists nothing.
func missingProvider(sysfs string) string {
	have, _ := filepath.Glob(sysfs + "/class/infiniband/*")
	if len(have) == 0 {
		return "there is no RDMA adapter"
	}
	for i := range have {
		have[i] = filepath.Base(have[i])
	}
	return "libibverbs has no provider for " + strings.Join(have, ", ") + " (package ibverbs-providers), or they are in another network namespace"
}

// New makes a device on a protection domain that the caller has: pd is the
// address of a struct ibv_pd, as every binding can give it. The caller keeps the
// protection domain, and the library that it came from, until the device is
// closed.
//
// Errors are those of Open.
func New(pd uintptr, opts *Options) (*Device, error) {
	o := optionsOf(opts)
	if pd == 0 {
		return nil, fmt.Errorf("verbs: new device: null protection domain: %w", device.ErrInvalid)
	}
	lib, err := load(o.Library)
	if err != nil {
		return nil, fmt.Errorf("verbs: new device: %w", err)
	}
	d, err := newDevice(lib, ibv.PDAt(pd), &o)
	if err != nil {
		return nil, fmt.Errorf("verbs: new device: %w", err)
	}
	return d, nil
}

func newDevice(lib *ibv.Lib, pd *ibv.PD, o *Options) (*Device, error) {
	attr, err := lib.QueryDevice(pd.Context)
	if err != nil {
		return nil, callError("ibv_query_device", err)
	}
	d := &Device{
		lib: lib, pd: pd, opts: *o,
		atomics: attr.AtomicCap != 0,
		info:    infoOf(lib, pd.Context, attr),
		limits:  limitsOf(attr, o),
		regs:    map[uint64]*registration{},
		queues:  map[*Queue]struct{}{},
		fast:    map[uint64]*fastKey{},
		next:    rand.Uint64() >> 1, // So that another device's handles mean nothing here.
	}
	d.idle.L = &d.mu
	if o.OnDemand && !d.info.OnDemand {
		return nil, notSupported(d.info.Name + " has no On-Demand Paging for reliable connections")
	}
	if err := d.probe(); err != nil {
		return nil, err
	}
	return d, nil
}

// probe finds out what ibv_rereg_mr does, on a page of its own. Nothing else
// tells: providers that have the function refuse some of its flags.
func (d *Device) probe() error {
	b, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return joinCall(device.ErrNoMemory, "mmap", err)
	}
	defer func() { _ = unix.Munmap(b) }() // It can't fail on what mmap returned.
	r := vm.RangeOf(b)
	// try reports whether all steps succeed and leave the keys as they were.
	try := func(steps ...func(*ibv.MR) (int, error)) (bool, error) {
		mr, err := d.lib.RegMR(d.pd, r.Start, r.Len(), d.flags(device.LocalWrite))
		if err != nil {
			return false, fmt.Errorf("register a page: %w: %w", device.ErrNotSupported, callError("ibv_reg_mr", err))
		}
		lkey, rkey, ok := mr.LKey, mr.RKey, true
		for _, step := range steps {
			if rc, _ := step(mr); rc != 0 || mr.LKey != lkey || mr.RKey != rkey {
				ok = false
				break
			}
		}
		if err := d.lib.DeregMR(mr); err != nil {
			return false, callError("ibv_dereg_mr", err)
		}
		return ok, nil
	}
	if d.info.Update, err = try(func(m *ibv.MR) (int, error) {
		return d.lib.ReregMR(m, ibv.ReregTranslation, nil, r.Start, r.Len(), 0)
	}); err != nil {
		return err
	}
	if d.info.ChangeAccess, err = try(func(m *ibv.MR) (int, error) {
		return d.lib.ReregMR(m, ibv.ReregAccess, nil, 0, 0, d.flags(device.LocalWrite|device.RemoteRead))
	}); err != nil {
		return err
	}
	if !d.info.Update {
		return nil
	}
	limbo, err := d.lib.AllocPD(d.pd.Context)
	if err != nil {
		return callError("ibv_alloc_pd", err)
	}
	d.info.Revoke, err = try(func(m *ibv.MR) (int, error) {
		return d.lib.ReregMR(m, ibv.ReregPD, limbo, 0, 0, 0)
	}, func(m *ibv.MR) (int, error) {
		return d.lib.ReregMR(m, ibv.ReregPD|ibv.ReregTranslation, d.pd, r.Start, r.Len(), 0)
	})
	if err != nil || !d.info.Revoke {
		return errors.Join(err, d.lib.DeallocPD(limbo))
	}
	d.limbo = limbo
	return nil
}
