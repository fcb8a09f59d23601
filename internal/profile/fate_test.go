package profile

import "testing"

// TestFate: of a process that it didn't start, nobody tells Run the exit code.
func TestFate(t *testing.T) {
	for want, r := range map[string]*Result{
		"exit code 0":               {Ended: true},
		"exit code 3":               {Ended: true, ExitCode: 3},
		"ended by a signal: killed": {Ended: true, ExitCode: 137, Signal: "killed"},
		"ended; its parent alone knows the exit code": {Ended: true, ExitCode: -1},
		"still runs": {ExitCode: -1},
	} {
		if got := r.fate(); got != want {
			t.Errorf("%+v: %q, want %q", r, got, want)
		}
	}
}
