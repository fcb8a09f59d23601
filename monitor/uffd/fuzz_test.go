package uffd

import (
	"os"
	"testing"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/vm"
)

// FuzzRecord feeds made-up messages to a monitor without a reader: whatever
// they say, what they name is invalid afterwards and the sets stay sound.
func FuzzRecord(f *testing.F) {
	f.Add([]byte{0x16, 0x15, 0x14}, uint64(1<<32), uint64(1<<32+4096), uint64(8192))
	f.Add([]byte{0x12}, uint64(0), ^uint64(0), uint64(1))
	f.Fuzz(func(t *testing.T, events []byte, a, b, c uint64) {
		mem, table, err := newTable(16)
		must(t, err)
		null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		must(t, err)
		defer null.Close()
		m := &Monitor{table: table}
		m.armed.grow(2)
		m.fresh.grow(2)
		m.reader, err = newThread(-1, int(null.Fd()), -1, word(mem))
		must(t, err)
		whole := new(epoch.Watch)
		must(t, table.Watch(whole, vm.Range{End: epoch.MaxAddress}))
		for i, e := range events[:min(len(events), 16)] {
			before := table.Stamp(whole)
			m.armed.add(vm.Range{Start: uintptr(i) << 20, End: uintptr(i)<<20 + pageSize})
			msg := sys.UFFDMsg{Event: sys.UFFDEvent(e), Arg: [3]uint64{a + uint64(i)<<12, b, c}}
			m.reader.ring[0] = msg
			m.record(&m.reader.ring[0])
			inside := a+uint64(i)<<12 < b && a+uint64(i)<<12 < uint64(epoch.MaxAddress)
			removed := msg.Event == sys.UFFDEventUnmap || msg.Event == sys.UFFDEventRemove
			if removed && inside && table.Stamp(whole) == before {
				t.Errorf("%+v isn't on record", msg)
			}
			if e < 0x14 && !table.Word().Lost() {
				t.Errorf("%+v is taken for something known", msg)
			}
			for _, s := range [][]vm.Range{m.armed.list, m.fresh.list} {
				for i, r := range s {
					if r.Empty() || i > 0 && r.Start <= s[i-1].End {
						t.Fatalf("set %v", s)
					}
				}
			}
		}
	})
}
