package uffd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/seccomptest"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

func init() {
	children["use"] = func() int { return childUse(nil) }
	children["eperm"] = func() int { return childDenied(unix.EPERM) }
	children["enosys"] = func() int { return childDenied(unix.ENOSYS) }
	children["fds"] = childFds
}

// child runs the test binary again as one of children.
func child(t *testing.T, name string, cred *syscall.Credential) {
	t.Helper()
	exe, err := os.Executable()
	must(t, err)
	if cred != nil {
		// The folder of a test binary is its owner's alone.
		dir, err := os.MkdirTemp("", "uffd-test-*")
		must(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		b, err := os.ReadFile(exe)
		must(t, err)
		exe = filepath.Join(dir, "test")
		must(t, os.WriteFile(exe, b, 0o755))
		must(t, os.Chmod(dir, 0o755))
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("child %s: %v: %s", name, err, out)
		return
	}
	t.Logf("child %s: %s", name, strings.TrimSpace(string(out)))
}

// use makes a registration's steps and checks that operations undo them.
func use(m *Monitor) error {
	mem, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	r := vm.RangeOf(mem)
	fill(r)
	for _, do := range []func() error{
		func() error { return madvise(r, unix.MADV_DONTNEED) },
		func() error { return mmapAt(r, unix.MAP_FIXED) },
		func() error { return munmap(r) },
	} {
		x := &watched{m: m}
		x.w = newWatch(m, r)
		defer x.unwatch()
		for {
			err := x.retake(r)
			if err == nil {
				break
			}
			if !errors.Is(err, monitor.ErrPending) {
				return err
			}
			runtime.Gosched()
		}
		if !x.valid() {
			return errors.New("not valid to begin with")
		}
		if err := do(); err != nil {
			return err
		}
		if x.valid() {
			return errors.New("valid after an operation")
		}
	}
	return nil
}

func childUse(o *Options) int {
	m, err := Open(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer m.Close()
	if err := use(m); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func childDenied(errno unix.Errno) int {
	if err := seccomptest.Deny(errno, unix.SYS_USERFAULTFD); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	_, err := Open(nil)
	fmt.Fprintln(os.Stderr, err)
	if !errors.Is(err, monitor.ErrNotSupported) || !errors.Is(err, errno) || !strings.Contains(err.Error(), "seccomp") {
		return 1
	}
	return 0
}

// childFds fails if a userfaultfd came with it through exec.
func childFds() int {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 1
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.Contains(to, "userfaultfd") {
			fmt.Fprintln(os.Stderr, to)
			return 1
		}
	}
	return 0
}

// TestNobody: no privilege is needed.
func TestNobody(t *testing.T) {
	open(t, nil)
	if os.Getuid() != 0 {
		child(t, "use", nil)
		return
	}
	child(t, "use", &syscall.Credential{Uid: 65534, Gid: 65534})
}

func TestDenied(t *testing.T) {
	open(t, nil)
	child(t, "eperm", nil)
	child(t, "enosys", nil)
}

func TestExec(t *testing.T) {
	m := open(t, nil)
	x, err := watch(t, m, mapPages(t, 4))
	must(t, err)
	child(t, "fds", nil)
	if !x.valid() {
		t.Error("starting a process invalidated a range")
	}
}

// TestFork: a forked child has nothing armed, so it unmaps without waiting for
// anybody; the parent's registration stays right.
func TestFork(t *testing.T) {
	m := open(t, nil)
	r := mapPages(t, 4)
	x, err := watch(t, m, r)
	must(t, err)
	// With the reader held an event would block the child for ever.
	release := holdReader(t, m)
	pid := forkAndUnmap(r, x.m.table, uint64(x.word))
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &status, 0, nil)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
	}
	if !status.Exited() || status.ExitStatus() != 0 {
		t.Errorf("child ended with %#x", status)
	}
	release()
	if !x.valid() {
		t.Error("what the child did invalidated a range")
	}
	must(t, munmap(r))
	if x.valid() {
		t.Error("valid after the parent's munmap")
	}
}

