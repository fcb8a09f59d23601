package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/pindown/pindown/internal/doctor"
	"github.com/pindown/pindown/internal/profile"
)

// place is what this machine offers to the tests. It is looked at once.
var place = sync.OnceValue(func() *doctor.Report {
	return doctor.Run(context.Background(), &doctor.Options{Command: trialCommand})
})

// offers are the conditions that scripts ask for.
var offers = map[string]func() bool{
	"root": func() bool { return os.Geteuid() == 0 },
	"profile": func() bool {
		_, err := profile.Run(context.Background(), &profile.Options{Command: []string{"true"}})
		return !errors.Is(err, profile.ErrNotSupported)
	},
	"io_uring": func() bool { return place().Selected.Device == "iouring" },
	"monitor":  func() bool { return place().Selected.Monitor != "none" },
	"uffd": func() bool {
		return slices.ContainsFunc(place().Monitors, func(m doctor.Monitor) bool { return m.Name == "uffd" && m.Usable })
	},
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Condition: func(cond string) (bool, error) {
			f, ok := offers[cond]
			switch {
			case !ok:
				return false, fmt.Errorf("unknown condition %q", cond)
			case f():
				return true, nil
			case os.Getenv("CI") == "true":
				return false, fmt.Errorf("CI lacks %s", cond)
			}
			return false, nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){"code": code},
	})
}

// code checks the exit code of a command: "code 3 pindown demo".
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code number command…")
	}
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		exit, ok := err.(interface{ ExitCode() int })
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if fmt.Sprint(got) != args[0] {
		ts.Fatalf("exit code %d, want %s", got, args[0])
	}
}
