// Command agent is the first process in the virtual machine of package vm.
//
// As process 1 it sets the guest up as its configuration file says, starts itself again to serve the harness, and then only reaps orphans: a
// process that waits for any child can't use os/exec, which waits for its own. When the server ends, the machine is switched off.
//
// What the harness wants done arrives on a virtio serial port, as package wire describes.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Arguments that select what this process is. They are this program's own, so no path can be mistaken for one.
const (
	argServe = "serve"
	argExec  = "exec"
)

// self is where the initramfs holds this program. It isn't /proc/self/exe, which an unprivileged user could not open here.
const self = "/agent"

// Config is what the harness leaves in /etc/pindown-vm.json.
type Config struct {
	Modules []string // paths, in load order
	Disk    string   // block device with an ext4 file system, or ""
	DiskDir string   // where to mount it
}

func main() {
	var err error
	switch {
	case len(os.Args) > 1 && os.Args[1] == argExec:
		err = become(os.Args[2:]) // returns only errors
	case len(os.Args) > 1 && os.Args[1] == argServe:
		err = serve()
	case os.Getpid() == 1:
		err = boot()
		if err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
		}
		unix.Sync()
		err = os.NewSyscallError("reboot", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
	default:
		err = errors.New("this program runs inside the test virtual machine only")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(exitCannotRun) //nolint:forbidigo // this is main
	}
}

// boot sets the guest up and returns when the server has ended.
func boot() error {
	var cfg Config
	b, err := os.ReadFile("/etc/pindown-vm.json")
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	if err := json.Unmarshal(b, &cfg); err != nil {
		return fmt.Errorf("decode configuration: %w", err)
	}
	if err := mountAll(); err != nil {
		return err
	}
	for _, m := range cfg.Modules {
		if err := loadModule(m); err != nil {
			return err
		}
	}
	if cfg.Disk != "" {
		if err := mountDisk(cfg.Disk, cfg.DiskDir); err != nil {
			return err
		}
	}
	if err := loopbackUp(); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte("pindown-vm")); err != nil {
		return os.NewSyscallError("sethostname", err)
	}

	p, err := os.StartProcess(self, []string{self, argServe}, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return fmt.Errorf("start server: %w", err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("wait for server: %w", os.NewSyscallError("wait4", err))
		case pid == p.Pid && status.Exited() && status.ExitStatus() == 0:
			return nil
		case pid == p.Pid:
			return fmt.Errorf("server ended with wait status %#x", uint32(status))
		}
	}
}

func mountAll() error {
	for _, m := range []struct {
		kind, dir, data string
		optional        bool
	}{
		{kind: "proc", dir: "/proc"},
		{kind: "sysfs", dir: "/sys"},
		{kind: "devtmpfs", dir: "/dev"},
		{kind: "devpts", dir: "/dev/pts", data: "mode=620,ptmxmode=666"},
		{kind: "tmpfs", dir: "/dev/shm", data: "mode=1777"},
		{kind: "hugetlbfs", dir: "/dev/hugepages", data: "mode=1777"},
		{kind: "tmpfs", dir: "/tmp", data: "mode=1777"},
		{kind: "tmpfs", dir: "/run", data: "mode=755"},
		{kind: "bpf", dir: "/sys/fs/bpf", data: "mode=700"},
		{kind: "cgroup2", dir: "/sys/fs/cgroup"},
		{kind: "debugfs", dir: "/sys/kernel/debug"},
		{kind: "tracefs", dir: "/sys/kernel/tracing"},
		{kind: "securityfs", dir: "/sys/kernel/security", optional: true},
	} {
		// Below /sys this fails where the directory is missing, and then so does the mount, with the better error.
		_ = os.MkdirAll(m.dir, 0o755)
		if err := unix.Mount(m.kind, m.dir, m.kind, 0, m.data); err != nil && !m.optional {
			return fmt.Errorf("mount %s: %w", m.dir, os.NewSyscallError("mount", err))
		}
	}
	for name, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "fd/0", "/dev/stdout": "fd/1", "/dev/stderr": "fd/2",
	} {
		if err := os.Symlink(target, name); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("load module: %w", err)
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return fmt.Errorf("load module %s: %w", path, os.NewSyscallError("finit_module", err))
	}
	return nil
}

func mountDisk(dev, dir string) error {
	if err := waitFor(func() bool { _, err := os.Stat(dev); return err == nil }); err != nil {
		return fmt.Errorf("find disk %s: %w", dev, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(dev, dir, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount %s: %w", dev, os.NewSyscallError("mount", err))
	}
	if err := unix.Chmod(dir, 0o1777); err != nil {
		return fmt.Errorf("open %s to all: %w", dir, os.NewSyscallError("chmod", err))
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set lo up: %w", os.NewSyscallError("socket", err))
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("set lo up: %w", os.NewSyscallError("ioctl", err))
	}
	return nil
}

// waitFor polls for something that the kernel makes in its own time and announces nowhere that is simpler to listen to.
func waitFor(ready func() bool) error {
	deadline := time.Now().Add(2 * time.Minute)
	for !ready() {
		if time.Now().After(deadline) {
			return os.ErrDeadlineExceeded
		}
		time.Sleep(5 * time.Millisecond)
	}
	return nil
}

// release returns the kernel's release, as uname -r prints it.
func release() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}
