package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/auto"
	"github.com/pindown/pindown/monitor/manual"
)

// TestHitMakesNoSystemCall hits in a process whose thread is killed at any
// system call but those that end it. One more run, in which a system call is
// made on purpose, shows that it would be.
//
// The Go scheduler takes a thread from a goroutine that has run for 10 ms, by a
// system call. The hits take a tenth of that, but the machine may be busy; so
// one try in which all of them went through is enough.
func TestHitMakesNoSystemCall(t *testing.T) {
	if mode := os.Getenv("PINDOWN_NO_SYSCALL"); mode != "" {
		hitUnderSeccomp(mode)
	}
	if raceDetector {
		t.Skip("the race detector makes system calls of its own; run without -race")
	}
	modes := []string{"manual", "touched"}
	for _, o := range auto.Openers() {
		if m, _ := auto.Try(t.Context(), o); m != nil {
			if m.HitCheck() == nil {
				modes = append(modes, o.Name+"/"+o.Mode)
			} else {
				t.Logf("a hit under %s asks the kernel once; see its documentation", m.Name())
			}
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	for _, mode := range append(modes, "guilty") {
		t.Run(mode, func(t *testing.T) {
			var out []byte
			var err error
			for range 50 {
				cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHitMakesNoSystemCall$")
				cmd.Env = append(os.Environ(), "PINDOWN_NO_SYSCALL="+mode, "GODEBUG=asyncpreemptoff=1", "GOGC=off")
				out, err = cmd.CombinedOutput()
				var exit *exec.ExitError
				killed := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGSYS
				switch {
				case mode == "guilty" && !killed:
					t.Fatalf("a system call went through: %v\n%s", err, out)
				case mode == "guilty":
					return
				case err == nil && strings.Contains(string(out), hitsDone):
					return
				case !killed:
					t.Fatalf("%v\n%s", err, out)
				}
			}
			t.Errorf("a system call in each of 50 tries: %v", err)
		})
	}
}

const (
	sealedHits = 20_000
	hitsDone   = "20000 hits"
)

func hitUnderSeccomp(mode string) {
	var m monitor.Monitor
	var err error
	if m, err = manual.New(nil); err != nil {
		die(err)
	}
	for _, o := range auto.Openers() {
		if mode == o.Name+"/"+o.Mode {
			if m, err = o.Open(); err != nil {
				die(err)
			}
		}
	}
	dev := devicetest.NewFake(&devicetest.FakeOptions{Limits: device.Limits{PageSize: page}})
	cache, err := pindown.New(dev, &pindown.Options{Monitor: m})
	if err != nil {
		die(err)
	}
	mem, err := unix.Mmap(-1, 0, 16*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		die(err)
	}
	ctx := context.Background()
	r, err := cache.Acquire(ctx, mem[:4*page], 0)
	if err != nil || !r.Cached() {
		die(fmt.Errorf("acquire: %w (cached %v)", err, err == nil && r.Cached()))
	}
	_ = r.Release()
	debug.SetGCPercent(-1)
	runtime.LockOSThread()
	runtime.Gosched() // a fresh time slice
	seal()
	hits := 0
	for i := range sealedHits {
		if mode == "touched" {
			// Another range changes, so that the hit compares stamps.
			m.Table().Touch(pindown.Range{Start: page, End: 2 * page})
		}
		r, err := cache.Acquire(ctx, mem[i%page:2*page], 0)
		if err != nil {
			break
		}
		if r.Stale() || r.Release() != nil {
			break
		}
		hits++
	}
	if mode == "guilty" {
		unix.Getppid()
	}
	// The runtime's own way out would make other calls.
	msg := fmt.Appendf(nil, "%d hits\n", hits)
	_, _, _ = syscall.RawSyscall(unix.SYS_WRITE, 1, uintptr(unsafe.Pointer(&msg[0])), uintptr(len(msg)))
	_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
}

func die(err error) {
	fmt.Println(err)
	os.Exit(1)
}

// seal installs a filter on this thread that admits only write, exit_group and
// the return from a signal.
func seal() {
	const (
		ld  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		jeq = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ret = unix.BPF_RET | unix.BPF_K
	)
	prog := []unix.SockFilter{
		{Code: ld, K: 0}, // seccomp_data.nr
		{Code: jeq, K: unix.SYS_WRITE, Jt: 3},
		{Code: jeq, K: unix.SYS_EXIT_GROUP, Jt: 2},
		{Code: jeq, K: unix.SYS_RT_SIGRETURN, Jt: 1},
		{Code: ret, K: unix.SECCOMP_RET_KILL_PROCESS},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
	}
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		die(err)
	}
	if _, _, e := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&fprog))); e != 0 {
		die(e)
	}
	runtime.KeepAlive(prog)
}

// TestFork: a forked child is refused everything, in memory alone; what it does
// to its own address space doesn't matter to the parent.
func TestFork(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector's locks don't survive a fork; run without -race")
	}
	r := newRig(t, nil, nil)
	b := r.buf(0, page)
	held := r.acquire(t, b, 0)

	// The child has one thread. If a lock of the runtime's is held by another
	// at the fork, the child waits for ever: then it says nothing about us.
	status, ok := 0, false
	for range 20 {
		if status, ok = forkedStatus(t, r, held, b); ok {
			break
		}
	}
	if !ok {
		t.Fatal("no child of 20 got to its end")
	}
	if status != 0 {
		t.Errorf("child: status bits %#x (1 hit, 2 release, 4 acquire, 8 close)", status)
	}
	check(t, "stale in the parent", held.Stale(), false)
	release(t, &held)
	if reg, ok := r.TryAcquire(b, 0); !ok {
		t.Error("no hit in the parent")
	} else {
		release(t, &reg)
	}
}

// forkedStatus forks a child that uses r and reports by its status. It reports
// false if the child didn't end by itself.
func forkedStatus(t *testing.T, r *rig, held pindown.Region, b []byte) (status int, ok bool) {
	t.Helper()
	ctx := context.Background()
	other := r.mem[page : 2*page]
	start := uintptr(unsafe.Pointer(&b[0]))
	return forked(t, func() (bits uintptr) {
		if _, ok := r.TryAcquire(b, 0); ok {
			bits |= 1
		}
		_, _, _ = syscall.RawSyscall(unix.SYS_MUNMAP, start, page, 0)
		if err := held.Release(); !errors.Is(err, pindown.ErrForked) {
			bits |= 2
		}
		if _, err := r.Acquire(ctx, other, 0); !errors.Is(err, pindown.ErrForked) {
			bits |= 4
		}
		if err := r.Close(); !errors.Is(err, pindown.ErrForked) {
			bits |= 8
		}
		return bits
	})
}

// forked runs f in a forked child, whose status is what f returns. It reports
// false if the child didn't end by itself: it has one thread, and a lock of the
// runtime's that another held at the fork is held for ever.
func forked(t *testing.T, f func() uintptr) (status int, ok bool) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	runtime.GC() // none is in progress now
	pid, _, e := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if e != 0 {
		t.Fatal(e)
	}
	if pid == 0 {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, f(), 0, 0)
	}
	// A timer ends a child that hangs; the wait is for the child alone.
	kill := time.AfterFunc(2*time.Second, func() { _ = syscall.Kill(int(pid), syscall.SIGKILL) })
	defer kill.Stop()
	var ws syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(int(pid), &ws, 0, nil); err == nil {
			return ws.ExitStatus(), ws.Exited()
		} else if !errors.Is(err, syscall.EINTR) {
			t.Fatal(err)
		}
	}
}
