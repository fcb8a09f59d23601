package ibv

import (
	"bytes"
	"runtime"
	"syscall"
	"unsafe"

	"github.com/ebitengine/purego"
)

// pointer is what a C function returned, as a pointer to memory of C.
func pointer[T any](r uintptr) *T {
	// The conversion goes through memory since vet can't know that this isn't
	// an address of Go's.
	return *(**T)(unsafe.Pointer(&r))
}

// object calls a function that returns a pointer, or NULL and errno.
//
//go:uintptrescapes
func (l *Lib) object(fn uintptr, args ...uintptr) (uintptr, error) {
	// errno is the thread's.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, _, _ := purego.SyscallN(fn, args...)
	if r == 0 {
		return 0, l.errno()
	}
	return r, nil
}

// errno returns the calling thread's, which a function has said is set. It may
// have been left zero.
func (l *Lib) errno() error {
	r, _, _ := purego.SyscallN(l.errnoLocation)
	if n := *pointer[int32](r); n != 0 {
		return syscall.Errno(n)
	}
	return syscall.EINVAL
}

// status calls a function that returns an errno, or -1 and errno.
//
//go:uintptrescapes
func (l *Lib) status(fn uintptr, args ...uintptr) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, _, _ := purego.SyscallN(fn, args...)
	switch n := int32(r); {
	case n == 0:
		return nil
	case n == -1:
		return l.errno()
	case n < 0:
		return syscall.Errno(-n)
	default:
		return syscall.Errno(n)
	}
}

// DeviceList is what ibv_get_device_list returned.
type DeviceList struct {
	list uintptr
	Devs []*Device
}

// Devices lists the devices. They are valid until Free.
func (l *Lib) Devices() (*DeviceList, error) {
	n := new(int32)
	r, err := l.object(l.getDeviceList, uintptr(unsafe.Pointer(n)))
	if err != nil {
		return nil, err
	}
	return &DeviceList{list: r, Devs: unsafe.Slice(pointer[*Device](r), *n)}, nil
}

// Free frees a list.
func (l *Lib) Free(d *DeviceList) { purego.SyscallN(l.freeDeviceList, d.list) }

// DeviceName returns the name of the kernel's device.
func DeviceName(d *Device) string { return cString(d.Name[:]) }

// UverbsName returns the name of the character device, such as uverbs0.
func UverbsName(d *Device) string { return cString(d.DevName[:]) }

// SysfsPath returns the device's directory in sysfs.
func SysfsPath(d *Device) string { return cString(d.IbdevPath[:]) }

// Firmware returns the firmware version; empty if it has none.
func (a *DeviceAttr) Firmware() string { return cString(a.FwVer[:]) }

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// OpenDevice opens a device.
func (l *Lib) OpenDevice(d *Device) (*Context, error) {
	r, err := l.object(l.openDevice, uintptr(unsafe.Pointer(d)))
	if err != nil {
		return nil, err
	}
	return pointer[Context](r), nil
}

// CloseDevice closes a device.
func (l *Lib) CloseDevice(c *Context) error {
	return l.status(l.closeDevice, uintptr(unsafe.Pointer(c)))
}

// QueryDevice returns a device's attributes.
func (l *Lib) QueryDevice(c *Context) (*DeviceAttr, error) {
	a := new(DeviceAttr)
	err := l.status(l.queryDevice, uintptr(unsafe.Pointer(c)), uintptr(unsafe.Pointer(a)))
	return a, err
}

// extended returns the word of struct verbs_context that lies n words before
// the context, zero if the context has none.
func extended(c *Context, n int) uintptr {
	const word = unsafe.Sizeof(uintptr(0))
	if c.AbiCompat != abiExtended {
		return 0
	}
	size := *(*uintptr)(unsafe.Add(unsafe.Pointer(c), -extSize*int(word)))
	if size < uintptr(n)*word+unsafe.Sizeof(Context{}) {
		return 0
	}
	return *(*uintptr)(unsafe.Add(unsafe.Pointer(c), -n*int(word)))
}

// QueryODP returns what the device says of on-demand paging; zero if it can't
// be asked.
func (l *Lib) QueryODP(c *Context) ODPCaps {
	fn := extended(c, extQueryDeviceEx)
	if fn == 0 {
		return ODPCaps{}
	}
	a := new(DeviceAttrEx)
	r, _, _ := purego.SyscallN(fn, uintptr(unsafe.Pointer(c)), 0, uintptr(unsafe.Pointer(a)), unsafe.Sizeof(*a))
	if int32(r) != 0 {
		return ODPCaps{}
	}
	return a.ODP
}

