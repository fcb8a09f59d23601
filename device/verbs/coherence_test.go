package verbs_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/bpf"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// churn changes the page behind b, which then reads as zeros.
var churn = []struct {
	name string
	do   func(b []byte) error
}{
	{"unmapped and mapped again", func(b []byte) error {
		r := vm.RangeOf(b)
		const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_FIXED | unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
		_, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Start, r.Len(), prot, flags, ^uintptr(0), 0)
		return errnoOrNil(errno)
	}},
	{"MADV_DONTNEED", func(b []byte) error { return unix.Madvise(b, unix.MADV_DONTNEED) }},
	{"another page moved there", func(b []byte) error {
		const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
		from, _, errno := unix.Syscall6(unix.SYS_MMAP, 0, uintptr(len(b)), prot, flags, ^uintptr(0), 0)
		if errno != 0 {
			return errno
		}
		_, _, errno = unix.Syscall6(unix.SYS_MREMAP, from, uintptr(len(b)), uintptr(len(b)), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, vm.RangeOf(b).Start, 0)
		return errnoOrNil(errno)
	}},
}

func errnoOrNil(errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

// target is memory that a peer writes to through the cache's keys, while the
// pages behind it change.
type target struct {
	d      *verbs.Device
	cache  *pindown.Cache
	writes int // by each worker
	seed   uint64

	checked, misplaced, churned atomic.Int64
}

const (
	buffers   = 24 // of each worker
	chunk     = 512
	workers   = 2
	perChurn  = 6  // one operation for that many writes
	round     = 12 // writes that are in flight together
	neighbour = buffers
)

// run returns how much the cache was asked for.
func (g *target) run(t *testing.T) {
	t.Helper()
	stop := make(chan struct{})
	var wg, bystander sync.WaitGroup
	for w := range workers {
		// The page after each worker's belongs to whoever unmaps for no reason.
		mem := mapMemory(t, buffers+1)
		page := os.Getpagesize()
		wg.Go(func() {
			if err := g.work(mem[:buffers*page], g.seed+uint64(w)); err != nil {
				t.Errorf("worker %d: %v", w, err)
			}
		})
		bystander.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if err := churn[i%len(churn)].do(mem[neighbour*page:]); err != nil {
					t.Errorf("bystander: %v", err)
					return
				}
				g.churned.Add(1)
				time.Sleep(time.Millisecond) // Not to synchronise: two CPUs must do all.
			}
		})
	}
	wg.Wait()
	close(stop)
	bystander.Wait()
}

// work is one worker: before each write it may change the page, after it the
// memory must hold what was written and nothing else.
func (g *target) work(mem []byte, seed uint64) (err error) {
	rnd := rand.New(rand.NewPCG(seed, 0))
	p, err := newPair(g.d)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	src, err := unix.Mmap(-1, 0, round*chunk, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Munmap(src)) }()
	ctx, cancel := timeout(2 * time.Minute)
	defer cancel()
	from, err := g.d.Register(ctx, vm.RangeOf(src), device.LocalWrite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.d.Deregister(from)) }()
	page := os.Getpagesize()
	shadow := make([]byte, len(mem)) // what memory must hold
	for done := 0; done < g.writes; {
		// Each round is of different buffers, so that none changes under a write.
		var held [round]pindown.Region
		order := rnd.Perm(buffers)[:min(round, g.writes-done)]
		for i, n := range order {
			b, want := mem[n*page:(n+1)*page], shadow[n*page:(n+1)*page]
			if rnd.IntN(perChurn) == 0 {
				op := churn[rnd.IntN(len(churn))]
				if err := op.do(b); err != nil {
					return fmt.Errorf("%s: %w", op.name, err)
				}
				clear(want)
				g.churned.Add(1)
			}
			r, err := g.cache.AcquireRange(ctx, vm.RangeOf(b), pindown.LocalWrite|pindown.RemoteWrite)
			if err != nil {
				return err
			}
			held[i] = r
			off := rnd.IntN(page - chunk)
			data := src[i*chunk : (i+1)*chunk]
			for j := 0; j < chunk; j += 8 {
				binary.LittleEndian.PutUint64(data[j:], seed<<48|uint64(done+i)<<16|uint64(j))
			}
			if err := p.a.Write(uint64(i), vm.RangeOf(data), from.LocalKey, addr(b)+uint64(off), r.RemoteKey()); err != nil {
				return err
			}
			copy(want[off:], data)
		}
		if err := p.a.Do(ctx); err != nil {
			return err
		}
		for i, n := range order {
			b, want := mem[n*page:(n+1)*page], shadow[n*page:(n+1)*page]
			g.checked.Add(1)
			if !bytes.Equal(b, want) {
				g.misplaced.Add(1)
				copy(want, b) // So that it counts once.
			}
			if err := held[i].Release(); err != nil {
				return err
			}
		}
		done += len(order)
	}
	return nil
}

// coherence runs peers' writes under churn with a monitor.
func coherence(t *testing.T, m monitor.Monitor, writes int) (*target, pindown.Stats) {
	t.Helper()
	d := openReal(t)
	cache, err := pindown.New(d, &pindown.Options{Monitor: m, MergeBytes: -1})
	must(t, err)
	seed := rand.Uint64() >> 17
	g := &target{d: d, cache: cache, writes: writes / workers, seed: seed}
	t.Logf("seed %d", seed)
	begin := time.Now()
	g.run(t)
	t.Logf("%v", time.Since(begin))
	s := cache.Stats()
	must(t, cache.Close())
	if d.Live() != 0 {
		t.Errorf("%d registrations left", d.Live())
	}
	registered := s.Register.Count
	t.Logf("device %s (%s), monitor %s: %d RDMA writes checked, %d misplaced; %d VM operations; %d registrations made, %d saved (%.1f %%)",
		d.Info().Name, s.Device, s.Monitor, g.checked.Load(), g.misplaced.Load(), g.churned.Load(),
		registered, g.checked.Load()-int64(registered), 100*(1-float64(registered)/float64(g.checked.Load())))
	return g, s
}

// Without a monitor, what peers write lands in pages that nothing maps any more,
// and nothing fails.
func TestPeerWithoutMonitor(t *testing.T) {
	m, err := manual.New(nil)
	must(t, err)
	defer m.Close()
	g, _ := coherence(t, m, 1000) // Nobody tells the monitor anything.
	if g.misplaced.Load() == 0 {
		t.Error("nothing was misplaced: the test shows nothing")
	}
}

// With the kernel's own word for it, none does.
func TestPeerWithMonitor(t *testing.T) {
	openReal(t) // Or skip.
	begin := time.Now()
	m, err := bpf.Open(&bpf.Options{Mode: bpf.ModeFunctions})
	must(t, err)
	t.Logf("monitor open after %v", time.Since(begin))
	defer m.Close()
	const writes = 10_200
	g, s := coherence(t, m, writes)
	if n := g.checked.Load(); n != writes {
		t.Errorf("%d writes checked, want %d", n, writes)
	}
	if n := g.misplaced.Load(); n != 0 {
		t.Errorf("%d writes misplaced", n)
	}
	if s.Hits == 0 || s.TotalPerUse() != 0 || s.TotalInvalidations() == 0 {
		t.Errorf("%d hits, %d per use, %d invalidations", s.Hits, s.TotalPerUse(), s.TotalInvalidations())
	}
}
