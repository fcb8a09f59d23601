package verbs_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

func fill(b []byte, c byte) {
	for i := range b {
		b[i] = c
	}
}

// part is the range of b[from:to].
func part(b []byte, from, to int) vm.Range { return vm.RangeOf(b[from:to]) }

// addr is where peers find b.
func addr(b []byte) uint64 { return uint64(vm.RangeOf(b).Start) }

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func TestQueue(t *testing.T) {
	d := open(t, nil)
	p := connected(t, d)
	ctx := t.Context()
	src, dst := mapMemory(t, 16), mapMemory(t, 16)
	from := register(t, d, src, device.LocalWrite)
	to := register(t, d, dst, device.LocalWrite|device.RemoteRead|device.RemoteWrite)

	t.Run("write", func(t *testing.T) {
		fill(src, 'w')
		must(t, p.a.Write(7, vm.RangeOf(src), from.LocalKey, addr(dst), to.RemoteKey), p.a.Do(ctx))
		if !bytes.Equal(src, dst) {
			t.Error("not what was written")
		}
	})
	t.Run("read", func(t *testing.T) {
		fill(dst, 'r')
		must(t, p.a.Read(7, vm.RangeOf(src), from.LocalKey, addr(dst), to.RemoteKey), p.a.Do(ctx))
		if !bytes.Equal(src, dst) {
			t.Error("not what was read")
		}
	})
	t.Run("send", func(t *testing.T) {
		fill(src, 's')
		must(t, p.b.Recv(1<<61+3, part(dst, 0, 5000), to.LocalKey), p.a.Send(1<<61+4, part(src, 0, 4321), from.LocalKey))
		var done [4]verbs.Completion
		n, err := p.b.Wait(ctx, done[:])
		if err != nil || n != 1 || done[0] != (verbs.Completion{ID: 1<<61 + 3, Recv: true, Bytes: 4321}) {
			t.Errorf("receiver: %+v, %v", done[:n], err)
		}
		n, err = p.a.Wait(ctx, done[:])
		if err != nil || n != 1 || done[0] != (verbs.Completion{ID: 1<<61 + 4}) {
			t.Errorf("sender: %+v, %v", done[:n], err)
		}
		if !bytes.Equal(src[:4321], dst[:4321]) || dst[4321] != 'r' {
			t.Error("not what was sent")
		}
	})
	t.Run("many", func(t *testing.T) {
		// More than fit in at once.
		const total = 1000
		posted, over := 0, 0
		var done [32]verbs.Completion
		for over < total {
			for posted < total {
				err := p.a.Write(uint64(posted), part(src, 0, 64), from.LocalKey, addr(dst), to.RemoteKey)
				if errors.Is(err, verbs.ErrQueueFull) {
					break
				}
				must(t, err)
				posted++
			}
			n, err := p.a.Wait(ctx, done[:])
			must(t, err)
			for _, c := range done[:n] {
				if c.Err() != nil || c.ID != uint64(over) {
					t.Fatalf("completion %d: %+v", over, c)
				}
				over++
			}
		}
	})
	t.Run("context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		wg.Go(func() {
			var done [1]verbs.Completion
			if n, err := p.a.Wait(ctx, done[:]); n != 0 || !errors.Is(err, context.Canceled) {
				t.Errorf("%d, %v", n, err)
			}
		})
		cancel()
		wg.Wait()
		// It goes on afterwards.
		must(t, p.a.Write(7, part(src, 0, 1), from.LocalKey, addr(dst), to.RemoteKey), p.a.Do(t.Context()))
	})
	t.Run("close", func(t *testing.T) {
		q, err := d.NewQueue(nil)
		must(t, err)
		var wg sync.WaitGroup
		wg.Go(func() {
			var done [1]verbs.Completion
			if n, err := q.Wait(t.Context(), done[:]); n != 0 || !errors.Is(err, device.ErrClosed) {
				t.Errorf("wait: %d, %v", n, err)
			}
		})
		must(t, q.Close(), q.Close())
		wg.Wait()
		if err := q.Send(1, part(src, 0, 1), from.LocalKey); !errors.Is(err, device.ErrClosed) {
			t.Errorf("send: %v", err)
		}
	})
	t.Run("bad", func(t *testing.T) {
		if err := p.a.Send(1, vm.Range{}, 0); !errors.Is(err, device.ErrInvalid) {
			t.Errorf("nothing: %v", err)
		}
		if err := p.a.Send(1, vm.Range{Start: 1, End: 2 << 30}, 0); !errors.Is(err, device.ErrTooLarge) {
			t.Errorf("too much: %v", err)
		}
		if _, err := d.NewQueue(&verbs.QueueOptions{Depth: -1}); !errors.Is(err, device.ErrInvalid) {
			t.Errorf("depth: %v", err)
		}
		if err := p.a.Connect(verbs.Endpoint{}); !errors.Is(err, verbs.ErrHandshake) {
			t.Errorf("endpoint: %v", err)
		}
	})
}

