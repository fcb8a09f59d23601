package uffd

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// Cover arms r, unless it is armed already, and makes sure that no removal that
// was recorded earlier is still to be carried out there.
//
// It returns a wrapped monitor.ErrUncovered for a range that isn't private
// anonymous memory throughout, has a hole, belongs to the Go heap or to another
// userfaultfd, or would take more mappings than Options.MaxMappings; the
// message says which. It returns a wrapped monitor.ErrPending if a removal may
// be in flight or the mapping changed under its eyes.
//
// Where r is armed and nothing is pending, it makes no system call.
func (m *Monitor) Cover(r vm.Range) error {
	if err := m.cover(r); err != nil {
		return fmt.Errorf("cover %v: %w", r, err)
	}
	return nil
}

func (m *Monitor) cover(r vm.Range) error {
	if r.Empty() || r.End > epoch.MaxAddress {
		return monitor.ErrUncovered
	}
	if err := m.alive(); err != nil {
		return err
	}
	pages := r.RoundOut(pageSize)
	m.drainMu.Lock()
	m.drain()
	armed := m.armed.contains(pages)
	m.drainMu.Unlock()
	// The set may be behind: an unmapping whose event isn't drained yet. That
	// one is recorded after the stamp that the caller has taken, and undoes it.
	if !armed {
		if err := m.arm(r, pages); err != nil {
			return err
		}
	}
	return m.settle(pages)
}

// arm arms pages, the rounded r, mapping by mapping.
func (m *Monitor) arm(r, pages vm.Range) error {
	m.coverMu.Lock()
	defer m.coverMu.Unlock()
	if m.maps == nil {
		return cmpErr(m.alive(), monitor.ErrLost)
	}
	if !m.opt.ArmGoHeap && m.heap.holds(r) {
		return fmt.Errorf("memory of the Go heap: %w", monitor.ErrUncovered)
	}
	for at := pages.Start; at < pages.End; {
		end, err := m.armNext(vm.Range{Start: at, End: pages.End})
		if err != nil {
			return err
		}
		at = end
	}
	return nil
}

// eventPatience is how often Cover yields to an event that is being read.
const eventPatience = 500

func cmpErr(err, otherwise error) error {
	if err == nil {
		return otherwise
	}
	return err
}

// armNext arms the part of r at its start that lies in one mapping, and
// returns where that part ends. coverMu must be held.
//
// UFFDIO_REGISTER skips holes, and the mapping that was looked at may be
// replaced before the ioctl. So the order is: arm, then look, then ask the
// kernel whether the first page is armed. What was seen by the look, one
// mapping V without a hole over the piece, is then armed or accounted for:
//
//   - V was armed when it was seen. It is armed as a whole, and whatever
//     happens to it later is an event: recorded after the caller's stamp.
//   - V was not armed. Then the first page, which is armed now, belongs to
//     another mapping, one that came later. Nobody else arms meanwhile, so it
//     was armed elsewhere and moved here by mremap, which is an event that
//     covers the page: recorded after the caller's stamp.
//
// So either the piece is armed or the registration that the caller is about to
// make fails its first check.
func (m *Monitor) armNext(r vm.Range) (uintptr, error) {
	fd := int(m.fd.Load())
	m.drainMu.Lock()
	m.drain()
	changes := m.changes
	m.drainMu.Unlock()

	v, err := m.look(r.Start)
	if err != nil {
		return 0, err
	}
	window, err := m.window(r.Intersect(v.Range), v)
	if err != nil {
		return 0, err
	}
	ioctls, err := sys.UFFDRegister(fd, window, sys.UFFDRegisterModeWP)
	switch {
	case errors.Is(err, unix.EBUSY):
		return 0, fmt.Errorf("registered with another userfaultfd: %w: %w", monitor.ErrUncovered, err)
	case err != nil:
		return 0, fmt.Errorf("%w: %w", monitor.ErrUncovered, err)
	case ioctls&sys.UFFDIoctlWriteprotect == 0:
		return 0, fmt.Errorf("no write-protect mode: %w", monitor.ErrUncovered)
	}

	if v, err = m.look(r.Start); err != nil {
		return 0, err
	}
	page := max(v.PageSize, pageSize)
	first := vm.Range{Start: r.Start &^ (page - 1), End: r.Start&^(page-1) + page}
	for i := 0; ; i++ {
		err = sys.UFFDWriteprotect(fd, first, 0)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EAGAIN) || i == eventPatience {
			return 0, fmt.Errorf("mapping changed while it was armed: %w: %w", monitor.ErrPending, err)
		}
		// An unread event, anywhere.
		runtime.Gosched()
	}
	m.remember(window.Intersect(v.Range), changes)
	return min(r.End, v.Range.End), nil
}

