package profile

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

// programEnv names what this test binary does when it is run as a program.
const programEnv = "PINDOWN_PROFILE_PROGRAM"

// Exit codes of the programs.
const (
	exitBad   = 1
	exitLacks = 4 // the device isn't there
)

var devicePrograms = map[string]func() error{
	"iouring": runIOUring,
	"verbs":   runVerbs,
	"threads": runThreads,
}

func TestMain(m *testing.M) {
	if run := devicePrograms[os.Getenv(programEnv)]; run != nil {
		err := run()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		switch {
		case err == nil:
			os.Exit(0)
		case errors.Is(err, device.ErrNotSupported):
			os.Exit(exitLacks)
		}
		os.Exit(exitBad)
	}
	goleak.VerifyTestMain(m)
}

const deviceBytes = 64 << 10

//go:noinline
func changeMemory(b []byte) error { return unix.Madvise(b, unix.MADV_DONTNEED) }

//go:noinline
func registerMemory(d device.Device, b []byte) (device.Registration, error) {
	return d.Register(context.Background(), vm.RangeOf(b), device.LocalWrite)
}

//go:noinline
func useMemory(d *iouring.Device, file *os.File, b []byte, reg device.Registration) error {
	r := d.Ring()
	if err := r.WriteFixed(int(file.Fd()), vm.RangeOf(b), 0, reg.LocalKey, 1); err != nil {
		return err
	}
	var done [1]iouring.Completion
	if err := r.Do(done[:]); err != nil {
		return err
	}
	return done[0].Err()
}

// useDevice registers memory, uses it, changes it, uses it again, and
// deregisters it.
func useDevice(d device.Device, use func(b []byte, reg device.Registration) error) error {
	b, err := unix.Mmap(-1, 0, deviceBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	reg, err := registerMemory(d, b)
	if err != nil {
		return err
	}
	return errors.Join(use(b, reg), changeMemory(b), use(b, reg), d.Deregister(reg), unix.Munmap(b))
}

func runIOUring() error {
	d, err := iouring.Open(nil)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(useDevice(d, func(b []byte, reg device.Registration) error { return useMemory(d, file, b, reg) }), d.Close())
}

func runVerbs() error {
	d, err := verbs.Open(nil)
	if err != nil {
		return err
	}
	return errors.Join(useDevice(d, func([]byte, device.Registration) error { return nil }), d.Close())
}

const (
	oldThreads = 3
	moves      = 50
)

// runThreads starts threads, waits for a line, and has each of them move
// mappings; so does one that is made only then.
func runThreads() error {
	start := make(chan struct{})
	var wg sync.WaitGroup
	errs := make([]error, oldThreads+1)
	work := func(i int) {
		runtime.LockOSThread() // and so a thread of its own
		if i < oldThreads {
			fmt.Println("ready")
			<-start
		}
		for range moves {
			errs[i] = errors.Join(errs[i], move())
		}
	}
	for i := range oldThreads {
		wg.Go(func() { work(i) })
	}
	if _, err := fmt.Scanln(); err != nil {
		return err
	}
	close(start)
	wg.Go(func() { work(oldThreads) })
	wg.Wait()
	return errors.Join(errs...)
}

func move() error {
	b, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	b, err = unix.Mremap(b, 8192, unix.MREMAP_MAYMOVE)
	return errors.Join(err, unix.Munmap(b))
}

// TestFollow: a process that runs is followed with the threads that it has and
// that it makes, until it ends.
func TestFollow(t *testing.T) {
	skipShort(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), programEnv+"=threads")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	lines := bufio.NewScanner(out)
	for range oldThreads {
		lines.Scan()
	}
	// The first news of progress means that it is followed.
	var once sync.Once
	waited := make(chan error, 1)
	res := profileIt(t, &Options{PID: cmd.Process.Pid, Progress: func(*Progress) {
		once.Do(func() {
			fmt.Fprintln(in)
			go func() { waited <- cmd.Wait() }()
		})
	}})
	if err := <-waited; err != nil {
		t.Error(err)
	}
	o := res.Operations["mremap"]
	if o == nil || o.Count != (oldThreads+1)*moves || o.Failed != 0 {
		t.Fatalf("mremap: %+v, want %d", o, (oldThreads+1)*moves)
	}
	if res.ExitCode != 0 || !res.Ended || len(res.Command) == 0 {
		t.Errorf("exit code %d, ended %v, command %q", res.ExitCode, res.Ended, res.Command)
	}
	if !slices.ContainsFunc(res.CallSites, func(c CallSite) bool {
		return c.Operation == "mremap" && slices.ContainsFunc(c.Stack, func(f Frame) bool { return strings.HasSuffix(f.Function, "profile.move") })
	}) {
		t.Errorf("call sites: %+v", res.CallSites)
	}
	threads := 0
	for _, th := range res.Threads {
		if th.Operations >= moves {
			threads++
		}
	}
	if threads < oldThreads {
		t.Errorf("threads: %+v", res.Threads)
	}
}

// TestNoSuchProcess: an error that says so.
func TestNoSuchProcess(t *testing.T) {
	_, err := Run(context.Background(), &Options{PID: 1 << 30})
	need(t, !errors.Is(err, ErrNotSupported), fmt.Sprint("BPF: ", err))
	if err == nil || !strings.Contains(err.Error(), "none of that number") {
		t.Error(err)
	}
}

// TestDevices: a program in Go that uses this module's devices. It runs in the
// virtual machine of test/vm too, which has an adapter.
func TestDevices(t *testing.T) {
	skipShort(t)
	for _, tt := range []struct {
		name, via string
		used      bool
	}{{"iouring", "io_uring", true}, {"verbs", "verbs", false}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(programEnv, tt.name)
			res := profileIt(t, &Options{Command: []string{os.Args[0]}})
			if res.ExitCode == exitLacks {
				t.Skipf("no device of %s here; test/vm runs this test with one", tt.name)
			}
			if res.ExitCode != 0 {
				t.Fatalf("exit code %d", res.ExitCode)
			}
			t.Logf("notes: %q", res.Notes)
			i := slices.IndexFunc(res.StaleWindows, func(w *StaleWindow) bool {
				return strings.HasPrefix(w.Operation, "madvise dontneed")
			})
			if i < 0 {
				t.Fatalf("no stale window: %+v, %d registrations", res.Stale, len(res.Registrations))
			}
			w := res.StaleWindows[i]
			reg := res.Registrations[w.Registration-1]
			if reg.Via != tt.via || reg.Length != deviceBytes || w.Length != deviceBytes || w.UsedAgain != tt.used {
				t.Errorf("window %+v of %+v", w, reg)
			}
			for stack, name := range map[*[]Frame]string{&w.Stack: "changeMemory", &w.RegistrationStack: "registerMemory"} {
				if tt.via == "verbs" && name == "registerMemory" {
					continue // through libraries without frame pointers
				}
				if !slices.ContainsFunc(*stack, func(f Frame) bool { return strings.HasSuffix(f.Function, "profile."+name) }) {
					t.Errorf("no %s in %v", name, *stack)
				}
			}
			if tt.used && !slices.ContainsFunc(w.UseStack, func(f Frame) bool { return strings.HasSuffix(f.Function, "profile.useMemory") }) {
				t.Errorf("used at %v", w.UseStack)
			}
		})
	}
}
