package probe

import (
	"bytes"
	"encoding/binary"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestEventLayout: the Go side decodes what struct event of src/profile.c is
// in the object's own description of its types.
func TestEventLayout(t *testing.T) {
	spec, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	// The type appears as that of no map; the programs' size of a reservation is
	// what counts, and the tests with a kernel check it. Here: maps' sizes.
	if got := spec.Maps["counts"].ValueSize; got != 32 {
		t.Errorf("struct count has %d bytes", got)
	}
	if got := spec.Maps["counts"].MaxEntries; got != uint32(operations) {
		t.Errorf("%d operations there, %d here", got, operations)
	}
	if got := spec.Maps["stacks"].ValueSize; got != 8*(1+32) {
		t.Errorf("struct stack has %d bytes", got)
	}
}

func TestDecodeEvent(t *testing.T) {
	want := Event{
		What: RingBuffer, PID: 7, TID: 8, Time: time.Second, Took: time.Millisecond, Args: [5]uint64{1, 2, 3, 4, 5},
		Result: -22, Ring: 0xffff888000000000, Stack: 99, Top: [3]uint64{6, 7, 8}, Part: 3,
	}
	var got Event
	if !got.decode(encodeEvent(&want)) {
		t.Fatal("not decoded")
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got.decode(encodeEvent(&want)[:eventSize-1]) {
		t.Error("decoded what is too short")
	}
}

func encodeEvent(e *Event) []byte {
	var b bytes.Buffer
	for _, v := range []any{
		uint64(e.Time), uint64(e.Took), e.Args, e.Result, e.Ring, e.Top, e.Stack, e.PID, e.TID, uint16(e.What), e.Part, uint32(0),
	} {
		_ = binary.Write(&b, binary.LittleEndian, v)
	}
	return b.Bytes()
}

func TestComm(t *testing.T) {
	e := Event{PID: 5, Args: [5]uint64{0: binary.LittleEndian.Uint64([]byte("postgres")), 2: 4, 3: 5}}
	if e.Comm() != "postgres" || e.Parent() != 4 {
		t.Errorf("%q, parent %d", e.Comm(), e.Parent())
	}
	e.Args[3] = 6 // another namespace's number
	if e.Parent() != 0 {
		t.Errorf("parent %d", e.Parent())
	}
}

// mmap2 makes a PERF_RECORD_MMAP2 as perf_event_open(2) describes it.
func mmap2(path string, at uint64) []byte {
	name := append([]byte(path), make([]byte, 8-len(path)%8)...)
	var b bytes.Buffer
	for _, v := range []any{
		uint32(perfRecordMmap2), uint16(0), uint16(8 + 64 + len(name) + 8),
		uint32(10), uint32(11), uint64(0x1000), uint64(0x2000), uint64(0x3000),
		uint32(8), uint32(1), uint64(77), uint64(0), uint32(5), uint32(2), name, at,
	} {
		_ = binary.Write(&b, binary.LittleEndian, v)
	}
	return b.Bytes()
}

func TestDecodeRecord(t *testing.T) {
	want := Record{
		Kind: RecordMap, PID: 10, Time: 42, Start: 0x1000, Length: 0x2000, Offset: 0x3000, Path: "/lib/x.so", Dev: 0x801, Inode: 77,
	}
	var got Record
	if !got.decode(mmap2("/lib/x.so", 42)) || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	b := mmap2("/lib/x.so", 42)
	for n := range b {
		got.decode(b[:n])
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(mmap2("/lib/x.so", 42))
	f.Add(encodeEvent(&Event{What: Mmap}))
	f.Fuzz(func(_ *testing.T, b []byte) {
		var r Record
		if r.decode(b) && r.Kind == RecordInvalid {
			panic("a record of no kind")
		}
		var e Event
		if e.decode(b) {
			_ = e.Comm()
			_ = e.What.String()
		}
	})
}

func TestVerbsNames(t *testing.T) {
	for path, want := range map[string]bool{
		"/usr/lib/libibverbs.so.1": true, "/a/libibverbs.so": true, "/a/libibverbs.so.1.14.44.0": true,
		"/a/libibverbs": false, "/a/xlibibverbs.so.1": false, "": false,
	} {
		if IsVerbs(path) != want {
			t.Errorf("%s: %v", path, !want)
		}
	}
	if _, err := functionOffsets("/proc/self/exe"); err == nil {
		t.Error("functions found in a program that has none")
	}
}
