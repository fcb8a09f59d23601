package vm

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pindown/pindown/test/vm/internal/wire"
)

// Defaults of [Options].
const (
	DefaultMemory      = 2048
	DefaultCPUs        = 2
	DefaultHugePages   = 32
	DefaultDiskSize    = 512
	DefaultBootTimeout = 5 * time.Minute
)

// DiskDir is where the guest's ext4 disk is mounted. Everybody may write there.
const DiskDir = "/mnt/ext4"

// defaultGrace is how long a command that has to end may take for each step of its ending.
const defaultGrace = 30 * time.Second

// Options describe a virtual machine. The zero value of each field means its default.
type Options struct {
	Memory    int // MiB; 0 means DefaultMemory
	CPUs      int // 0 means DefaultCPUs
	HugePages int // number of 2 MiB pages set aside at boot; 0 means DefaultHugePages, a negative number none
	DiskSize  int // MiB of the ext4 disk, a sparse file; 0 means DefaultDiskSize

	// RDMA makes a soft-RoCE adapter rxe0 over a dummy network interface with the address 192.0.2.1, and adds the rdma command,
	// libibverbs, librdmacm and the verbs utilities (ibv_devinfo, ibv_rc_pingpong, …) to the guest.
	RDMA bool

	// Modules are kernel modules to load besides those that the machine itself needs.
	Modules []string

	// KernelArgs are added to the kernel's command line, for example "lockdown=integrity".
	KernelArgs []string

	// Files are added to the guest: host path by absolute guest path. Modes are kept.
	Files map[string]string

	// Programs are dynamically linked programs of the host, by name or path, that are added to the guest's /usr/bin with the libraries they need.
	Programs []string

	// BootTimeout is how long the guest may take until it takes commands. 0 means DefaultBootTimeout.
	BootTimeout time.Duration
}

func (o Options) withDefaults() Options {
	o.Memory = cmp.Or(o.Memory, DefaultMemory)
	o.CPUs = cmp.Or(o.CPUs, DefaultCPUs)
	o.HugePages = max(cmp.Or(o.HugePages, DefaultHugePages), 0)
	o.DiskSize = cmp.Or(o.DiskSize, DefaultDiskSize)
	o.BootTimeout = cmp.Or(o.BootTimeout, DefaultBootTimeout)
	return o
}

// ErrClosed means that the machine was switched off because its test has ended.
var ErrClosed = errors.New("vm: machine is closed")

// CrashError says that a machine ended before it was asked to.
type CrashError struct {
	Reason  string   // the kernel's own line if it panicked, else what is known
	Panic   bool     // the kernel reported an oops or a panic
	Console []string // the last lines of the console
	Log     string   // path of the whole console log, which is kept if the test fails
}

// Error returns the reason, the last lines of the console, and the path of the log.
func (e *CrashError) Error() string {
	return fmt.Sprintf("virtual machine ended: %s\nlast lines of its console, of which %s holds all:\n\t%s",
		e.Reason, e.Log, strings.Join(e.Console, "\n\t"))
}

// Machine is a running virtual machine. Its methods may be called by several goroutines at once.
type Machine struct {
	opts    Options
	release string // immutable after start
	root    string // module root on the host
	dir     string // temporary files
	logPath string
	grace   time.Duration // defaultGrace, except in tests
	console *console
	conn    net.Conn
	w       *wire.Writer
	proc    *os.Process
	dead    chan struct{} // closed when QEMU has ended and all its frames were read
	hello   chan struct{} // closed when the agent has said hello

	mu      sync.Mutex
	nextID  uint32             // guarded by mu
	calls   map[uint32]*call   // guarded by mu
	reason  string             // guarded by mu; why QEMU was killed
	closing bool               // guarded by mu; it was asked to end
	cause   error              // guarded by mu; set before dead is closed
	told    bool               // guarded by mu; the cause was returned to somebody
	guest   map[string]*binary // guarded by mu; test binaries by how they were built
	libs    map[string]bool    // guarded by mu; the shared libraries that the guest has
}

