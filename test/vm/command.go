package vm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pindown/pindown/test/vm/internal/wire"
)

// DefaultTimeout is how long a command may run.
const DefaultTimeout = 5 * time.Minute

// Cmd is a command to run in the guest. The zero value of each field but Args means its default.
type Cmd struct {
	Args   []string       // program and arguments; a program without a slash is looked for in PATH
	Env    []string       // added to the guest's PATH, HOME, TMPDIR and PINDOWN_VM=1
	Dir    string         // working directory, by default /tmp
	User   string         // "root" (the default) or "nobody"
	Caps   []uintptr      // capabilities that User keeps, as numbers: unix.CAP_…
	Limits map[int]uint64 // resource limits, soft and hard, by number: unix.RLIMIT_…; unix.RLIM_INFINITY for none

	// Combined sends standard error where standard output goes, so that their order is kept.
	Combined bool

	// Progress, if set, receives standard output as it comes, besides its being kept for the Result.
	Progress io.Writer

	// Timeout is how long the command may run. 0 means DefaultTimeout. Then its process group gets SIGQUIT, then SIGKILL; and if it
	// has not ended even so, the machine is ended.
	Timeout time.Duration
}

// Result is how a command ended.
type Result struct {
	Stdout, Stderr string
	Code           int // exit status, -1 if it was killed
	Signal         int // the signal that killed it, or 0
}

// Exec runs a command in the guest. A command that fails is no error: look at the Result.
//
// The error wraps context.DeadlineExceeded or the context's error for a command that ran too long, and is a [*CrashError] if the machine ended. In both
// cases the Result holds the output so far.
func (m *Machine) Exec(ctx context.Context, c Cmd) (Result, error) {
	if len(c.Args) == 0 {
		return Result{}, errors.New("run command: no arguments")
	}
	name := strings.Join(c.Args, " ")
	timeout := cmp.Or(c.Timeout, DefaultTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("%w: still running after %v", context.DeadlineExceeded, timeout))
	defer cancel()

	id, call := m.newCall(c.Progress)
	msg := wire.ExecMsg{
		Args:     c.Args,
		Env:      append(guestEnv(), c.Env...),
		Dir:      cmp.Or(c.Dir, "/tmp"),
		User:     cmp.Or(c.User, "root"),
		Caps:     c.Caps,
		Limits:   c.Limits,
		Combined: c.Combined,
	}
	// If the machine is dead, this may fail or not, but the wait below says so either way.
	if err := m.w.Send(wire.Exec, id, msg); errors.Is(err, wire.ErrProtocol) {
		return Result{}, fmt.Errorf("run %s: %w", name, err)
	}
	f, err := m.wait(ctx, id, call)
	res := Result{Stdout: call.stdout.String(), Stderr: call.stderr.String(), Code: -1}
	if f.Kind == wire.Exit {
		var exit wire.ExitMsg
		if derr := f.Decode(&exit); derr != nil {
			return res, fmt.Errorf("run %s: %w", name, derr)
		}
		if exit.Err != "" && err == nil {
			err = errors.New(exit.Err)
		}
		res.Code, res.Signal = exit.Code, exit.Signal
	}
	if err != nil {
		return res, fmt.Errorf("run %s: %w", name, err)
	}
	return res, nil
}

// wait returns the last frame of a command. It makes the command end when ctx does, and the machine if the command won't.
func (m *Machine) wait(ctx context.Context, id uint32, c *call) (wire.Frame, error) {
	select {
	case f := <-c.done:
		return f, nil
	case <-m.dead:
		return m.deadFrame(c)
	case <-ctx.Done():
	}
	cause := context.Cause(ctx)
	for _, sig := range []syscall.Signal{syscall.SIGQUIT, syscall.SIGKILL} {
		_ = m.w.Send(wire.Signal, id, wire.SignalMsg{Signal: int(sig)})
		select {
		case f := <-c.done:
			return f, fmt.Errorf("%w; ended by %v", cause, sig)
		case <-m.dead:
			return m.deadFrame(c)
		case <-time.After(m.grace):
		}
	}
	// It may still be able to say where it hangs.
	_, d := m.newDump()
	select {
	case <-d.done:
	case <-m.dead:
	case <-time.After(m.grace):
	}
	m.kill(cause.Error() + ", and SIGKILL does not end it")
	<-m.dead
	return wire.Frame{}, fmt.Errorf("%w: %w", cause, m.ended())
}

