package simhca_test

import (
	"testing"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// Whatever takes a key's meaning away waits for the packet that is in the
// middle of using it: until then the page isn't freed, afterwards nothing
// arrives.
func TestRevokeWaitsForPacket(t *testing.T) {
	for _, c := range []struct {
		name string
		// key returns the key to use, and what ends it.
		key func(g *rig, r vm.Range, reg device.Registration) (uint32, func() error)
	}{
		{"deregister", func(g *rig, _ vm.Range, reg device.Registration) (uint32, func() error) {
			return reg.RemoteKey, func() error { return g.dev.Deregister(reg) }
		}},
		{"revoke", func(g *rig, _ vm.Range, reg device.Registration) (uint32, func() error) {
			return reg.RemoteKey, func() error { return g.dev.Revoke(ctx, reg) }
		}},
		{"withdraw", func(g *rig, r vm.Range, reg device.Registration) (uint32, func() error) {
			x, err := g.dev.Expose(ctx, reg, r, device.RemoteRead|device.RemoteWrite)
			g.must(err)
			return x.RemoteKey, func() error { return g.dev.Withdraw(ctx, x) }
		}},
		{"local-invalidate", func(g *rig, r vm.Range, reg device.Registration) (uint32, func() error) {
			k := g.fastKey(r, reg)
			g.must(g.dev.Deregister(reg))
			q := g.newQueue(nil)
			return k.Key, func() error { return g.do(q, invalidate(1, k.Key)).Err() }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inside, leave := make(chan struct{}), make(chan struct{})
			g := newRig(t, simhca.Options{Fault: func(f simhca.Fault) error {
				if f.ID == 77 && f.Step == simhca.StepMoving {
					close(inside)
					<-leave
				}
				return nil
			}}, true)
			r := g.mapped(1, 'x')
			reg := g.register(r, allAcc)
			from := g.scratch(1, 'w')
			key, end := c.key(g, r, reg)
			q := g.newQueue(nil)
			g.must(q.Post(write(77, from, r.Start, key)))
			<-inside
			g.must(g.space.Unmap(r)) // Only the pin keeps the page.
			ended := make(chan error, 1)
			go func() { ended <- end() }()
			// The key is dead for others as soon as the call has begun.
			for {
				if _, s := g.deviceSees(r, key); s == simhca.StatusRemoteAccess {
					break
				}
			}
			select {
			case err := <-ended:
				t.Errorf("returned while a packet uses the page: %v", err)
				ended <- err
			default:
			}
			close(leave)
			g.must(<-ended)
			completion, err := q.CompletionQueue().Wait(ctx)
			g.must(err)
			g.wantStatus("the packet", completion.Status, simhca.StatusSuccess)
			g.must(g.space.Check()) // Had it not waited, the packet met a freed page.
			g.wantDead("afterwards", r, key)
		})
	}
}

// A request whose key was revoked when it had begun starts over: no page of it,
// nor the request, is partly of before and partly of after.
func TestRevokedRequestStartsOver(t *testing.T) {
	for _, op := range []simhca.Opcode{simhca.OpRead, simhca.OpWrite, simhca.OpSend} {
		for steps := 1; steps <= 4; steps++ {
			g := newRig(t, simhca.Options{}, false)
			r := g.mapped(2, 'x')
			reg := g.register(r, allAcc)
			far := g.scratch(3, 'f')
			wr := write(1, far, r.Start, reg.RemoteKey)
			wr.Op = op
			wr.Local[0].Addr += 1000
			wr.Local[0].Length = r.Len()
			if op == simhca.OpSend {
				g.must(g.queue.PostReceive(2, simhca.SegmentOf(reg, r)))
			}
			g.must(g.queue.Post(wr))
			for range steps {
				g.stepper.Step()
			}
			if g.queue.Pending() == 0 {
				break
			}
			g.must(g.dev.Revoke(ctx, reg))
			g.replace(r, 'y')
			_, err := g.dev.Load(ctx, reg)
			g.must(err)
			g.stepper.Run()
			if g.queue.Failed() {
				t.Errorf("%v after %d packets: failed", op, steps)
			}
			near := vm.Range{Start: wr.Local[0].Addr, End: wr.Local[0].Addr + r.Len()}
			want := byte('f') // Everything was sent again.
			if op == simhca.OpRead {
				want = 'y'
			}
			if a, b := g.memory(near), g.memory(r); a != want || op != simhca.OpRead && b != want {
				t.Errorf("%v after %d packets: %q here, %q there", op, steps, a, b)
			}
		}
	}
}
