package trace

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/vm"
)

// decoder reads the fields of one record's body. After the first field that
// is not there, or not possible, bad is set and all are zero.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) fail() {
	d.b, d.bad = nil, true
}

func (d *decoder) uvarint() uint64 {
	// Most are small.
	if len(d.b) > 0 && d.b[0] < 0x80 {
		v := d.b[0]
		d.b = d.b[1:]
		return uint64(v)
	}
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) varint() int64 {
	u := d.uvarint()
	return int64(u>>1) ^ -int64(u&1)
}

func (d *decoder) u32() uint32 {
	v := d.uvarint()
	if v > math.MaxUint32 {
		d.fail()
		return 0
	}
	return uint32(v)
}

func (d *decoder) int(limit int64) int {
	v := d.varint()
	if v < -limit || v > limit {
		d.fail()
		return 0
	}
	return int(v)
}

func (d *decoder) time() time.Duration {
	v := d.uvarint()
	if v > uint64(maxTime) {
		d.fail()
		return 0
	}
	return time.Duration(v)
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.fail()
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) string() string {
	n := d.uvarint()
	if n > maxString || n > uint64(len(d.b)) {
		d.fail()
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

// list returns the length of a list whose elements have at least size bytes.
func (d *decoder) list(size int) int {
	n := d.uvarint()
	if n > maxList || n*uint64(size) > uint64(len(d.b)) {
		d.fail()
		return 0
	}
	return int(n)
}

func (d *decoder) strings() []string {
	n := d.list(1)
	if n == 0 {
		return nil
	}
	s := make([]string, n)
	for i := range s {
		s[i] = d.string()
	}
	return s
}

func (d *decoder) rng(relative uint64) vm.Range {
	start := relative + uint64(d.varint())
	end := start + d.uvarint()
	if end < start {
		d.fail()
		return vm.Range{}
	}
	return vm.Range{Start: uintptr(start), End: uintptr(end)}
}

// known maps the numbers that later versions may have added.
func known[T ~uint8](v uint64, end, unknown T) T {
	if v >= uint64(end) {
		return unknown
	}
	return T(v)
}

func (m *Meta) decode(d *decoder, _ *previous) {
	*m = Meta{}
	if ns := d.varint(); ns != 0 {
		m.Began = time.Unix(0, ns).UTC()
	}
	m.Command = d.strings()
	m.Arch = d.string()
	m.CPUs = int(d.u32())
	m.Kernel = d.string()
	m.PageSize = int(d.u32())
	m.Mode = d.string()
	m.UseRule = d.string()
	m.Tool = d.string()
	if n := d.list(2); n > 0 {
		m.Labels = make(map[string]string, n)
		for range n {
			k := d.string()
			m.Labels[k] = d.string()
		}
	}
	if m.check() != nil {
		d.fail()
	}
}

func (p *Process) decode(d *decoder, _ *previous) {
	*p = Process{Start: d.time(), PID: d.u32(), PPID: d.u32(), Comm: d.string(), Args: d.strings()}
}

func (t *Thread) decode(d *decoder, _ *previous) {
	*t = Thread{Start: d.time(), PID: d.u32(), TID: d.u32(), Comm: d.string()}
}

func (m *Mapping) decode(d *decoder, _ *previous) {
	*m = Mapping{Start: d.time(), PID: d.u32(), Range: d.rng(0)}
	m.Kind = known(d.uvarint(), vm.MappingTHP+1, vm.MappingInvalid)
	m.Prot = d.u32()
	m.Path = d.string()
	m.Offset = d.uvarint()
}

func (s *Stack) decode(d *decoder, _ *previous) {
	*s = Stack{ID: d.u32()}
	if s.ID == 0 {
		d.fail()
	}
	if n := d.list(6); n > 0 {
		s.Frames = make([]Frame, n)
		for i := range s.Frames {
			s.Frames[i] = Frame{
				Addr: d.uvarint(), Function: d.string(), File: d.string(),
				Line: d.u32(), Module: d.string(), Offset: d.uvarint(),
			}
		}
	}
}

func (l *Lost) decode(d *decoder, _ *previous) {
	*l = Lost{Time: d.time()}
	l.Cause = known(d.uvarint(), lostEnd, LostDamage)
	l.Records = d.uvarint()
	if l.Cause == LostInvalid {
		d.fail()
	}
}

func (x *Exit) decode(d *decoder, _ *previous) {
	*x = Exit{Time: d.time(), PID: d.u32(), Code: d.int(math.MaxInt32), Signal: d.int(math.MaxInt32)}
}

func (e *Event) decode(d *decoder, prev *previous) {
	*e = Event{Kind: Kind(d.byte()), PID: prev.pid, TID: prev.tid}
	mask := d.uvarint()
	start := prev.start + d.varint()
	if start < 0 || start > maxTime {
		d.fail()
	}
	e.Start, prev.start = time.Duration(start), start
	if mask&hasOp != 0 {
		e.Op = known(uint64(d.byte()), opEnd, OpUnknown)
	}
	if mask&hasRange != 0 {
		e.Range = d.rng(prev.addr)
		prev.addr = uint64(e.Range.Start)
	}
	if mask&hasDuration != 0 {
		e.Duration = d.time()
	}
	if mask&hasTID != 0 {
		e.TID = d.u32()
	}
	if mask&hasStack != 0 {
		e.Stack = d.u32()
	}
	if mask&hasUse != 0 {
		e.Use = known(d.uvarint(), useEnd, UseOther)
	}
	if mask&hasFD != 0 {
		e.FD = known(d.uvarint(), fdEnd, FDOther)
	}
	if mask&hasResult != 0 {
		e.Result = d.varint()
	}
	if mask&hasPID != 0 {
		e.PID = d.u32()
	}
	if mask&hasPages != 0 {
		e.Pages = d.u32()
	}
	if mask&hasVia != 0 {
		e.Via = known(d.uvarint(), viaEnd, ViaOther)
	}
	if mask&hasOwner != 0 {
		e.Owner = d.uvarint()
	}
	if mask&hasHandle != 0 {
		e.Handle = d.uvarint()
	}
	if mask&hasKey != 0 {
		e.Key = d.uvarint()
	}
	if mask&hasAccess != 0 {
		e.Access = device.Access(d.u32())
	}
	if mask&hasDest != 0 {
		e.Dest = d.rng(uint64(e.Range.Start))
	}
	prev.pid, prev.tid = e.PID, e.TID
	if e.Kind < kindEnd && e.check() != nil {
		d.fail()
	}
}
