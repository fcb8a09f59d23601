package trace

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/pindown/pindown/vm"
)

// Bits of an event's mask: the fields that follow it, in this order. What is
// absent is zero, but for pid and tid: those of the event before.
const (
	hasOp = 1 << iota
	hasRange
	hasDuration
	hasTID
	hasStack
	hasUse
	hasFD
	hasResult
	hasPID
	hasPages
	hasVia
	hasOwner
	hasHandle
	hasKey
	hasAccess
	hasDest
)

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendStrings(b []byte, list []string) []byte {
	b = binary.AppendUvarint(b, uint64(len(list)))
	for _, s := range list {
		b = appendString(b, s)
	}
	return b
}

func appendRange(b []byte, r vm.Range, relative uint64) []byte {
	b = binary.AppendVarint(b, int64(uint64(r.Start)-relative))
	return binary.AppendUvarint(b, uint64(r.End-r.Start))
}

func appendUvarints(b []byte, list ...uint64) []byte {
	for _, v := range list {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

// checks.

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrRecord, fmt.Sprintf(format, args...))
}

func checkRange(what string, r vm.Range) error {
	if r.End < r.Start {
		return bad("%s %v ends before it starts", what, r)
	}
	return nil
}

func checkTime(what string, d time.Duration) error {
	if int64(d) < 0 || int64(d) > maxTime {
		return bad("%s is %v", what, d)
	}
	return nil
}

func checkStrings(list ...string) error {
	if len(list) > maxList {
		return bad("a list of %d", len(list))
	}
	for _, s := range list {
		if len(s) > maxString {
			return bad("a string of %d bytes", len(s))
		}
	}
	return nil
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *Meta) tag() tag    { return tagMeta }
func (p *Process) tag() tag { return tagProcess }
func (t *Thread) tag() tag  { return tagThread }
func (m *Mapping) tag() tag { return tagMapping }
func (s *Stack) tag() tag   { return tagStack }
func (e *Event) tag() tag   { return tagEvent }
func (l *Lost) tag() tag    { return tagLost }
func (x *Exit) tag() tag    { return tagExit }

func (m *Meta) check() error {
	if m.PageSize < 0 || m.PageSize > 1<<30 || m.PageSize&(m.PageSize-1) != 0 {
		return bad("page size %d", m.PageSize)
	}
	if m.CPUs < 0 || m.CPUs > 1<<20 {
		return bad("%d CPUs", m.CPUs)
	}
	if y := m.Began.Year(); !m.Began.IsZero() && (y < 1970 || y > 2200) {
		return bad("began in the year %d", y)
	}
	err := first(checkStrings(m.Command...), checkStrings(m.Arch, m.Kernel, m.Mode, m.UseRule, m.Tool))
	if len(m.Labels) > maxList {
		return bad("%d labels", len(m.Labels))
	}
	for k, v := range m.Labels {
		err = first(err, checkStrings(k, v))
	}
	return err
}

func (m *Meta) append(b []byte, _ *previous) []byte {
	began := int64(0)
	if !m.Began.IsZero() {
		began = m.Began.UnixNano()
	}
	b = binary.AppendVarint(b, began)
	b = appendStrings(b, m.Command)
	b = appendString(b, m.Arch)
	b = appendUvarints(b, uint64(m.CPUs))
	b = appendString(b, m.Kernel)
	b = appendUvarints(b, uint64(m.PageSize))
	b = appendString(b, m.Mode)
	b = appendString(b, m.UseRule)
	b = appendString(b, m.Tool)
	b = appendUvarints(b, uint64(len(m.Labels)))
	for _, k := range slices.Sorted(maps.Keys(m.Labels)) {
		b = appendString(appendString(b, k), m.Labels[k])
	}
	return b
}

func (p *Process) check() error {
	return first(checkTime("start", p.Start), checkStrings(p.Comm), checkStrings(p.Args...))
}

func (p *Process) append(b []byte, _ *previous) []byte {
	b = appendUvarints(b, uint64(p.Start), uint64(p.PID), uint64(p.PPID))
	return appendStrings(appendString(b, p.Comm), p.Args)
}

func (t *Thread) check() error { return first(checkTime("start", t.Start), checkStrings(t.Comm)) }

func (t *Thread) append(b []byte, _ *previous) []byte {
	return appendString(appendUvarints(b, uint64(t.Start), uint64(t.PID), uint64(t.TID)), t.Comm)
}

func (m *Mapping) check() error {
	return first(checkTime("start", m.Start), checkRange("range", m.Range), checkStrings(m.Path))
}

func (m *Mapping) append(b []byte, _ *previous) []byte {
	b = appendRange(appendUvarints(b, uint64(m.Start), uint64(m.PID)), m.Range, 0)
	b = appendUvarints(b, uint64(m.Kind), uint64(m.Prot))
	return appendUvarints(appendString(b, m.Path), m.Offset)
}

