package probe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// ErrNotSupported says that programs can't be watched: no privilege, or a kernel
// that lacks something. The error that wraps it says what.
var ErrNotSupported = errors.New("profiling not supported")

// Options of a Probe. The zero value of each field means its default.
type Options struct {
	// UseBytes is the size from which on transfers are sent. Default: none are.
	UseBytes uint64
	// RingBytes is the size of the ring buffer, rounded up to a power of two.
	// Default 16 MiB: some hundred thousand events.
	RingBytes int
	// Stacks is how many different stacks are kept. Default 32768.
	Stacks int
}

// Defaults.
const (
	defaultRingBytes = 16 << 20
	defaultStacks    = 32768
)

// States of a task in src/profile.c.
const (
	stateStarter = 1
	stateMember  = 3
)

// Probe is a set of BPF programs that watch. It isn't safe for concurrent use,
// but for Follow and Start, and for Stack during Detach.
type Probe struct {
	coll   *ebpf.Collection
	links  []link.Link
	events *ringbuf.Reader
	record ringbuf.Record
	stats  io.Closer // nil if the kernel's statistics couldn't be enabled
	// verbs are the files whose functions are attached to.
	verbs map[fileID]bool
	multi bool // they are attached to together
	notes []string
	look  float64 // at a task that isn't followed, in ns
}

// Open loads and attaches the programs. Nil options mean defaults. An error
// wraps [ErrNotSupported] if this machine or the caller's privileges don't
// allow it.
func Open(opts *Options) (_ *Probe, err error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.RingBytes == 0 {
		o.RingBytes = defaultRingBytes
	}
	if o.Stacks == 0 {
		o.Stacks = defaultStacks
	}
	if lacks := missingCapabilities(); lacks != "" {
		return nil, fmt.Errorf("%w: it needs %s; %s", ErrNotSupported, lacks, howToGrant())
	}
	p := &Probe{verbs: map[fileID]bool{}}
	defer func() {
		if err != nil {
			_ = p.Close()
		}
	}()
	// Kernels before 5.11 account maps against it; where it can't be raised, the
	// load says so.
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	if err := p.load(&o); err != nil {
		return nil, fmt.Errorf("load BPF programs: %w", explain(err))
	}
	if p.events, err = ringbuf.NewReader(p.coll.Maps["events"]); err != nil {
		return nil, fmt.Errorf("open ring buffer: %w", err)
	}
	p.record.RawSample = make([]byte, 0, eventSize)
	if p.stats, err = ebpf.EnableStats(unix.BPF_STATS_RUN_TIME); err != nil {
		p.note("the programs' run time isn't measured: %v", err)
		p.stats = nil
	}
	for name, prog := range p.coll.Programs {
		if prog.Type() != ebpf.Tracing {
			continue
		}
		l, err := link.AttachTracing(link.TracingOptions{Program: prog})
		if err != nil {
			return nil, fmt.Errorf("attach BPF program %s: %w", name, explain(err))
		}
		p.links = append(p.links, l)
	}
	if err := p.calibrate(); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *Probe) note(format string, args ...any) {
	p.notes = append(p.notes, fmt.Sprintf(format, args...))
}

// Notes returns what couldn't be watched, for people.
func (p *Probe) Notes() []string { return p.notes }

func (p *Probe) load(o *Options) error {
	cache := btf.NewCache()
	kernel, err := cache.Kernel()
	if err != nil {
		return fmt.Errorf("the kernel has no BTF: %w", err)
	}
	spec, err := loadProgram()
	if err != nil {
		return err
	}
	// Tracepoints that this kernel doesn't have.
	for name, prog := range spec.Programs {
		if prog.Type != ebpf.Tracing {
			continue
		}
		var t *btf.Typedef
		if err := kernel.TypeByName("btf_trace_"+prog.AttachTo, &t); err == nil {
			continue
		}
		if !strings.HasPrefix(prog.AttachTo, "io_uring") {
			return fmt.Errorf("the kernel has no tracepoint %s: %w", prog.AttachTo, ErrNotSupported)
		}
		delete(spec.Programs, name)
	}
	if spec.Programs["on_submit_req"] == nil && spec.Programs["on_submit_sqe"] == nil {
		p.note("the kernel has no tracepoint for requests to io_uring: uses of its buffers aren't seen")
	}
	if p.multi = features.HaveBPFLinkUprobeMulti() == nil; p.multi {
		spec.Programs["on_verbs"].AttachType = ebpf.AttachTraceUprobeMulti
		spec.Programs["on_verbs_return"].AttachType = ebpf.AttachTraceUprobeMulti
	}
	size := 1 << 12
	for size < o.RingBytes {
		size <<= 1
	}
	spec.Maps["events"].MaxEntries = uint32(size)
	spec.Maps["stacks"].MaxEntries = uint32(o.Stacks)
	set := map[string]any{"use_bytes": o.UseBytes}
	dev, ino, err := pidNamespace()
	if err != nil {
		return err
	}
	if ino != initialPIDNamespace {
		set["ns_dev"], set["ns_ino"] = dev, ino
	}
	for name, value := range set {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	p.coll, err = ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Cache: cache})
	return err
}

