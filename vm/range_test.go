package vm

import (
	"errors"
	"math/big"
	"testing"
)

// naive is a range in unbounded arithmetic.
type naive struct{ start, end *big.Int }

func naiveOf(r Range) naive {
	return naive{new(big.Int).SetUint64(uint64(r.Start)), new(big.Int).SetUint64(uint64(r.End))}
}

func (n naive) empty() bool { return n.end.Cmp(n.start) <= 0 }

func (n naive) contains(a *big.Int) bool { return a.Cmp(n.start) >= 0 && a.Cmp(n.end) < 0 }

func FuzzRange(f *testing.F) {
	top := ^uint64(0)
	f.Add(uint64(0), uint64(0), uint64(0), uint64(0), uint8(12))
	f.Add(uint64(4095), uint64(4097), uint64(4096), uint64(8192), uint8(12))
	f.Add(top-1, top, top-5000, top-4000, uint8(12))
	f.Add(uint64(5), uint64(3), uint64(0), top, uint8(63))
	f.Add(uint64(1)<<47, uint64(1)<<48, uint64(1)<<48-1, uint64(1)<<48+1, uint8(30))
	f.Fuzz(func(t *testing.T, a, b, c, d uint64, shift uint8) {
		r, o := Range{Start: uintptr(a), End: uintptr(b)}, Range{Start: uintptr(c), End: uintptr(d)}
		nr, no := naiveOf(r), naiveOf(o)
		if r.Empty() != nr.empty() || (r.Check() == nil) == nr.empty() || (r.Len() == 0) != nr.empty() {
			t.Fatalf("%v: empty %v, check %v, length %d", r, r.Empty(), r.Check(), r.Len())
		}
		if err := r.Check(); nr.empty() && errors.Is(err, ErrEmpty) != (a == b) {
			t.Fatalf("%v: %v", r, err)
		}

		in := r.Intersect(o)
		if in.Empty() == r.Overlaps(o) || r.Overlaps(o) != o.Overlaps(r) || in != o.Intersect(r) {
			t.Fatalf("%v and %v: intersection %v, overlap %v", r, o, in, r.Overlaps(o))
		}
		for _, at := range []uint64{a, a - 1, a + 1, b, b - 1, c, c - 1, c + 1, d, d - 1, 0, top} {
			x := new(big.Int).SetUint64(at)
			both := nr.contains(x) && no.contains(x)
			if ni := naiveOf(in); !ni.empty() && ni.contains(x) != both || in.Empty() && both {
				t.Fatalf("%v and %v: %#x in %v", r, o, at, in)
			}
		}

		u := r.Union(o)
		if !u.Contains(r) || !u.Contains(o) || u != o.Union(r) && (!r.Empty() || !o.Empty()) {
			t.Fatalf("union of %v and %v is %v", r, o, u)
		}
		if want := nr.empty() && no.empty(); u.Empty() != want {
			t.Fatalf("union of %v and %v is %v", r, o, u)
		}

		size := uintptr(1) << (shift % 64)
		out := r.RoundOut(size)
		if out.Start%size != 0 || out.End%size != 0 || !out.Empty() && out.RoundOut(size) != out {
			t.Fatalf("%v rounded to %#x: %v", r, size, out)
		}
		// Only at the very end of the address space the range is clipped.
		clipped := !r.Empty() && r.End > -size
		if !clipped && !out.Contains(r) {
			t.Fatalf("%v rounded to %#x: %v", r, size, out)
		}
		if !r.Empty() && !clipped && (r.Start-out.Start >= size || out.End-r.End >= size) {
			t.Fatalf("%v rounded to %#x: %v", r, size, out)
		}
		if n := r.Pages(size); size > 1 && uint64(n) != uint64(out.Len()/size) {
			t.Fatalf("%v has %d pages of %#x", r, n, size)
		}
	})
}

func FuzzNewRange(f *testing.F) {
	f.Add(uint64(0), int64(1))
	f.Add(^uint64(0), int64(1))
	f.Add(^uint64(0)-9, int64(10))
	f.Add(uint64(1)<<63, int64(1)<<62)
	f.Add(uint64(7), int64(-7))
	f.Fuzz(func(t *testing.T, addr uint64, n int64) {
		r, err := NewRange(uintptr(addr), int(n))
		end := new(big.Int).Add(new(big.Int).SetUint64(addr), big.NewInt(n))
		switch {
		case n <= 0:
			if !errors.Is(err, ErrEmpty) {
				t.Fatalf("%#x+%d: %v, %v", addr, n, r, err)
			}
		case !end.IsUint64():
			if !errors.Is(err, ErrOverflow) {
				t.Fatalf("%#x+%d: %v, %v", addr, n, r, err)
			}
		default:
			if err != nil || r.Check() != nil || uint64(r.Start) != addr || uint64(r.End) != end.Uint64() || r.Len() != uintptr(n) {
				t.Fatalf("%#x+%d: %v, %v", addr, n, r, err)
			}
		}
	})
}

func TestRangeOf(t *testing.T) {
	b := make([]byte, 8, 16)
	if r := RangeOf(b); r.Len() != 8 || !r.Contains(RangeOf(b[3:5])) || r.Contains(RangeOf(b[3:9])) {
		t.Errorf("%v", r)
	}
	if r := RangeOf(nil); !r.Empty() {
		t.Errorf("%v", r)
	}
	if r := RangeOf(b[8:]); !r.Empty() {
		t.Errorf("%v", r)
	}
}
