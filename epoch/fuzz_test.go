package epoch

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/pindown/pindown/vm"
)

// FuzzTouchStamp reads the input as a program of watches, unwatches and
// touches, eight bytes a step, and holds the table against the naive model.
func FuzzTouchStamp(f *testing.F) {
	step := func(op byte, base byte, first uint16, n uint16, fine uint16) []byte {
		b := []byte{op, base, 0, 0, 0, 0, 0, 0}
		binary.LittleEndian.PutUint16(b[2:], first)
		binary.LittleEndian.PutUint16(b[4:], n)
		binary.LittleEndian.PutUint16(b[6:], fine)
		return b
	}
	cat := func(steps ...[]byte) (out []byte) {
		for _, s := range steps {
			out = append(out, s...)
		}
		return out
	}
	f.Add([]byte{})
	f.Add(cat(step(0, 0, 3, 16, 0), step(2, 0, 3, 1, 0), step(2, 0, 19, 1, 0), step(1, 0, 0, 0, 0)))
	f.Add(cat(step(0, 2, 0, 1, 1), step(0, 3, 0xffff, 1, 7), step(2, 3, 0, 0xffff, 0), step(2, 2, 0, 1, 0)))
	f.Add(cat(step(0, 1, 1, 0xffff, 0), step(0, 17, 5, 300, 0), step(1, 0, 1, 0, 0), step(2, 33, 2, 9, 0)))
	f.Fuzz(func(t *testing.T, program []byte) {
		m := newModel(t, minBucketBits)
		for len(program) >= 8 && len(m.entries) < 24 {
			op, base := program[0]%4, program[1]
			first := uintptr(binary.LittleEndian.Uint16(program[2:]))
			n := uintptr(binary.LittleEndian.Uint16(program[4:])) + 1
			fine := uintptr(binary.LittleEndian.Uint16(program[6:]))
			program = program[8:]
			shift := PageShift + FanoutShift*(int(base>>4)%Levels)
			at := []uintptr{0x7f0000000000, 0x7f00ffff0000, 0, MaxAddress - 1<<28}[base%4] + first<<shift + fine
			r := vm.Range{Start: at, End: at + n<<shift - fine/2}
			switch op {
			case 1:
				if len(m.entries) > 0 {
					m.unwatch(t, int(first)%len(m.entries))
				}
			case 0:
				if !r.Empty() && r.End <= MaxAddress {
					m.watch(t, r)
					continue
				}
				if err := m.t.Watch(new(Watch), r); !errors.Is(err, ErrRange) {
					t.Fatalf("Watch(%v): %v", r, err)
				}
			default:
				m.touch(t, r)
			}
		}
		for len(m.entries) > 0 {
			m.unwatch(t, 0)
		}
	})
}

// FuzzOpen opens a table whose header and first buckets hold any bytes, and
// uses it if it is let in.
func FuzzOpen(f *testing.F) {
	good := make([]byte, Size(3))
	if _, err := Format(good, 3); err != nil {
		f.Fatal(err)
	}
	full := append([]byte(nil), good...)
	table, err := Open(full)
	if err != nil {
		f.Fatal(err)
	}
	for i := range uint64(12) {
		if err := table.Watch(new(Watch), pages(i*12345, 17)); err != nil {
			f.Fatal(err)
		}
	}
	table.AddBusy()
	f.Add([]byte{}, []byte{}, uint16(Size(3)))
	f.Add(good[:256], []byte{}, uint16(Size(3)))
	f.Add(good[:256], good[headerSize:headerSize+256], uint16(Size(3)-1))
	f.Add(full[:256], full[headerSize:], uint16(Size(3)))
	f.Add(withBits(good, 5)[:256], []byte{}, uint16(65535))
	f.Fuzz(func(t *testing.T, head, buckets []byte, size uint16) {
		mem := make([]byte, int(size)&^7)
		copy(mem, head)
		if len(mem) > headerSize {
			copy(mem[headerSize:], buckets)
		}
		table, err := OpenReader(mem, nil)
		if err != nil {
			var ie *IncompatibleError
			if !errors.As(err, &ie) && !errors.Is(err, ErrMemory) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		table.Touch(pages(0, 1))
		table.Touch(vm.Range{Start: 4097, End: MaxAddress})
		var w Watch
		if err := table.Watch(&w, pages(12345, 17)); err != nil {
			if !errors.Is(err, ErrInUse) {
				t.Fatal(err)
			}
			return
		}
		stamp := table.Stamp(&w)
		if !table.Touch(pages(12350, 1)) || table.Stamp(&w) == stamp {
			t.Fatal("missed")
		}
		table.Unwatch(&w)
		if used := table.Stats().Used; used != 0 {
			t.Fatalf("%d slots in use", used)
		}
	})
}
