package profile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/profile/probe"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/trace"
)

// Errors that Run wraps.
var (
	// ErrNotSupported says that programs can't be watched here, or not by this
	// user.
	ErrNotSupported = probe.ErrNotSupported
	// ErrStart says that the program couldn't be started.
	ErrStart = errors.New("start program")
)

// Options of Run. The zero value of each field means its default.
type Options struct {
	// Command is what to run; its streams are those that follow. Or PID is a
	// process to follow, which is what it was started with otherwise.
	Command []string
	PID     int
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
	// Signals are passed on to the program.
	Signals <-chan os.Signal
	// UseBytes is the size of a transfer from which on it is a use of a buffer.
	// Default 16 KiB. NoUses: none is.
	UseBytes uint64
	NoUses   bool
	// Trace is where the recording goes. Default: none is made.
	Trace io.Writer
	// TraceBytes is the most that a recording gets. Default: no limit.
	TraceBytes int64
	// Progress is called about once a second.
	Progress func(*Progress)
	// RingBytes is the size of the buffer between the kernel and this process.
	RingBytes int
	// Sites is how many call sites the result has. Default 100.
	Sites int
	// Tool is the name and version of the program that records.
	Tool string
}

// Defaults.
const (
	DefaultUseBytes = 16 << 10
	DefaultSites    = 100
)

func (o *Options) withDefaults() (Options, error) {
	c := *o
	if len(c.Command) == 0 && c.PID <= 0 || len(c.Command) > 0 && c.PID != 0 {
		return c, errors.New("profile: one of a command and a process")
	}
	if c.UseBytes == 0 {
		c.UseBytes = DefaultUseBytes
	}
	if c.NoUses {
		c.UseBytes = 0
	}
	if c.Sites == 0 {
		c.Sites = DefaultSites
	}
	return c, nil
}

// Progress is what there is so far.
type Progress struct {
	Elapsed       time.Duration
	Operations    uint64
	Bytes         uint64
	PerSecond     float64 // operations, of late
	Registrations uint64  // that live
	Stale         uint64
	Lost          uint64
}

const (
	// poll is how often the ring buffer is emptied, from maxPoll to poll by how
	// much is in it. Each time takes the program's processors some tenths of a
	// millisecond.
	poll    = 20 * time.Millisecond
	maxPoll = 5 * poll
	// busyShare is the share of the ring buffer, 1/busyShare, from which on it is
	// emptied often.
	busyShare = 16
	// flush is how often a recording is written out.
	flush = time.Second
)

type run struct {
	o       Options
	probe   *probe.Probe
	side    *probe.Sideband
	spaces  *spaces
	a       *analysis
	trace   *trace.Writer
	cmd     *exec.Cmd
	pid     int
	began   time.Duration
	notes   []string
	exit    *os.ProcessState
	ended   bool
	cpu     time.Duration // of this process at the beginning
	lastN   uint64
	lastAt  time.Duration
	flushed time.Duration
}

// Run runs a program and returns what its VM activity was. The program's exit
// code is in the result; an error is Run's own. When the context ends a program
// that Run started is killed, and one that it follows is let go. If the recording
// can't be written any more, Run goes on without it, and returns both the result
// and the error.
func Run(ctx context.Context, opts *Options) (_ *Result, err error) {
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &run{o: o, pid: o.PID, spaces: newSpaces()}
	defer r.spaces.close()
	if r.probe, err = probe.Open(&probe.Options{UseBytes: o.UseBytes, RingBytes: o.RingBytes}); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.probe.Close()) }()
	if r.side, err = probe.OpenSideband(); err != nil {
		r.note("functions of programs that end soon aren't named: %v", err)
	} else {
		r.spaces.side = r.side
	}
	defer func() {
		if r.side != nil {
			err = errors.Join(err, r.side.Close())
		}
	}()
	for _, path := range probe.InstalledVerbs() {
		// Whether it can't be watched matters if the program loads it.
		_ = r.probe.AttachVerbs(path)
	}
	r.began, r.cpu = now(), ownTime()
	r.lastAt = r.began
	if o.Trace != nil {
		if r.trace, err = trace.NewWriter(o.Trace, &trace.WriterOptions{MaxBytes: o.TraceBytes}); err != nil {
			return nil, err
		}
	}
	r.a = newAnalysis(r.began, r.spaces, r.probe.Stack, r.trace)
	r.a.uses.Rule = o.useRule()
	if err := r.start(); err != nil {
		return nil, err
	}
	if err := r.follow(ctx); err != nil {
		return nil, err
	}
	return r.finish()
}

