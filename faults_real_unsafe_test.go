package pindown_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/devicetest"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/internal/oracle"
	"github.com/pindown/pindown/internal/vmops"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/auto"
	"github.com/pindown/pindown/vm"
)

// The tests TestFaultNN are numbered as in docs/FAULTS.md. Those in this file
// carry out real operations under each monitor that works here, on a device
// that really pins, and compare frames.

// real is a cache over an io_uring, which remembers the frames that it pinned.
type real struct {
	*pindown.Cache
	dev  *devicetest.Fake
	ring *iouring.Device
	mon  monitor.Monitor

	beforePin    func() // run by the device while it registers
	onDeregister func()
}

func skipOrFail(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// underMonitors runs f under each monitor, and verifies that nothing is left
// of cache, device and monitor: no pin, no descriptor.
func underMonitors(t *testing.T, o *pindown.Options, f func(t *testing.T, r *real)) {
	if err := oracle.CheckPFN(); err != nil {
		skipOrFail(t, err.Error())
	}
	ran := 0
	for _, op := range auto.Openers() {
		name := op.Name
		if op.Mode != "" {
			name += "-" + op.Mode
		}
		mon, err := op.Open()
		if err != nil {
			t.Logf("%s: %v", name, err)
			continue
		}
		ran++
		t.Run(name, func(t *testing.T) {
			r := &real{mon: mon}
			var err error
			if r.ring, err = iouring.Open(nil); err != nil {
				_ = mon.Close()
				skipOrFail(t, err.Error())
			}
			r.dev = devicetest.NewFake(&devicetest.FakeOptions{
				Backing: r.ring, Frames: devicetest.PageFrames, Limits: r.ring.Limits(),
				BeforePin: func(int, vm.Range) {
					if r.beforePin != nil {
						r.beforePin()
					}
				},
				OnDeregister: func(int, device.Registration) error {
					if r.onDeregister != nil {
						r.onDeregister()
					}
					return nil
				},
			})
			var opts pindown.Options
			if o != nil {
				opts = *o
			}
			opts.Monitor = mon
			if r.Cache, err = pindown.New(r.dev, &opts); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := r.Close(); err != nil {
					t.Error(err)
				}
				r.dev.AssertEmpty(t)
				check(t, "pinned slots", r.ring.Live(), 0)
				if err := errors.Join(r.dev.Close(), r.ring.Close(), mon.Close()); err != nil {
					t.Error(err)
				}
			}()
			f(t, r)
		})
	}
	if ran == 0 {
		skipOrFail(t, "no monitor works here")
	}
}

// use acquires b, whose pages the caller has written, compares the frames that
// the device holds with those mapped, and releases. It reports whether the
// region was served without a registration.
func (r *real) use(t *testing.T, b []byte) (hit bool) {
	t.Helper()
	before := r.dev.Stats().Registers
	reg, err := r.Acquire(t.Context(), b, pindown.LocalWrite)
	if err != nil {
		t.Fatalf("acquire: %v", err)
	}
	r.verify(t, reg, b)
	cached := reg.Cached()
	release(t, &reg)
	hit = r.dev.Stats().Registers == before
	// A monitor may have to refuse what an operation is just leaving; what
	// comes next is about a cached region.
	for tries := 0; !cached && r.Reason() == "" && tries < 1000; tries++ {
		runtime.Gosched()
		if cached, err = r.Prefetch(t.Context(), vm.RangeOf(b), pindown.LocalWrite); err != nil {
			t.Fatalf("prefetch: %v", err)
		}
	}
	return hit
}

func (r *real) verify(t *testing.T, reg pindown.Region, b []byte) {
	t.Helper()
	want := vm.RangeOf(b).RoundOut(page)
	now, err := oracle.Frames(want)
	if err != nil {
		t.Fatal(err)
	}
	pinned := r.dev.Frames(reg.Registration())
	first := int(want.Start-reg.Range().RoundOut(page).Start) / page
	for i, e := range now {
		if !e.Present() || first+i >= len(pinned) || pinned[first+i] != e.PFN() {
			t.Fatalf("stale: page %d of %v: mapped %v, registered %#x (cached %v)", i, want, e, pinned, reg.Cached())
		}
	}
}