// initialPIDNamespace is PROC_PID_INIT_INO of the kernel.
const initialPIDNamespace = 0xeffffffc

func pidNamespace() (dev, ino uint64, err error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return 0, 0, fmt.Errorf("stat pid namespace: %w", err)
	}
	return st.Dev, st.Ino, nil
}

// Start starts the command so that it is followed from the execution of the
// program on. Processes that this one starts at the same time are followed too,
// so there should be none.
func (p *Probe) Start(cmd *exec.Cmd) error {
	if err := p.setState(os.Getpid(), stateStarter); err != nil {
		return err
	}
	err := cmd.Start()
	if e := p.forget(os.Getpid()); e != nil {
		err = errors.Join(err, e)
	}
	return err
}

// Follow follows a process that exists, with the threads that it has and all
// threads and children that it makes from now on.
func (p *Probe) Follow(pid int) error {
	if err := p.setState(pid, stateMember); err != nil {
		return err
	}
	return nil
}

// withPIDFD calls f with a descriptor of the process as a map's key.
func withPIDFD(pid int, f func(key []byte) error) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, os.NewSyscallError("pidfd_open", err))
	}
	defer func() { _ = unix.Close(fd) }()
	if err := f(binary.LittleEndian.AppendUint32(nil, uint32(fd))); err != nil {
		return fmt.Errorf("follow process %d: %w", pid, err)
	}
	return nil
}

func (p *Probe) setState(pid int, state uint32) error {
	m := p.coll.Maps["tasks"]
	value := make([]byte, m.ValueSize())
	binary.LittleEndian.PutUint32(value, state)
	return withPIDFD(pid, func(key []byte) error { return m.Put(key, value) })
}

func (p *Probe) forget(pid int) error {
	return withPIDFD(pid, func(key []byte) error { return p.coll.Maps["tasks"].Delete(key) })
}

// Capacity is how many events the ring buffer has room for.
func (p *Probe) Capacity() int {
	const header = 8
	return int(p.coll.Maps["events"].MaxEntries()) / (eventSize + header)
}

// Drain calls f for each event in the ring buffer, in order, and returns when
// there are no more. The event is valid until f returns. The programs don't
// wake anybody, so the caller drains by the clock.
func (p *Probe) Drain(f func(*Event)) error {
	var e Event
	p.events.SetDeadline(time.Unix(1, 0))
	for {
		switch err := p.events.ReadInto(&p.record); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return fmt.Errorf("read events: %w", err)
		}
		if e.decode(p.record.RawSample) && e.What != Nothing {
			f(&e)
		}
	}
}

// Count counts calls.
type Count struct {
	// Calls are all that returned, Failed those with an error among them.
	Calls, Failed uint64
	// Bytes is the sum of the sizes of those that didn't fail, as they were
	// passed, not rounded to pages.
	Bytes uint64
	// Time is the sum from entry to return.
	Time time.Duration
}

// Counts returns the exact counts of all operations.
func (p *Probe) Counts() (map[What]Count, error) {
	all := map[What]Count{}
	for w := Munmap; w < operations; w++ {
		c, err := p.count(w)
		if err != nil {
			return nil, err
		}
		if c.Calls > 0 {
			all[w] = c
		}
	}
	return all, nil
}

// count returns an entry of the counts; that of Nothing has all system calls.
func (p *Probe) count(w What) (c Count, err error) {
	var perCPU [][4]uint64
	if err := p.coll.Maps["counts"].Lookup(uint32(w), &perCPU); err != nil {
		return c, fmt.Errorf("read counts: %w", err)
	}
	for _, v := range perCPU {
		c.Calls += v[0]
		c.Failed += v[1]
		c.Bytes += v[2]
		c.Time += time.Duration(v[3])
	}
	return c, nil
}

// calibrate measures what the programs take for a task that isn't followed.
func (p *Probe) calibrate() error {
	const calls = 2000
	before, err := p.Stats()
	if err != nil {
		return err
	}
	for range calls {
		unix.Getppid()
	}
	after, err := p.Stats()
	if err != nil {
		return err
	}
	if n := after.Runs - before.Runs; n > 0 {
		p.look = float64(after.Time-before.Time) / float64(n)
	}
	return nil
}

