package plural

import "testing"

func TestOf(t *testing.T) {
	for n, want := range map[int]string{0: "0 blocks", 1: "1 block", 2: "2 blocks", 12800: "12800 blocks"} {
		if got := Of(n, "block"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := Of(uint64(2), "CPU"); got != "2 CPUs" {
		t.Errorf("%q", got)
	}
}
