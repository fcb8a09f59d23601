// Package vm runs tests in a virtual machine: a Debian 6.1 kernel under QEMU, by software emulation, so that it needs no KVM and no privilege.
//
// A test calls [Boot], then any number of [Machine.RunTests], [Machine.Command] and [Machine.Exec]:
//
//	m := vm.Boot(t, vm.Options{})
//	m.RunTests(t, vm.TestBinary{Pkg: "./monitor/bpf"})
//	m.RunTests(t, vm.TestBinary{Pkg: "./monitor/uffd", User: "nobody", Limits: map[int]uint64{unix.RLIMIT_MEMLOCK: 64 << 10}})
//
// RunTests builds the package's tests without cgo, runs them in the machine, and reports each of them as a subtest of its own, with its
// result and, where it failed, its log.
//
// The guest is an initramfs with busybox, the kernel modules that are needed, and an agent as its first process. It has an ext4 disk at
// [DiskDir], 2 MiB huge pages, and the usual kernel file systems; [Options.RDMA] adds the soft-RoCE adapter rxe0. The agent takes its orders over
// a virtio serial port (package wire); the serial console carries the kernel's messages alone, and they are kept when a test fails.
//
// The kernel, and for RDMA some user-space libraries, come from Debian packages that are downloaded and unpacked into a cache directory; nothing is
// installed. Where a needed tool is missing, tests skip with a line that says what to install, unless CI=true: then they fail.
package vm
