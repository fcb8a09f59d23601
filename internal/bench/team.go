package bench

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// team is a few OS threads, each on a processor of its own if there are enough.
type team struct {
	jobs []chan func()
	wait sync.WaitGroup
}

// newTeam returns a team of n, and how many processors there are for them.
func newTeam(n int) (t *team, processors int) {
	var allowed unix.CPUSet
	var cpus []int
	if err := unix.SchedGetaffinity(0, &allowed); err == nil {
		for i := range len(allowed) * 64 {
			if allowed.IsSet(i) {
				cpus = append(cpus, i)
			}
		}
	}
	t = &team{}
	for i := range n {
		jobs := make(chan func())
		t.jobs = append(t.jobs, jobs)
		t.wait.Go(func() {
			// Never unlocked: the thread ends with its goroutine, so that nobody
			// inherits its processor.
			runtime.LockOSThread()
			if len(cpus) >= 2 {
				var one unix.CPUSet
				// The first one is where interrupts tend to be served.
				one.Set(cpus[len(cpus)-1-i%len(cpus)])
				_ = unix.SchedSetaffinity(0, &one) // a courtesy to the figures
			}
			for f := range jobs {
				f()
			}
		})
	}
	return t, max(len(cpus), 1)
}

func (t *team) close() {
	for _, j := range t.jobs {
		close(j)
	}
	t.wait.Wait()
}

// do runs f on the first thread and waits for it.
func (t *team) do(f func() error) (err error) {
	done := make(chan struct{})
	t.jobs[0] <- func() { err = f(); close(done) }
	<-done
	return err
}

// maxSteps bounds how many steps of one measurement are remembered.
const maxSteps = 1 << 14

// step does some acquires and returns how many.
type step func() (int, error)

// pace is what came of running steps for a while.
type pace struct {
	ops       uint64
	perSecond float64 // of all threads together
	nsPerOp   float64 // for one of the threads
}

// run lets each step be repeated on a thread of its own, all at the same time,
// for warm and then for d, and returns the pace during d: that of the median
// step, so that the time in which something else had the processor, which comes
// by milliseconds, doesn't count. What a step does now and then does not count
// either, unless it does so in most calls.
func (t *team) run(warm, d time.Duration, steps ...step) (pace, error) {
	var ready atomic.Int32
	type share struct {
		ops int
		ns  []float64 // of an operation, by step
		err error
		_   [64]byte
	}
	shares := make([]share, len(steps))
	var wait sync.WaitGroup
	for i, s := range steps {
		wait.Add(1)
		t.jobs[i] <- func() {
			defer wait.Done()
			// All begin together: a thread is a processor, so this spins.
			ready.Add(1)
			for int(ready.Load()) < len(steps) {
				runtime.Gosched()
			}
			begin := time.Now()
			for time.Since(begin) < warm {
				if _, err := s(); err != nil {
					shares[i].err = err
					return
				}
			}
			// What is written here is this thread's alone, until it ends.
			n, ns := 0, make([]float64, 0, maxSteps)
			begin = time.Now()
			for last := begin; ; {
				k, err := s()
				if err != nil {
					shares[i].err = err
					return
				}
				now := time.Now()
				n += k
				if len(ns) < maxSteps {
					ns = append(ns, float64(now.Sub(last))/float64(k))
				}
				if now.Sub(begin) >= d {
					shares[i].ops, shares[i].ns = n, ns
					return
				}
				last = now
			}
		}
	}
	wait.Wait()
	var p pace
	var errs []error
	for _, s := range shares {
		errs = append(errs, s.err)
		p.ops += uint64(s.ops)
		if m := median(s.ns); m > 0 {
			p.perSecond += 1e9 / m
		}
	}
	if p.perSecond > 0 {
		p.nsPerOp = 1e9 * float64(len(steps)) / p.perSecond
	}
	return p, errors.Join(errs...)
}

// loop goes through an order, a chunk at a time.
type loop struct {
	w            Worker
	base, length uintptr
	order        []uint32 // a multiple of chunk
	at           int
}

func (l *loop) step() (int, error) {
	if l.at == len(l.order) {
		l.at = 0
	}
	pages := l.order[l.at : l.at+chunk]
	l.at += chunk
	return chunk, l.w.Run(l.base, l.length, pages)
}
