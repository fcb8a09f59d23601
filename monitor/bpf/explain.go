package bpf

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/monitor"
)

// verifierLines is how many of the verifier's last lines an error holds.
const verifierLines = 4

// explain wraps an error of bpf(2) as monitor.ErrNotSupported with the reason,
// as far as it can be told.
func explain(err error) error {
	var verifier *ebpf.VerifierError
	switch {
	case err == nil, errors.Is(err, monitor.ErrNotSupported):
		return err
	case errors.As(err, &verifier) && len(verifier.Log) > 0:
		log := verifier.Log
		if n := len(log) - verifierLines; n > 0 {
			log = log[n:]
		}
		return fmt.Errorf("%w: refused by the verifier: %s: %w", monitor.ErrNotSupported, strings.Join(log, "; "), verifier.Cause)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: %s: %w", monitor.ErrNotSupported, whyNotPermitted(), unix.EPERM)
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w: the kernel has no bpf(2), or a seccomp filter hides it: %w", monitor.ErrNotSupported, err)
	case errors.Is(err, btf.ErrNotFound):
		return fmt.Errorf("%w: the kernel lacks something that the programs attach to or read: %w", monitor.ErrNotSupported, err)
	case errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("%w: no memory for the table, see the memory cgroup's limit: %w", monitor.ErrNotSupported, err)
	}
	return fmt.Errorf("%w: %w", monitor.ErrNotSupported, err)
}

// whyNotPermitted tells what may be behind an EPERM of bpf(2), which has many
// causes and no detail.
func whyNotPermitted() string {
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return "not permitted"
	}
	caps, seccomp := parseStatus(status)
	if lacks := missing(caps); lacks != "" {
		return "needs " + lacks
	}
	lockdown, err := os.ReadFile("/sys/kernel/security/lockdown")
	switch {
	case err == nil && !bytes.Contains(lockdown, []byte("[none]")):
		return "the kernel is locked down: " + strings.TrimSpace(string(lockdown))
	case seccomp != 0:
		return "the capabilities are there; a seccomp filter may forbid bpf(2)"
	case before(5, 11):
		return "the capabilities are there; RLIMIT_MEMLOCK may be too low"
	case err != nil:
		return "the capabilities are there; the kernel is locked down (securityfs isn't mounted to tell) or a security module forbids it"
	}
	return "the capabilities are there; a security module forbids it"
}

// before reports whether the running kernel is older than major.minor. One that
// can't be told isn't.
func before(major, minor int) bool {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return false
	}
	x, y, err := parseRelease(unix.ByteSliceToString(u.Release[:]))
	return err == nil && (x < major || x == major && y < minor)
}

// parseRelease returns the first two numbers of a kernel's release.
func parseRelease(release string) (major, minor int, err error) {
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return 0, 0, fmt.Errorf("kernel release %q: %w", release, err)
	}
	return major, minor, nil
}

// missing names the capabilities that caps lacks.
func missing(caps uint64) string {
	has := func(c int) bool { return caps>>c&1 != 0 }
	if has(unix.CAP_SYS_ADMIN) {
		return ""
	}
	var lacks []string
	if !has(unix.CAP_BPF) {
		lacks = append(lacks, "CAP_BPF")
	}
	if !has(unix.CAP_PERFMON) {
		lacks = append(lacks, "CAP_PERFMON")
	}
	return strings.Join(lacks, " and ")
}

// parseStatus returns the effective capabilities and the seccomp mode from the
// text of /proc/PID/status.
func parseStatus(status []byte) (caps uint64, seccomp int) {
	lines := bufio.NewScanner(bytes.NewReader(status))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch name {
		case "CapEff":
			caps, _ = strconv.ParseUint(value, 16, 64)
		case "Seccomp":
			seccomp, _ = strconv.Atoi(value)
		}
	}
	return caps, seccomp
}