func (o *Options) useRule() string {
	if o.UseBytes == 0 {
		return "transfers aren't recorded"
	}
	return fmt.Sprintf("read, write, send and receive calls, vectored or not, and such requests to io_uring, that transfer at least %d bytes; each part of a vector for itself", o.UseBytes)
}

func (r *run) note(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	if !slices.Contains(r.notes, s) {
		r.notes = append(r.notes, s)
	}
}

func (r *run) attachVerbs(path string) bool {
	err := r.probe.AttachVerbs(path)
	if err != nil {
		r.note("registrations through %s aren't seen: %v", path, err)
	}
	return err == nil
}

func now() time.Duration {
	var ts unix.Timespec
	// CLOCK_MONOTONIC can always be read.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// ownTime is the processor time of this process.
func ownTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func (r *run) start() error {
	command := r.o.Command
	if len(command) == 0 {
		var err error
		if command, err = commandOf(r.pid); err != nil {
			return fmt.Errorf("follow process %d: %w", r.pid, err)
		}
	}
	r.o.Command = command
	if r.trace != nil {
		if err := r.trace.Meta(&trace.Meta{
			Began: time.Now(), Command: command, Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), Kernel: sys.Release(),
			PageSize: os.Getpagesize(), Mode: "bpf-syscalls", UseRule: r.a.uses.Rule, Tool: r.o.Tool,
		}); err != nil {
			return err
		}
	}
	if r.o.PID != 0 {
		return r.attach()
	}
	r.cmd = exec.Command(command[0], command[1:]...) //nolint:noctx // It isn't killed when the context ends, but told.
	r.cmd.Stdin, r.cmd.Stdout, r.cmd.Stderr = r.o.Stdin, r.o.Stdout, r.o.Stderr
	if err := r.probe.Start(r.cmd); err != nil {
		return fmt.Errorf("%w: %w", ErrStart, err)
	}
	r.pid = r.cmd.Process.Pid
	return nil
}

// commandOf returns what a process was started with, its name if that isn't
// known, or an error if it can't be followed.
func commandOf(pid int) ([]string, error) {
	read := func(name string) (string, error) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			err = errors.New("there is none of that number")
		}
		return string(b), err
	}
	status, err := read("status")
	if err != nil {
		return nil, err
	}
	field := func(name string) string {
		_, rest, _ := strings.Cut(status, "\n"+name+":")
		line, _, _ := strings.Cut(rest, "\n")
		return strings.TrimSpace(line)
	}
	switch leader := field("Tgid"); {
	case leader != strconv.Itoa(pid):
		return nil, fmt.Errorf("it is a thread of process %s: follow that", leader)
	case strings.HasPrefix(field("State"), "Z"):
		return nil, fmt.Errorf("%w: its parent hasn't asked for its exit code yet", os.ErrProcessDone)
	case field("VmSize") == "":
		return nil, errors.New("it is a thread of the kernel, which has no memory of its own")
	}
	line, err := read("cmdline")
	if err != nil {
		return nil, err
	}
	if line = strings.TrimRight(line, "\x00"); line == "" {
		_, rest, _ := strings.Cut("\n"+status, "\nName:")
		line, _, _ = strings.Cut(strings.TrimSpace(rest), "\n")
	}
	return strings.Split(line, "\x00"), nil
}

