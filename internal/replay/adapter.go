package replay

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/vm"
)

// Adapter is what a simulated adapter made of a policy's registrations; see
// Options.Simhca.
type Adapter struct {
	// Model is whose costs it charged.
	Model string `json:"model"`
	// Calls are the verbs that it carried out, and Seconds what they cost on its
	// clock: those of the table, and of the processes that ended.
	Registers   uint64  `json:"registers"`
	Deregisters uint64  `json:"deregisters"`
	Updates     uint64  `json:"updates"`
	Register    float64 `json:"register_seconds"`
	Deregister  float64 `json:"deregister_seconds"`
	Update      float64 `json:"update_seconds"`
	// Checked is the number of hits whose physical pages were compared with
	// those mapped, StaleHits how many of them were others.
	Checked   uint64 `json:"checked_hits"`
	StaleHits uint64 `json:"stale_hits"`
	// Left out are registrations of memory that the adapter can't have: too long,
	// or beyond its address space.
	LeftOut uint64 `json:"left_out"`
	// OrphanPages is the most pages that were pinned and mapped nowhere.
	OrphanPages int `json:"peak_orphan_pages"`
}

const (
	simPage     = 4096
	simMaxPages = 1 << 15 // of a registration
	simSpaceEnd = 1 << 36 // pages
)

// adapter carries out a sim's registrations: each process has simulated memory
// and an adapter over it.
type adapter struct {
	costs    simhca.Costs
	machines []*machine
	out      Adapter
	err      error // the first that must not happen
}

type machine struct {
	space *simhca.Space
	dev   *simhca.Device
}

// pinned is a region's registration.
type pinned struct {
	reg    device.Registration
	frames []uint64 // of its pages when it was made
}

func simCost(c Cost) simhca.Cost {
	return simhca.Cost{Call: time.Duration(c.Call), Page: time.Duration(c.Page)}
}

func newAdapter(m *Model) *adapter {
	return &adapter{
		costs: simhca.Costs{Register: simCost(m.Register), Deregister: simCost(m.Deregister), Update: simCost(m.Update)},
		out:   Adapter{Model: m.Name},
	}
}

func (a *adapter) machine(space uint32) *machine {
	for int(space) >= len(a.machines) {
		a.machines = append(a.machines, nil)
	}
	m := a.machines[space]
	if m == nil {
		s := simhca.NewSpace(&simhca.SpaceOptions{PageSize: simPage, Everywhere: true})
		m = &machine{s, simhca.Open(s, &simhca.Options{
			Costs: a.costs, Limits: device.Limits{MaxRegistrations: 1 << 22, MaxRange: simMaxPages * simPage},
		})}
		a.machines[space] = m
	}
	return m
}

func simRange(start, end uint64) vm.Range {
	return vm.Range{Start: uintptr(start * simPage), End: uintptr(end * simPage)}
}

func (a *adapter) fail(err error) {
	if a.err == nil && err != nil {
		a.err = fmt.Errorf("simulated adapter: %w", err)
	}
}

func (a *adapter) register(r *region) {
	if r.pages() > simMaxPages || r.end > simSpaceEnd {
		a.out.LeftOut++
		return
	}
	m := a.machine(r.space)
	access := device.LocalRead
	if r.write {
		access = device.LocalWrite
	}
	rng := simRange(r.start, r.end)
	reg, err := m.dev.Register(context.Background(), rng, access)
	if err != nil {
		a.fail(err)
		return
	}
	r.pin = &pinned{reg, m.space.Frames(rng)}
}

func (a *adapter) deregister(r *region) {
	if r.pin == nil {
		return
	}
	a.fail(a.machine(r.space).dev.Deregister(r.pin.reg))
	r.pin = nil
}

func (a *adapter) update(r *region) {
	if r.pin == nil {
		return
	}
	m := a.machine(r.space)
	reg, err := m.dev.Update(context.Background(), r.pin.reg)
	if err != nil {
		a.fail(err)
		return
	}
	r.pin.reg, r.pin.frames = reg, m.space.Frames(reg.Range)
}

// hit checks that what is handed out are the pages that are mapped.
func (a *adapter) hit(r *region) {
	if r.pin == nil {
		return
	}
	a.out.Checked++
	if !slices.Equal(r.pin.frames, a.machine(r.space).space.Frames(r.pin.reg.Range)) {
		a.out.StaleHits++
	}
}

// change gives the addresses [start,end) other pages: without looking at what
// the cache has there, so that it can be compared; only where the range is very
// long, at the cache's regions alone.
func (a *adapter) change(space uint32, start, end uint64, regions []*region) {
	m := a.machine(space)
	end = min(end, simSpaceEnd)
	switch {
	case end <= start:
	case end-start <= simMaxPages:
		a.fail(m.space.Dontneed(simRange(start, end)))
	default:
		for _, r := range regions {
			// Those that were left out may be as long.
			if from, to := max(start, r.start), min(end, r.end); from < to && r.pin != nil {
				a.fail(m.space.Dontneed(simRange(from, to)))
			}
		}
	}
	a.out.OrphanPages = max(a.out.OrphanPages, m.space.Stats().Orphans)
}

// result gives up what is left, after noting what the verbs have cost.
func (a *adapter) result() (*Adapter, error) {
	for _, m := range a.machines {
		if m == nil {
			continue
		}
		stats := m.dev.Stats()
		for _, x := range []struct {
			verb    simhca.Verb
			calls   *uint64
			seconds *float64
		}{
			{simhca.VerbRegister, &a.out.Registers, &a.out.Register},
			{simhca.VerbDeregister, &a.out.Deregisters, &a.out.Deregister},
			{simhca.VerbUpdate, &a.out.Updates, &a.out.Update},
		} {
			s := stats.Verbs[x.verb]
			*x.calls += s.Calls
			*x.seconds += s.Time.Seconds()
		}
		a.fail(m.space.Check())
		// It takes what the trace ends with along.
		a.fail(m.dev.Close())
	}
	return &a.out, a.err
}
