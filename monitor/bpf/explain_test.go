package bpf

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/monitor"
)

func TestExplain(t *testing.T) {
	if err := explain(nil); err != nil {
		t.Error(err)
	}
	own := fmt.Errorf("own: %w", monitor.ErrNotSupported)
	if err := explain(own); !errors.Is(err, own) || err.Error() != own.Error() {
		t.Error(err)
	}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("load: %w", unix.ENOSYS), "seccomp"},
		{fmt.Errorf("load: %w", unix.EPERM), unix.EPERM.Error()},
		{fmt.Errorf("load: %w", unix.ENOMEM), "memory"},
		{fmt.Errorf("load: %w", btf.ErrNotFound), "lacks"},
		{unix.E2BIG, unix.E2BIG.Error()},
		{
			&ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"1", "2", "3", "4", "R1 is bad", "processed 9 insns"}},
			"verifier: 3; 4; R1 is bad; processed 9 insns",
		},
	} {
		err := explain(tt.err)
		if !errors.Is(err, monitor.ErrNotSupported) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v: got %v, want %q in it", tt.err, err, tt.want)
		}
	}
}

func TestParseStatus(t *testing.T) {
	caps, seccomp := parseStatus([]byte("Name:\tx\nCapEff:\t000000c000000000\nSeccomp:\t2\nSeccomp_filters:\t1\n"))
	if caps != 0xc000000000 || seccomp != 2 {
		t.Errorf("%#x, %d", caps, seccomp)
	}
	for _, tt := range []struct {
		caps uint64
		want string
	}{
		{0, "CAP_BPF and CAP_PERFMON"},
		{1 << unix.CAP_BPF, "CAP_PERFMON"},
		{1 << unix.CAP_PERFMON, "CAP_BPF"},
		{caps, ""},
		{1 << unix.CAP_SYS_ADMIN, ""},
	} {
		if got := missing(tt.caps); got != tt.want {
			t.Errorf("%#x lacks %q, want %q", tt.caps, got, tt.want)
		}
	}
}

func TestRelease(t *testing.T) {
	for _, tt := range []struct {
		release      string
		major, minor int
	}{
		{"6.1.0-53-amd64", 6, 1},
		{"5.15.153.1-microsoft", 5, 15},
		{"7.0-rc1", 7, 0},
		{"6.18+", 6, 18},
	} {
		major, minor, err := parseRelease(tt.release)
		if err != nil || major != tt.major || minor != tt.minor {
			t.Errorf("%s: %d.%d, %v", tt.release, major, minor, err)
		}
	}
	if _, _, err := parseRelease("Linux"); err == nil {
		t.Error("no error")
	}
}
