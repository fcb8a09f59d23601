package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
)

// needRing skips the test without io_uring. It keeps a cache for the test's time,
// so that the monitor that all share is loaded once.
func needRing(t *testing.T) {
	t.Helper()
	dev, err := iouring.Open(nil)
	if errors.Is(err, device.ErrNotSupported) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	cache, err := pindown.New(dev, nil)
	if err != nil {
		t.Fatal(errors.Join(err, dev.Close()))
	}
	t.Cleanup(func() {
		if err := errors.Join(cache.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
}

func TestCopy(t *testing.T) {
	needRing(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	const block = 8192
	for _, size := range []int{0, 1, block - 1, block, block + 1, 200*block + 77} {
		from, to := filepath.Join(t.TempDir(), "from"), filepath.Join(t.TempDir(), "to")
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		if err := os.WriteFile(from, data, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, renew := range []int{0, 1, 7} {
			if err := run(t.Context(), []string{"-block", fmt.Sprint(block), "-depth", "4", "-renew", fmt.Sprint(renew), from, to}); err != nil {
				t.Fatalf("%d bytes: %v", size, err)
			}
			if got, err := os.ReadFile(to); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, renewed after %d: %v, or other bytes", size, renew, err)
			}
		}
	}
}

func TestCopyFails(t *testing.T) {
	needRing(t)
	from := filepath.Join(t.TempDir(), "from")
	if err := os.WriteFile(from, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{}, {from}, {"-nonsense", from, from + "2"}} {
		if err := run(t.Context(), args); !errors.Is(err, errUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
	for _, args := range [][]string{{"-block", "0", from, from + "2"}, {from + "-no", from + "2"}, {from, "/dev/full"}, {from, filepath.Join(from, "x")}} {
		if err := run(t.Context(), args); err == nil || errors.Is(err, errUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
