package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pindown/pindown/bench/baseline"
	"github.com/pindown/pindown/bench/ucx"
	"github.com/pindown/pindown/internal/bench"
	"github.com/pindown/pindown/vm"
)

// TestRun runs everything briefly and reads what it writes.
func TestRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rows.json")
	var out bytes.Buffer
	err := run(t.Context(), strings.Fields("--short --rounds 2 --duration 1ms --regions 1,200 --json "+file), &out)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r bench.Report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]int)
	for _, x := range r.Results {
		rows[x.Impl]++
	}
	for impl, want := range map[string]int{"pindown": 20, "lane": 5, "ucx": 20, "mutex-btree": 10, "per-use": 5} {
		if rows[impl] < want {
			t.Errorf("%d rows of %s\n%s", rows[impl], impl, &out)
		}
	}
	if !slices.ContainsFunc(r.Ratios, func(x bench.Ratio) bool { return x.To == "ucx" && x.Median > 0 && x.Met == nil }) {
		t.Errorf("no ratio to UCX, or one that is judged\n%s", &out)
	}
	if !strings.Contains(out.String(), file) {
		t.Errorf("the file is not named\n%s", &out)
	}
}

func TestWrongFlags(t *testing.T) {
	for _, args := range []string{"--nosuch", "--workload sleep", "--regions 0", "--rounds -1"} {
		if err := run(t.Context(), strings.Fields(args), &bytes.Buffer{}); err == nil {
			t.Errorf("%s: no error", args)
		}
	}
}

// TestSubjects checks that the peers do what they are measured at: register
// once, hit, and register again after an operation.
func TestSubjects(t *testing.T) {
	for _, f := range []bench.Factory{ucx.Factory(), baseline.MutexBTree()} {
		t.Run(f.Impls[0], func(t *testing.T) {
			space, release, err := bench.Reserve(64)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = release() }()
			s, err := f.New(100)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}()
			w, err := s.Worker(f.Impls[0])
			if err != nil {
				t.Fatal(err)
			}
			step := func(what string, length uintptr, want uint64, pages ...uint32) {
				t.Helper()
				if err := w.Run(space, length, pages); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if made, _ := s.Registrations(); made != want {
					t.Errorf("%s: %d registrations, want %d", what, made, want)
				}
			}
			step("misses", 4096, 3, 0, 2, 4)
			step("hits", 4096, 3, 0, 0, 2, 4, 2)
			step("part of a region", 512, 3, 2)
			if _, live := s.Registrations(); live != 3 {
				t.Errorf("%d live", live)
			}
			if err := s.Invalidate(vm.Range{Start: space + 4096, End: space + 3*4096}); err != nil {
				t.Fatal(err)
			}
			step("others", 4096, 3, 0, 4)
			step("the invalidated one", 4096, 4, 2)
			step("and again", 4096, 4, 2)
			if _, live := s.Registrations(); live != 3 {
				t.Errorf("%d live", live)
			}
		})
	}
}

// TestUCXEvicts: the limit is the one that was asked for.
func TestUCXEvicts(t *testing.T) {
	space, release, err := bench.Reserve(64)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = release() }()
	s, err := ucx.Factory().New(4)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	w, err := s.Worker("ucx")
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint32(20) {
		if err := w.Run(space, 4096, []uint32{2 * i}); err != nil {
			t.Fatal(err)
		}
	}
	if made, live := s.Registrations(); made != 20 || live > 5 {
		t.Errorf("%d made, %d live", made, live)
	}
}
