package doctor

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// capabilities are those that matter, in the order of reports.
var capabilities = []struct {
	name string
	bit  int
}{
	{"CAP_BPF", unix.CAP_BPF},
	{"CAP_PERFMON", unix.CAP_PERFMON},
	{"CAP_SYS_PTRACE", unix.CAP_SYS_PTRACE},
	{"CAP_IPC_LOCK", unix.CAP_IPC_LOCK},
	{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN},
}

// What a value reads that can't be told.
const (
	unknown = "unknown"
	absent  = "not there"
)

// environment looks at what needs no trial. It only reads files and makes
// system calls that every sandbox allows; what can't be read is unknown.
func environment(root string) *Report {
	r := &Report{Kernel: unknown, Arch: runtime.GOARCH, Go: runtime.Version()}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		r.Kernel, r.KernelBuild = unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Version[:])
	}
	status, _ := os.ReadFile(root + "/proc/self/status") // without it, all is unknown
	r.Privileges = parsePrivileges(string(status))
	r.Privileges.UID = os.Geteuid()
	if ns, err := os.Readlink(root + "/proc/self/ns/user"); err == nil {
		r.Privileges.UserNamespace = ns != "user:[4026531837]" // PROC_USER_INIT_INO
	}
	r.Settings = settings(root, r.Privileges)
	return r
}

// parsePrivileges reads /proc/self/status.
func parsePrivileges(status string) Privileges {
	p := Privileges{Capabilities: map[string]bool{}, Seccomp: unknown}
	var effective uint64
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch key {
		case "CapEff":
			effective, _ = strconv.ParseUint(value, 16, 64) // zero if it isn't a number
		case "NoNewPrivs":
			p.NoNewPrivs = value == "1"
		case "Seccomp":
			switch value {
			case "0":
				p.Seccomp = "off"
			case "1":
				p.Seccomp = "strict"
			case "2":
				p.Seccomp = "filter"
			}
		}
	}
	for _, c := range capabilities {
		p.Capabilities[c.name] = effective>>c.bit&1 != 0
	}
	return p
}

// can reports whether the capability is effective and counts.
func (p *Privileges) can(name string) bool { return p.Capabilities[name] && !p.UserNamespace }

func settings(root string, p Privileges) []Setting {
	s := []Setting{memlock(p)}
	for _, f := range []struct {
		name, path string
		meaning    func(value string) string
	}{
		{"vm.max_map_count", "/proc/sys/vm/max_map_count", nil},
		{"vm.nr_hugepages", "/proc/sys/vm/nr_hugepages", func(v string) string {
			return when(v == "0", "mappings of huge pages can't be tested")
		}},
		{"transparent_hugepage", "/sys/kernel/mm/transparent_hugepage/enabled", nil},
		{"vm.unprivileged_userfaultfd", "/proc/sys/vm/unprivileged_userfaultfd", func(v string) string {
			return when(v == "0", "doesn't matter: user mode suffices")
		}},
		{"kernel.io_uring_disabled", "/proc/sys/kernel/io_uring_disabled", func(v string) string {
			return when(v == "1", "io_uring for CAP_SYS_ADMIN and kernel.io_uring_group only") + when(v == "2", "no io_uring for anybody")
		}},
		{"kernel.unprivileged_bpf_disabled", "/proc/sys/kernel/unprivileged_bpf_disabled", nil},
		{"kernel lockdown", "/sys/kernel/security/lockdown", func(v string) string {
			return when(v == "integrity" || v == "confidentiality", "BPF programs may be refused") +
				when(v == absent, "the kernel has none, or securityfs isn't mounted")
		}},
	} {
		value := unknown
		if b, err := os.ReadFile(root + f.path); err == nil {
			value = chosen(strings.TrimSpace(string(b)))
		} else if os.IsNotExist(err) {
			value = absent
		}
		set := Setting{Name: f.name, Value: value}
		if f.meaning != nil {
			set.Meaning = f.meaning(value)
		}
		s = append(s, set)
	}
	btf := Setting{Name: "kernel BTF", Value: "yes"}
	if _, err := os.Stat(root + "/sys/kernel/btf/vmlinux"); err != nil {
		btf.Value, btf.Meaning = "no", "BPF programs can't be loaded (CONFIG_DEBUG_INFO_BTF)"
	}
	return append(s, btf)
}

func when(cond bool, s string) string {
	if cond {
		return s
	}
	return ""
}

// chosen returns the word in brackets of files that list all choices.
func chosen(s string) string {
	if _, rest, ok := strings.Cut(s, "["); ok {
		if word, _, ok := strings.Cut(rest, "]"); ok {
			return word
		}
	}
	return s
}

func memlock(p Privileges) Setting {
	s := Setting{Name: "RLIMIT_MEMLOCK", Value: unknown}
	var rl unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &rl) != nil {
		return s
	}
	s.Value = bytesOr(rl.Cur, "unlimited")
	if rl.Max != rl.Cur {
		s.Value += fmt.Sprintf(" (at most %s)", bytesOr(rl.Max, "unlimited"))
	}
	switch {
	case p.can("CAP_IPC_LOCK"):
		s.Meaning = "doesn't matter with CAP_IPC_LOCK"
	case rl.Cur < 1<<20:
		s.Meaning = "little or nothing can be pinned"
	}
	return s
}

func bytesOr(n uint64, infinite string) string {
	if n == unix.RLIM_INFINITY {
		return infinite
	}
	return formatBytes(n)
}

func formatBytes(n uint64) string {
	for _, u := range []struct {
		shift int
		name  string
	}{{30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n>>u.shift > 0 && n&(1<<u.shift-1) == 0 {
			return fmt.Sprintf("%d %s", n>>u.shift, u.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}