// QueryPort returns a port's attributes.
func (l *Lib) QueryPort(c *Context, port uint8) (*PortAttr, error) {
	a := new(PortAttr)
	err := l.status(l.queryPort, uintptr(unsafe.Pointer(c)), uintptr(port), uintptr(unsafe.Pointer(a)))
	return a, err
}

// QueryGID returns an entry of a port's table of addresses.
func (l *Lib) QueryGID(c *Context, port uint8, index int) (GID, error) {
	g := new(GID)
	err := l.status(l.queryGID, uintptr(unsafe.Pointer(c)), uintptr(port), uintptr(index), uintptr(unsafe.Pointer(g)))
	return *g, err
}

// AllocPD makes a protection domain.
func (l *Lib) AllocPD(c *Context) (*PD, error) {
	r, err := l.object(l.allocPD, uintptr(unsafe.Pointer(c)))
	if err != nil {
		return nil, err
	}
	return pointer[PD](r), nil
}

// PDAt is the protection domain at an address that somebody else's binding
// returned.
func PDAt(addr uintptr) *PD { return pointer[PD](addr) }

// Addr is the address of a protection domain, for somebody else's binding.
func (p *PD) Addr() uintptr { return uintptr(unsafe.Pointer(p)) }

// DeallocPD frees a protection domain.
func (l *Lib) DeallocPD(p *PD) error {
	return l.status(l.deallocPD, uintptr(unsafe.Pointer(p)))
}

// optionalAccess are flags that ibv_reg_mr doesn't take
// (IBV_ACCESS_OPTIONAL_RANGE).
const optionalAccess = 0x3ff << 20

// RegMR registers memory. A library that doesn't know optional access flags
// registers without them.
func (l *Lib) RegMR(p *PD, addr, length uintptr, access uint32) (*MR, error) {
	var r uintptr
	var err error
	if access&optionalAccess != 0 && l.regMRIova2 != 0 {
		r, err = l.object(l.regMRIova2, uintptr(unsafe.Pointer(p)), addr, length, addr, uintptr(access))
	} else {
		r, err = l.object(l.regMR, uintptr(unsafe.Pointer(p)), addr, length, uintptr(access&^optionalAccess))
	}
	if err != nil {
		return nil, err
	}
	return pointer[MR](r), nil
}

// RegDMABufMR registers a part of a dma-buf.
func (l *Lib) RegDMABufMR(p *PD, offset uint64, length uintptr, iova uint64, fd int, access uint32) (*MR, error) {
	if l.regDMABufMR == 0 {
		return nil, syscall.EOPNOTSUPP
	}
	r, err := l.object(l.regDMABufMR, uintptr(unsafe.Pointer(p)), uintptr(offset), length, uintptr(iova), uintptr(fd), uintptr(access))
	if err != nil {
		return nil, err
	}
	return pointer[MR](r), nil
}