// call is something that the agent was asked to do.
type call struct {
	stdout, stderr limitedBuffer
	progress       io.Writer       // or nil; used by the goroutine that reads frames
	done           chan wire.Frame // receives Exit or Done, once
}

// Boot starts a virtual machine and returns when it takes commands. It is switched off when the test ends.
//
// If the test fails, or the machine has crashed, the path of its console log is in the test's log.
func Boot(tb testing.TB, opts Options) *Machine {
	tb.Helper()
	Require(tb)
	opts = opts.withDefaults()
	k, err := fetchKernel()
	if err != nil {
		unavailable(tb, fmt.Sprintf("get a kernel for virtual machines: %v", err))
	}
	var sysroot string
	if opts.RDMA {
		if sysroot, err = fetchRDMA(); err != nil {
			unavailable(tb, fmt.Sprintf("get RDMA libraries for virtual machines: %v", err))
		}
	}

	m := &Machine{
		opts:  opts,
		grace: defaultGrace,
		dead:  make(chan struct{}),
		hello: make(chan struct{}),
		calls: make(map[uint32]*call),
		guest: make(map[string]*binary),
		libs:  make(map[string]bool),
	}
	// The path of a socket is at most 107 bytes long, so t.TempDir, which holds the test's name, won't do.
	if m.dir, err = os.MkdirTemp("", "pindown-vm-"); err != nil {
		tb.Fatalf("boot: %v", err)
	}
	tb.Cleanup(func() { os.RemoveAll(m.dir) })
	log, keep, err := openLog(tb)
	if err != nil {
		tb.Fatalf("boot: %v", err)
	}
	m.logPath = log.Name()
	m.console = newConsole(log)
	tb.Cleanup(func() {
		log.Close()
		switch {
		case tb.Failed():
			tb.Logf("console log of the virtual machine: %s", m.logPath)
		case !keep:
			os.Remove(m.logPath)
		}
	})

	begin := time.Now()
	if err := m.prepare(k, sysroot); err != nil {
		tb.Fatalf("boot: %v", err)
	}
	prepared := time.Now()
	if err := m.start(k); err != nil {
		tb.Fatalf("boot: %v", err)
	}
	tb.Cleanup(func() {
		if err := m.close(); err != nil {
			tb.Error(err)
		}
		for _, line := range m.console.warningLines() {
			tb.Logf("kernel: %s", line)
		}
	})
	if err := m.waitHello(); err != nil {
		tb.Fatalf("boot: %v", err)
	}
	if opts.RDMA {
		if err := m.setUpRDMA(tb.Context()); err != nil {
			tb.Fatalf("boot: %v", err)
		}
	}
	tb.Logf("virtual machine with Linux %s: prepared in %.1fs, up in %.1fs", m.release, prepared.Sub(begin).Seconds(), time.Since(prepared).Seconds())
	return m
}

// Release returns the kernel's release, as uname -r prints it.
func (m *Machine) Release() string { return m.release }

// Console returns the last lines that the guest's kernel printed.
func (m *Machine) Console() []string { return m.console.lastLines() }

// openLog creates the file that takes the console's output. keep says that it is to be kept even if the test passes.
func openLog(tb testing.TB) (log *os.File, keep bool, err error) {
	tb.Helper()
	pattern := "pindown-vm-" + strings.Map(func(r rune) rune {
		if r == '/' || r == '*' || r == os.PathSeparator {
			return '_'
		}
		return r
	}, tb.Name()) + "-*.log"
	dir := os.Getenv("PINDOWN_VM_LOGS")
	switch f := flag.Lookup("test.artifacts"); {
	case dir != "":
		keep = true
		err = os.MkdirAll(dir, 0o755)
	case f != nil && f.Value.String() == "true":
		dir, keep = tb.ArtifactDir(), true
	default:
		dir = os.TempDir()
	}
	if err == nil {
		log, err = os.CreateTemp(dir, pattern)
	}
	if err != nil {
		return nil, false, fmt.Errorf("create console log: %w", err)
	}
	return log, keep, nil
}