// remember adds r to the armed set, unless something happened to any armed
// mapping since changes was read.
func (m *Monitor) remember(r vm.Range, changes uint64) {
	m.drainMu.Lock()
	defer m.drainMu.Unlock()
	m.drain()
	// In this order: an operation that the kernel doesn't count any more has
	// been read, and then the table is busy or it is drained.
	if sys.UFFDChanging(int(m.fd.Load())) || m.table.Word().Busy() || m.changes != changes {
		m.lost++
		return
	}
	if len(m.armed.list) == cap(m.armed.list) {
		m.armed.grow(2 * cap(m.armed.list))
	}
	if !m.armed.add(r) {
		m.lost++
	}
}

// look returns the mapping at addr if it can be covered.
func (m *Monitor) look(addr uintptr) (sys.VMA, error) {
	v, err := m.maps.At(addr)
	switch {
	case errors.Is(err, sys.ErrNoVMA):
		return v, fmt.Errorf("%w: %w", monitor.ErrUncovered, err)
	case err != nil:
		return v, fmt.Errorf("%w: %w", monitor.ErrUncovered, err)
	case v.Flags&sys.VMAShared != 0:
		// Its pages can change without an event: by truncation, by a hole
		// punched, by another process.
		return v, fmt.Errorf("shared mapping %q: %w", v.Name, monitor.ErrUncovered)
	case v.Inode == 0 && (v.Name == "" || v.Name[0] == '[' && anonymousNames[v.Name]):
		return v, nil
	case v.Inode == 0 && len(v.Name) > 6 && v.Name[:6] == "[anon:":
		return v, nil
	case v.Inode != 0 && v.Name == hugeName && m.hugeDev != 0 && deviceOf(v) == m.hugeDev && v.PageSize > pageSize:
		return v, nil
	case v.Inode == 0:
		return v, fmt.Errorf("special mapping %q: %w", v.Name, monitor.ErrUncovered)
	}
	return v, fmt.Errorf("private mapping of file %q: %w", v.Name, monitor.ErrUncovered)
}

// anonymousNames are the names that proc_pid_maps(5) gives to ordinary
// anonymous memory; other names in brackets are the kernel's.
var anonymousNames = map[string]bool{"[heap]": true, "[stack]": true}

// hugeName is the name of the file behind private anonymous hugetlb memory.
const hugeName = "/anon_hugepage (deleted)"

func deviceOf(v sys.VMA) uint64 { return uint64(v.Major)<<32 | uint64(v.Minor) }

// window returns what to arm around piece, part of the mapping v, or an error
// if that would split too many mappings.
func (m *Monitor) window(piece vm.Range, v sys.VMA) (vm.Range, error) {
	size := m.opt.Window
	if size == 0 {
		if v.Range.Len() <= wholeLimit {
			return v.Range, nil
		}
		size = maxWindow
	}
	limit := m.opt.MaxMappings / 2 // a window adds two mappings
	m.drainMu.Lock()
	defer m.drainMu.Unlock()
	used := len(m.armed.list) + m.lost
	switch {
	case used > limit/2:
		size = maxWindow
	case used > limit/4:
		size = min(8*size, maxWindow)
	}
	w := piece.RoundOut(max(size, v.PageSize)).Intersect(v.Range)
	if used >= limit && w != v.Range && !m.armed.overlaps(vm.Range{Start: w.Start - min(w.Start, 1), End: w.End + 1}) {
		return w, fmt.Errorf("%d mappings split already: %w", 2*used, monitor.ErrUncovered)
	}
	return w, nil
}

// settle makes sure that no removal that was recorded before is still to be
// carried out in r.
//
// The kernel reports MADV_DONTNEED and its like before it carries them out
// (userfaultfd_remove, then zap_page_range, in mm/madvise.c). A registration
// made in between would hold pages that are about to go, with a stamp that is
// up to date. What is recorded stays on a list until every thread has been seen
// outside of the call, at a time after it was recorded.
func (m *Monitor) settle(r vm.Range) error {
	if !m.pending(r) {
		return nil
	}
	m.proofMu.Lock()
	defer m.proofMu.Unlock()
	m.drainMu.Lock()
	for _, p := range m.fresh.list {
		m.proving.addCoarse(p)
	}
	m.fresh.clear()
	due := m.proving.overlaps(r)
	m.drainMu.Unlock()
	if !due {
		// Proved by another caller in the meantime.
		return nil
	}
	if !m.threads() {
		return fmt.Errorf("removal under way: %w", monitor.ErrPending)
	}
	m.drainMu.Lock()
	m.proving.clear()
	m.drainMu.Unlock()
	return nil
}

// pending reports whether a removal in r may not be carried out yet.
func (m *Monitor) pending(r vm.Range) bool {
	m.drainMu.Lock()
	defer m.drainMu.Unlock()
	m.drain()
	return m.fresh.overlaps(r) || m.proving.overlaps(r)
}