func (s *Stack) check() error {
	if s.ID == 0 {
		return bad("stack 0")
	}
	if len(s.Frames) > maxList {
		return bad("a stack of %d frames", len(s.Frames))
	}
	for i := range s.Frames {
		f := &s.Frames[i]
		if err := checkStrings(f.Function, f.File, f.Module); err != nil {
			return err
		}
	}
	return nil
}

func (s *Stack) append(b []byte, _ *previous) []byte {
	b = appendUvarints(b, uint64(s.ID), uint64(len(s.Frames)))
	for i := range s.Frames {
		f := &s.Frames[i]
		b = appendString(appendString(appendUvarints(b, f.Addr), f.Function), f.File)
		b = appendString(appendUvarints(b, uint64(f.Line)), f.Module)
		b = appendUvarints(b, f.Offset)
	}
	return b
}

func (l *Lost) check() error {
	if l.Cause == LostInvalid || l.Cause >= lostEnd {
		return bad("cause of loss %d", l.Cause)
	}
	return checkTime("time", l.Time)
}

func (l *Lost) append(b []byte, _ *previous) []byte {
	return appendUvarints(b, uint64(l.Time), uint64(l.Cause), l.Records)
}

func (x *Exit) check() error { return checkTime("time", x.Time) }

func (x *Exit) append(b []byte, _ *previous) []byte {
	b = appendUvarints(b, uint64(x.Time), uint64(x.PID))
	return binary.AppendVarint(binary.AppendVarint(b, int64(x.Code)), int64(x.Signal))
}

func (e *Event) check() error {
	switch {
	case e.Kind == KindInvalid || e.Kind >= kindEnd:
		return bad("kind of event %d", e.Kind)
	case (e.Kind == KindOp) != (e.Op != OpInvalid) || e.Op >= opEnd:
		return bad("%v with operation %d", e.Kind, e.Op)
	case (e.Kind == KindUse) != (e.Use != UseInvalid) || e.Use >= useEnd:
		return bad("%v with use %d", e.Kind, e.Use)
	case (e.Kind == KindRegister || e.Kind == KindDeregister) && e.Via == ViaInvalid || e.Via >= viaEnd:
		return bad("%v via %d", e.Kind, e.Via)
	case e.FD >= fdEnd:
		return bad("kind of file descriptor %d", e.FD)
	case e.Start < 0 || int64(e.Start) > maxTime:
		return bad("start is %v", e.Start)
	case e.Duration < 0 || int64(e.Duration) > maxTime:
		return bad("duration is %v", e.Duration)
	}
	return first(checkRange("range", e.Range), checkRange("dest", e.Dest))
}

func (e *Event) append(b []byte, prev *previous) []byte {
	mask := 0
	set := func(bit int, present bool) {
		if present {
			mask |= bit
		}
	}
	set(hasOp, e.Op != 0)
	set(hasRange, e.Range != vm.Range{})
	set(hasDuration, e.Duration != 0)
	set(hasTID, e.TID != prev.tid)
	set(hasStack, e.Stack != 0)
	set(hasUse, e.Use != 0)
	set(hasFD, e.FD != 0)
	set(hasResult, e.Result != 0)
	set(hasPID, e.PID != prev.pid)
	set(hasPages, e.Pages != 0)
	set(hasVia, e.Via != 0)
	set(hasOwner, e.Owner != 0)
	set(hasHandle, e.Handle != 0)
	set(hasKey, e.Key != 0)
	set(hasAccess, e.Access != 0)
	set(hasDest, e.Dest != vm.Range{})

	b = append(b, byte(e.Kind))
	b = binary.AppendUvarint(b, uint64(mask))
	b = binary.AppendVarint(b, int64(e.Start)-prev.start)
	prev.start = int64(e.Start)
	if mask&hasOp != 0 {
		b = append(b, byte(e.Op))
	}
	if mask&hasRange != 0 {
		b = appendRange(b, e.Range, prev.addr)
		prev.addr = uint64(e.Range.Start)
	}
	for _, f := range [...]struct {
		bit int
		v   uint64
	}{
		{hasDuration, uint64(e.Duration)},
		{hasTID, uint64(e.TID)},
		{hasStack, uint64(e.Stack)},
		{hasUse, uint64(e.Use)},
		{hasFD, uint64(e.FD)},
	} {
		if mask&f.bit != 0 {
			b = binary.AppendUvarint(b, f.v)
		}
	}
	if mask&hasResult != 0 {
		b = binary.AppendVarint(b, e.Result)
	}
	for _, f := range [...]struct {
		bit int
		v   uint64
	}{
		{hasPID, uint64(e.PID)},
		{hasPages, uint64(e.Pages)},
		{hasVia, uint64(e.Via)},
		{hasOwner, e.Owner},
		{hasHandle, e.Handle},
		{hasKey, e.Key},
		{hasAccess, uint64(e.Access)},
	} {
		if mask&f.bit != 0 {
			b = binary.AppendUvarint(b, f.v)
		}
	}
	if mask&hasDest != 0 {
		b = appendRange(b, e.Dest, uint64(e.Range.Start))
	}
	prev.pid, prev.tid = e.PID, e.TID
	return b
}
