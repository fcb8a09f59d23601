package vmops

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/vm"
)

const helperEnv = "PINDOWN_VMOPS_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" {
		if err := Serve(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func startHelper(t *testing.T) *Helper {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"=1")
	cmd.Stderr = os.Stderr
	h, err := StartHelper(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// extents are the operations' ranges on a scratch mapping of n units of which
// [n/4,3n/4) is held.
func extents(s *Scratch) map[string]vm.Range {
	n := s.Units()
	lo, hi := n/4, 3*n/4
	return map[string]vm.Range{
		"whole":          s.Slice(lo, hi),
		"part":           s.Slice((lo+hi)/2, (lo+hi)/2+1),
		"straddle-start": s.Slice(lo-1, lo+1),
		"straddle-end":   s.Slice(hi-1, hi+1),
		"before":         s.Slice(lo-1, lo),
		"after":          s.Slice(hi, hi+1),
	}
}

// The table says where pages change; the physical pages say whether it is
// right.
func TestTableAgreesWithFrames(t *testing.T) {
	helper := startHelper(t)
	done := 0
	for _, kind := range Kinds() {
		for _, o := range Operations() {
			if o.Heavy && testing.Short() {
				continue
			}
			for _, by := range o.Actors(kind) {
				if by == OtherThread && testing.Short() {
					continue
				}
				for name := range extents(&Scratch{unit: 1, r: vm.Range{End: 16}}) {
					if testing.Short() && (name == "part" || strings.HasPrefix(name, "straddle")) {
						continue
					}
					t.Run(fmt.Sprintf("%v/%v/%v/%v", kind, o, by, name), func(t *testing.T) {
						if try(t, kind, o, by, name, helper) {
							done++
						}
					})
				}
			}
		}
	}
	t.Logf("%d combinations", done)
	if done < 200 {
		t.Errorf("only %d combinations could be tried", done)
	}
}

func try(t *testing.T, kind vm.Mapping, o *Operation, by Actor, extent string, helper *Helper) bool {
	t.Helper()
	s, err := New(kind, &Options{Dir: t.TempDir()})
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Release(); err != nil {
			t.Errorf("release: %v", err)
		}
		if owned := s.Owned(); len(owned) != 0 {
			t.Errorf("still owned: %v", owned)
		}
	}()
	n := s.Units()
	held := s.Slice(n/4, 3*n/4)
	r := extents(s)[extent]
	w, err := oracle.Hold(held, s.Unit())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	before, err := w.Compare()
	if err != nil || (before.Any() && os.Getuid() == 0) {
		t.Fatalf("compare before: %v, %v", before, err)
	}
	if os.Getuid() != 0 {
		// Comparing by content works once.
		w.Close()
		if w, err = oracle.Hold(held, s.Unit()); err != nil {
			t.Fatal(err)
		}
	}
	err = Perform(s, o, r, by, helper)
	if Unavailable(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	d, err := w.Compare()
	if err != nil {
		t.Fatal(err)
	}
	want := o.Changes(kind) && o.Affected(s, r).Overlaps(held)
	if d.Any() != want {
		t.Errorf("pages differ: %v (%v), table says %v", d.Any(), d, want)
	}
	affected := o.Affected(s, r)
	for _, a := range slices.Concat(d.Gone, d.Changed) {
		if a < affected.Start || a >= affected.End {
			t.Errorf("page %#x differs, outside of the affected %v", a, affected)
		}
	}
	return true
}

func TestNothingIsLeftBehind(t *testing.T) {
	count := func() (maps, fds int) {
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range b {
			if c == '\n' {
				maps++
			}
		}
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return maps, len(d)
	}
	run := func() {
		for _, kind := range Kinds() {
			for _, o := range Operations() {
				if o.Heavy || !slices.Contains(o.Actors(kind), ThisThread) {
					continue
				}
				s, err := New(kind, nil)
				if err != nil {
					continue
				}
				_ = Perform(s, o, s.Slice(1, 3), ThisThread, nil)
				if err := s.Release(); err != nil {
					t.Errorf("%v/%v: %v", kind, o, err)
				}
			}
		}
	}
	run()
	maps, fds := count()
	for range 4 {
		run()
	}
	maps2, fds2 := count()
	// The Go heap and its threads may have grown in the meantime.
	if maps2 > maps+40 || fds2 > fds {
		t.Errorf("mappings %d → %d, descriptors %d → %d", maps, maps2, fds, fds2)
	}
}

func TestOwned(t *testing.T) {
	s := &Scratch{}
	r := func(a, b uintptr) vm.Range { return vm.Range{Start: a, End: b} }
	s.own(r(10, 20))
	s.own(r(30, 40))
	s.disown(r(15, 32))
	s.disown(r(12, 13))
	s.own(r(19, 21))
	want := []vm.Range{r(10, 12), r(13, 15), r(19, 21), r(32, 40)}
	if got := s.Owned(); !slices.Equal(got, want) {
		t.Errorf("owned %v, want %v", got, want)
	}
}

func TestUnavailable(t *testing.T) {
	for err, want := range map[error]bool{
		fmt.Errorf("x: %w", ErrUnavailable):         true,
		os.NewSyscallError("madvise", unix.EINVAL):  true,
		os.NewSyscallError("madvise", unix.EFAULT):  false,
		os.NewSyscallError("munmap", unix.EBADF):    false,
		os.NewSyscallError("io_uring", unix.ENOSYS): true,
	} {
		if got := Unavailable(err); got != want {
			t.Errorf("Unavailable(%v) = %v", err, got)
		}
	}
	if Unavailable(nil) {
		t.Error("Unavailable(nil)")
	}
}

func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for _, o := range Operations() {
		if seen[o.Name] {
			t.Errorf("%s twice", o.Name)
		}
		seen[o.Name] = true
		if got, ok := Lookup(o.Name); !ok || got != o {
			t.Errorf("Lookup(%q) = %v, %v", o.Name, got, ok)
		}
		if o.Op == vm.OpInvalid || o.Reach == ReachInvalid {
			t.Errorf("%s lacks an op or a reach", o.Name)
		}
	}
	if _, ok := Lookup("no such"); ok {
		t.Error("Lookup found what isn't there")
	}
}

func FuzzParseStartBrk(f *testing.F) {
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(b))
	f.Add("1 (a) b) S 1")
	f.Add("")
	f.Fuzz(func(_ *testing.T, stat string) { _, _ = parseStartBrk(stat) })
}