// deadFrame returns the last frame of a command if it came before the machine ended.
func (m *Machine) deadFrame(c *call) (wire.Frame, error) {
	select {
	case f := <-c.done:
		return f, nil
	default:
		return wire.Frame{}, m.ended()
	}
}

func (m *Machine) newDump() (uint32, *call) {
	id, c := m.newCall(nil)
	_ = m.w.Write(wire.Dump, id, nil)
	return id, c
}

// guestEnv is the environment that every command gets.
func guestEnv() []string {
	return []string{"PATH=/usr/bin:/usr/sbin:/bin:/sbin", "HOME=/tmp", "TMPDIR=/tmp", "PINDOWN_VM=1"}
}

// Command runs a command as root and returns its standard output. The test ends if it fails.
func (m *Machine) Command(tb testing.TB, args ...string) string {
	tb.Helper()
	res, err := m.Exec(tb.Context(), Cmd{Args: args})
	if err != nil {
		tb.Fatal(err)
	}
	if res.Code != 0 {
		tb.Fatalf("%s: exit status %d, signal %d\n%s%s", strings.Join(args, " "), res.Code, res.Signal, res.Stdout, res.Stderr)
	}
	return res.Stdout
}

// WriteFile writes a file in the guest, and the directories above it. The test ends if it fails.
func (m *Machine) WriteFile(tb testing.TB, path string, perm fs.FileMode, data []byte) {
	tb.Helper()
	if err := m.put(tb.Context(), path, perm, bytes.NewReader(data)); err != nil {
		tb.Fatal(err)
	}
}

// PutProgram copies a program of the host into the guest, with the shared libraries and the dynamic linker that it needs and the guest hasn't
// got. Go programs need some, in spite of CGO_ENABLED=0, if they load libraries at run time.
func (m *Machine) PutProgram(ctx context.Context, guest, host string) error {
	libs, err := libraries([]string{"/"}, host)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(libs)) {
		m.mu.Lock()
		have := m.libs[name]
		m.libs[name] = true
		m.mu.Unlock()
		if have {
			continue
		}
		if err := m.putFile(ctx, name, libs[name]); err != nil {
			return err
		}
	}
	return m.putFile(ctx, guest, host)
}

// putFile copies a file of the host into the guest.
func (m *Machine) putFile(ctx context.Context, guest, host string) error {
	f, err := os.Open(host)
	if err != nil {
		return fmt.Errorf("copy %s: %w", host, err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return fmt.Errorf("copy %s: %w", host, err)
	}
	return m.put(ctx, guest, fi.Mode(), f)
}

func (m *Machine) put(ctx context.Context, path string, perm fs.FileMode, r io.Reader) error {
	ctx, cancel := context.WithTimeout(ctx, DefaultTimeout)
	defer cancel()
	// A guest that doesn't take a file is broken, and the writes below would hang with it.
	stop := context.AfterFunc(ctx, func() { m.kill("can't write " + path + ": " + context.Cause(ctx).Error()) })
	defer stop()
	id, c := m.newCall(nil)
	err := m.w.Send(wire.Put, id, wire.PutMsg{Path: path, Mode: uint32(perm.Perm())})
	buf := make([]byte, 1<<18)
	for err == nil {
		var n int
		n, err = r.Read(buf)
		if n > 0 {
			if werr := m.w.Write(wire.Data, id, buf[:n]); werr != nil {
				err = werr
			}
		}
	}
	if errors.Is(err, io.EOF) {
		err = m.w.Write(wire.End, id, nil)
	}
	if err != nil {
		select {
		case <-m.dead:
			err = m.ended()
		default:
		}
		return fmt.Errorf("write %s: %w", path, err)
	}
	select {
	case f := <-c.done:
		var msg wire.DoneMsg
		if err := f.Decode(&msg); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
		if msg.Err != "" {
			return fmt.Errorf("write %s: %s", path, msg.Err)
		}
		return nil
	case <-m.dead:
		return fmt.Errorf("write %s: %w", path, m.ended())
	}
}

// maxOutput is how much of a command's output is kept.
const maxOutput = 64 << 20

// limitedBuffer keeps the first maxOutput bytes.
type limitedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer // guarded by mu
	cut bool         // guarded by mu
}

func (b *limitedBuffer) append(p []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := maxOutput - b.buf.Len(); n < len(p) {
		p, b.cut = p[:n], true
	}
	b.buf.Write(p)
}

// String returns what was kept, and says if something was not.
func (b *limitedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cut {
		return b.buf.String() + "\n[more output was dropped]\n"
	}
	return b.buf.String()
}
