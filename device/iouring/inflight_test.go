package iouring

import "testing"

// What somebody else sends to the ring comes as it is, and takes no request's place.
func TestInflightOfOthers(t *testing.T) {
	f := newInflight(1)
	id := f.begin(7, 3)
	for _, foreign := range []uint64{0, 1, 7, 1 << 63, id + 1} {
		if got := f.end(foreign); got != foreign {
			t.Errorf("%#x came as %#x", foreign, got)
		}
	}
	if n := f.of(3); n != 1 {
		t.Errorf("%d requests use the slot, want 1", n)
	}
	if got := f.end(id); got != 7 || f.of(3) != 0 {
		t.Errorf("came as %d, %d left", got, f.of(3))
	}
	if got := f.end(id); got != id || f.of(3) != 0 {
		t.Errorf("a second time came as %#x, %d left", got, f.of(3))
	}
}