// attach follows a process that runs.
func (r *run) attach() error {
	if err := r.probe.Follow(r.pid); err != nil {
		if errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("follow process %d: %w", r.pid, os.ErrProcessDone)
		}
		return err
	}
	pid := uint32(r.pid)
	r.a.pid = pid
	if err := r.spaces.readMaps(pid); err != nil {
		r.note("functions aren't named: %v", err)
	}
	r.note("registrations and children made before the profile began aren't known")
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	name := strings.TrimSpace(string(comm))
	r.a.processes[pid], r.a.running[pid] = name, true
	if r.trace != nil {
		r.a.traced(r.trace.Process(&trace.Process{PID: pid, Comm: name, Args: r.o.Command}))
	}
	for _, m := range r.spaces.modules {
		if probe.IsVerbs(m.path) {
			r.attachVerbs(m.path)
		}
	}
	return nil
}

// follow reads until the program ends.
func (r *run) follow(ctx context.Context) error {
	ended := make(chan error, 1)
	if r.cmd != nil {
		go func() { ended <- r.cmd.Wait() }()
	} else {
		go func() { ended <- waitFor(ctx, r.pid) }()
	}
	wait := poll
	tick := time.NewTimer(wait)
	defer tick.Stop()
	done := ctx.Done()
	for {
		select {
		case <-tick.C:
			before, modules := r.a.events, len(r.spaces.modules)
			if err := r.drain(); err != nil {
				return err
			}
			r.progress()
			wait = nextPoll(wait, r.a.events-before, r.probe.Capacity(), len(r.spaces.modules) > modules)
			tick.Reset(wait)
		case s := <-r.o.Signals:
			if r.cmd != nil {
				// It may have ended meanwhile.
				_ = r.cmd.Process.Signal(s)
			}
		case <-done:
			done = nil
			if r.cmd == nil {
				return r.drain()
			}
			_ = r.cmd.Process.Kill()
		case err := <-ended:
			if r.cmd != nil {
				r.exit = r.cmd.ProcessState
				var exit *exec.ExitError
				if err != nil && !errors.As(err, &exit) {
					r.note("copy of the program's output: %v", err)
				}
			}
			r.ended = err == nil || r.cmd != nil
			return r.drain()
		}
	}
}

// nextPoll returns when to look again after events were found in a buffer with
// room for so many. What a program loads may have to be watched soon.
func nextPoll(wait time.Duration, events uint64, room int, loads bool) time.Duration {
	if loads || events > uint64(room/busyShare) {
		return poll
	}
	return min(2*wait, maxPoll)
}

// waitFor returns nil when a process ended.
func waitFor(ctx context.Context, pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // It has ended.
	}
	defer func() { _ = unix.Close(fd) }()
	for ctx.Err() == nil {
		const wait = 100 // ms
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, wait)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("poll", err)
		}
	}
	return ctx.Err()
}

// stopTrace goes on without the recording.
func (r *run) stopTrace(err error) {
	r.trace, r.a.trace = nil, nil
	r.note("the recording ends early: %v", err)
}

// drain takes in what happened.
func (r *run) drain() error {
	r.spaces.drain(now())
	if err := r.probe.Drain(r.a.event); err != nil {
		return err
	}
	if r.trace != nil {
		if t := now(); t-r.flushed >= flush {
			r.flushed = t
			r.a.traced(r.trace.Flush())
		}
	}
	if err := r.a.traceErr; err != nil && r.trace != nil {
		r.stopTrace(err)
	}
	for _, m := range r.spaces.takeNew() {
		if probe.IsVerbs(m.path) {
			if !r.probe.Attached(m.path) && r.attachVerbs(m.path) {
				r.note("%s was found when the program had loaded it: its first registrations may be missing", m.path)
			}
		}
	}
	return nil
}

func (r *run) progress() {
	t := now()
	if r.o.Progress == nil || t-r.lastAt < time.Second {
		return
	}
	p := &Progress{
		Elapsed: t - r.began, Operations: r.a.total, Bytes: r.a.bytes,
		Registrations: uint64(len(r.a.regs.live)), Stale: r.a.regs.stale.Windows,
	}
	p.PerSecond = float64(r.a.total-r.lastN) / (t - r.lastAt).Seconds()
	if s, err := r.probe.Stats(); err == nil {
		p.Lost = s.LostEvents
	}
	r.lastN, r.lastAt = r.a.total, t
	r.o.Progress(p)
}

