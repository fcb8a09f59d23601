package seccomptest

import (
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

const childEnv = "SECCOMPTEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	if err := Deny(unix.EPERM, unix.SYS_USERFAULTFD, unix.SYS_BPF); err != nil {
		println(err.Error())
		os.Exit(1)
	}
	done := make(chan unix.Errno)
	for _, nr := range []uintptr{unix.SYS_USERFAULTFD, unix.SYS_BPF} {
		go func() {
			_, _, errno := unix.Syscall(nr, ^uintptr(0), 0, 0)
			done <- errno
		}()
		if errno := <-done; errno != unix.EPERM {
			println(nr, errno.Error())
			os.Exit(1)
		}
	}
}

func TestDeny(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
