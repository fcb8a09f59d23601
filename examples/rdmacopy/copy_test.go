package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/pindown/pindown/device/verbs"
)

// library returns a libibverbs without an adapter, or skips the test. In the
// virtual machine of test/vm the program runs on a real one.
func library(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "libfakeibv.so")
	out, err := exec.Command("gcc", "-std=gnu11", "-shared", "-fPIC", "-O1", "-pthread", "-o", path, "../../device/verbs/testdata/fakeibv.c").CombinedOutput()
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%v\n%s", err, out)
		}
		t.Skipf("needs gcc and the header infiniband/verbs.h (apt-get install gcc libc6-dev libibverbs-dev): %v", err)
	}
	return path
}

func testAdapter(t *testing.T, library string) *adapter {
	t.Helper()
	a, err := openAdapter(&verbs.Options{Library: library})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// startServer serves until the test ends and returns the address and the
// directory. What goes wrong at the server ends up in failed.
func startServer(t *testing.T, a *adapter, failed *[]error) (addr, dir string) {
	t.Helper()
	dir = t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{a: a, dir: root}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if err := s.serve(context.Background(), conn); err != nil {
				*failed = append(*failed, err)
			}
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
		root.Close()
		if len(*failed) > 0 {
			t.Logf("server: %v", *failed)
		}
	})
	return l.Addr().String(), dir
}

func TestCopy(t *testing.T) {
	lib := library(t)
	here, there := testAdapter(t, lib), testAdapter(t, lib)
	var failed []error
	addr, dir := startServer(t, there, &failed)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	const block = 8192
	for _, size := range []int{0, 1, block - 1, block, block + 1, 3 * block, 100*block + 77} {
		path := filepath.Join(t.TempDir(), fmt.Sprint("file-", size))
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		var results []result
		for _, way := range ways {
			s := &sender{a: here, addr: addr, block: block, renew: 5}
			r, err := s.send(t.Context(), path, way)
			if err != nil {
				t.Fatalf("%d bytes, way %s: %v", size, way, err)
			}
			got, err := os.ReadFile(filepath.Join(dir, filepath.Base(path)))
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, way %s: %v, or other bytes", size, way, err)
			}
			blocks := (size + block - 1) / block
			if r.here.Acquires != blocks || r.there.Acquires != blocks {
				t.Errorf("%d bytes, way %s: %d and %d acquires for %d blocks", size, way, r.here.Acquires, r.there.Acquires, blocks)
			}
			switch way {
			case wayCache:
				if size > 50*block && r.here.Hits == 0 {
					t.Errorf("%d bytes: no hits", size)
				}
			case wayRegister:
				if r.here.Registrations != blocks || r.here.Hits != 0 {
					t.Errorf("%d bytes: %+v", size, r.here)
				}
			case wayBounce:
				if r.here.Copied != size || r.there.Copied != size {
					t.Errorf("%d bytes: %d and %d copied", size, r.here.Copied, r.there.Copied)
				}
			}
			results = append(results, r)
		}
		var out strings.Builder
		if err := printResults(&out, results); err != nil || strings.Count(out.String(), "\n") != 4 {
			t.Errorf("%v: %s", err, out.String())
		}
	}
	// A file that is there already, onto itself.
	self := filepath.Join(dir, fmt.Sprint("file-", block+1))
	before, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	s := &sender{a: here, addr: addr, block: block}
	if _, err := s.send(t.Context(), self, wayCache); err != nil {
		t.Errorf("onto itself: %v", err)
	}
	if after, err := os.ReadFile(self); err != nil || !bytes.Equal(after, before) {
		t.Errorf("onto itself: %v, or other bytes", err)
	}
	if parts, _ := filepath.Glob(filepath.Join(dir, "*.part")); len(parts) > 0 {
		t.Errorf("left: %v", parts)
	}
	if len(failed) > 0 {
		t.Error(failed)
	}
	if here.dev.Live() > here.cache.Stats().Regions || there.dev.Live() > there.cache.Stats().Regions {
		t.Errorf("%d and %d registrations left", here.dev.Live(), there.dev.Live())
	}
}

// What goes wrong is said, and nothing is left of it.
func TestCopyFails(t *testing.T) {
	lib := library(t)
	here, there := testAdapter(t, lib), testAdapter(t, lib)
	var failed []error
	addr, dir := startServer(t, there, &failed)
	path := filepath.Join(t.TempDir(), "taken")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &sender{a: here, addr: addr, block: 4096}
	// At the server, the name is a directory: it is found out at the end, or at
	// once.
	for _, name := range []string{"taken", "taken.part"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := s.send(t.Context(), path, wayCache); !errors.Is(err, errPeer) {
			t.Errorf("%s is taken: %v", name, err)
		}
	}
	s.addr = "127.0.0.1:1"
	if _, err := s.send(t.Context(), path, wayCache); err == nil {
		t.Error("nobody listens there")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.addr = addr
	if _, err := s.send(ctx, path, wayCache); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	for _, args := range [][]string{{}, {"fly"}, {"send"}, {"serve", "x"}, {"send", "-nonsense", "x"}} {
		if err := run(t.Context(), args); !errors.Is(err, errUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
	for _, args := range [][]string{
		{"send", "-way", "teleport", path}, {"send", "-block", "0", path}, {"send", "-library", "no-such-library.so", path}, {"serve", "-dir", "/no/such"},
	} {
		if err := run(t.Context(), args); err == nil || errors.Is(err, errUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
	var out strings.Builder
	if err := devicesCommand(&out, []string{"-library", lib}); err != nil || !strings.Contains(out.String(), "fake0") {
		t.Errorf("%v: %s", err, out.String())
	}
}