// prepare makes the files that QEMU needs.
func (m *Machine) prepare(k kernel, sysroot string) error {
	out, err := output(exec.Command("go", "list", "-m", "-f", "{{.Dir}}"))
	if err != nil {
		return fmt.Errorf("find module root: %w", err)
	}
	m.root = strings.TrimSpace(string(out))
	if err := m.buildInitramfs(k, sysroot); err != nil {
		return fmt.Errorf("build initramfs: %w", err)
	}
	disk, err := os.Create(m.path("disk"))
	if err != nil {
		return fmt.Errorf("create disk: %w", err)
	}
	if err := errors.Join(disk.Truncate(int64(m.opts.DiskSize)<<20), disk.Close()); err != nil {
		return fmt.Errorf("create disk: %w", err)
	}
	if _, err := output(tool("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", m.path("disk"))); err != nil {
		return fmt.Errorf("create disk: %w", err)
	}
	return nil
}

// path returns the path of a temporary file.
func (m *Machine) path(name string) string { return filepath.Join(m.dir, name) }

// start runs QEMU.
func (m *Machine) start(k kernel) error {
	accel := cmp.Or(os.Getenv("PINDOWN_VM_ACCEL"), "tcg")
	kernelArgs := []string{
		"console=ttyS0", "rdinit=" + agentPath, "net.ifnames=0",
		// An oops becomes a panic, and a panic ends the machine at once.
		"panic=-1", "oops=panic",
		// On a busy host, a virtual CPU that gets no time looks stuck.
		"nowatchdog", "rcupdate.rcu_cpu_stall_suppress=1",
		"hugepages=" + strconv.Itoa(m.opts.HugePages),
	}
	args := []string{
		"-accel", accel, "-cpu", "max", "-smp", strconv.Itoa(m.opts.CPUs), "-m", strconv.Itoa(m.opts.Memory) + "M",
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio",
		"-kernel", k.image, "-initrd", m.path("initramfs"), "-append", strings.Join(append(kernelArgs, m.opts.KernelArgs...), " "),
		"-drive", "if=virtio,format=raw,cache=unsafe,file=" + m.path("disk"),
		"-device", "virtio-serial-pci", "-chardev", "socket,id=control,path=" + m.path("control"),
		"-device", "virtserialport,chardev=control,name=pindown",
	}
	l, err := net.Listen("unix", m.path("control"))
	if err != nil {
		return fmt.Errorf("start QEMU: %w", err)
	}
	defer l.Close()
	cmd := tool("qemu-system-x86_64", args...)
	cmd.Stdout, cmd.Stderr = m.console, m.console
	cmd.SysProcAttr = dieWithThread()

	started := make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		runtime.LockOSThread() // For dieWithThread: a thread that is idle could be ended by the runtime.
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
		close(ended)
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start QEMU: %w", err)
	}
	m.proc = cmd.Process

	accepted := make(chan net.Conn, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			accepted <- conn
		}
	}()
	select {
	case m.conn = <-accepted:
	case <-ended:
		return fmt.Errorf("start QEMU: %s: %s", cmd.ProcessState, strings.Join(m.console.lastLines(), "\n"))
	case <-time.After(m.opts.BootTimeout):
		_ = m.proc.Kill()
		<-ended
		return errors.New("start QEMU: it does not open its control channel")
	}
	m.w = wire.NewWriter(m.conn)
	readEnded := make(chan struct{})
	go func() {
		defer close(readEnded)
		if err := m.read(); err != nil {
			m.kill(err.Error())
		}
	}()
	go func() {
		select {
		case <-m.console.broken:
			// The kernel goes on to print where it broke, and ends the machine.
			select {
			case <-ended:
			case <-time.After(2 * time.Minute):
				m.kill("the kernel broke, but did not end the machine")
			}
		case <-ended:
		}
	}()
	go func() {
		<-ended
		<-readEnded
		m.conn.Close()
		m.setCause(cmd.ProcessState)
		close(m.dead)
	}()
	return nil
}

