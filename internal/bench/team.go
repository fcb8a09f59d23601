package bench

import (
	"errors"
	"runtime"
	"slices"
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
// by milliseconds, doesn't count. What a step does now and then doesn't count
// either, unless it does so in most calls. With several steps, only the time in
// which all of them were really running counts.
func (t *team) run(warm, d time.Duration, steps ...step) (pace, error) {
	return t.runFrom(0, warm, d, steps...)
}

// runFrom is run with the threads from the given one on.
func (t *team) runFrom(first int, warm, d time.Duration, steps ...step) (pace, error) {
	var ready atomic.Int32
	epoch := time.Now()
	logs := make([]stepLog, len(steps))
	errs := make([]error, len(steps))
	var wait sync.WaitGroup
	for i, s := range steps {
		wait.Add(1)
		t.jobs[first+i] <- func() {
			defer wait.Done()
			log := stepLog{at: make([]time.Duration, 0, maxSteps+1), ops: make([]int, 0, maxSteps)}
			// All begin together: a thread is a processor, so this spins.
			ready.Add(1)
			for int(ready.Load()) < len(steps) {
				runtime.Gosched()
			}
			for begin := time.Now(); time.Since(begin) < warm; {
				if _, errs[i] = s(); errs[i] != nil {
					return
				}
			}
			begin := time.Since(epoch)
			for now := begin; now-begin < d; {
				n, err := s()
				if err != nil {
					errs[i] = err
					return
				}
				if len(log.ops) < maxSteps {
					log.at, log.ops = append(log.at, now), append(log.ops, n)
				}
				now = time.Since(epoch)
				log.end = now
				log.total += n
			}
			logs[i] = log
		}
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return pace{}, err
	}
	var p pace
	for i := range logs {
		p.ops += uint64(logs[i].total)
		var ns []float64
		for j := range logs[i].ops {
			if logs[i].accompanied(j, logs, i) {
				ns = append(ns, logs[i].nsPerOp(j))
			}
		}
		if len(ns) == 0 {
			return pace{}, errNotTogether
		}
		p.perSecond += 1e9 / median(ns)
	}
	p.nsPerOp = 1e9 * float64(len(steps)) / p.perSecond
	return p, nil
}

// errNotTogether: the threads never ran at the same time.
var errNotTogether = errors.New("bench: the threads did not get processors at the same time")

// stepLog is when the steps of one thread began, without a gap between them.
type stepLog struct {
	at    []time.Duration
	ops   []int
	end   time.Duration
	total int
	usual float64 // ns for an operation, once asked for
}

// until returns when step j ended.
func (l *stepLog) until(j int) time.Duration {
	if j+1 < len(l.at) {
		return l.at[j+1]
	}
	return l.end
}

func (l *stepLog) nsPerOp(j int) float64 { return float64(l.until(j)-l.at[j]) / float64(l.ops[j]) }

// offDuty is how much longer than usual a step takes if its thread lost the
// processor meanwhile. Waiting for a lock takes less, in steps of a shortChunk.
const offDuty = 400 * time.Microsecond

// running returns how much of the time from a to b the thread was at work.
func (l *stepLog) running(a, b time.Duration) (sum time.Duration) {
	if l.usual == 0 {
		ns := make([]float64, len(l.ops))
		for j := range l.ops {
			ns[j] = l.nsPerOp(j)
		}
		l.usual = median(ns)
	}
	j, found := slices.BinarySearch(l.at, a)
	if !found {
		j--
	}
	for j = max(j, 0); j < len(l.at) && l.at[j] < b; j++ {
		if l.until(j)-l.at[j] < offDuty+time.Duration(4*l.usual*float64(l.ops[j])) {
			sum += max(min(b, l.until(j))-max(a, l.at[j]), 0)
		}
	}
	return sum
}

// accompanied reports whether all the others were at work during step j of the
// i-th.
func (l *stepLog) accompanied(j int, logs []stepLog, i int) bool {
	a, b := l.at[j], l.until(j)
	for k := range logs {
		if k != i && logs[k].running(a, b) < (b-a)*9/10 {
			return false
		}
	}
	return true
}

// loop goes through an order, a chunk at a time.
type loop struct {
	w            Worker
	base, length uintptr
	order        []uint32 // a multiple of chunk
	at           int
	chunk        int // acquires in a step
}

func (l *loop) step() (int, error) {
	if l.at == len(l.order) {
		l.at = 0
	}
	pages := l.order[l.at : l.at+l.chunk]
	l.at += l.chunk
	return l.chunk, l.w.Run(l.base, l.length, pages)
}