// finish makes the result.
func (r *run) finish() (*Result, error) {
	elapsed := now() - r.began
	reader := ownTime() - r.cpu
	// The kernel takes its time to detach.
	detached := make(chan error, 1)
	go func() { detached <- r.probe.Detach() }()
	r.a.readSymbols()
	if err := <-detached; err != nil {
		return nil, err
	}
	if err := r.drain(); err != nil {
		return nil, err
	}
	counts, err := r.probe.Counts()
	if err != nil {
		return nil, err
	}
	stats, err := r.probe.Stats()
	if err != nil {
		return nil, err
	}
	res := r.a.result(counts, r.o.Sites)
	res.Command, res.PID, res.Kernel, res.PageSize = r.o.Command, r.pid, sys.Release(), os.Getpagesize()
	res.Seconds = elapsed.Seconds()
	res.ExitCode, res.Ended = -1, r.ended
	res.Lost = Lost{Events: stats.LostEvents, Stacks: stats.LostStacks, Tasks: stats.LostTasks, Mappings: r.spaces.lost}
	res.Overhead = Overhead{
		Measured: stats.Measured, Runs: stats.Runs, Seconds: stats.FollowedTime.Seconds(),
		MachineSeconds: stats.Time.Seconds(), ReaderSeconds: reader.Seconds(),
	}
	if r.exit != nil {
		status, _ := r.exit.Sys().(syscall.WaitStatus)
		res.ended(status)
		// Daemons aren't children that anybody waits for.
		res.Overhead.ProgramSeconds = max(r.exit.UserTime()+r.exit.SystemTime(), r.a.cpu).Seconds()
		if res.Overhead.ProgramSeconds > 0 {
			res.Overhead.Share = res.Overhead.Seconds / res.Overhead.ProgramSeconds
		}
	}
	if r.a.status != nil {
		res.ended(syscall.WaitStatus(*r.a.status))
	}
	delete(r.a.running, uint32(r.pid))
	if n := len(r.a.running); n > 0 && r.ended && res.Lost.Events == 0 {
		r.note("%s still ran when the program ended", plural(n, "other process", "other processes"))
	}
	if r.trace != nil {
		if err := r.finishTrace(&res.Lost, elapsed); err != nil {
			r.stopTrace(err)
		}
	}
	res.Notes = append(append(res.Notes, r.probe.Notes()...), r.notes...)
	return res, r.a.traceErr
}

// ended notes how the program ended.
func (r *Result) ended(status syscall.WaitStatus) {
	r.Ended, r.ExitCode = true, status.ExitStatus()
	if status.Signaled() {
		const signalled = 128
		r.ExitCode, r.Signal = signalled+int(status.Signal()), status.Signal().String()
	}
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}

// finishTrace writes the call sites and what was lost.
func (r *run) finishTrace(lost *Lost, at time.Duration) error {
	for _, s := range r.a.sites {
		st := &trace.Stack{ID: s.id}
		for _, f := range r.a.resolve(s) {
			st.Frames = append(st.Frames, trace.Frame{
				Addr: f.Address, Function: f.Function, File: f.File, Line: uint32(f.Line), Module: f.Module, Offset: f.Offset,
			})
		}
		r.a.traced(r.trace.Stack(st))
	}
	for cause, n := range map[trace.LostCause]uint64{trace.LostBuffer: lost.Events, trace.LostTable: lost.Tasks + lost.Stacks} {
		if n > 0 {
			r.a.traced(r.trace.Lost(&trace.Lost{Time: at, Cause: cause, Records: n}))
		}
	}
	r.a.traced(r.trace.Close())
	return r.a.traceErr
}

