package verbs

import (
	"context"
	"fmt"
	"os"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
)

// fastKey is a memory window of type 2.
type fastKey struct {
	mw     *ibv.MW
	max    uint64
	key    uint32        // as it will be when what is posted is done.
	over   *registration // whose pages it means then; nil for nothing.
	posted int           // requests that change it and aren't polled.
	q      *Queue        // that binds it; nil if it is unbound or the queue is gone.
}

// AllocFastKey implements [device.FastRegistrar] by a memory window of type 2,
// where Info.WindowType2 says that there are any. A window is for peers: what is
// posted for its key must give remote access and nothing else, and its
// registration needs WindowBind. The key serves the peer of the queue that it is
// posted to.
func (d *Device) AllocFastKey(ctx context.Context, maxBytes uint64) (device.FastKey, error) {
	k, err := d.allocFastKey(ctx, maxBytes)
	if err != nil {
		return device.FastKey{}, fmt.Errorf("verbs: allocate fast key of %d bytes: %w", maxBytes, err)
	}
	return k, nil
}

func (d *Device) allocFastKey(ctx context.Context, maxBytes uint64) (device.FastKey, error) {
	if err := ctx.Err(); err != nil {
		return device.FastKey{}, err
	}
	if maxBytes == 0 {
		return device.FastKey{}, device.ErrInvalid
	}
	if m := d.limits.MaxRange; m != 0 && maxBytes > m {
		return device.FastKey{}, fmt.Errorf("at most %d bytes: %w", m, device.ErrTooLarge)
	}
	if err := d.begin(); err != nil {
		return device.FastKey{}, err
	}
	defer d.end()
	if !d.info.WindowType2 {
		return device.FastKey{}, notSupported(d.info.Name + " has no memory windows of type 2")
	}
	mw, err := d.lib.AllocMW(d.pd, ibv.MWType2)
	if err != nil {
		return device.FastKey{}, allocError(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next++
	d.fast[d.next] = &fastKey{mw: mw, max: maxBytes, key: mw.RKey}
	return device.FastKey{Key: mw.RKey, MaxBytes: maxBytes, Handle: d.next}, nil
}

// FreeFastKey implements [device.FastRegistrar]. The key of a queue that was
// closed means nothing any more.
func (d *Device) FreeFastKey(k device.FastKey) error {
	if err := d.freeFastKey(k); err != nil {
		return fmt.Errorf("verbs: free fast key %#x: %w", k.Key, err)
	}
	return nil
}

func (d *Device) freeFastKey(k device.FastKey) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return device.ErrClosed
	}
	f := d.fast[k.Handle]
	if f == nil || !device.SameKeyIndex(f.key, k.Key) {
		return device.ErrNotRegistered
	}
	if f.posted > 0 || f.over != nil && f.q != nil {
		return device.ErrBusy
	}
	if err := d.lib.DeallocMW(f.mw); err != nil {
		return callError("ibv_dealloc_mw", err)
	}
	if f.over != nil {
		f.over.windows--
	}
	delete(d.fast, k.Handle)
	return nil
}

// fastKeyLocked finds the entry that a key names.
func (d *Device) fastKeyLocked(key uint32) *fastKey {
	for _, f := range d.fast {
		if device.SameKeyIndex(f.key, key) {
			return f
		}
	}
	return nil
}

// fastRequests are the posted requests that change keys, by identifier.
type fastRequests struct {
	next  uint64
	calls map[uint64]func(error)
}

func (f *fastRequests) add(call func(error)) uint64 {
	if f.calls == nil {
		f.calls = map[uint64]func(error){}
	}
	f.next++
	id := f.next&idMask | idFast
	f.calls[id] = call
	return id
}

// over returns what remains to be called for a request that is over.
func (f *fastRequests) over(id uint64, err error) func() {
	call := f.calls[id]
	delete(f.calls, id)
	if call == nil {
		return nil
	}
	return func() { call(err) }
}

// all ends every request with err.
func (f *fastRequests) all(err error) []func() {
	var calls []func()
	for _, call := range f.calls {
		calls = append(calls, func() { call(err) })
	}
	f.calls = nil
	return calls
}

// orphan notes that the keys bound by a queue died with it.
func (d *Device) orphan(q *Queue) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.fast {
		if f.q == q {
			f.q = nil
		}
	}
}

