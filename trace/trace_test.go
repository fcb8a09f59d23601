package trace_test

import (
	"bytes"
	"errors"
	"io"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/vm"
)

// clone copies a record out of the reader.
func clone(r trace.Record) trace.Record {
	switch r := r.(type) {
	case *trace.Meta:
		c := *r
		return &c
	case *trace.Process:
		c := *r
		return &c
	case *trace.Thread:
		c := *r
		return &c
	case *trace.Mapping:
		c := *r
		return &c
	case *trace.Stack:
		c := *r
		return &c
	case *trace.Event:
		c := *r
		return &c
	case *trace.Lost:
		c := *r
		return &c
	case *trace.Exit:
		c := *r
		return &c
	}
	return nil
}

// read reads everything.
func read(tb fataler, r io.Reader) ([]trace.Record, error) {
	tb.Helper()
	t, err := trace.NewReader(r)
	if err != nil {
		return nil, err
	}
	var list []trace.Record
	for rec, err := range t.All() {
		if err != nil {
			return list, err
		}
		list = append(list, clone(rec))
	}
	return list, nil
}

func put(w *trace.Writer, r trace.Record) error {
	switch r := r.(type) {
	case *trace.Meta:
		return w.Meta(r)
	case *trace.Process:
		return w.Process(r)
	case *trace.Thread:
		return w.Thread(r)
	case *trace.Mapping:
		return w.Mapping(r)
	case *trace.Stack:
		return w.Stack(r)
	case *trace.Event:
		return w.Event(r)
	case *trace.Lost:
		return w.Lost(r)
	case *trace.Exit:
		return w.Exit(r)
	}
	return errors.New("what is it?")
}

