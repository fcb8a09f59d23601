package simhca

import "github.com/pindown/pindown/device"

// dropHoldLocked gives a hold on pages back.
func (d *Device) dropHoldLocked(p *pinned) {
	p.holds--
	if p.holds == 0 {
		d.bytes -= p.bytes
		d.toUnpin = append(d.toUnpin, p)
	}
}

// dropLocked gives a meaning's pages back, once.
func (d *Device) dropLocked(m *meaning) {
	if m.dropped {
		return
	}
	m.dropped = true
	if m.pinned != nil {
		d.dropHoldLocked(m.pinned)
	}
}

// replaceLocked gives e a new meaning. Requests that have begun go on with the
// old one.
func (d *Device) replaceLocked(e *entry, m *meaning) {
	old := e.now
	e.now = m
	e.before = append(e.before, old)
	d.settleLocked(e)
}

// settleLocked forgets the former meanings of e that nobody uses.
func (d *Device) settleLocked(e *entry) {
	kept := e.before[:0]
	for _, m := range e.before {
		if m.moving == 0 && m.viewed == 0 {
			d.dropLocked(m)
		} else {
			kept = append(kept, m)
		}
	}
	clear(e.before[len(kept):])
	e.before = kept
}

// killLocked takes e's meaning away, its former meanings too, and waits until
// no packet is using their pages: mu is released meanwhile. When it returns
// nothing reaches the pages by e.
func (d *Device) killLocked(e *entry) {
	all := e.before
	if e.now != nil {
		all = append(all, e.now)
	}
	e.now, e.before = nil, nil
	for _, m := range all {
		m.revoked = true
	}
	for _, m := range all {
		for m.moving > 0 {
			d.settled.Wait()
		}
		d.dropLocked(m)
	}
}

// freeLocked frees an entry that means nothing.
func (d *Device) freeLocked(e *entry) {
	if e.over != nil {
		e.over.windows--
		e.over = nil
	}
	d.live[e.kind]--
	d.table.release(e)
}

// view is what a request remembers of one of its sides: the meaning under
// which it reached its last page. It goes on with it after an update. After a
// revocation it starts over, as a requester does that has to send again.
type view struct {
	key    uint32
	page   uintptr  // the number of the page's address.
	e      *entry   // the region or fast key.
	m      *meaning // what it means; nil if nothing is remembered.
	window *meaning // of a window's key.
}

// use is one page in use by a packet.
type use struct {
	m, window *meaning
	index     int     // of the page in m.
	off       uintptr // in the page.
}

// beginUse looks up n bytes at addr, which are in one page, under key. The
// caller ends the use. A status other than success is the adapter's answer.
func (d *Device) beginUse(v *view, pd *ProtectionDomain, key uint32, addr, n uintptr, need device.Access, s side) (use, Status) {
	d.mu.Lock()
	defer d.unlock()
	number := addr / d.page
	if v.m != nil && (v.m.revoked || v.window != nil && v.window.revoked) {
		d.forgetLocked(v)
		return use{}, statusRestart
	}
	if v.m == nil || v.key != key || v.page != number && !d.opts.KeepPages {
		d.forgetLocked(v)
		e, m, window, status := d.lookupLocked(pd, key, s)
		if status != StatusSuccess {
			return use{}, status
		}
		m.viewed++
		*v = view{key: key, e: e, m: m, window: window}
	}
	v.page = number
	limits := v.m
	if v.window != nil {
		limits = v.window
	}
	if addr < limits.r.Start || addr > limits.r.End || n > limits.r.End-addr || need&^limits.access != 0 {
		return use{}, s.refusal()
	}
	v.m.moving++
	if v.window != nil {
		v.window.moving++
	}
	return use{m: v.m, window: v.window, index: int(number - v.m.pinned.r.Start/d.page), off: addr % d.page}, StatusSuccess
}

// side is whose a key is, and on whose behalf it is used.
type side uint8

const (
	sideLocal   side = iota // a local key, by the queue's own request.
	sideReceive             // a local key of a receive, by a peer's send.
	sideRemote              // a remote key, by a peer's read or write.
)

// refusal is the answer to a use that a key doesn't allow.
func (s side) refusal() Status {
	if s == sideRemote {
		return StatusRemoteAccess
	}
	return StatusLocalProtection
}

// lookupLocked finds what key means to a queue of pd: the region or fast key,
// its meaning, and that of a window before it.
func (d *Device) lookupLocked(pd *ProtectionDomain, key uint32, s side) (e *entry, m, window *meaning, status Status) {
	e = d.table.byKey(key)
	if d.closed || e == nil || e.key() != key || e.pd != pd {
		return nil, nil, nil, s.refusal()
	}
	if e.kind.isWindow() {
		if s != sideRemote || e.now == nil {
			return nil, nil, nil, s.refusal()
		}
		window, e = e.now, e.over
	}
	switch {
	case e.now != nil:
		return e, e.now, window, StatusSuccess
	case e.revoked && s != sideLocal && d.opts.HoldRevoked:
		return nil, nil, nil, statusTryLater
	}
	return nil, nil, nil, s.refusal()
}

func (d *Device) endUse(u use) {
	d.mu.Lock()
	u.m.moving--
	if u.window != nil {
		u.window.moving--
	}
	d.settled.Broadcast()
	d.mu.Unlock()
}

// forget ends a view, when its request goes on to another page or ends.
func (d *Device) forget(v *view) {
	d.mu.Lock()
	d.forgetLocked(v)
	d.unlock()
}

func (d *Device) forgetLocked(v *view) {
	if v.m == nil {
		return
	}
	v.m.viewed--
	if !v.m.revoked {
		d.settleLocked(v.e)
	}
	*v = view{}
}
