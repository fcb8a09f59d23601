package monitor

import (
	"sync"
	"sync/atomic"

	"github.com/pindown/pindown/vm"
)

// feedDepth is how many events a feed holds before it loses some. Losing is
// harmless (the receiver sweeps), so there is no reason for more.
const feedDepth = 256

// Feed is a receiver's end of a monitor's news. Receive from C. C is closed
// when the monitor closes or is lost.
type Feed struct {
	// C delivers events. It is never blocked on by the sender.
	C <-chan vm.Event

	c    chan vm.Event
	lost atomic.Uint64
	hub  *Hub
}

// Lost returns the number of events that found the feed full, ever. A receiver
// that sees it grow must look at every region by its stamp.
func (f *Feed) Lost() uint64 { return f.lost.Load() }

// Close ends the subscription. It is idempotent.
func (f *Feed) Close() { f.hub.remove(f) }

// Hub hands events to any number of feeds, without ever blocking the sender.
// Monitors embed it. The zero Hub is ready.
type Hub struct {
	mu     sync.Mutex
	feeds  map[*Feed]struct{} // guarded by mu
	closed bool               // guarded by mu
}

// Subscribe returns a new feed; on a closed hub, one whose C is closed.
func (h *Hub) Subscribe() *Feed {
	f := &Feed{c: make(chan vm.Event, feedDepth), hub: h}
	f.C = f.c
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		close(f.c)
		return f
	}
	if h.feeds == nil {
		h.feeds = make(map[*Feed]struct{})
	}
	h.feeds[f] = struct{}{}
	return f
}

// Send hands e to every feed that has room and counts it as lost on the
// others. It doesn't block and doesn't allocate.
func (h *Hub) Send(e vm.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for f := range h.feeds {
		select {
		case f.c <- e:
		default:
			f.lost.Add(1)
		}
	}
}

// SendLost counts one lost event on every feed and wakes the receivers, for
// news that was lost before it reached the hub.
func (h *Hub) SendLost() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for f := range h.feeds {
		f.lost.Add(1)
		select {
		case f.c <- vm.Event{Op: vm.OpUnknown}:
		default:
		}
	}
}

// CloseFeeds closes every feed. It is idempotent.
func (h *Hub) CloseFeeds() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for f := range h.feeds {
		close(f.c)
	}
	h.feeds = nil
}

func (h *Hub) remove(f *Feed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.feeds, f)
}