// TestClose: closing is idempotent, lets waiting operations go, and leaves no
// descriptor, no thread and nothing armed.
func TestClose(t *testing.T) {
	countFds := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(fds)
	}
	open(t, nil).Close() // the poller's own descriptors
	before := countFds()
	m := open(t, nil)
	feed := m.Subscribe()
	r := mapPages(t, 4)
	x, err := watch(t, m, r)
	must(t, err)
	tid := m.reader.ctl.tid.Load()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { must(t, m.Close()) })
	}
	wg.Wait()
	if x.valid() {
		t.Error("valid after close")
	}
	if err := m.Cover(r); !errors.Is(err, monitor.ErrClosed) {
		t.Errorf("cover after close: %v, want ErrClosed", err)
	}
	if _, ok := <-feed.C; ok {
		t.Error("feed open after close")
	}
	if n := countFds(); n != before {
		t.Errorf("%d descriptors before, %d after", before, n)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tid)); err == nil {
		t.Error("the reader is still there")
	}
	must(t, munmap(r)) // waits for nobody

	if m.hitCheck() {
		t.Error("HitCheck says yes after close")
	}
}

// TestCloseReleases: an operation that waits for the reader goes on when the
// monitor is closed or lost, and nothing is valid then.
func TestCloseReleases(t *testing.T) {
	m := open(t, nil)
	r := mapPages(t, 4)
	x, err := watch(t, m, r)
	must(t, err)
	release := holdReader(t, m)
	done := make(chan error)
	go func() { done <- munmap(r) }()
	for m.reader.ctl.held.Load() == 0 {
		runtime.Gosched()
	}
	m.stopReader()
	release()
	must(t, <-done)
	must(t, m.Close())
	if x.valid() || x.validUnchecked() {
		t.Error("valid after close")
	}
}

// TestReaderDies: the reader finds its descriptor unusable.
func TestReaderDies(t *testing.T) {
	m := open(t, nil)
	feed := m.Subscribe()
	r := mapPages(t, 4)
	x, err := watch(t, m, r)
	must(t, err)
	// What it polls becomes something else that is always ready.
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	must(t, unix.Dup3(null, int(m.fd.Load()), unix.O_CLOEXEC))
	must(t, unix.Close(null))
	// It waits on the old file. The operation that wakes it goes free, for the
	// file is closed with the last who waits on it.
	go munmap(r)
	for range feed.C {
	}
	if x.valid() || x.validUnchecked() {
		t.Error("valid without a reader")
	}
	if err := m.Cover(mapPages(t, 1)); !errors.Is(err, monitor.ErrLost) {
		t.Errorf("cover: %v, want ErrLost", err)
	}
	<-m.done
	must(t, m.Close())
	if m.reader.ctl.dead.Load() == deadStopped {
		t.Error("the reader was stopped rather than failed")
	}
}

// TestSignals: a storm of signals at every thread.
func TestSignals(t *testing.T) {
	m := open(t, nil)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			tids, err := os.ReadDir("/proc/self/task")
			must(t, err)
			for _, e := range tids {
				var tid int
				fmt.Sscan(e.Name(), &tid)
				unix.Tgkill(os.Getpid(), tid, unix.SIGURG)
				unix.Tgkill(os.Getpid(), tid, unix.SIGPROF)
			}
		}
	})
	for range 50 {
		must(t, use(m))
	}
	stop.Store(true)
	wg.Wait()
}

// TestSparse arms thousands of pages far from each other: the process keeps
// enough mappings, what is too much is refused, and nothing else fails.
func TestSparse(t *testing.T) {
	for _, c := range []struct {
		name               string
		window             uintptr
		limit, step, pages int
		all, refused       bool
	}{
		// Windows grow until they meet.
		{"near", 2 << 20, 2000, 4 << 20, 3000, true, false},
		// Windows never meet.
		{"far", maxWindow, 400, 2 * maxWindow, 400, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := open(t, &Options{MaxMappings: c.limit, Window: c.window})
			size := uintptr(c.step * c.pages)
			base := nextPages.Add(size + 1<<30)
			base = (base - size) &^ (maxWindow - 1)
			r := vm.Range{Start: base, End: base + size}
			must(t, mmapAt(r, unix.MAP_FIXED_NOREPLACE|unix.MAP_NORESERVE))
			defer munmap(r)
			before := countMaps(t)
			covered := 0
			for i := range c.pages {
				// Not in order, so that windows don't meet at once.
				at := r.Start + uintptr((i*1103)%c.pages*c.step)
				err := m.Cover(vm.Range{Start: at, End: at + pageSize})
				switch {
				case err == nil:
					covered++
				case !errors.Is(err, monitor.ErrUncovered):
					t.Fatal(err)
				}
			}
			added := countMaps(t) - before
			t.Logf("%d of %d pages covered with %d mappings more", covered, c.pages, added)
			if added > c.limit {
				t.Errorf("%d mappings added, limit %d", added, c.limit)
			}
			if c.all && covered < c.pages || covered < c.limit/2-1 || c.refused == (covered == c.pages) {
				t.Errorf("%d pages covered", covered)
			}
			// The program isn't hindered, and what is covered is seen.
			must(t, munmap(r))
			m.table.Quiet()
			must(t, use(m))
			m.drainMu.Lock()
			n := len(m.armed.list)
			m.drainMu.Unlock()
			if n > 8 {
				t.Errorf("%d ranges armed after munmap", n)
			}
		})
	}
}

