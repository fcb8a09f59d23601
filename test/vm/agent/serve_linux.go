package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/test/vm/internal/wire"
)

// portName is the name that the harness gives to the virtio serial port.
const portName = "pindown"

// outputGrace is how long a command's output is read on after the command itself has ended, for the sake of children it left behind.
const outputGrace = 5 * time.Second

type server struct {
	w *wire.Writer

	mu    sync.Mutex
	procs map[uint32]int // guarded by mu; process group by call
}

// serve answers the harness until it hangs up or asks for the power to be switched off.
func serve() error {
	port, err := openPort()
	if err != nil {
		return err
	}
	defer port.Close()
	s := &server{w: wire.NewWriter(port), procs: make(map[uint32]int)}
	if err := s.w.Send(wire.Hello, 0, wire.HelloMsg{Release: release()}); err != nil {
		return err
	}
	err = s.loop(wire.NewReader(bufio.NewReaderSize(port, 1<<16)))
	if errors.Is(err, io.EOF) {
		return nil // The harness is gone, or asked for the end.
	}
	return err
}

func openPort() (*os.File, error) {
	var dev string
	err := waitFor(func() bool {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			if b, err := os.ReadFile(n); err == nil && strings.TrimSpace(string(b)) == portName {
				dev = "/dev/" + filepath.Base(filepath.Dir(n))
				return true
			}
		}
		return false
	})
	if err != nil {
		return nil, fmt.Errorf("find serial port %s: %w", portName, err)
	}
	return os.OpenFile(dev, os.O_RDWR, 0)
}

func (s *server) loop(r *wire.Reader) error {
	files := make(map[uint32]*upload)
	for {
		f, err := r.Read()
		if err != nil {
			return err
		}
		switch f.Kind {
		case wire.Exec:
			var msg wire.ExecMsg
			if err := f.Decode(&msg); err != nil {
				return err
			}
			go s.exec(f.ID, msg)
		case wire.Signal:
			var msg wire.SignalMsg
			if err := f.Decode(&msg); err != nil {
				return err
			}
			s.signal(f.ID, syscall.Signal(msg.Signal))
		case wire.Put:
			var msg wire.PutMsg
			if err := f.Decode(&msg); err != nil {
				return err
			}
			files[f.ID] = newUpload(msg)
		case wire.Data:
			if u := files[f.ID]; u != nil {
				u.write(f.Payload)
			}
		case wire.End:
			if u := files[f.ID]; u != nil {
				delete(files, f.ID)
				if err := s.done(f.ID, u.close()); err != nil {
					return err
				}
			}
		case wire.Dump:
			if err := s.done(f.ID, dump()); err != nil {
				return err
			}
		case wire.PowerOff:
			return io.EOF
		default:
			return fmt.Errorf("serve: %w: kind %d from the harness", wire.ErrProtocol, f.Kind)
		}
	}
}

func (s *server) done(id uint32, err error) error {
	var msg wire.DoneMsg
	if err != nil {
		msg.Err = err.Error()
	}
	return s.w.Send(wire.Done, id, msg)
}

// exec runs a command and reports how it ended.
func (s *server) exec(id uint32, msg wire.ExecMsg) {
	exit, err := s.run(id, msg)
	if err != nil {
		exit = wire.ExitMsg{Code: -1, Err: err.Error()}
	}
	if err := s.w.Send(wire.Exit, id, exit); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
	}
}