// PostFastRegister implements [device.WorkQueue]: it binds a window of type 2.
// That the window means nothing is checked when it is posted, assuming that what
// was posted before succeeds. Done is called by who polls the completion, which
// isn't reported otherwise.
func (q *Queue) PostFastRegister(wr device.FastRegister) error {
	if err := q.fastRegister(wr); err != nil {
		return fmt.Errorf("verbs: post fast register of key %#x, %v: %w", wr.Key, wr.Range, err)
	}
	return nil
}

func (q *Queue) fastRegister(wr device.FastRegister) error {
	d := q.d
	e, err := d.hold(wr.Over, wr.Range, wr.Access)
	if err != nil {
		return err
	}
	if d.info.WindowType1 {
		d.exposer.mu.Lock()
		err = d.checkBounds(e, wr.Range)
		d.exposer.mu.Unlock()
		if err != nil {
			d.letGo(e)
			return err
		}
	}
	d.mu.Lock()
	f := d.fastKeyLocked(wr.Key)
	switch {
	case f == nil:
		err = fmt.Errorf("no such fast key: %w", device.ErrInvalid)
	case uint64(wr.Range.RoundOut(uintptr(os.Getpagesize())).Len()) > f.max:
		err = fmt.Errorf("at most %d bytes: %w", f.max, device.ErrTooLarge)
	case f.over != nil:
		err = fmt.Errorf("the key means something: %w", device.ErrInvalid)
	}
	if err != nil {
		e.windows--
		d.mu.Unlock()
		return err
	}
	old := *f
	f.over, f.key, f.q = e, wr.Key, q
	f.posted++
	d.mu.Unlock()

	err = q.postFast(func(s *ibv.SendWR) {
		s.Opcode = ibv.WRBindMW
		s.BindMW, s.BindRKey = f.mw, wr.Key
		s.BindInfo = ibv.MWBindInfo{MR: e.mr, Addr: uint64(wr.Range.Start), Length: uint64(wr.Range.Len()), Access: windowFlags(wr.Access)}
	}, func() {
		// Providers compare the window's key with the adapter's.
		f.mw.RKey = wr.Key
	}, func(err error) {
		d.mu.Lock()
		f.posted--
		if err != nil {
			// What a failed binding leaves of the window only freeing it tells.
			f.q = nil
		}
		d.mu.Unlock()
		if wr.Done != nil {
			wr.Done(queueError(err))
		}
	})
	if err != nil {
		d.mu.Lock()
		f.over, f.key, f.q = old.over, old.key, old.q
		f.posted--
		e.windows--
		d.mu.Unlock()
	}
	return err
}

// PostLocalInvalidate implements [device.WorkQueue], with the key of a window.
func (q *Queue) PostLocalInvalidate(wr device.LocalInvalidate) error {
	if err := q.localInvalidate(wr); err != nil {
		return fmt.Errorf("verbs: post local invalidate of key %#x: %w", wr.Key, err)
	}
	return nil
}

func (q *Queue) localInvalidate(wr device.LocalInvalidate) error {
	d := q.d
	d.mu.Lock()
	f := d.fastKeyLocked(wr.Key)
	if f == nil || f.key != wr.Key || f.over == nil || f.q != q {
		d.mu.Unlock()
		return fmt.Errorf("not a key that this queue has given a meaning: %w", device.ErrInvalid)
	}
	e := f.over
	f.over = nil
	f.posted++
	d.mu.Unlock()

	err := q.postFast(func(s *ibv.SendWR) {
		s.Opcode, s.Invalidate = ibv.WRLocalInv, wr.Key
	}, func() {}, func(err error) {
		d.mu.Lock()
		f.posted--
		switch {
		case err == nil:
			e.windows--
		case f.over == nil:
			f.over, f.q = e, nil
		}
		d.mu.Unlock()
		if wr.Done != nil {
			wr.Done(queueError(err))
		}
	})
	if err != nil {
		d.mu.Lock()
		f.over = e
		f.posted--
		d.mu.Unlock()
	}
	return err
}

func queueError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", device.ErrQueue, err)
}

// postFast posts a request whose completion goes to done. posted is called
// under the queue's lock once it is posted.
func (q *Queue) postFast(fill func(*ibv.SendWR), posted func(), done func(error)) error {
	if err := q.begin(); err != nil {
		return err
	}
	defer q.mu.Unlock()
	if q.err != nil {
		return queueError(q.err)
	}
	if q.sends == q.depth {
		return fmt.Errorf("%d requests: %w", q.sends, device.ErrBusy)
	}
	id := q.fast.add(done)
	if err := q.postLocked(id, fill); err != nil {
		q.fast.over(id, nil)
		return err
	}
	posted()
	return nil
}
