package doctor

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// verbsLibrary is what package verbs loads.
const verbsLibrary = "libibverbs.so.1"

// tryVerbs says what RDMA through libibverbs would find. It looks at files only:
// a program that can load the library is linked with libc, and this one is for
// machines of all kinds. root is the file system's.
func tryVerbs(ctx context.Context, root string) Finding {
	var missing []string
	if !found(libraryPaths(root, verbsLibrary)) {
		missing = append(missing, verbsLibrary+" isn't installed (Debian: libibverbs1)")
	} else if !found([]string{root + "/etc/libibverbs.d/*.driver"}) {
		missing = append(missing, "libibverbs has no providers (Debian: ibverbs-providers)")
	}
	adapters := baseNames(root + "/sys/class/infiniband/*")
	devices, problem := uverbs(root)
	switch {
	case len(adapters) == 0:
		missing = append(missing, "there is no RDMA adapter (soft-RoCE makes one of a network interface: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0)")
	case problem != "":
		missing = append(missing, problem)
	}
	if len(missing) > 0 {
		return Finding{Reason: strings.Join(missing, "; ")}
	}
	f := Finding{Usable: true, Reason: fmt.Sprintf("%s, by looking at files alone", strings.Join(devices, ", "))}
	if odp := onDemand(ctx); odp != "" {
		f.Reason += "; " + odp
	}
	return f
}

// libraryPaths are where the dynamic linker finds a library, as patterns.
func libraryPaths(root, name string) []string {
	var list []string
	for dir := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
		if dir != "" {
			list = append(list, filepath.Join(root, dir, name))
		}
	}
	for _, dir := range []string{"lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib", "lib/*-linux-gnu", "usr/lib/*-linux-gnu", "usr/local/lib/*-linux-gnu"} {
		list = append(list, filepath.Join(root, dir, name))
	}
	return list
}

// found reports whether a pattern matches anything.
func found(patterns []string) bool {
	for _, p := range patterns {
		if names, _ := filepath.Glob(p); len(names) > 0 {
			return true
		}
	}
	return false
}

func baseNames(pattern string) []string {
	names, _ := filepath.Glob(pattern)
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	return names
}

// uverbs returns the adapters that can be opened from user space, and what is
// wrong if there are none.
func uverbs(root string) (usable []string, problem string) {
	for _, name := range baseNames(root + "/sys/class/infiniband_verbs/uverbs*") {
		b, err := os.ReadFile(filepath.Join(root, "sys/class/infiniband_verbs", name, "ibdev"))
		if err != nil {
			continue
		}
		path := filepath.Join(root, "dev/infiniband", name)
		if err := unix.Access(path, unix.R_OK|unix.W_OK); err != nil {
			problem = fmt.Sprintf("%s can't be opened: %v", path, err)
			continue
		}
		usable = append(usable, strings.TrimSpace(string(b)))
	}
	switch {
	case len(usable) > 0:
		return usable, ""
	case problem != "":
		return nil, problem
	default:
		return nil, "adapters can't be used from user space (modprobe ib_uverbs)"
	}
}

// onDemand asks ibv_devinfo, if it is installed, for On-Demand Paging.
func onDemand(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "ibv_devinfo", "-v").Output()
	if err != nil {
		return ""
	}
	if names := parseODP(string(out)); len(names) > 0 {
		return strings.Join(names, ", ") + ": On-Demand Paging (verbs.Options.OnDemand): registrations follow the page tables and need no monitor"
	}
	return ""
}

// parseODP returns the adapters that ibv_devinfo -v reports On-Demand Paging of.
func parseODP(out string) []string {
	var names []string
	var name string
	inCaps := false
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		key, value, isKey := strings.Cut(line, ":")
		switch {
		case key == "hca_id":
			name = strings.TrimSpace(value)
		case isKey:
			inCaps = key == "general_odp_caps"
		case inCaps && line == "ODP_SUPPORT":
			names = append(names, name)
		}
	}
	return names
}