// ReregMR changes a registration. The result is one of Rereg…, zero for
// success; the error is errno.
func (l *Lib) ReregMR(m *MR, flags int, p *PD, addr, length uintptr, access uint32) (int, error) {
	if l.reregMR == 0 {
		return ReregErrInput, syscall.EOPNOTSUPP
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, _, _ := purego.SyscallN(l.reregMR, uintptr(unsafe.Pointer(m)), uintptr(flags), uintptr(unsafe.Pointer(p)), addr, length, uintptr(access))
	if n := int(int32(r)); n != 0 {
		return n, l.errno()
	}
	return 0, nil
}

// DeregMR gives a registration back.
func (l *Lib) DeregMR(m *MR) error {
	return l.status(l.deregMR, uintptr(unsafe.Pointer(m)))
}

// AllocMW makes a memory window, not bound yet.
func (l *Lib) AllocMW(p *PD, kind uint32) (*MW, error) {
	fn := p.Context.Ops[opAllocMW]
	if fn == 0 {
		return nil, syscall.EOPNOTSUPP
	}
	r, err := l.object(fn, uintptr(unsafe.Pointer(p)), uintptr(kind))
	if err != nil {
		return nil, err
	}
	return pointer[MW](r), nil
}

// DeallocMW frees a memory window.
func (l *Lib) DeallocMW(m *MW) error {
	return l.status(m.Context.Ops[opDeallocMW], uintptr(unsafe.Pointer(m)))
}

// BindMW posts the binding of a window of type 1, whose key it changes.
func (l *Lib) BindMW(q *QP, m *MW, b *MWBind) error {
	fn := m.Context.Ops[opBindMW]
	if fn == 0 {
		return syscall.EOPNOTSUPP
	}
	return l.status(fn, uintptr(unsafe.Pointer(q)), uintptr(unsafe.Pointer(m)), uintptr(unsafe.Pointer(b)))
}

// CreateCompChannel makes a channel of completion events.
func (l *Lib) CreateCompChannel(c *Context) (*CompChannel, error) {
	r, err := l.object(l.createCompChannel, uintptr(unsafe.Pointer(c)))
	if err != nil {
		return nil, err
	}
	return pointer[CompChannel](r), nil
}

// DestroyCompChannel frees a channel.
func (l *Lib) DestroyCompChannel(ch *CompChannel) error {
	return l.status(l.destroyCompChannel, uintptr(unsafe.Pointer(ch)))
}

// CreateCQ makes a completion queue; ch may be nil.
func (l *Lib) CreateCQ(c *Context, entries int, ch *CompChannel) (*CQ, error) {
	r, err := l.object(l.createCQ, uintptr(unsafe.Pointer(c)), uintptr(entries), 0, uintptr(unsafe.Pointer(ch)), 0)
	if err != nil {
		return nil, err
	}
	return pointer[CQ](r), nil
}

// DestroyCQ frees a completion queue. Its events must have been acknowledged.
func (l *Lib) DestroyCQ(q *CQ) error {
	return l.status(l.destroyCQ, uintptr(unsafe.Pointer(q)))
}

// PollCQ fills wc with completions and returns how many there were.
func (l *Lib) PollCQ(q *CQ, wc []WC) (int, error) {
	r, _, _ := purego.SyscallN(q.Context.Ops[opPollCQ], uintptr(unsafe.Pointer(q)), uintptr(len(wc)), uintptr(unsafe.Pointer(unsafe.SliceData(wc))))
	n := int(int32(r))
	if n < 0 {
		return 0, syscall.EIO
	}
	return n, nil
}

// ReqNotifyCQ asks for an event at the next completion.
func (l *Lib) ReqNotifyCQ(q *CQ) error {
	return l.status(q.Context.Ops[opReqNotify], uintptr(unsafe.Pointer(q)), 0)
}

// GetCQEvent takes one event from a channel, whose descriptor says when there
// is one, and acknowledges it.
func (l *Lib) GetCQEvent(ch *CompChannel) error {
	var out struct{ cq, context uintptr }
	p := &out
	if err := l.status(l.getCQEvent, uintptr(unsafe.Pointer(ch)), uintptr(unsafe.Pointer(&p.cq)), uintptr(unsafe.Pointer(&p.context))); err != nil {
		return err
	}
	purego.SyscallN(l.ackCQEvents, p.cq, 1)
	return nil
}

// CreateQP makes a queue pair. The library writes to attr what it granted.
func (l *Lib) CreateQP(p *PD, attr *QPInitAttr) (*QP, error) {
	r, err := l.object(l.createQP, uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(attr)))
	if err != nil {
		return nil, err
	}
	return pointer[QP](r), nil
}

// ModifyQP changes a queue pair.
func (l *Lib) ModifyQP(q *QP, attr *QPAttr, mask int) error {
	return l.status(l.modifyQP, uintptr(unsafe.Pointer(q)), uintptr(unsafe.Pointer(attr)), uintptr(mask))
}

// DestroyQP frees a queue pair.
func (l *Lib) DestroyQP(q *QP) error {
	return l.status(l.destroyQP, uintptr(unsafe.Pointer(q)))
}

// PostSend posts a chain of work requests. None of it is read after the call.
func (l *Lib) PostSend(q *QP, wr *SendWR) error {
	bad := new(uintptr)
	return l.status(q.Context.Ops[opPostSend], uintptr(unsafe.Pointer(q)), uintptr(unsafe.Pointer(wr)), uintptr(unsafe.Pointer(bad)))
}

// PostRecv posts a chain of receive requests.
func (l *Lib) PostRecv(q *QP, wr *RecvWR) error {
	bad := new(uintptr)
	return l.status(q.Context.Ops[opPostRecv], uintptr(unsafe.Pointer(q)), uintptr(unsafe.Pointer(wr)), uintptr(unsafe.Pointer(bad)))
}
