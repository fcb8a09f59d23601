// Package psi tells when the kernel is short of memory, by a trigger on pressure
// stall information (Linux 5.2 with CONFIG_PSI; unprivileged processes since
// Linux 6.4, before that CAP_SYS_RESOURCE).
package psi

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// trigger fires when for 15 % of two seconds some task waited for memory. A
// process without CAP_SYS_RESOURCE may only ask for windows of a multiple of two
// seconds (psi_trigger_create in kernel/sched/psi.c).
const trigger = "some 300000 2000000\x00"

const system = "/proc/pressure/memory"

// Trigger is a trigger on memory pressure. Create it with [Open]; it holds two
// file descriptors and a thread until Close.
type Trigger struct {
	path  string
	fired chan struct{}
	stop  *os.File // an eventfd
	file  *os.File
	done  chan struct{}
}

// Open sets a trigger on the memory pressure of this process's control group,
// or, where that can't be had, of the whole system. The error says why for each.
func Open() (*Trigger, error) {
	var errs []error
	for _, path := range paths("/proc/self") {
		t, err := open(path)
		if err == nil {
			return t, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// paths returns where the pressure of the process at proc can be read, the most
// telling first.
func paths(proc string) []string {
	group := ""
	if b, err := os.ReadFile(proc + "/cgroup"); err == nil {
		for line := range strings.Lines(string(b)) {
			if path, ok := strings.CutPrefix(line, "0::"); ok {
				group = strings.TrimSuffix(path, "\n")
			}
		}
	}
	if group == "" {
		return []string{system}
	}
	b, err := os.ReadFile(proc + "/mountinfo")
	if err != nil {
		return []string{system}
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		// 40 30 0:37 /root /mount/point options [tags] - type source options
		front, back, ok := strings.Cut(s.Text(), " - ")
		f := strings.Fields(front)
		if !ok || len(f) < 5 || !strings.HasPrefix(back, "cgroup2 ") {
			continue
		}
		if below, ok := strings.CutPrefix(group, strings.TrimSuffix(unescape(f[3]), "/")); ok && (below == "" || below[0] == '/') {
			return []string{filepath.Join(unescape(f[4]), below, "memory.pressure"), system}
		}
	}
	return []string{system}
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	for _, c := range " \t\n\\" {
		s = strings.ReplaceAll(s, fmt.Sprintf("\\%03o", c), string(c))
	}
	return s
}

func open(path string) (*Trigger, error) {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the call and the path
	}
	// A trigger is set by one write.
	if _, err := file.WriteString(trigger); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("eventfd", err), file.Close())
	}
	t := &Trigger{
		path: path, file: file, stop: os.NewFile(uintptr(fd), "eventfd "+strconv.Itoa(fd)),
		fired: make(chan struct{}, 1), done: make(chan struct{}),
	}
	go t.watch(int32(file.Fd()), int32(fd))
	return t, nil
}

// watch waits for the trigger. The Go runtime's poller doesn't ask for POLLPRI.
func (t *Trigger) watch(file, stop int32) {
	defer close(t.done)
	defer close(t.fired)
	for {
		fds := []unix.PollFd{{Fd: file, Events: unix.POLLPRI}, {Fd: stop, Events: unix.POLLIN}}
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil || fds[1].Revents != 0 || fds[0].Revents&(unix.POLLERR|unix.POLLNVAL) != 0:
			// Closed, or the control group is gone.
			return
		case fds[0].Revents&unix.POLLPRI != 0:
			select {
			case t.fired <- struct{}{}:
			default:
			}
		}
	}
}

// Path returns the file whose pressure is watched.
func (t *Trigger) Path() string { return t.path }

// Fired gets a value when there was pressure, at most every two seconds. It is
// closed by Close, and when the control group is gone.
func (t *Trigger) Fired() <-chan struct{} { return t.fired }

// Close ends the trigger.
func (t *Trigger) Close() error {
	_, err := t.stop.Write([]byte{1, 0, 0, 0, 0, 0, 0, 0})
	if err == nil {
		<-t.done
	}
	return errors.Join(err, t.file.Close(), t.stop.Close())
}