// want acquires, and says that it had to be a hit or not.
func (r *real) want(t *testing.T, what string, b []byte, hit bool) {
	t.Helper()
	if got := r.use(t, b); got != hit {
		t.Errorf("%s: hit %v, want %v", what, got, hit)
	}
}

func write(b []byte) {
	for i := 0; i < len(b); i += page {
		b[i]++
	}
}

// mapAt maps written memory of n pages by a raw system call.
func mapAt(t *testing.T, addr uintptr, n, flags int) []byte {
	t.Helper()
	p, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, uintptr(n*page), unix.PROT_READ|unix.PROT_WRITE,
		uintptr(unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags), ^uintptr(0), 0)
	if errno != 0 {
		t.Fatalf("mmap %#x: %v", addr, errno)
	}
	b := vmops.Bytes(vm.Range{Start: p, End: p + uintptr(n*page)})
	write(b)
	return b
}

func unmap(b []byte) {
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, addr(b), uintptr(len(b)), 0); errno != 0 {
		panic(errno)
	}
}

func addr(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

func remap(t *testing.T, from []byte, to uintptr) {
	t.Helper()
	if _, _, errno := unix.Syscall6(unix.SYS_MREMAP, addr(from), uintptr(len(from)), uintptr(len(from)),
		unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to, 0); errno != 0 {
		t.Fatalf("mremap: %v", errno)
	}
}

func dontneed(t *testing.T, b []byte) {
	t.Helper()
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
}

// TestFault01MapAgain: raw system calls, as a static binary or the Go runtime
// makes them; nothing of libc is there to be patched.
func TestFault01MapAgain(t *testing.T) {
	underMonitors(t, nil, func(t *testing.T, r *real) {
		b := mapAt(t, 0, 4, 0)
		r.use(t, b)
		r.want(t, "second", b, true)
		unmap(b)
		b = mapAt(t, addr(b), 4, unix.MAP_FIXED_NOREPLACE)
		defer unmap(b)
		r.want(t, "after munmap and mmap", b, false)
		r.want(t, "again", b, true)
	})
}

func TestFault02Dontneed(t *testing.T) {
	underMonitors(t, nil, func(t *testing.T, r *real) {
		b := mapAt(t, 0, 4, 0)
		defer unmap(b)
		r.use(t, b)
		dontneed(t, b)
		write(b)
		r.want(t, "after MADV_DONTNEED", b, false)
		// Under uffd the range is pending until every thread was seen outside
		// of madvise, which a busy machine delays; then it is cached again.
		for range 1000 {
			if reg, ok := r.TryAcquire(b, 0); ok {
				release(t, &reg)
				break
			}
			r.use(t, b)
			runtime.Gosched()
		}
		r.want(t, "again", b, true)
	})
}

func TestFault03MapOver(t *testing.T) {
	underMonitors(t, nil, func(t *testing.T, r *real) {
		b := mapAt(t, 0, 4, 0)
		defer unmap(b)
		r.use(t, b)
		mapAt(t, addr(b), 4, unix.MAP_FIXED)
		r.want(t, "after MAP_FIXED", b, false)
		r.want(t, "again", b, true)
		for _, name := range []string{"shmat-remap", "mmap-fixed", "mremap-onto"} {
			s, err := vmops.New(vm.MappingAnonPrivate, nil)
			if err != nil {
				t.Fatal(err)
			}
			op, _ := vmops.Lookup(name)
			rng := s.Slice(4, 8)
			r.use(t, vmops.Bytes(rng))
			if err := vmops.Perform(s, op, rng, vmops.ThisThread, nil); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			vmops.Fill(rng, page)
			if blind(r.mon, op.Op) {
				// Documented: then the program has to say so.
				if _, err := r.Invalidate(rng); err != nil {
					t.Error(err)
				}
			}
			r.want(t, "after "+name, vmops.Bytes(rng), false)
			if err := s.Release(); err != nil {
				t.Error(err)
			}
		}
	})
}

// blind reports whether the monitor says that it doesn't see op.
func blind(m monitor.Monitor, op vm.Op) bool {
	b, ok := m.(monitor.Blinded)
	if !ok {
		return false
	}
	for _, c := range b.BlindTo() {
		if c.Op == op {
			return true
		}
	}
	return false
}

func TestFault04MoveOnto(t *testing.T) {
	underMonitors(t, nil, func(t *testing.T, r *real) {
		src, dst := mapAt(t, 0, 4, 0), mapAt(t, 0, 4, 0)
		r.use(t, src)
		r.use(t, dst)
		remap(t, src, addr(dst))
		defer unmap(dst)
		r.want(t, "destination", dst, false)
		if reg, err := r.Acquire(t.Context(), src, 0); err == nil {
			t.Error("source, which isn't mapped, was acquired")
			release(t, &reg)
		}
		src = mapAt(t, addr(src), 4, unix.MAP_FIXED_NOREPLACE)
		defer unmap(src)
		r.want(t, "source mapped anew", src, false)
	})
}

func TestFault05SameAddressComesBack(t *testing.T) {
	rounds := 300
	if testing.Short() {
		rounds = 40
	}
	underMonitors(t, nil, func(t *testing.T, r *real) {
		at := uintptr(0)
		for range rounds {
			b := mapAt(t, at, 4, 0) // the hint is honoured while it is free
			at = addr(b)
			r.use(t, b)
			unmap(b)
		}
	})
}

func TestFault06OneUnmapManyRegions(t *testing.T) {
	underMonitors(t, nil, func(t *testing.T, r *real) {
		b := mapAt(t, 0, 512, 0)
		parts := [][]byte{b[:page], b[16*page : 17*page], b[256*page : 257*page]}
		for _, p := range parts {
			r.use(t, p)
		}
		unmap(b)
		b = mapAt(t, addr(b), 512, unix.MAP_FIXED_NOREPLACE)
		defer unmap(b)
		for i, p := range parts {
			r.want(t, fmt.Sprintf("region %d", i), p, false)
		}
	})
}

// TestFault07And08Part: one page inside, or one at either end together with its
// neighbour, is enough; the neighbour alone is not.
func TestFault07And08Part(t *testing.T) {
	underMonitors(t, nil, func(t *testing.T, r *real) {
		for _, tc := range []struct {
			name     string
			from, to int
			hit      bool
		}{
			{"inside", 12, 13, false}, {"straddles start", 7, 9, false}, {"straddles end", 23, 25, false},
			{"page before", 7, 8, true}, {"page after", 24, 25, true},
		} {
			for _, how := range []string{"unmap", "dontneed"} {
				b := mapAt(t, 0, 32, 0)
				region := b[8*page : 24*page]
				r.use(t, region)
				part := b[tc.from*page : tc.to*page]
				if how == "unmap" {
					unmap(part)
					mapAt(t, addr(part), tc.to-tc.from, unix.MAP_FIXED_NOREPLACE)
				} else {
					dontneed(t, part)
					write(part)
				}
				r.want(t, how+" "+tc.name, region, tc.hit)
				unmap(b)
			}
		}
	})
}

// TestFault09SharedFile: another process truncates the file, or punches a hole
// into it; the range is registered anew or was never cached.
func TestFault09SharedFile(t *testing.T) {
	if os.Getenv("PINDOWN_FAULT09") != "" {
		f := os.NewFile(3, "memory")
		for {
			var cmd [1]byte
			if _, err := os.Stdin.Read(cmd[:]); err != nil {
				os.Exit(0)
			}
			var err error
			if cmd[0] == 't' {
				err = errors.Join(f.Truncate(0), f.Truncate(8*page))
			} else {
				err = unix.Fallocate(3, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 8*page)
			}
			if err != nil {
				os.Exit(1)
			}
			if _, err := os.Stdout.Write(cmd[:]); err != nil {
				os.Exit(1)
			}
		}
	}
	fd, err := unix.MemfdCreate("fault09", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memfd")
	defer func() { _ = f.Close() }()
	if err := f.Truncate(8 * page); err != nil {
		t.Fatal(err)
	}
	other := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFault09SharedFile$")
	other.Env, other.ExtraFiles = append(os.Environ(), "PINDOWN_FAULT09=1"), []*os.File{f}
	in, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close(); _ = other.Wait() }()
	underMonitors(t, nil, func(t *testing.T, r *real) {
		b, err := unix.Mmap(fd, 0, 8*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Munmap(b) }()
		for _, cmd := range []string{"t", "p", "t"} {
			write(b)
			r.use(t, b)
			if _, err := in.Write([]byte(cmd)); err != nil {
				t.Fatal(err)
			}
			var done [1]byte
			if _, err := io.ReadFull(out, done[:]); err != nil {
				t.Fatal(err)
			}
			write(b)
			r.want(t, "after "+cmd, b, false)
		}
	})
}

func TestFault13GoHeap(t *testing.T) {
	rounds := 12
	if testing.Short() {
		rounds = 3
	}
	underMonitors(t, nil, func(t *testing.T, r *real) {
		for range rounds {
			for range 8 {
				b := make([]byte, 64*page)
				write(b)
				r.use(t, b)
				runtime.KeepAlive(b)
			}
			debug.FreeOSMemory()
		}
	})
}

// TestFault14And15DeviceUnmaps: a device that unmaps cached memory while it
// registers or deregisters, and a program that does so in a callback.
func TestFault14And15DeviceUnmaps(t *testing.T) {
	var callbacks atomic.Int32
	var r *real
	o := &pindown.Options{MergeBytes: -1, OnEvent: func(pindown.Event) {
		callbacks.Add(1)
		_ = r.Stats()
	}}
	underMonitors(t, o, func(t *testing.T, x *real) {
		r = x
		a, b := mapAt(t, 0, 4, 0), mapAt(t, 0, 4, 0)
		defer unmap(b)
		r.use(t, a)
		unmapped := false
		r.beforePin = func() {
			if !unmapped {
				unmapped = true
				unmap(a)
			}
		}
		r.use(t, b)
		r.beforePin = nil
		a = mapAt(t, addr(a), 4, unix.MAP_FIXED_NOREPLACE)
		r.want(t, "unmapped while another range was registered", a, false)

		gone := false
		var mu sync.Mutex
		r.onDeregister = func() {
			mu.Lock()
			defer mu.Unlock()
			if !gone {
				gone = true
				unmap(a)
			}
		}
		dontneed(t, b)
		write(b)
		r.use(t, b)
		eventually(t, "deregistration", func() bool { mu.Lock(); defer mu.Unlock(); return gone })
		a = mapAt(t, addr(a), 4, unix.MAP_FIXED_NOREPLACE)
		defer unmap(a)
		r.want(t, "unmapped while another range was deregistered", a, false)
	})
	if callbacks.Load() == 0 {
		t.Log("no event; no monitor?")
	}
}

// TestFault16CallbackHeld: the reader of events needs no lock that the thread
// which unmaps may hold, and no progress of a callback.
func TestFault16CallbackHeld(t *testing.T) {
	var mu sync.Mutex
	entered := make(chan struct{}, 1<<14)
	o := &pindown.Options{MergeBytes: -1, OnEvent: func(pindown.Event) {
		entered <- struct{}{}
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // only to wait
	}}
	underMonitors(t, o, func(t *testing.T, r *real) {
		b := mapAt(t, 0, 8, 0)
		defer unmap(b)
		r.use(t, b[:page])
		mu.Lock()
		if _, err := r.Invalidate(vm.RangeOf(b)); err != nil {
			t.Error(err)
		}
		<-entered // the reaper is stuck now
		r.use(t, b[4*page:])
		for range 50 {
			unmap(b)
			b = mapAt(t, addr(b), 8, unix.MAP_FIXED_NOREPLACE)
			r.want(t, "while a callback waits for our lock", b[4*page:], false)
		}
		mu.Unlock()
	})
}

// TestFault20OpenAndClose: caches come and go while other goroutines map and
// unmap; no descriptor is left.
func TestFault20OpenAndClose(t *testing.T) {
	before := descriptors(t)
	underMonitors(t, nil, func(t *testing.T, r *real) {
		n := 20
		if testing.Short() {
			n = 4
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range n {
					c, err := pindown.New(r.dev, &pindown.Options{Monitor: r.mon})
					if err != nil {
						t.Error(err)
						return
					}
					b, err := unix.Mmap(-1, 0, 4*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
					if err != nil {
						t.Error(err)
						return
					}
					for range 4 {
						reg, err := c.Acquire(t.Context(), b, 0)
						if err != nil {
							t.Error(err)
							break
						}
						if err := errors.Join(unix.Madvise(b, unix.MADV_DONTNEED), reg.Release()); err != nil {
							t.Error(err)
						}
					}
					if err := errors.Join(c.Close(), unix.Munmap(b), c.Close()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
	})
	check(t, "descriptors", descriptors(t), before)
}

func descriptors(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// TestFault21OneProcessor: GOMAXPROCS=1 and collections in between.
func TestFault21OneProcessor(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	n := 100
	if testing.Short() {
		n = 20
	}
	underMonitors(t, nil, func(t *testing.T, r *real) {
		var wg sync.WaitGroup
		stop := make(chan struct{})
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					runtime.GC()
				}
			}
		})
		b := mapAt(t, 0, 8, 0)
		for range n {
			r.use(t, b)
			unmap(b)
			b = mapAt(t, addr(b), 8, unix.MAP_FIXED_NOREPLACE)
		}
		close(stop)
		wg.Wait()
		unmap(b)
	})
}

// TestFault23OperationsWithoutAcquire: a program that registers once and then
// only maps and unmaps grows nothing.
func TestFault23OperationsWithoutAcquire(t *testing.T) {
	n := steps(2000, 300) // the fault was seen with 40 000
	underMonitors(t, nil, func(t *testing.T, r *real) {
		b := mapAt(t, 0, 4, 0)
		keep := mapAt(t, 0, 4, 0)
		defer unmap(keep)
		r.use(t, keep)
		r.use(t, b)
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		at := addr(b)
		for range n {
			unmap(b)
			b = mapAt(t, at, 4, unix.MAP_FIXED_NOREPLACE)
		}
		defer unmap(b)
		runtime.GC()
		runtime.ReadMemStats(&after)
		if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 1<<20 {
			t.Errorf("%d bytes of heap after %d operations", grown, n)
		}
		eventually(t, "reclaim", func() bool { return r.dev.Stats().Live == 1 })
		r.want(t, "after it all", b, false)
		r.want(t, "the other", keep, true)
	})
}

// TestFault34UnionImpossible: a hole, or a page that can't be written, inside
// the union.
func TestFault34UnionImpossible(t *testing.T) {
	underMonitors(t, nil, func(t *testing.T, r *real) {
		for _, hole := range []bool{true, false} {
			b := mapAt(t, 0, 8, 0)
			left, right := b[:4*page], b[3*page:]
			r.use(t, left)
			if hole {
				unmap(b[:page])
			} else if err := unix.Mprotect(b[:page], unix.PROT_READ); err != nil {
				t.Fatal(err)
			}
			reg, err := r.Acquire(t.Context(), right, pindown.LocalWrite)
			if err != nil {
				t.Fatalf("hole %v: %v", hole, err)
			}
			r.verify(t, reg, right)
			if hole {
				check(t, "range", reg.Range(), vm.RangeOf(right))
			}
			release(t, &reg)
			unmap(b)
		}
	})
}

// TestFault41ManyMappings: many separate ranges leave the process the mappings
// that it needs.
func TestFault41ManyMappings(t *testing.T) {
	limit, err := os.ReadFile("/proc/sys/vm/max_map_count")
	if err != nil {
		t.Fatal(err)
	}
	most, err := strconv.Atoi(string(limit[:len(limit)-1]))
	if err != nil {
		t.Fatal(err)
	}
	n := 1000
	if testing.Short() || raceDetector {
		n = 200
	}
	underMonitors(t, &pindown.Options{MergeBytes: -1}, func(t *testing.T, r *real) {
		before := mappings(t)
		b := mapAt(t, 0, 4*n, unix.MAP_NORESERVE)
		defer unmap(b)
		for i := range n {
			r.use(t, b[4*i*page:][:page])
		}
		if got := mappings(t) - before; got > max(most/4, 64) || got > n/4 {
			t.Errorf("%d mappings more for %d ranges; the limit is %d", got, n, most)
		}
	})
}

func mappings(t *testing.T) (n int) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range maps {
		if c == '\n' {
			n++
		}
	}
	return n
}
