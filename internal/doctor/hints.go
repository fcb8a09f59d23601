package doctor

import "strings"

// monitorHint says what would make a monitor usable, for the reasons that
// occur.
func (r *Report) monitorHint(t trial, reason string) string {
	has := func(s ...string) bool { return contains(reason, s...) }
	seccomp := r.Privileges.Seccomp == "filter"
	switch t.name {
	case "bpf":
		mayLoad := r.Privileges.can("CAP_SYS_ADMIN") || r.Privileges.can("CAP_BPF") && r.Privileges.can("CAP_PERFMON")
		switch {
		case !mayLoad:
			hint := "run as root, or give the program CAP_BPF and CAP_PERFMON (setcap cap_bpf,cap_perfmon+ep PROGRAM, or AmbientCapabilities= of its unit)"
			if r.Privileges.NoNewPrivs {
				hint += "; setcap has no effect under no_new_privs"
			}
			return hint
		case r.setting("kernel BTF") == "no":
			return "boot a kernel with CONFIG_DEBUG_INFO_BTF"
		case seccomp && has("seccomp", "not permitted", "SIGSYS", "ENOSYS", "not implemented"):
			return "let the seccomp filter pass bpf(2) and perf_event_open(2)"
		case t.mode == "functions" && has("not permitted", "locked down"):
			return "boot without lockdown (it, or a kernel built without function tracing, forbids this mode); mode syscalls does without"
		}
	case "uffd":
		switch {
		case seccomp && has("seccomp", "SIGSYS", "not permitted", "not implemented"):
			return "let the seccomp filter pass userfaultfd(2); container runtimes deny it by default"
		case has("CONFIG_USERFAULTFD", "not implemented"):
			return "boot a kernel with CONFIG_USERFAULTFD"
		case has("older than", "lacks"):
			return "boot a newer kernel (5.15 on amd64, 6.10 on arm64)"
		case has("not permitted"):
			return "let the security module allow userfaultfd(2)"
		}
	}
	if has("the trial hangs") {
		return "please report this, with the output of this command"
	}
	return ""
}

// deviceHint is monitorHint for devices. What verbs lack says itself what to do.
func (r *Report) deviceHint(name, reason string) string {
	has := func(s ...string) bool { return contains(reason, s...) }
	if name != "iouring" {
		return ""
	}
	switch {
	case has("kernel.io_uring_disabled"):
		return "sysctl kernel.io_uring_disabled=0, or for a value of 1 put the user into the group kernel.io_uring_group"
	case has("RLIMIT_MEMLOCK", "cannot allocate memory"):
		return "raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=), which all processes of the user share, or give the program CAP_IPC_LOCK"
	case r.Privileges.Seccomp == "filter" && has("seccomp", "SIGSYS", "not permitted", "not implemented"):
		return "let the seccomp filter pass io_uring_setup(2), io_uring_enter(2) and io_uring_register(2)"
	case has("no io_uring", "Linux 5.13", "not implemented"):
		return "boot a kernel with CONFIG_IO_URING, Linux 5.13 or newer"
	case has("security module"):
		return "let the security module allow io_uring"
	}
	return ""
}

func contains(s string, parts ...string) bool {
	for _, p := range parts {
		if strings.Contains(s, p) {
			return true
		}
	}
	return false
}

func (r *Report) setting(name string) string {
	for _, s := range r.Settings {
		if s.Name == name {
			return s.Value
		}
	}
	return unknown
}
