package trace_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/vm"
)

// sample is a small program's life. The labels of its events number them.
func sample(n int) []trace.Record {
	list := []trace.Record{
		&trace.Meta{Command: []string{"a", "b"}, Kernel: "6.18", PageSize: 4096, Mode: "synthetic"},
		&trace.Process{PID: 10, Comm: "a"},
		&trace.Stack{ID: 1, Frames: []trace.Frame{{Addr: 1, Function: "f"}, {Addr: 2, Function: "main"}}},
	}
	for i := range n {
		list = append(list, &trace.Event{
			Kind: trace.KindOp, Op: trace.OpMunmap, PID: 10, TID: 10 + uint32(i%2), Stack: 1, Key: uint64(i) + 1,
			Start: time.Duration(i) * time.Microsecond, Range: vm.Range{Start: uintptr(i) << 12, End: uintptr(i+1) << 12},
		})
	}
	return append(list, &trace.Exit{Time: time.Second, PID: 10})
}

// subsequence reports whether got are records of list in their order, apart
// from notes of damage. It returns how many are missing, and the losses told.
func subsequence(list, got []trace.Record) (missing int, told uint64, err error) {
	i := 0
	for _, g := range got {
		if l, ok := g.(*trace.Lost); ok && l.Cause == trace.LostDamage {
			told += l.Records
			continue
		}
		for i < len(list) && !cmp.Equal(list[i], g) {
			i++
			missing++
		}
		if i == len(list) {
			return 0, 0, fmt.Errorf("read what was not written: %+v", g)
		}
		i++
	}
	return missing + len(list) - i, told, nil
}

func TestTruncation(t *testing.T) {
	list := sample(40)
	whole := write(t, 7, list...)
	last := 0
	for n := range whole {
		got, err := read(t, iotest.HalfReader(bytes.NewReader(whole[:n])))
		missing, _, serr := subsequence(list, got)
		if serr != nil {
			t.Fatalf("cut at %d: %v", n, serr)
		}
		switch {
		case n == 0:
			if !errors.Is(err, trace.ErrFormat) {
				t.Fatalf("cut at 0: %v", err)
			}
		case n < 8:
			if !errors.Is(err, trace.ErrFormat) {
				t.Fatalf("cut at %d: %v", n, err)
			}
		default:
			if !errors.Is(err, trace.ErrTruncated) || errors.Is(err, trace.ErrCorrupt) {
				t.Fatalf("cut at %d: %v", n, err)
			}
		}
		intact := len(list) - missing
		if intact < last {
			t.Fatalf("cut at %d: %d records, %d of fewer bytes", n, intact, last)
		}
		last = intact
	}
	if last != len(list) {
		t.Fatalf("%d of %d records without the end", last, len(list))
	}
}

func TestEveryByteMatters(t *testing.T) {
	list := sample(40)
	whole := write(t, 7, list...)
	for n := 16; n < len(whole); n++ {
		hurt := bytes.Clone(whole)
		hurt[n] ^= 0x10
		got, err := read(t, bytes.NewReader(hurt))
		missing, told, serr := subsequence(list, got)
		if serr != nil {
			t.Fatalf("byte %d: %v", n, serr)
		}
		d, ok := errors.AsType[*trace.DamageError](err)
		if !ok {
			t.Fatalf("byte %d: %v", n, err)
		}
		if missing > 7 {
			t.Fatalf("byte %d: %d records are missing, a block has 7: %v", n, missing, err)
		}
		// At the end of the trace nothing says how many there were.
		if !d.Truncated && told != uint64(missing) || d.Records != told {
			t.Fatalf("byte %d: %d are missing, told %d, error says %d: %v", n, missing, told, d.Records, err)
		}
	}
}