// Stack returns the addresses of a stack, innermost first: that of an
// instruction, then return addresses; nil if there is no such stack.
func (p *Probe) Stack(key uint64) []uint64 {
	raw, err := p.coll.Maps["stacks"].LookupBytes(key)
	const word = 8
	if key == 0 || err != nil || len(raw) < word {
		return nil
	}
	addrs := make([]uint64, min(binary.LittleEndian.Uint64(raw), uint64(len(raw)/word-1)))
	for i := range addrs {
		addrs[i] = binary.LittleEndian.Uint64(raw[word*(i+1):])
	}
	return addrs
}

// Stats are what watching cost and what was lost.
type Stats struct {
	// Measured says that Runs and Time are known.
	Measured bool
	// Runs counts the programs' runs, Time is what they took: of all tasks of the
	// machine, since every system call runs a program that looks whether the
	// task is followed. FollowedTime is what those at system calls took for tasks
	// that are: measured for the calls that matter, and a look, of a duration
	// measured in the beginning, at each.
	Runs         uint64
	Time         time.Duration
	FollowedTime time.Duration
	// LostEvents found the ring buffer full. LostStacks found no place among the
	// stacks, LostTasks weren't followed for want of memory.
	LostEvents, LostStacks, LostTasks uint64
	// Missed runs were left out by the kernel to avoid recursion.
	Missed uint64
}

// Stats returns a snapshot.
func (p *Probe) Stats() (Stats, error) {
	s := Stats{Measured: p.stats != nil}
	for name, prog := range p.coll.Programs {
		st, err := prog.Stats()
		if err != nil {
			return s, fmt.Errorf("statistics of BPF program %s: %w", name, err)
		}
		s.Runs += st.RunCount
		s.Time += st.Runtime
		s.Missed += st.RecursionMisses
	}
	entries, err := p.count(Nothing)
	if err != nil {
		return s, err
	}
	const both = 2 // entry and exit
	// A measured time includes interruptions, so it may be the longer one.
	s.FollowedTime = min(s.Time, entries.Time+time.Duration(both*float64(entries.Calls)*p.look))
	for name, to := range map[string]*uint64{
		"lost_events": &s.LostEvents, "lost_stacks": &s.LostStacks, "lost_tasks": &s.LostTasks,
	} {
		if err := p.coll.Variables[name].Get(to); err != nil {
			return s, fmt.Errorf("read %s: %w", name, err)
		}
	}
	return s, nil
}

// Detach ends the watching; what was seen can still be read.
func (p *Probe) Detach() error {
	// Each waits until no processor runs the program any more; together they
	// wait once.
	errs := make([]error, len(p.links))
	var wg sync.WaitGroup
	for i, l := range p.links {
		wg.Go(func() { errs[i] = l.Close() })
	}
	wg.Wait()
	p.links = nil
	return errors.Join(errs...)
}

// Close detaches and unloads the programs.
func (p *Probe) Close() error {
	err := p.Detach()
	if p.events != nil {
		err = errors.Join(err, p.events.Close())
	}
	if p.stats != nil {
		err = errors.Join(err, p.stats.Close())
	}
	if p.coll != nil {
		p.coll.Close()
	}
	return err
}

// verifierLines is how many of the verifier's last lines an error holds.
const verifierLines = 6

// explain wraps an error of bpf(2) as ErrNotSupported with what to do.
func explain(err error) error {
	var verifier *ebpf.VerifierError
	switch {
	case errors.Is(err, ErrNotSupported):
		return err
	case errors.As(err, &verifier) && len(verifier.Log) > 0:
		log := verifier.Log
		log = log[max(0, len(log)-verifierLines):]
		return fmt.Errorf("%w: refused by the verifier: %s: %w", ErrNotSupported, strings.Join(log, "; "), verifier.Cause)
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: the capabilities are there, but a seccomp filter, a security module or the kernel's lockdown forbids it: %w",
			ErrNotSupported, err)
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w: the kernel has no bpf(2), or a seccomp filter hides it: %w", ErrNotSupported, err)
	}
	return fmt.Errorf("%w: %w", ErrNotSupported, err)
}

// missingCapabilities names those that this process lacks.
func missingCapabilities() string {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return ""
	}
	has := func(c int) bool { return data[c/32].Effective>>(c%32)&1 != 0 }
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

// howToGrant tells how this program gets what it needs.
func howToGrant() string {
	path, err := os.Executable()
	if err != nil {
		path = "pindown"
	}
	return "run it as root, or grant it once: setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_sys_admin+ep " + path +
		" (the last only to see registrations through libibverbs, and what profiling costs)"
}