// write writes records, flushing after every so many.
func write(tb fataler, every int, list ...trace.Record) []byte {
	tb.Helper()
	var b bytes.Buffer
	w, err := trace.NewWriter(&b, nil)
	if err != nil {
		tb.Fatal(err)
	}
	for i, r := range list {
		if err := put(w, r); err != nil {
			tb.Fatal(err)
		}
		if every > 0 && (i+1)%every == 0 {
			if err := w.Flush(); err != nil {
				tb.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	if w.Written() != int64(b.Len()) {
		tb.Fatalf("Written says %d, %d were", w.Written(), b.Len())
	}
	return b.Bytes()
}

func durations() *rapid.Generator[time.Duration] {
	return rapid.Custom(func(t *rapid.T) time.Duration {
		return time.Duration(rapid.Int64Range(0, 1<<62-1).Draw(t, "duration"))
	})
}

func ranges() *rapid.Generator[vm.Range] {
	return rapid.Custom(func(t *rapid.T) vm.Range {
		a, b := rapid.Uint64().Draw(t, "a"), rapid.Uint64().Draw(t, "b")
		return vm.Range{Start: uintptr(min(a, b)), End: uintptr(max(a, b))}
	})
}

func texts() *rapid.Generator[string] { return rapid.StringN(0, 20, 80) }

func lists(t *rapid.T) []string {
	l := rapid.SliceOfN(texts(), 0, 4).Draw(t, "list")
	if len(l) == 0 {
		return nil
	}
	return l
}

func events() *rapid.Generator[*trace.Event] {
	return rapid.Custom(func(t *rapid.T) *trace.Event {
		d, r := durations(), ranges()
		u32 := rapid.Uint32()
		e := &trace.Event{
			Kind: trace.Kind(rapid.IntRange(1, 4).Draw(t, "kind")),
			PID:  u32.Draw(t, "pid"), TID: u32.Draw(t, "tid"), Stack: u32.Draw(t, "stack"), Pages: u32.Draw(t, "pages"),
			Start: d.Draw(t, "start"), Duration: d.Draw(t, "duration"), Range: r.Draw(t, "range"), Dest: r.Draw(t, "dest"),
			Result: rapid.Int64().Draw(t, "result"), Owner: rapid.Uint64().Draw(t, "owner"),
			Handle: rapid.Uint64().Draw(t, "handle"), Key: rapid.Uint64().Draw(t, "key"),
			FD: trace.FDKind(rapid.IntRange(0, int(trace.FDOther)).Draw(t, "fd")),
		}
		via := rapid.IntRange(int(trace.ViaVerbs), int(trace.ViaOther))
		switch e.Kind {
		case trace.KindOp:
			e.Op = trace.Op(rapid.IntRange(1, int(trace.OpUnknown)).Draw(t, "op"))
		case trace.KindUse:
			e.Use = trace.UseKind(rapid.IntRange(1, int(trace.UseOther)).Draw(t, "use"))
		default:
			e.Via = trace.Via(via.Draw(t, "via"))
			e.Access = device.Access(u32.Draw(t, "access"))
		}
		return e
	})
}

func records() *rapid.Generator[trace.Record] {
	return rapid.Custom(func(t *rapid.T) trace.Record {
		d, u32 := durations(), rapid.Uint32()
		switch rapid.IntRange(0, 11).Draw(t, "type") {
		case 0:
			m := &trace.Meta{
				Command: lists(t), Arch: texts().Draw(t, "arch"), CPUs: rapid.IntRange(0, 1000).Draw(t, "cpus"),
				Kernel: texts().Draw(t, "kernel"), PageSize: 1 << rapid.IntRange(0, 20).Draw(t, "page"),
				Mode: texts().Draw(t, "mode"), UseRule: texts().Draw(t, "rule"), Tool: texts().Draw(t, "tool"),
			}
			if ns := rapid.Int64Range(0, 1<<62).Draw(t, "began"); ns > 0 {
				m.Began = time.Unix(0, ns).UTC()
			}
			if l := rapid.MapOfN(texts(), texts(), 0, 3).Draw(t, "labels"); len(l) > 0 {
				m.Labels = l
			}
			return m
		case 1:
			return &trace.Process{Start: d.Draw(t, "start"), PID: u32.Draw(t, "pid"), PPID: u32.Draw(t, "ppid"), Comm: texts().Draw(t, "comm"), Args: lists(t)}
		case 2:
			return &trace.Thread{Start: d.Draw(t, "start"), PID: u32.Draw(t, "pid"), TID: u32.Draw(t, "tid"), Comm: texts().Draw(t, "comm")}
		case 3:
			return &trace.Mapping{
				Start: d.Draw(t, "start"), PID: u32.Draw(t, "pid"), Range: ranges().Draw(t, "range"),
				Kind: vm.Mapping(rapid.IntRange(0, int(vm.MappingTHP)).Draw(t, "kind")), Prot: u32.Draw(t, "prot"),
				Path: texts().Draw(t, "path"), Offset: rapid.Uint64().Draw(t, "offset"),
			}
		case 4:
			s := &trace.Stack{ID: rapid.Uint32Min(1).Draw(t, "id")}
			for range rapid.IntRange(0, 4).Draw(t, "frames") {
				s.Frames = append(s.Frames, trace.Frame{
					Addr: rapid.Uint64().Draw(t, "addr"), Function: texts().Draw(t, "func"), File: texts().Draw(t, "file"),
					Line: u32.Draw(t, "line"), Module: texts().Draw(t, "module"), Offset: rapid.Uint64().Draw(t, "offset"),
				})
			}
			return s
		case 5:
			return &trace.Lost{Time: d.Draw(t, "time"), Cause: trace.LostCause(rapid.IntRange(1, 4).Draw(t, "cause")), Records: rapid.Uint64().Draw(t, "n")}
		case 6:
			return &trace.Exit{
				Time: d.Draw(t, "time"), PID: u32.Draw(t, "pid"),
				Code: rapid.IntRange(math.MinInt32+1, math.MaxInt32).Draw(t, "code"), Signal: rapid.IntRange(0, 64).Draw(t, "signal"),
			}
		}
		return events().Draw(t, "event")
	})
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(records(), 0, 30).Draw(t, "records")
		b := write(t, rapid.IntRange(0, 5).Draw(t, "flush"), list...)
		got, err := read(t, bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(list, got, cmp.Transformer("empty", func(l []trace.Record) []trace.Record { return slices.Clip(l) })); diff != "" && len(list)+len(got) > 0 {
			t.Fatal(diff)
		}
	})
}

// fataler is a testing.TB or a rapid.T.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}