// TestWhole: by default arming splits no mapping, so that the program can still
// do with it what it could before.
func TestWhole(t *testing.T) {
	m := open(t, nil)
	r := mapPages(t, 64)
	before := countMaps(t)
	for i := uintptr(1); i < 64; i += 2 {
		must(t, m.Cover(vm.Range{Start: r.Start + i*pageSize, End: r.Start + (i+1)*pageSize}))
	}
	if n := countMaps(t) - before; n > 2 {
		t.Errorf("%d mappings more", n)
	}
	to := mapPages(t, 64)
	must(t, mremap(r, r.Len(), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to.Start))
}

func countMaps(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	must(t, err)
	return strings.Count(string(b), "\n")
}

// TestReplacedWhileArming: the mapping is replaced between look and ioctl.
// Whatever Cover returns, a registration made on its word is undone by the next
// operation.
func TestReplacedWhileArming(t *testing.T) {
	rounds := 300
	if testing.Short() {
		rounds = 50
	}
	m := open(t, nil)
	r := mapPages(t, 8)
	var stop atomic.Bool
	var gate sync.RWMutex
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			gate.RLock()
			munmap(vm.Range{Start: r.Start + 2*pageSize, End: r.Start + 5*pageSize})
			mmapAt(vm.Range{Start: r.Start + 2*pageSize, End: r.Start + 5*pageSize}, unix.MAP_FIXED_NOREPLACE)
			gate.RUnlock()
			runtime.Gosched()
		}
	})
	covered := 0
	for range rounds {
		x, err := watch(t, m, r)
		gate.Lock() // the race is over; this is the pin
		if err == nil {
			covered++
			must(t, mmapAt(vm.Range{Start: r.Start + 3*pageSize, End: r.Start + 4*pageSize}, unix.MAP_FIXED))
			if x.valid() {
				t.Fatal("valid after an operation")
			}
		}
		gate.Unlock()
		x.unwatch()
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("covered in %d of %d rounds", covered, rounds)
}

// TestOtherUserfaultfd: memory that another userfaultfd holds is refused.
func TestOtherUserfaultfd(t *testing.T) {
	m := open(t, nil)
	fd, _, err := openUserfaultfd()
	must(t, err)
	defer unix.Close(fd)
	r := mapPages(t, 4)
	_, err = sys.UFFDRegister(fd, r, sys.UFFDRegisterModeWP)
	must(t, err)
	if err := m.Cover(r); !errors.Is(err, monitor.ErrUncovered) {
		t.Errorf("%v, want ErrUncovered", err)
	}
}

// TestGoHeapArmed: with ArmGoHeap the runtime's own madvise is seen, and
// doesn't hang with it.
func TestGoHeapArmed(t *testing.T) {
	rounds := 8
	if testing.Short() {
		rounds = 2
	}
	for _, procs := range []int{1, 2} {
		old := runtime.GOMAXPROCS(procs)
		m := open(t, &Options{ArmGoHeap: true})
		var stale, freed int
		for range rounds {
			b := make([]byte, 8<<20)
			fill(vm.RangeOf(b))
			r := vm.RangeOf(b)
			x, err := watch(t, m, r)
			if errors.Is(err, monitor.ErrPending) {
				x.unwatch()
				continue
			}
			must(t, err)
			runtime.KeepAlive(b) // and no longer
			freeOSMemory()
			if present(t, r) {
				continue // not given back
			}
			freed++
			if x.valid() {
				stale++
			}
			x.unwatch()
		}
		t.Logf("GOMAXPROCS=%d: heap memory given back in %d rounds, %d stale", procs, freed, stale)
		if stale > 0 {
			t.Errorf("%d stale", stale)
		}
		must(t, m.Close())
		runtime.GOMAXPROCS(old)
	}
}
