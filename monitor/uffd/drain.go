package uffd

import (
	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/vm"
)

// help drains in place of the goroutine that is there for it, which may have
// to wait for a processor, unless somebody does already.
func (m *Monitor) help() {
	if m.drainMu.TryLock() {
		defer m.drainMu.Unlock()
		m.drain()
	}
}

// drain records all that the reader has read, and then drops its busy count.
// drainMu must be held. It allocates nothing.
func (m *Monitor) drain() {
	c := m.reader.ctl
	done := false
	defer func() {
		if !done {
			// A panic on its way. The busy count stays, lost goes before it.
			m.table.SetLost()
		}
	}()
	for c.flag.Swap(0) != 0 {
		if c.overflow.Swap(0) != 0 {
			m.suspectAll()
		}
		head := c.head.Load()
		for tail := c.tail.Load(); tail < head; tail++ {
			m.record(&m.reader.ring[tail%ringSize])
			c.tail.Store(tail + 1)
		}
		m.table.DropBusy()
	}
	done = true
}

// record notes one message. drainMu must be held.
func (m *Monitor) record(msg *sys.UFFDMsg) {
	switch msg.Event {
	case sys.UFFDEventUnmap:
		r := vm.Range{Start: uintptr(msg.Arg[0]), End: uintptr(msg.Arg[1])}
		m.remapped(r)
		m.touch(r, vm.OpMunmap)
	case sys.UFFDEventRemap:
		from := vm.Range{Start: uintptr(msg.Arg[0]), End: uintptr(msg.Arg[0] + msg.Arg[2])}
		to := vm.Range{Start: uintptr(msg.Arg[1]), End: uintptr(msg.Arg[1] + msg.Arg[2])}
		m.remapped(from)
		m.remapped(to)
		m.touch(from, vm.OpMremap)
		m.touch(to, vm.OpMremap)
	case sys.UFFDEventRemove:
		// Before the touch: who takes a stamp after it must find it here.
		r := vm.Range{Start: uintptr(msg.Arg[0]), End: uintptr(msg.Arg[1])}
		m.fresh.addCoarse(r)
		m.touch(r, vm.OpDontneed)
	default:
		// A page fault would be somebody else's protection, and a fork wasn't
		// asked for. There is no telling what it means: see nothing more.
		m.table.SetLost()
		m.reader.requestStop()
	}
}

// remapped notes that what is mapped in r has changed.
func (m *Monitor) remapped(r vm.Range) {
	m.changes++
	if !m.armed.remove(r) {
		m.lost++
	}
}

// touch records an operation and sends the news of it.
func (m *Monitor) touch(r vm.Range, op vm.Op) {
	if m.table.Touch(r) {
		m.Send(vm.Event{Range: r, Op: op})
	}
}

// suspectAll is for messages that were lost: anything may have happened.
func (m *Monitor) suspectAll() {
	all := vm.Range{End: epoch.MaxAddress}
	m.changes++
	m.lost += len(m.armed.list)
	m.armed.clear()
	m.fresh.addCoarse(all)
	m.table.Touch(all)
	m.SendLost()
}
