package vmops

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// Helper is another process that carries out operations. Methods may be called
// from many goroutines; requests are served one by one.
type Helper struct {
	mu  sync.Mutex
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// request is one operation for the helper, a line of JSON.
type request struct {
	Op   string     `json:"op"`
	Kind vm.Mapping `json:"kind"`
	PID  int        `json:"pid"`
	Path string     `json:"path,omitempty"` // opens the file behind the mapping
	Shm  int        `json:"shm"`            // System V segment
	Addr uintptr    `json:"addr"`
	Off  int64      `json:"off"`
	Len  int64      `json:"len"`
	Size int64      `json:"size"`
}

// response answers a request: an error's number and text, both zero for none.
type response struct {
	Errno int    `json:"errno"`
	Text  string `json:"text"`
}

// StartHelper starts cmd, which must call Serve, and returns it as a helper.
// The process ends when the helper is closed or this process is gone.
func StartHelper(cmd *exec.Cmd) (*Helper, error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start helper process: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start helper process: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start helper process: %w", err)
	}
	return &Helper{cmd: cmd, in: in, out: bufio.NewReader(out)}, nil
}

// PID returns the helper's process number.
func (h *Helper) PID() int { return h.cmd.Process.Pid }

// Close ends the process and waits for it.
func (h *Helper) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return errors.Join(h.in.Close(), h.cmd.Wait())
}

func (h *Helper) do(s *Scratch, o *Operation, r vm.Range) error {
	req := request{
		Op: o.Name, Kind: s.kind, PID: os.Getpid(), Shm: s.shmid, Addr: r.Start,
		Off: int64(r.Start - s.r.Start), Len: int64(r.Len()), Size: int64(s.r.Len()),
	}
	if s.fd != nil {
		req.Path = fmt.Sprintf("/proc/%d/fd/%d", req.PID, s.fd.Fd())
	} else if s.kind == vm.MappingAnonShared || s.kind == vm.MappingSysV {
		// Needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN.
		req.Path = fmt.Sprintf("/proc/%d/map_files/%x-%x", req.PID, s.r.Start, s.r.End)
	}
	line, err := json.Marshal(req)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, err := h.in.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write to helper process: %w", err)
	}
	answer, err := h.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read from helper process: %w", err)
	}
	var resp response
	switch err := json.Unmarshal(answer, &resp); {
	case err != nil:
		return fmt.Errorf("read from helper process: %w", err)
	case resp.Errno != 0:
		return fmt.Errorf("helper process: %s: %w", resp.Text, syscall.Errno(resp.Errno))
	case resp.Text != "":
		return fmt.Errorf("helper process: %s", resp.Text)
	}
	return nil
}

// Serve is the helper process: it reads operations from r, carries them out
// and answers on w, until r ends.
func Serve(r io.Reader, w io.Writer) error {
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var req request
		var resp response
		err = json.Unmarshal(line, &req)
		if err == nil {
			err = req.serve()
		}
		if err != nil {
			resp.Text = err.Error()
			var errno syscall.Errno
			switch {
			case errors.As(err, &errno):
				resp.Errno = int(errno)
			case Unavailable(err):
				resp.Errno = int(unix.ENOSYS)
			}
		}
		answer, err := json.Marshal(resp)
		if err != nil {
			return err
		}
		if _, err := w.Write(append(answer, '\n')); err != nil {
			return err
		}
	}
}

func (q request) serve() error {
	o, ok := Lookup(q.Op)
	if !ok || !o.other.has(q.Kind) {
		return fmt.Errorf("operation %q: %w", q.Op, ErrUnavailable)
	}
	if o.Op == vm.OpProcessMadvise {
		return processMadvise(q.PID, vm.Range{Start: q.Addr, End: q.Addr + uintptr(q.Len)}, unix.MADV_PAGEOUT)
	}
	if o.Op == vm.OpRemove && q.Kind == vm.MappingSysV {
		a, err := shmat(q.Shm, 0, 0)
		if err != nil {
			return err
		}
		r := vm.Range{Start: a + uintptr(q.Off), End: a + uintptr(q.Off+q.Len)}
		return errors.Join(madvise(r, unix.MADV_REMOVE), shmdt(a))
	}
	f, err := os.OpenFile(q.Path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if o.Op == vm.OpRemove {
		a, err := mmap(0, uintptr(q.Len), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED, int(f.Fd()), q.Off)
		if err != nil {
			return err
		}
		r := vm.Range{Start: a, End: a + uintptr(q.Len)}
		return errors.Join(madvise(r, unix.MADV_REMOVE), munmap(r))
	}
	return o.file(f, q.Off, q.Len, q.Size)
}
