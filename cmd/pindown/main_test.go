package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/seccomptest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"pindown": main, "sandbox": sandbox})
}

const nobody = 65534

// sandbox is a command of the scripts: it runs pindown with the given
// arguments in a poor environment.
func sandbox() {
	asNobody := flag.Bool("nobody", false, "run as user nobody")
	memlock := flag.Int64("memlock", -1, "RLIMIT_MEMLOCK in bytes")
	deny := flag.String("deny", "", "system calls to deny")
	kill := flag.Bool("kill", false, "kill who makes them, instead of EPERM")
	flag.Parse()
	err := enter(*asNobody, *memlock, *deny, *kill)
	if err == nil {
		err = syscall.Exec("/proc/self/exe", append([]string{"pindown"}, flag.Args()...), os.Environ())
	}
	fmt.Fprintln(os.Stderr, "sandbox:", err)
	os.Exit(125)
}

var denied = map[string][]uint32{
	"io_uring":    {unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER},
	"userfaultfd": {unix.SYS_USERFAULTFD},
	"bpf":         {unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN},
}

func enter(asNobody bool, memlock int64, deny string, kill bool) error {
	if memlock >= 0 {
		lim := unix.Rlimit{Cur: uint64(memlock), Max: uint64(memlock)}
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
			return err
		}
	}
	if asNobody {
		for _, err := range []error{syscall.Setgroups(nil), syscall.Setgid(nobody), syscall.Setuid(nobody)} {
			if err != nil {
				return err
			}
		}
		// The script's own directories are not for nobody.
		if err := os.Unsetenv("TMPDIR"); err != nil {
			return err
		}
	}
	var calls []uint32
	for name := range strings.FieldsFuncSeq(deny, func(r rune) bool { return r == ',' }) {
		nr, ok := denied[name]
		if !ok {
			return fmt.Errorf("nothing is known of %q", name)
		}
		calls = append(calls, nr...)
	}
	if len(calls) == 0 {
		return nil
	}
	errno := unix.EPERM
	if kill {
		// In the place of the action it makes one that isn't known, for which
		// seccomp(2) promises death.
		errno = 0x80000000
	}
	return seccomptest.Deny(errno, calls...)
}
