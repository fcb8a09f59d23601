package iouring_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
)

// TestMain skips examples where there is no io_uring, since they can't do it
// themselves, and fails if a ring or a goroutine is left at the end.
func TestMain(m *testing.M) {
	var ring *iouring.Ring
	var err error
	if _, child := os.LookupEnv(sandboxEnv); !child { // It counts what is locked.
		ring, err = iouring.NewRing(nil)
	}
	switch {
	case ring != nil:
		err = ring.Close()
	case errors.Is(err, device.ErrNotSupported) && os.Getenv("CI") != "true":
		fmt.Fprintln(os.Stderr, "examples skipped:", err)
		err = flag.Set("test.skip", "^Example")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if left := openRings(); code == 0 && len(left) > 0 {
			fmt.Fprintln(os.Stderr, "rings left open:", left)
			code = 1
		}
		os.Exit(code)
	}))
}

// openRings returns the descriptors of this process that are rings.
func openRings() []string {
	var rings []string
	links, _ := filepath.Glob("/proc/self/fd/*")
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.Contains(to, "io_uring") {
			rings = append(rings, link)
		}
	}
	return rings
}