func (s *server) run(id uint32, msg wire.ExecMsg) (wire.ExitMsg, error) {
	if len(msg.Args) == 0 {
		return wire.ExitMsg{}, errors.New("run command: no arguments")
	}
	path, err := lookPath(msg.Args[0], msg.Env)
	if err != nil {
		return wire.ExitMsg{}, err
	}
	cred, err := credential(msg.User)
	if err != nil {
		return wire.ExitMsg{}, err
	}
	hold, release, err := os.Pipe()
	if err != nil {
		return wire.ExitMsg{}, err
	}
	defer hold.Close()
	defer release.Close()

	// Between fork and exec there is no place for resource limits in os/exec, and raising one takes a privilege that the command may not
	// have. So this program goes in between, waits until the limits are set from here, and becomes the command.
	cmd := &exec.Cmd{
		Path:        self,
		Args:        append([]string{self, argExec, path}, msg.Args...),
		Env:         msg.Env,
		Dir:         msg.Dir,
		ExtraFiles:  []*os.File{hold},
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Credential: cred, AmbientCaps: msg.Caps},
		WaitDelay:   outputGrace,
	}
	cmd.Stdout = output{s.w, wire.Stdout, id}
	if cmd.Stderr = (output{s.w, wire.Stderr, id}); msg.Combined {
		cmd.Stderr = cmd.Stdout
	}
	if err := cmd.Start(); err != nil {
		return wire.ExitMsg{}, fmt.Errorf("run %s: %w", msg.Args[0], err)
	}
	pid := cmd.Process.Pid
	s.mu.Lock()
	s.procs[id] = pid
	s.mu.Unlock()
	for res, v := range msg.Limits {
		if e := unix.Prlimit(pid, res, &unix.Rlimit{Cur: v, Max: v}, nil); e != nil {
			err = fmt.Errorf("run %s: set limit %d: %w", msg.Args[0], res, os.NewSyscallError("prlimit", e))
		}
	}
	if err == nil {
		_, err = release.Write([]byte{0})
	}
	release.Close() // Without the byte, the child gives up.
	werr := cmd.Wait()
	s.mu.Lock()
	delete(s.procs, id)
	s.mu.Unlock()
	if err != nil {
		return wire.ExitMsg{}, err
	}
	exit := wire.ExitMsg{Code: cmd.ProcessState.ExitCode()}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		exit.Signal = int(ws.Signal())
	}
	var ee *exec.ExitError
	if werr != nil && !errors.As(werr, &ee) && !errors.Is(werr, exec.ErrWaitDelay) {
		return wire.ExitMsg{}, fmt.Errorf("run %s: %w", msg.Args[0], werr)
	}
	return exit, nil
}

// exitCannotRun is what a shell, too, reports for a command that can't be run.
const exitCannotRun = 126

// become turns this process into the command args[1:] at path args[0], as soon as a byte arrives on descriptor 3.
func become(args []string) error {
	hold := os.NewFile(3, "hold")
	if _, err := io.ReadFull(hold, make([]byte, 1)); err != nil {
		return fmt.Errorf("become %s: %w", args[0], err)
	}
	if err := hold.Close(); err != nil {
		return err
	}
	// A file just uploaded is busy for as long as a child forked meanwhile for another command has not reached its own exec.
	err := syscall.Exec(args[0], args[1:], os.Environ())
	for i := 0; err == syscall.ETXTBSY && i < 1000; i++ {
		time.Sleep(10 * time.Millisecond)
		err = syscall.Exec(args[0], args[1:], os.Environ())
	}
	return fmt.Errorf("become %s: %w", args[0], os.NewSyscallError("execve", err))
}

func (s *server) signal(id uint32, sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if pid, ok := s.procs[id]; ok {
		_ = syscall.Kill(-pid, sig) // ESRCH: it has just ended.
	}
}

// lookPath finds a command in the PATH that env says, not in the agent's own, which has none.
func lookPath(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, kv := range env {
		dirs, ok := strings.CutPrefix(kv, "PATH=")
		for _, dir := range filepath.SplitList(dirs) {
			p := filepath.Join(dir, name)
			if fi, err := os.Stat(p); ok && err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0 {
				return p, nil
			}
		}
	}
	return "", fmt.Errorf("find %s: %w", name, exec.ErrNotFound)
}

func credential(name string) (*syscall.Credential, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// dump has the kernel print where all CPUs are and which tasks are blocked.
func dump() error {
	for _, key := range []string{"l", "w"} {
		if err := os.WriteFile("/proc/sysrq-trigger", []byte(key), 0); err != nil {
			return err
		}
	}
	return nil
}

// output sends what is written to it as frames.
type output struct {
	w    *wire.Writer
	kind wire.Kind
	id   uint32
}

func (o output) Write(b []byte) (int, error) {
	if err := o.w.Write(o.kind, o.id, b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// upload is a file on its way from the harness. The first error stays until close reports it.
type upload struct {
	f   *os.File
	err error
}

func newUpload(msg wire.PutMsg) *upload {
	u := &upload{}
	if u.err = os.MkdirAll(filepath.Dir(msg.Path), 0o755); u.err != nil {
		return u
	}
	u.f, u.err = os.OpenFile(msg.Path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if u.err == nil {
		u.err = u.f.Chmod(os.FileMode(msg.Mode))
	}
	return u
}

func (u *upload) write(b []byte) {
	if u.err == nil {
		_, u.err = u.f.Write(b)
	}
}

func (u *upload) close() error {
	if u.f != nil {
		u.err = errors.Join(u.err, u.f.Close())
	}
	return u.err
}
