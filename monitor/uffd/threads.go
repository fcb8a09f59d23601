package uffd

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// maxThreads is how many threads a proof looks at, at most.
const maxThreads = 512

// provePatience is how often a proof asks after one thread. Failing is cheap:
// the caller's registration isn't cached.
const provePatience = 24

// threadInspector proves that no thread of this process is still inside an
// madvise that it was in when the proof began.
//
// It lists /proc/self/task and asks of each thread where it is. A thread that
// waits inside another system call, or outside of any, has left madvise. A
// thread that runs may be anywhere; it is sent SIGURG, which Go's runtime sends
// to its threads all the time and ignores when it has no use for it: once the
// signal has been taken the thread has been at the border to user mode since.
//
// Threads that needn't be asked: the caller's own; the reader, which makes no
// such call; threads that are born later. Processes that needn't be asked: the
// kernel lets process_madvise(2) act on another process only with advice that
// removes nothing (process_madvise_remote_valid in mm/madvise.c). A process
// that shares the address space without sharing the thread group (clone with
// CLONE_VM alone) isn't seen; Go's os/exec makes one for the time between fork
// and exec, which calls no madvise.
type threadInspector struct {
	reader *atomic.Uint32 // the reader's thread id
}

// quiescent reports whether the proof succeeds. It takes a few microseconds a
// thread, and a fraction of a millisecond if threads are running.
func (i *threadInspector) quiescent() bool {
	// The caller's thread must be one and the same throughout.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	task, err := unix.Open("/proc/self/task", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(task) }()
	self := unix.Gettid()
	for range 3 {
		before, err := listThreads(task)
		if err != nil {
			return false
		}
		for _, tid := range before {
			if tid == self || tid == int(i.reader.Load()) {
				continue
			}
			if !leftMadvise(task, tid) {
				return false
			}
		}
		// The kernel ends a listing early if the thread that it stands at
		// exits. That one isn't in the next listing, so two that are the same
		// are whole.
		after, err := listThreads(task)
		if err != nil {
			return false
		}
		if slices.Equal(before, after) {
			return true
		}
	}
	return false
}

// listThreads returns the thread ids in the directory task, in its order.
func listThreads(task int) ([]int, error) {
	if _, err := unix.Seek(task, 0, unix.SEEK_SET); err != nil {
		return nil, err
	}
	// One call for all, so that no position is looked up by number.
	buf := make([]byte, 64*maxThreads)
	n, err := unix.ReadDirent(task, buf)
	if err != nil {
		return nil, err
	}
	_, _, names := unix.ParseDirent(buf[:n], -1, nil)
	if len(names) >= maxThreads {
		return nil, fmt.Errorf("list threads: more than %d: %w", maxThreads, unix.EOVERFLOW)
	}
	tids := make([]int, 0, len(names))
	for _, name := range names {
		tid, err := strconv.Atoi(name)
		if err != nil {
			return nil, err
		}
		tids = append(tids, tid)
	}
	return tids, nil
}

// place is where a thread was seen.
type place uint8

const (
	placeUnknown place = iota
	placeOutside       // waiting, and not inside madvise
	placeInside        // waiting inside madvise, or something that may be it
	placeRunning
	placeWorker // one of the kernel's own threads in this process
	placeGone
)

// leftMadvise waits a little for proof that the thread isn't inside an madvise
// that began before the call.
func leftMadvise(task, tid int) bool {
	signaled := false
	for try := range provePatience {
		text, err := readTask(task, tid, "syscall")
		where := placeUnknown
		switch {
		case errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH):
			where = placeGone
		case err == nil:
			where = parseSyscall(text)
		}
		switch where {
		case placeOutside, placeGone:
			return true
		case placeUnknown:
			return false
		case placeWorker:
			stat, err := readTask(task, tid, "stat")
			return err == nil && idleWorker(stat)
		case placeInside:
			// It waits for a lock or for memory; signals don't hurry it.
		case placeRunning:
			if try == 0 {
				break // most are gone a moment later
			}
			if !signaled {
				stat, err := readTask(task, tid, "stat")
				if err == nil && isWorker(stat) {
					return idleWorker(stat)
				}
				status, err := readTask(task, tid, "status")
				if err != nil || !takesSignal(status) {
					return false
				}
				if err := unix.Tgkill(unix.Getpid(), tid, unix.SIGURG); err != nil {
					return errors.Is(err, unix.ESRCH)
				}
				signaled = true
			}
			status, err := readTask(task, tid, "status")
			if err == nil && takesSignal(status) && !signalPending(status) {
				return true
			}
		}
		if try > 8 {
			runtime.Gosched()
		}
	}
	return false
}

