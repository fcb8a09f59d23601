package profile

import "testing"

// TestFate: what has ended doesn't still run, even if its exit code was lost.
func TestFate(t *testing.T) {
	for want, r := range map[string]*Result{
		"exit code 0":               {Ended: true},
		"exit code 3":               {Ended: true, ExitCode: 3},
		"ended by a signal: killed": {Ended: true, ExitCode: 137, Signal: "killed"},
		"ended, exit code not seen": {Ended: true, ExitCode: -1},
		"still runs":                {ExitCode: -1},
	} {
		if got := r.fate(); got != want {
			t.Errorf("%+v: %q, want %q", r, got, want)
		}
	}
}