// setCause decides why the machine has ended.
func (m *Machine) setCause(state *os.ProcessState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := &CrashError{Reason: m.console.fatalLine(), Console: m.console.lastLines(), Log: m.logPath}
	switch {
	case e.Reason != "":
		e.Panic = true
	case m.reason != "":
		e.Reason = m.reason
	case m.closing:
		m.cause = ErrClosed
		return
	default:
		e.Reason = fmt.Sprintf("QEMU ended by itself (%s)", state)
	}
	m.cause = e
}

// kill ends QEMU at once.
func (m *Machine) kill(reason string) {
	m.mu.Lock()
	m.reason = cmp.Or(m.reason, reason)
	m.mu.Unlock()
	_ = m.proc.Kill() // os.ErrProcessDone: it was faster.
}

// ended returns why the machine has ended. It is called only after dead was closed.
func (m *Machine) ended() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.told = true
	return m.cause
}

// close switches the machine off. The error is a crash that nobody has been told of.
func (m *Machine) close() error {
	m.mu.Lock()
	m.closing = true
	m.mu.Unlock()
	_ = m.w.Write(wire.PowerOff, 0, nil) // If it is dead, that is seen below.
	select {
	case <-m.dead:
	case <-time.After(2 * time.Minute):
		m.kill("the machine can't be switched off")
		<-m.dead
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.told || errors.Is(m.cause, ErrClosed) {
		return nil
	}
	return m.cause
}

func (m *Machine) waitHello() error {
	select {
	case <-m.hello:
		return nil
	case <-m.dead:
	case <-time.After(m.opts.BootTimeout):
		m.kill(fmt.Sprintf("the guest is not up after %v", m.opts.BootTimeout))
		<-m.dead
	}
	return m.ended()
}

// read takes what the agent sends, until QEMU closes the channel.
func (m *Machine) read() error {
	r := wire.NewReader(bufio.NewReaderSize(m.conn, 1<<16))
	for {
		f, err := r.Read()
		if err == io.EOF || errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.ECONNRESET) { //nolint:errorlint // documented as the bare value
			return nil
		}
		if err != nil {
			return fmt.Errorf("read control channel: %w", err)
		}
		if f.Kind == wire.Hello {
			var msg wire.HelloMsg
			if err := f.Decode(&msg); err != nil {
				return fmt.Errorf("read control channel: %w", err)
			}
			m.release = msg.Release
			close(m.hello)
			continue
		}
		m.mu.Lock()
		c := m.calls[f.ID]
		if f.Kind == wire.Exit || f.Kind == wire.Done {
			delete(m.calls, f.ID)
		}
		m.mu.Unlock()
		switch {
		case c == nil: // The caller has gone.
		case f.Kind == wire.Stdout:
			c.stdout.append(f.Payload)
			if c.progress != nil {
				_, _ = c.progress.Write(f.Payload)
			}
		case f.Kind == wire.Stderr:
			c.stderr.append(f.Payload)
		case f.Kind == wire.Exit || f.Kind == wire.Done:
			c.done <- f
		default:
			return fmt.Errorf("read control channel: %w: kind %d from the agent", wire.ErrProtocol, f.Kind)
		}
	}
}

// newCall registers a call. progress may be nil.
func (m *Machine) newCall(progress io.Writer) (uint32, *call) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nextID++
	c := &call{progress: progress, done: make(chan wire.Frame, 1)}
	m.calls[m.nextID] = c
	return m.nextID, c
}

// setUpRDMA makes rxe0 over dummy0, which is there since the module dummy was loaded. The adapter can't be made over lo.
func (m *Machine) setUpRDMA(ctx context.Context) error {
	for _, args := range [][]string{
		{"ip", "addr", "add", "192.0.2.1/24", "dev", "dummy0"},
		{"ip", "link", "set", "dummy0", "mtu", "4500"}, // for an MTU of 4096 of the adapter: a quarter of the packets
		{"ip", "link", "set", "dummy0", "up"},
		{"rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "dummy0"},
	} {
		res, err := m.Exec(ctx, Cmd{Args: args})
		if err == nil && res.Code != 0 {
			err = fmt.Errorf("exit status %d: %s", res.Code, res.Stderr)
		}
		if err != nil {
			return fmt.Errorf("set up RDMA: run %s: %w", strings.Join(args, " "), err)
		}
	}
	return nil
}