// readTask returns the beginning of a file of a thread.
func readTask(task, tid int, file string) ([]byte, error) {
	fd, err := unix.Openat(task, strconv.Itoa(tid)+"/"+file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	buf := make([]byte, 4096)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return nil, err
	}
	return buf[:n], nil
}

// Numbers of the system calls that remove pages, beyond unix.SYS_MADVISE.
const (
	// restartSyscall hides which call it restarts. It is also the number of
	// i386's madvise, which a 64-bit thread can call through int 0x80.
	restartSyscallAMD64 = 219
	x32Bit              = 1 << 30
)

// parseSyscall decodes /proc/PID/syscall, see proc_pid_syscall(5).
func parseSyscall(text []byte) place {
	f := bytes.Fields(text)
	if len(f) == 0 {
		return placeUnknown
	}
	if string(f[0]) == "running" {
		return placeRunning
	}
	nr, err := strconv.ParseInt(string(f[0]), 10, 64)
	if err != nil || len(f) < 3 {
		return placeUnknown
	}
	// The kernel's threads for io_uring and vhost have no user registers: stack
	// pointer and program counter are zero (copy_thread), and the number is
	// that of whoever created them.
	if string(f[len(f)-1]) == "0x0" && string(f[len(f)-2]) == "0x0" {
		return placeWorker
	}
	switch nr &^ x32Bit {
	case unix.SYS_MADVISE, unix.SYS_PROCESS_MADVISE:
		return placeInside
	case restartSyscallAMD64:
		if runtime.GOARCH == "amd64" {
			return placeInside
		}
	}
	return placeOutside
}

// Flags of a task in /proc/PID/stat, from include/linux/sched.h.
const (
	pfIOWorker   = 0x10
	pfUserWorker = 0x4000
)

// parseStat returns the name, the state and the flags in /proc/PID/stat.
func parseStat(text []byte) (name string, state byte, flags uint64, ok bool) {
	open, end := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return "", 0, 0, false
	}
	f := bytes.Fields(text[end+1:])
	if len(f) < 7 || len(f[0]) != 1 {
		return "", 0, 0, false
	}
	flags, err := strconv.ParseUint(string(f[6]), 10, 64)
	return string(text[open+1 : end]), f[0][0], flags, err == nil
}

func isWorker(stat []byte) bool {
	_, _, flags, ok := parseStat(stat)
	return ok && flags&(pfIOWorker|pfUserWorker) != 0
}

// idleWorker reports whether a kernel's thread isn't in the middle of an
// IORING_OP_MADVISE. Those are run by io_uring's workers only, never by who
// submits them or by the submission thread (io_madvise_prep sets
// REQ_F_FORCE_ASYNC). An idle worker sleeps interruptibly; the waits inside
// madvise, for the event and for locks, are not interruptible.
func idleWorker(stat []byte) bool {
	name, state, flags, ok := parseStat(stat)
	if !ok || flags&(pfIOWorker|pfUserWorker) == 0 {
		return false
	}
	return state == 'S' || bytes.HasPrefix([]byte(name), []byte("iou-sqp-"))
}

// signalSet returns a mask in /proc/PID/status.
func signalSet(status []byte, name string) (uint64, bool) {
	_, rest, ok := bytes.Cut(status, []byte("\n"+name+":\t"))
	if !ok {
		return 0, false
	}
	hex, _, ok := bytes.Cut(rest, []byte{'\n'})
	if !ok {
		return 0, false
	}
	set, err := strconv.ParseUint(string(hex), 16, 64)
	return set, err == nil
}

const sigurgBit = 1 << (unix.SIGURG - 1)

// takesSignal reports whether a thread handles SIGURG: a signal that is
// ignored is never pending, and one that is blocked stays so.
func takesSignal(status []byte) bool {
	caught, ok := signalSet(status, "SigCgt")
	blocked, ok2 := signalSet(status, "SigBlk")
	return ok && ok2 && caught&^blocked&sigurgBit != 0
}

// signalPending reports whether SIGURG waits for a thread.
func signalPending(status []byte) bool {
	pending, ok := signalSet(status, "SigPnd")
	return !ok || pending&sigurgBit != 0
}
