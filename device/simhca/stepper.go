package simhca

import (
	"math/rand/v2"
	"slices"
	"sync"
)

// Stepper executes the work of devices one step at a time, in an order that a
// seed decides: the same calls with the same seed have the same outcome. It may
// be used from many goroutines, but then their order decides as well.
//
// Calls that wait for work (Flush, CompletionQueue.Wait) take steps themselves.
type Stepper struct {
	mu     sync.Mutex
	rng    *rand.Rand // guarded by mu.
	queues []*Queue   // guarded by mu.
}

// NewStepper returns a stepper for Options.Stepper.
func NewStepper(seed uint64) *Stepper {
	return &Stepper{rng: rand.New(rand.NewPCG(seed, seed))}
}

func (s *Stepper) add(q *Queue) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queues = append(s.queues, q)
}

func (s *Stepper) remove(q *Queue) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.queues, q); i >= 0 {
		s.queues = slices.Delete(s.queues, i, i+1)
	}
}

// Step executes one packet, or one request that has none, of a queue picked at
// random. It returns false if nothing can be executed.
func (s *Stepper) Step() bool {
	s.mu.Lock()
	queues := slices.Clone(s.queues)
	s.rng.Shuffle(len(queues), func(i, j int) { queues[i], queues[j] = queues[j], queues[i] })
	s.mu.Unlock()
	for _, q := range queues {
		if q.step() {
			return true
		}
	}
	return false
}

// Run steps until nothing can be executed, and returns the number of steps.
func (s *Stepper) Run() int {
	n := 0
	for s.Step() {
		n++
	}
	return n
}