// result makes the result of what is known, without what Run knows.
func (a *analysis) result(counts map[probe.What]probe.Count, sites int) *Result {
	res := &Result{
		Operations: map[string]*Operation{}, Uses: a.uses, Registering: a.regs.sum, Stale: a.regs.stale,
		Processes: len(a.processes), Threads: []Thread{}, CallSites: []CallSite{},
		Registrations: []*Registration{}, StaleWindows: []*StaleWindow{}, Notes: []string{},
		Timeline: Timeline{Interval: a.interval.Seconds(), Points: a.points},
	}
	for w, c := range counts {
		o := &Operation{
			Count: c.Calls, Failed: c.Failed, Bytes: c.Bytes, Seconds: c.Time.Seconds(),
			Mean: c.Time.Seconds() / float64(c.Calls), Kinds: map[string]uint64{}, Sizes: []SizeBucket{},
		}
		res.Operations[w.String()] = o
		seen := a.ops[w]
		if seen == nil {
			continue
		}
		o.Pages, o.Changes, o.Kinds = seen.pages, seen.changes, seen.kinds
		o.P50, o.P99, o.Max = seen.latency.quantile(0.5).Seconds(), seen.latency.quantile(0.99).Seconds(), seen.latency.max.Seconds()
		o.Latencies = seen.latency.buckets()
		for i, s := range seen.sizes {
			if s.Count > 0 {
				s.UpTo = 1 << min(i, 63)
				o.Sizes = append(o.Sizes, s)
			}
		}
		if w == probe.Shmat || w == probe.Shmdt {
			// The kernel's counts have no size of a segment.
			for _, s := range seen.sizes {
				o.Bytes += s.Bytes
			}
		}
	}
	for tid, t := range a.threads {
		res.Threads = append(res.Threads, Thread{
			PID: t.pid, TID: tid, Name: t.name, Operations: t.operations, Bytes: t.size, Seconds: t.time.Seconds(),
		})
	}
	slices.SortFunc(res.Threads, func(x, y Thread) int {
		return cmp.Or(cmp.Compare(y.Operations, x.Operations), cmp.Compare(x.TID, y.TID))
	})
	res.CallSites = a.callSites(sites)
	for _, x := range a.regs.list {
		x.out.Stack = a.resolve(x.site)
		res.Registrations = append(res.Registrations, x.out)
	}
	for _, w := range a.regs.stales {
		w.out.Stack, w.out.RegistrationStack = a.resolve(w.site), a.resolve(w.reg.site)
		if w.used {
			w.out.UseStack = a.resolve(w.where)
		}
		res.StaleWindows = append(res.StaleWindows, w.out)
	}
	return res
}

// callSites returns those where most time is spent. The same place in several
// processes that run the same program is one.
func (a *analysis) callSites(n int) []CallSite {
	type place struct {
		operation, program, stack string
	}
	places := map[place]*CallSite{}
	for s, by := range a.siteOps {
		frames := a.resolve(s)
		for w, so := range by {
			key := place{w.String(), a.processes[s.pid], stackKey(frames)}
			c := places[key]
			if c == nil {
				c = &CallSite{Operation: key.operation, Program: key.program, Stack: frames}
				places[key] = c
			}
			c.Count += so.count
			c.Bytes += so.bytes
			c.Seconds += so.time.Seconds()
		}
	}
	list := make([]CallSite, 0, len(places))
	for _, c := range places {
		list = append(list, *c)
	}
	slices.SortFunc(list, func(x, y CallSite) int {
		return cmp.Or(cmp.Compare(y.Seconds, x.Seconds), cmp.Compare(y.Count, x.Count), cmp.Compare(x.Operation, y.Operation))
	})
	return list[:min(n, len(list))]
}

func stackKey(frames []Frame) string {
	var b strings.Builder
	for _, f := range frames {
		if f.Module == "" {
			fmt.Fprintf(&b, "%x;", f.Address)
		} else {
			fmt.Fprintf(&b, "%s+%x;", f.Module, f.Offset)
		}
	}
	return b.String()
}