func TestMissingBlocks(t *testing.T) {
	list := sample(21)
	whole := write(t, 5, list...) // 25 records in 5 blocks
	starts := blocks(whole)
	if len(starts) != 6 {
		t.Fatalf("%d blocks", len(starts))
	}
	without := func(i, j int) []byte {
		return append(bytes.Clone(whole[:starts[i]]), whole[starts[j]:]...)
	}
	for _, c := range []struct {
		name    string
		b       []byte
		missing uint64
		places  int
		cut     bool
	}{
		{"second", without(1, 2), 5, 1, false},
		{"first two", without(0, 2), 10, 1, false},
		{"all", without(0, 5), 25, 1, false},
		{"zeros in between", append(append(bytes.Clone(whole[:starts[2]]), make([]byte, 100000)...), whole[starts[2]:]...), 0, 1, false},
		{"zeros in place of one", append(append(bytes.Clone(whole[:starts[2]]), make([]byte, 4096)...), whole[starts[3]:]...), 5, 1, false},
		{"one twice", append(bytes.Clone(whole[:starts[2]]), whole[starts[1]:]...), 0, 1, false},
		{"something after the end", append(bytes.Clone(whole), 'x'), 0, 1, false},
		{"zeros for an end", append(bytes.Clone(whole[:starts[5]]), make([]byte, 4096)...), 0, 1, true},
	} {
		got, err := read(t, bytes.NewReader(c.b))
		missing, told, serr := subsequence(list, got)
		d, ok := errors.AsType[*trace.DamageError](err)
		if serr != nil || !ok {
			t.Errorf("%s: %v, %v", c.name, serr, err)
			continue
		}
		if uint64(missing) != c.missing || told != c.missing || d.Records != c.missing || d.Places != c.places || d.Truncated != c.cut {
			t.Errorf("%s: missing %d, told %d, %+v: %v", c.name, missing, told, *d, d)
		}
	}
}

// blocks returns where the blocks begin.
func blocks(b []byte) (at []int) {
	for i := 16; i < len(b); {
		at = append(at, i)
		i += 40 + int(binary.LittleEndian.Uint32(b[i+12:]))
	}
	return at
}