// What a peer may not do fails, and the queue takes no more.
func TestRemoteAccess(t *testing.T) {
	d := open(t, nil)
	src, dst := mapMemory(t, 1), mapMemory(t, 3)
	from := register(t, d, src, device.LocalWrite)
	mid := dst[len(src) : 2*len(src)]
	writable := register(t, d, mid, device.LocalWrite|device.RemoteWrite)
	readable := register(t, d, mid, device.RemoteRead)
	dead := register(t, d, mid, device.LocalWrite|device.RemoteWrite)
	must(t, d.Deregister(dead))
	n := uint64(len(src))
	for _, c := range []struct {
		name string
		post func(q *verbs.Queue) error
	}{
		{"write to what may be read", func(q *verbs.Queue) error {
			return q.Write(1, vm.RangeOf(src), from.LocalKey, addr(mid), readable.RemoteKey)
		}},
		{"read of what may be written", func(q *verbs.Queue) error {
			return q.Read(1, vm.RangeOf(src), from.LocalKey, addr(mid), writable.RemoteKey)
		}},
		{"write beyond the end", func(q *verbs.Queue) error {
			return q.Write(1, vm.RangeOf(src), from.LocalKey, addr(mid)+1, writable.RemoteKey)
		}},
		{"write before the start", func(q *verbs.Queue) error {
			return q.Write(1, vm.RangeOf(src), from.LocalKey, addr(mid)-1, writable.RemoteKey)
		}},
		{"write elsewhere", func(q *verbs.Queue) error {
			return q.Write(1, vm.RangeOf(src), from.LocalKey, addr(mid)+n, writable.RemoteKey)
		}},
		{"dead key", func(q *verbs.Queue) error {
			return q.Write(1, vm.RangeOf(src), from.LocalKey, addr(mid), dead.RemoteKey)
		}},
		{"from a dead key", func(q *verbs.Queue) error {
			return q.Write(1, vm.RangeOf(mid), dead.LocalKey, addr(mid), writable.RemoteKey)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := connected(t, d)
			fill(src, 'x')
			must(t, c.post(p.a))
			if err := p.a.Do(t.Context()); !errors.Is(err, verbs.ErrCompletion) {
				t.Errorf("%v", err)
			} else {
				t.Log(err)
			}
			if !errors.Is(p.a.Err(), verbs.ErrCompletion) {
				t.Errorf("the queue says %v", p.a.Err())
			}
			if bytes.ContainsRune(dst, 'x') {
				t.Error("something was written")
			}
		})
	}
}

// Two queues meet over a connection.
func TestHandshake(t *testing.T) {
	d := open(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	b := mapMemory(t, 2)
	reg := register(t, d, b, device.LocalWrite)
	half := len(b) / 2
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := l.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		q, err := d.NewQueue(nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer q.Close()
		if err := errors.Join(q.Recv(1, part(b, half, 2*half), reg.LocalKey), q.Handshake(t.Context(), conn), q.Do(t.Context())); err != nil {
			t.Error(err)
		}
	})
	conn, err := net.Dial("tcp", l.Addr().String())
	must(t, err)
	defer conn.Close()
	q, err := d.NewQueue(nil)
	must(t, err)
	defer q.Close()
	fill(b[:half], 'h')
	must(t, q.Handshake(t.Context(), conn), q.Send(2, part(b, 0, half), reg.LocalKey), q.Do(t.Context()))
	wg.Wait()
	if !bytes.Equal(b[:half], b[half:]) {
		t.Error("not what was sent")
	}

	// A peer that says nothing, and one that says something else.
	ctx, cancel := context.WithCancel(t.Context())
	one, other := net.Pipe()
	defer one.Close()
	defer other.Close()
	q2, err := d.NewQueue(nil)
	must(t, err)
	defer q2.Close()
	wg.Go(func() {
		var b [1]byte
		_, _ = other.Read(b[:])
		cancel()
	})
	if err := q2.Handshake(ctx, one); !errors.Is(err, context.Canceled) {
		t.Errorf("silent peer: %v", err)
	}
	wg.Wait()
}
