package epoch

import (
	"sync/atomic"
	"testing"
)

func TestNoAllocations(t *testing.T) {
	table := newTestTable(t, 10)
	r := pages(0x7f0000003, 16)
	var w, few Watch
	if err := table.Watch(&w, r); err != nil {
		t.Fatal(err)
	}
	if err := table.Watch(&few, pages(0x7f0000010, 1)); err != nil {
		t.Fatal(err)
	}
	word, stamp := table.Take(&w)
	var seen atomic.Uint64
	var sink uint64
	for name, f := range map[string]func(){
		"Word":       func() { sink += uint64(table.Word()) },
		"Quiet":      func() { sink += uint64(table.Quiet()) },
		"Touch":      func() { table.Touch(pages(0x7f0000005, 3)) },
		"Touch none": func() { table.Touch(pages(0x7e0000005, 300)) },
		"Stamp":      func() { sink += table.Stamp(&w) },
		"Stamp few":  func() { sink += table.Stamp(&few) },
		"Take":       func() { word, stamp = table.Take(&w) },
		"Check": func() {
			seen.Store(0)
			if table.Check(&w, stamp, &seen) == VerdictLost {
				t.Error("lost")
			}
		},
		"busy": func() { table.AddBusy(); table.DropBusy() },
		"Watch of few blocks": func() {
			var v Watch
			if err := table.Watch(&v, pages(0x7f0123400, 2)); err != nil {
				t.Error(err)
			}
			table.Unwatch(&v)
		},
	} {
		if n := testing.AllocsPerRun(200, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
	var v Watch
	if n := testing.AllocsPerRun(200, func() {
		if err := table.Watch(&v, r); err != nil {
			t.Error(err)
		}
		table.Unwatch(&v)
	}); n != 0 {
		t.Errorf("Watch of many blocks, again: %v allocations", n)
	}
	if w.Bytes() == 0 || few.Bytes() != 0 || w.Blocks() != 16 || few.Blocks() != 1 {
		t.Errorf("watches of %d and %d blocks hold %d and %d bytes", w.Blocks(), few.Blocks(), w.Bytes(), few.Bytes())
	}
	if sink == 0 || word == 0 {
		t.Error("nothing was read")
	}
}