func sum(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// block is one that has every checksum right, whatever its content.
func block(kind, codec byte, seq, raw, count uint32, before uint64, payload []byte) []byte {
	b := []byte{0xd7, 'B', 'L', 'K', kind, codec, 0, 0}
	for _, v := range []uint32{seq, uint32(len(payload)), raw, count} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	b = binary.LittleEndian.AppendUint64(b, before)
	b = binary.LittleEndian.AppendUint32(b, sum(payload))
	b = binary.LittleEndian.AppendUint32(b, sum(b))
	return append(b, payload...)
}

func header(version uint16) []byte {
	b := []byte{0xd7, 'P', 'D', 'T', 'R', 'C', '\r', '\n'}
	b = binary.LittleEndian.AppendUint16(b, version)
	b = binary.LittleEndian.AppendUint16(b, 3)
	return binary.LittleEndian.AppendUint32(b, sum(b))
}

func TestHeader(t *testing.T) {
	for _, c := range []struct {
		b    []byte
		want error
	}{
		{nil, trace.ErrFormat},
		{[]byte("P"), trace.ErrFormat},
		{[]byte("#!/bin/sh\necho hello world, this is not a trace\n"), trace.ErrFormat},
		{bytes.Repeat([]byte{0}, 4096), trace.ErrFormat},
		{header(2), trace.ErrVersion},
		{header(0), trace.ErrVersion},
		{header(2)[:12], trace.ErrTruncated},
		{append(header(1)[:15], 0), trace.ErrCorrupt},
		{header(1), trace.ErrTruncated},
		{append(header(1), block(2, 0, 0, 0, 0, 0, nil)...), nil},
	} {
		_, err := read(t, bytes.NewReader(c.b))
		if !errors.Is(err, c.want) {
			t.Errorf("% x: %v, want %v", c.b[:min(len(c.b), 16)], err, c.want)
		}
	}
	broken := errors.New("disk on fire")
	if _, err := trace.NewReader(iotest.ErrReader(broken)); !errors.Is(err, broken) {
		t.Errorf("NewReader: %v", err)
	}
	_, err := read(t, io.MultiReader(bytes.NewReader(write(t, 2, sample(10)...)[:300]), iotest.ErrReader(broken)))
	if !errors.Is(err, broken) {
		t.Errorf("Next: %v", err)
	}
}

// TestLaterMinor: what a later version of the format adds is skipped.
func TestLaterMinor(t *testing.T) {
	const event = 6
	payload := []byte{
		200, 3, 1, 2, 3, // a record of a kind that isn't known
		event, 3, 77, 0, 0, // an event of a kind that isn't known
		event, 6, byte(trace.KindOp), 1, 10, 250, 99, 99, // an operation that isn't, and more fields
		event, 4, byte(trace.KindOp), 1, 2, byte(trace.OpMunmap),
	}
	b := append(header(1), block(1, 0, 0, uint32(len(payload)), 4, 0, payload)...)
	b = append(b, block(9, 0, 1, 5, 1, 4, []byte("whats"))...)
	b = append(b, block(2, 0, 2, 0, 0, 5, nil)...)
	r, err := trace.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	var got []trace.Event
	for rec, err := range r.All() {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, *rec.(*trace.Event))
	}
	want := []trace.Event{
		{Kind: trace.KindOp, Op: trace.OpUnknown, Start: 5},
		{Kind: trace.KindOp, Op: trace.OpMunmap, Start: 6},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if r.Skipped() != 3 {
		t.Errorf("skipped %d", r.Skipped())
	}
}

// TestHostile: right checksums around wrong content.
func TestHostile(t *testing.T) {
	long := bytes.Repeat([]byte{0x80}, 11)
	for name, payload := range map[string][]byte{
		"nothing":             {},
		"length runs over":    {6, 200, 1, 1},
		"endless length":      append([]byte{6}, long...),
		"endless field":       append([]byte{6, 11}, long...),
		"kind 0":              {6, 3, 0, 0, 0},
		"time before zero":    {6, 4, 1, 1, 1, 3},
		"operation without":   {6, 3, 1, 0, 0},
		"list without end":    {1, 4, 0, 0xff, 0xff, 0x03},
		"string without end":  {3, 5, 0, 0, 0, 0xff, 0x01},
		"range that wraps":    {6, 15, 1, 3, 0, 3, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01},
		"stack 0":             {5, 2, 0, 0},
		"page size 3":         {1, 9, 0, 0, 0, 0, 0, 3, 0, 0, 0},
		"loss without reason": {7, 3, 0, 0, 0},
	} {
		b := append(header(1), block(1, 0, 0, uint32(len(payload)), 1, 0, payload)...)
		b = append(b, block(2, 0, 1, 0, 0, 1, nil)...)
		got, err := read(t, bytes.NewReader(b))
		d, ok := errors.AsType[*trace.DamageError](err)
		if !ok || d.Truncated || d.Records != 1 || len(got) != 1 {
			t.Errorf("%s: %v, %d records", name, err, len(got))
		}
	}
}

// TestBounded: a file can't make the reader use much memory.
func TestBounded(t *testing.T) {
	bomb := trace.CompressForTest(make([]byte, 900<<20/8))
	b := header(1)
	for i := range 50 {
		b = append(b, block(1, 1, uint32(i), 1<<20, 1, uint64(i), bomb[:min(len(bomb), 1<<20)])...)
	}
	// Headers that announce much.
	fake := block(1, 1, 50, 1<<20, 1<<31, 50, nil)
	binary.LittleEndian.PutUint32(fake[12:], 1<<20)
	binary.LittleEndian.PutUint32(fake[36:], sum(fake[:36]))
	b = append(b, fake...)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	_, err := read(t, bytes.NewReader(b))
	runtime.ReadMemStats(&after)
	if !errors.Is(err, trace.ErrCorrupt) {
		t.Error(err)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 16<<20 {
		t.Errorf("%d bytes were allocated for a file of %d", n, len(b))
	}
}

func TestWriterRefuses(t *testing.T) {
	var b bytes.Buffer
	w, err := trace.NewWriter(&b, nil)
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 1<<20)
	many := make([]string, 5000)
	big := &trace.Stack{ID: 1}
	for range 4 {
		for range 10 {
			big.Frames = append(big.Frames, trace.Frame{Function: long[:60000]})
		}
	}
	op := func(f func(*trace.Event)) *trace.Event {
		e := &trace.Event{Kind: trace.KindOp, Op: trace.OpBrk}
		f(e)
		return e
	}
	for i, r := range []trace.Record{
		&trace.Meta{PageSize: 3}, &trace.Meta{CPUs: -1}, &trace.Meta{Command: many}, &trace.Meta{Began: time.Unix(-1<<50, 0)},
		&trace.Meta{Labels: map[string]string{"": long}},
		&trace.Process{Comm: long}, &trace.Process{Start: -1}, &trace.Thread{Comm: long},
		&trace.Mapping{Range: vm.Range{Start: 2, End: 1}}, &trace.Mapping{Path: long},
		&trace.Stack{}, &trace.Stack{ID: 1, Frames: make([]trace.Frame, 5000)}, big, &trace.Stack{ID: 1, Frames: []trace.Frame{{File: long}}},
		&trace.Lost{}, &trace.Lost{Cause: 99}, &trace.Exit{Time: -1},
		&trace.Event{}, &trace.Event{Kind: 9}, &trace.Event{Kind: trace.KindOp}, &trace.Event{Kind: trace.KindUse},
		&trace.Event{Kind: trace.KindRegister}, op(func(e *trace.Event) { e.Op = 99 }), op(func(e *trace.Event) { e.Use = trace.UseRead }),
		op(func(e *trace.Event) { e.Start = -1 }), op(func(e *trace.Event) { e.Duration = -1 }), op(func(e *trace.Event) { e.FD = 99 }),
		op(func(e *trace.Event) { e.Via = 99 }), op(func(e *trace.Event) { e.Range = vm.Range{Start: 2, End: 1} }),
		op(func(e *trace.Event) { e.Start = 1<<63 - 1 }),
	} {
		if err := put(w, r); !errors.Is(err, trace.ErrRecord) {
			t.Errorf("%d, %T: %v", i, r, err)
		}
	}
	good := op(func(*trace.Event) {})
	if err := w.Event(good); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Event(good); !errors.Is(err, trace.ErrClosed) {
		t.Error(err)
	}
	if err := w.Flush(); !errors.Is(err, trace.ErrClosed) {
		t.Error(err)
	}
	got, err := read(t, &b)
	if err != nil || len(got) != 1 {
		t.Fatalf("%d records, %v", len(got), err)
	}
}

// limited fails after some bytes.
type limited struct{ n int }

func (l *limited) Write(b []byte) (int, error) {
	if l.n -= len(b); l.n < 0 {
		return 0, unix.ENOSPC
	}
	return len(b), nil
}

func TestWriterFails(t *testing.T) {
	if _, err := trace.NewWriter(&limited{}, nil); !errors.Is(err, unix.ENOSPC) {
		t.Error(err)
	}
	w, err := trace.NewWriter(&limited{n: 100}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range sample(10) {
		if err := put(w, r); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Flush(); !errors.Is(err, unix.ENOSPC) {
		t.Error(err)
	}
	if err := put(w, sample(1)[0]); !errors.Is(err, unix.ENOSPC) {
		t.Error(err)
	}
	if err := w.Close(); !errors.Is(err, unix.ENOSPC) {
		t.Error(err)
	}
}

// TestMaxBytes: beyond it events are counted, other records still written.
func TestMaxBytes(t *testing.T) {
	var b bytes.Buffer
	w, err := trace.NewWriter(&b, &trace.WriterOptions{MaxBytes: 20000})
	if err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	const events = 100000
	for i := range events {
		e := trace.Event{Kind: trace.KindOp, Op: trace.OpMunmap, Start: time.Duration(i), Key: rnd.Uint64()}
		if err := w.Event(&e); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Exit(&trace.Exit{Code: 3}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := read(t, &b)
	if err != nil {
		t.Fatal(err)
	}
	kept := len(got) - 2
	lost, ok := got[len(got)-1].(*trace.Lost)
	if !ok || lost.Cause != trace.LostLimit || lost.Records != uint64(events-kept) || kept < 500 || w.Written() > 200000 {
		t.Errorf("kept %d, lost %+v, %d bytes", kept, lost, w.Written())
	}
	if x, ok := got[len(got)-2].(*trace.Exit); !ok || x.Code != 3 {
		t.Errorf("%+v", got[len(got)-2])
	}
}

func TestChanged(t *testing.T) {
	r := func(a, b uintptr) vm.Range { return vm.Range{Start: a << 12, End: b << 12} }
	none := vm.Range{}
	for _, c := range []struct {
		name string
		e    trace.Event
		a, b vm.Range
	}{
		{"munmap", trace.Event{Op: trace.OpMunmap, Range: r(1, 3)}, r(1, 3), none},
		{"munmap failed", trace.Event{Op: trace.OpMunmap, Range: r(1, 3), Result: -int64(unix.EINVAL)}, none, none},
		{"mmap", trace.Event{Op: trace.OpMmap, Range: r(1, 3)}, none, none},
		{"mmap fixed", trace.Event{Op: trace.OpMmapFixed, Range: r(1, 3)}, r(1, 3), none},
		{"advice with a hole", trace.Event{Op: trace.OpDontneed, Range: r(1, 3), Result: -int64(unix.ENOMEM)}, r(1, 3), none},
		{"mmap out of memory", trace.Event{Op: trace.OpMmapFixed, Range: r(1, 3), Result: -int64(unix.ENOMEM)}, none, none},
		{"other advice", trace.Event{Op: trace.OpMadvise, Range: r(1, 3)}, none, none},
		{"grown in place", trace.Event{Op: trace.OpMremap, Range: r(1, 3), Dest: r(1, 5)}, none, none},
		{"shrunk in place", trace.Event{Op: trace.OpMremap, Range: r(1, 5), Dest: r(1, 2)}, r(2, 5), none},
		{"moved", trace.Event{Op: trace.OpMremap, Range: r(1, 3), Dest: r(7, 9)}, r(1, 3), none},
		{"moved to", trace.Event{Op: trace.OpMremapFixed, Range: r(1, 3), Dest: r(7, 9)}, r(1, 3), r(7, 9)},
		{"brk down", trace.Event{Op: trace.OpBrk, Range: r(1, 3)}, r(1, 3), none},
		{"brk up", trace.Event{Op: trace.OpBrk, Range: r(1, 3), Dest: r(1, 3)}, none, none},
		{"exec", trace.Event{Op: trace.OpExec}, vm.Range{End: ^uintptr(0)}, none},
		{"mprotect", trace.Event{Op: trace.OpMprotect, Range: r(1, 3)}, none, none},
	} {
		c.e.Kind = trace.KindOp
		a, b := c.e.Changed()
		if a.Empty() && c.a.Empty() {
			a = c.a
		}
		if a != c.a || b != c.b {
			t.Errorf("%s: %v %v, want %v %v", c.name, a, b, c.a, c.b)
		}
	}
	if a, b := (&trace.Event{Kind: trace.KindUse, Use: trace.UseRead, Range: r(1, 2)}).Changed(); !a.Empty() || !b.Empty() {
		t.Error("a use changed pages")
	}
}

func TestKinds(t *testing.T) {
	seen := map[string]bool{}
	for o := trace.OpMmap; o <= trace.OpUnknown; o++ {
		if s := o.String(); seen[s] || strings.Contains(s, "(") || o.Call() == "" {
			t.Errorf("%d is %q, %q", o, s, o.Call())
		}
		seen[o.String()] = true
	}
	if trace.OpDontneed.Call() != "madvise" || trace.OpDontneed.VM() != vm.OpDontneed || trace.Op(99).Call() != "unknown" || trace.Op(99).VM() != vm.OpUnknown {
		t.Error("wrong call or VM operation")
	}
}

func FuzzReader(f *testing.F) {
	f.Add(write(f, 3, sample(10)...))
	f.Add(write(f, 0, sample(3)...)[:120])
	f.Add(header(1))
	f.Add(append(header(1), block(1, 0, 0, 4, 1, 0, []byte{6, 2, 77, 0})...))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := read(t, bytes.NewReader(b))
		_, damaged := errors.AsType[*trace.DamageError](err)
		if err != nil && !damaged && !errors.Is(err, trace.ErrFormat) && !errors.Is(err, trace.ErrVersion) &&
			!errors.Is(err, trace.ErrTruncated) && !errors.Is(err, trace.ErrCorrupt) {
			t.Fatal(err)
		}
		// What was read can be written, and reads the same.
		again, err := read(t, bytes.NewReader(write(t, 0, list...)))
		if err != nil {
			t.Fatal(err)
		}
		if !cmp.Equal(list, again) {
			t.Fatal(cmp.Diff(list, again))
		}
	})
}

// FuzzRecords is FuzzReader behind the checksums.
func FuzzRecords(f *testing.F) {
	whole := write(f, 0, sample(10)...)
	_ = whole
	f.Add([]byte{6, 4, 1, 1, 2, 3}, uint32(1))
	f.Add([]byte{1, 9, 0, 0, 0, 0, 0, 4, 0, 0, 0}, uint32(1))
	f.Add([]byte{5, 11, 1, 1, 0, 1, 'f', 0, 0, 0, 0, 0, 0}, uint32(1))
	f.Fuzz(func(t *testing.T, payload []byte, count uint32) {
		if len(payload) > 1<<20 {
			return
		}
		b := append(header(1), block(1, 0, 0, uint32(len(payload)), count, 0, payload)...)
		b = append(b, block(2, 0, 1, 0, 0, uint64(count), nil)...)
		list, err := read(t, bytes.NewReader(b))
		if _, damaged := errors.AsType[*trace.DamageError](err); err != nil && !damaged {
			t.Fatal(err)
		}
		again, err := read(t, bytes.NewReader(write(t, 0, list...)))
		if err != nil || !cmp.Equal(list, again) {
			t.Fatal(err, cmp.Diff(list, again))
		}
	})
}

func BenchmarkWriter(b *testing.B) {
	list := sample(1000)
	w, err := trace.NewWriter(io.Discard, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if err := w.Event(list[3+i%1000].(*trace.Event)); err != nil {
			b.Fatal(err)
		}
		i++
	}
	b.ReportMetric(float64(w.Written())/float64(b.N), "bytes/event")
}

func BenchmarkReader(b *testing.B) {
	list := sample(100000)
	whole := write(b, 0, list...)
	b.ReportAllocs()
	for b.Loop() {
		r, err := trace.NewReader(bytes.NewReader(whole))
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for _, err := range r.All() {
			if err != nil {
				b.Fatal(err)
			}
			n++
		}
		if n != len(list) {
			b.Fatal(n)
		}
	}
	b.ReportMetric(float64(b.N*len(list))/b.Elapsed().Seconds(), "records/s")
}
