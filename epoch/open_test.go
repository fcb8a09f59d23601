package epoch

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/pindown/pindown/vm"
)

func TestFormatRefuses(t *testing.T) {
	aligned := make([]byte, Size(3)+8)
	for name, c := range map[string]struct {
		mem  []byte
		bits int
	}{
		"nil memory":     {nil, 3},
		"bits too small": {make([]byte, Size(3)), minBucketBits - 1},
		"bits negative":  {make([]byte, Size(3)), -1},
		"bits too large": {make([]byte, Size(3)), maxBucketBits + 1},
		"one byte short": {make([]byte, Size(4)-1), 4},
		"misaligned":     {aligned[1:], 3},
		"half aligned":   {aligned[4:], 3},
	} {
		if table, err := Format(c.mem, c.bits); !errors.Is(err, ErrMemory) || table != nil {
			t.Errorf("%s: Format = %v, %v", name, table, err)
		}
	}
	mem := make([]byte, Size(3))
	if _, err := Format(mem, 3); err != nil {
		t.Fatal(err)
	}
	if _, err := Format(mem, 3); !errors.Is(err, ErrMemory) {
		t.Errorf("Format of a table in use: %v", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	good := make([]byte, Size(4))
	if _, err := Format(good, 4); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		field  string
		off    uintptr
		size   int
		values []uint64
	}{
		{"magic", offsets.magic, 8, []uint64{0, Magic + 1, Magic >> 8, 1<<64 - 1}},
		{"version", offsets.version, 4, []uint64{0, Version - 1, Version + 1, 1<<32 - 1}},
		{"header_size", offsets.headerSize, 4, []uint64{0, 256, headerSize * 2}},
		{"features", offsets.features, 8, []uint64{1 << 2, 1 << 31, 1 << 32, 1 << 63, 1<<64 - 1}},
		{"page_shift", offsets.pageShift, 4, []uint64{0, 14, 16, 1<<32 - 1}},
		{"fanout_shift", offsets.fanoutShift, 4, []uint64{0, 3, 9}},
		{"levels", offsets.levels, 4, []uint64{0, 9, 11}},
		{"bucket_slots", offsets.bucketSlots, 4, []uint64{0, 4, 16}},
		{"bucket_size", offsets.bucketSize, 4, []uint64{0, 255, 512}},
		{"bucket_bits", offsets.bucketBits, 4, []uint64{0, minBucketBits - 1, maxBucketBits + 1, 63, 1<<32 - 1}},
	} {
		for _, v := range c.values {
			mem := append([]byte(nil), good...)
			if c.size == 8 {
				binary.LittleEndian.PutUint64(mem[c.off:], v)
			} else {
				binary.LittleEndian.PutUint32(mem[c.off:], uint32(v))
			}
			for name, open := range map[string]func() error{
				"Open":       func() error { _, err := Open(mem); return err },
				"OpenReader": func() error { _, err := OpenReader(mem, nil); return err },
				"OpenWriter": func() error { _, err := OpenWriter(mem, nil); return err },
			} {
				err := open()
				var ie *IncompatibleError
				if !errors.Is(err, ErrIncompatible) || !errors.As(err, &ie) || ie.Field != c.field || ie.Have != v {
					t.Errorf("%s with %s = %#x: %v", name, c.field, v, err)
				} else if !strings.Contains(err.Error(), c.field) {
					t.Errorf("%s with %s = %#x: message %q", name, c.field, v, err)
				}
			}
		}
	}

	for name, mem := range map[string][]byte{
		"nil":                nil,
		"header only":        good[:headerSize],
		"half a header":      good[:100],
		"one byte short":     good[:len(good)-1],
		"misaligned":         append(make([]byte, 1, len(good)+9), good...)[1:],
		"larger than bits":   withBits(good, 5),
		"largest bits":       withBits(good, maxBucketBits),
		"a table, unaligned": append(make([]byte, 4, len(good)+12), good...)[4:],
	} {
		if _, err := Open(mem); !errors.Is(err, ErrMemory) {
			t.Errorf("Open, %s: %v", name, err)
		}
	}
	if _, err := Open(withBits(good, 3)); err != nil {
		t.Errorf("Open with memory to spare: %v", err)
	}
}

func withBits(mem []byte, bits uint32) []byte {
	mem = append([]byte(nil), mem...)
	binary.LittleEndian.PutUint32(mem[offsets.bucketBits:], bits)
	return mem
}

func TestBucketBitsFor(t *testing.T) {
	for _, c := range []struct{ regions, want int }{
		{-1, minBucketBits}, {0, minBucketBits}, {4, 3}, {5, 4},
		{16384, 15}, {16385, 16}, {100000, 16}, {1 << 40, recommendedBucketBits},
	} {
		if got := BucketBitsFor(c.regions); got != c.want {
			t.Errorf("BucketBitsFor(%d) = %d, want %d", c.regions, got, c.want)
		}
	}
	if Size(-1) != Size(minBucketBits) || Size(99) != Size(maxBucketBits) || Size(3) != headerSize+9*bucketSize {
		t.Error("Size doesn't clamp")
	}
}

// TestOldAndNew sets this version's side against a later one's in all four
// pairs, by layout version.
func TestOldAndNew(t *testing.T) {
	next := dialect{version: Version + 1, features: knownFeatures | 1<<5}
	mem := make([]byte, Size(3))
	if _, err := Format(mem, 3); err != nil {
		t.Fatal(err)
	}
	newer := append([]byte(nil), mem...)
	binary.LittleEndian.PutUint32(newer[offsets.version:], next.version)
	featured := append([]byte(nil), mem...)
	binary.LittleEndian.PutUint64(featured[offsets.features:], 1<<5)
	sameVersion := dialect{version: Version, features: next.features}
	for _, c := range []struct {
		name  string
		mem   []byte
		d     dialect
		field string
	}{
		{"old party, old table", mem, current, ""},
		{"new party, new table", newer, next, ""},
		{"old party, new table", newer, current, "version"},
		{"new party, old table", mem, next, "version"},
		{"old party, table with a new feature", featured, current, "features"},
		{"party with a new feature, such a table", featured, sameVersion, ""},
		{"party with a new feature, old table", mem, sameVersion, ""},
	} {
		_, err := open(c.mem, c.d)
		var ie *IncompatibleError
		if c.field == "" && err != nil || c.field != "" && (!errors.As(err, &ie) || ie.Field != c.field) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestAttach(t *testing.T) {
	const future = Features(1 << 9)
	type party = AttachOptions
	for _, c := range []struct {
		name            string
		readers         []*party
		writers         []*party
		refusesLast     string // field, if the last to attach is refused
		writersGoFirst  bool
		readerAnnounced uint64
	}{
		{name: "defaults", readers: []*party{nil}, writers: []*party{nil}, readerAnnounced: 1},
		{name: "defaults, writer first", readers: []*party{nil}, writers: []*party{nil}, writersGoFirst: true, readerAnnounced: 1},
		{name: "new reader that offers more, old writer", readers: []*party{{Understands: future}}, writers: []*party{nil},
			readerAnnounced: uint64(future | 1)},
		{name: "new reader that needs more, old writer", readers: []*party{{Requires: future}}, writers: []*party{nil},
			refusesLast: "reader_features", readerAnnounced: uint64(future)<<32 | 1},
		{name: "old writer, new reader that needs more", readers: []*party{{Requires: future}}, writers: []*party{nil},
			writersGoFirst: true, refusesLast: "writer_features"},
		{name: "old reader, writer that needs the hit check", readers: []*party{nil}, writers: []*party{{Requires: FeatureHitCheck}},
			refusesLast: "reader_features", readerAnnounced: 1},
		{name: "writer that needs the hit check, old reader", readers: []*party{nil}, writers: []*party{{Requires: FeatureHitCheck}},
			writersGoFirst: true, refusesLast: "writer_features"},
		{name: "writer that needs the hit check, reader that does it", readers: []*party{{Understands: FeatureHitCheck}},
			writers: []*party{{Requires: FeatureHitCheck}}, readerAnnounced: 3},
		{name: "two readers, one doesn't do the hit check", readers: []*party{{Understands: FeatureHitCheck}, nil},
			writers: []*party{{Requires: FeatureHitCheck}}, refusesLast: "reader_features", readerAnnounced: 1},
		{name: "second writer needs what the reader lacks", readers: []*party{nil}, writers: []*party{nil, {Requires: future}},
			refusesLast: "reader_features", readerAnnounced: 1},
		{name: "reader needs what the second writer lacks", readers: []*party{{Requires: future}},
			writers: []*party{{Understands: future}, nil}, refusesLast: "reader_features", readerAnnounced: uint64(future)<<32 | 1},
		{name: "both need and understand", readers: []*party{{Requires: future, Understands: future}},
			writers: []*party{{Requires: future, Understands: future}}, readerAnnounced: uint64(future)<<32 | uint64(future) | 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			mem := make([]byte, Size(3))
			if _, err := Format(mem, 3); err != nil {
				t.Fatal(err)
			}
			var attach []func() error
			for _, o := range c.readers {
				attach = append(attach, func() error { _, err := OpenReader(mem, o); return err })
			}
			for i, o := range c.writers {
				f := func() error { _, err := OpenWriter(mem, o); return err }
				if c.writersGoFirst {
					attach = append(append(append([]func() error(nil), attach[:i]...), f), attach[i:]...)
				} else {
					attach = append(attach, f)
				}
			}
			for i, f := range attach {
				err := f()
				var ie *IncompatibleError
				if i < len(attach)-1 || c.refusesLast == "" {
					if err != nil {
						t.Fatalf("party %d refused: %v", i, err)
					}
				} else if !errors.As(err, &ie) || ie.Field != c.refusesLast || !errors.Is(err, ErrIncompatible) {
					t.Fatalf("last party: %v", err)
				}
			}
			if got := binary.LittleEndian.Uint64(mem[offsets.readerFeatures:]); got != c.readerAnnounced {
				t.Errorf("reader_features = %#x, want %#x", got, c.readerAnnounced)
			}
		})
	}
}

func TestAttachToTableFeature(t *testing.T) {
	mem := make([]byte, Size(3))
	if _, err := Format(mem, 3); err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint64(mem[offsets.features:], uint64(FeatureHitCheck))
	if _, err := OpenReader(mem, nil); !errors.Is(err, ErrIncompatible) {
		t.Errorf("a reader without the hit check: %v", err)
	}
	if _, err := OpenReader(mem, &AttachOptions{Understands: FeatureHitCheck}); err != nil {
		t.Errorf("a reader with the hit check: %v", err)
	}
}

func TestOnePartyWatches(t *testing.T) {
	mem := make([]byte, Size(3))
	first, err := Format(mem, 3)
	if err != nil {
		t.Fatal(err)
	}
	second, err := Open(mem)
	if err != nil {
		t.Fatal(err)
	}
	r := pages(0x7f0000000, 20)
	var w, v Watch
	if err := first.Watch(&w, r); err != nil {
		t.Fatal(err)
	}
	if err := second.Watch(&v, r); !errors.Is(err, ErrInUse) || v != (Watch{}) {
		t.Errorf("second party: %v", err)
	}
	second.Unwatch(&v)
	// A writer it may well be.
	stamp := first.Stamp(&w)
	if !second.Touch(vm.Range{Start: r.Start, End: r.Start + 1}) || first.Stamp(&w) == stamp {
		t.Error("the touch of an opened table isn't seen")
	}
	first.Unwatch(&w)
	if err := second.Watch(&v, r); err != nil {
		t.Errorf("after the first party left: %v", err)
	}
}

func TestWatchRefuses(t *testing.T) {
	table := newTestTable(t, 3)
	for _, r := range []vm.Range{
		{}, {Start: 4096, End: 4096}, {Start: 8192, End: 4096}, {Start: 4096, End: 0},
		{Start: 0, End: MaxAddress + 1}, {Start: MaxAddress, End: MaxAddress + 4096},
		{Start: ^uintptr(0) - 4095, End: ^uintptr(0)},
	} {
		var w Watch
		if err := table.Watch(&w, r); !errors.Is(err, ErrRange) || w.Blocks() != 0 {
			t.Errorf("Watch(%v): %v", r, err)
		}
	}
	if used := table.Stats().Used; used != 0 {
		t.Errorf("%d slots in use", used)
	}
}

func TestWord(t *testing.T) {
	table := newTestTable(t, 3)
	if w := table.Word(); w == 0 || w.Busy() || w.Lost() {
		t.Errorf("first word %#x", w)
	}
	first := table.Word()
	for range 127 {
		table.AddBusy()
	}
	if w := table.Word(); !w.Busy() || w.Lost() || w.Generation() != first.Generation() {
		t.Errorf("word with 127 busy: %#x", w)
	}
	for range 127 {
		table.DropBusy()
	}
	if w := table.Quiet(); w != first {
		t.Errorf("word after: %#x, want %#x", w, first)
	}

	var w Watch
	if err := table.Watch(&w, pages(5, 1)); err != nil {
		t.Fatal(err)
	}
	table.SetLost()
	if w := table.Word(); !w.Lost() {
		t.Errorf("word of a lost table: %#x", w)
	}
	if word, _ := table.Take(&w); word != 0 {
		t.Errorf("Take of a lost table: %#x", word)
	}
	// Nothing brings it back.
	for range 300 {
		table.AddBusy()
		if !table.Word().Lost() {
			t.Fatal("a busy writer made a lost table good again")
		}
	}
	for range 300 {
		table.DropBusy()
		table.Touch(pages(5, 1))
		if !table.Word().Lost() {
			t.Fatal("a quiet writer made a lost table good again")
		}
	}
}

func TestBusyCountFailsSafe(t *testing.T) {
	table := newTestTable(t, 3)
	for range 128 {
		table.AddBusy()
	}
	if !table.Word().Lost() {
		t.Error("128 busy writers: not lost")
	}
	table = newTestTable(t, 3)
	table.DropBusy()
	if w := table.Word(); !w.Lost() || w.Generation() == 0 {
		t.Errorf("DropBusy without AddBusy: word %#x", w)
	}
}
