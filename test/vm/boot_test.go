package vm

import (
	"testing"
)

func TestBoot(t *testing.T) {
	m := Boot(t, Options{})
	t.Log(m.Release())
	t.Log(m.Command(t, "sh", "-c", "id; mount; free -m; dmesg | tail -5; date; lsmod; ls -l /bin/sh /usr/bin; sysctl vm.unprivileged_userfaultfd; grep -i huge /proc/meminfo; ip a; ls -la /sys/kernel/btf/vmlinux; nproc; ps"))
}
