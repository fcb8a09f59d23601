package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
)

// sender is the sending end.
type sender struct {
	a     *adapter
	addr  string
	block int
	renew int
}

func sendCommand(ctx context.Context, args []string) (err error) {
	f := flag.NewFlagSet("rdmacopy send", flag.ContinueOnError)
	addr := f.String("to", "localhost:7471", "`address` of the server")
	opts := adapterFlags(f)
	way := f.String("way", wayCache, "how memory is registered: cache, register, bounce, or all for a comparison")
	size := f.Int("block", 64<<10, "`bytes` of a transfer")
	renew := f.Int("renew", 32, "a buffer is freed and allocated again after this many `uses`; 0: never")
	if err := parse(f, args, 1); err != nil {
		return err
	}
	list := []string{*way}
	if *way == "all" {
		list = ways
	}
	for _, w := range list {
		if err := checkWay(w); err != nil {
			return err
		}
	}
	if *size < 1 || *size > maxBlock || *renew < 0 {
		return fmt.Errorf("block of %d bytes (at most %d), renew after %d", *size, maxBlock, *renew)
	}
	a, err := openAdapter(opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	s := &sender{a: a, addr: *addr, block: *size, renew: *renew}
	var results []result
	for _, w := range list {
		r, err := s.send(ctx, f.Arg(0), w)
		if err != nil {
			return fmt.Errorf("send %s: %w", f.Arg(0), err)
		}
		results = append(results, r)
	}
	return printResults(os.Stdout, results)
}

// result is one copy.
type result struct {
	way         string
	bytes       int64
	elapsed     time.Duration
	here, there wayStats
}

// printResults prints a table.
func printResults(w io.Writer, results []result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "way\tbytes\ttime\trate\tacquires\thits\tregistrations\tsaved\tcopied\t")
	for _, r := range results {
		acquires, hits := r.here.Acquires+r.there.Acquires, r.here.Hits+r.there.Hits
		share := "-"
		if r.way == wayCache {
			share = fmt.Sprintf("%.1f %%", 100*float64(hits)/float64(max(acquires, 1)))
		}
		regs := r.here.Registrations + r.there.Registrations
		fmt.Fprintf(t, "%s\t%d\t%.2f s\t%s\t%d\t%s\t%d\t%d\t%s\t\n", r.way, r.bytes, r.elapsed.Seconds(), rate(r.bytes, r.elapsed),
			acquires, share, regs, acquires-regs, formatBytes(float64(r.here.Copied+r.there.Copied)))
	}
	return t.Flush()
}

// send copies a file.
func (s *sender) send(ctx context.Context, path, way string) (res result, err error) {
	file, err := os.Open(path)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return res, err
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", s.addr)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	q, err := s.a.dev.NewQueue(&verbs.QueueOptions{Depth: slots})
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, q.Close()) }()
	if err := q.Handshake(ctx, conn); err != nil {
		return res, err
	}
	p, err := newPool(ctx, s.a, way, slots, s.block, s.renew)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()

	begin := time.Now()
	c := &copying{q: q, p: p, ctl: newControl(conn), file: file, size: info.Size(), bar: newBar(way, info.Size())}
	defer c.bar.end()
	for i := range slots {
		c.free = append(c.free, i)
	}
	if err := c.ctl.enc.Encode(request{Name: filepath.Base(path), Size: info.Size(), Block: s.block, Way: way, Renew: s.renew}); err != nil {
		return res, err
	}
	last, err := c.run(ctx)
	if err != nil {
		// Nothing may write to or read from the buffers when they are freed.
		return res, errors.Join(err, q.Close())
	}
	return result{way: way, bytes: info.Size(), elapsed: time.Since(begin), here: p.stats, there: last.Stats}, c.verify(last.CRC)
}

// copying is one file on its way. One goroutine does all but read offers.
type copying struct {
	q    *verbs.Queue
	p    *pool
	ctl  *control
	file *os.File
	size int64
	bar  *bar

	free   []int            // buffers
	flying map[int]inFlight // by buffer
	next   int64            // offset in the file
	sent   int64            // bytes that have arrived
}

// inFlight is a block on its way.
type inFlight struct {
	t     transfer
	block block
}

// run sends all blocks and returns the server's last word.
func (c *copying) run(ctx context.Context) (*reply, error) {
	c.flying = map[int]inFlight{}
	answers, failed := make(chan answer), make(chan error, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for {
			var a answer
			if err := c.ctl.dec.Decode(&a); err != nil {
				failed <- err
				cancel() // So that nobody waits for completions.
				return
			}
			select {
			case answers <- a:
			case <-ctx.Done():
				return
			}
			if a.Offer == nil {
				return
			}
		}
	}()
	for c.sent < c.size {
		// Take an offer if there is one, wait for one if nothing else is to do.
		var a answer
		switch {
		case c.next == c.size || len(c.free) == 0:
			if err := c.completions(ctx); err != nil {
				return nil, peerError(err, failed)
			}
			continue
		case len(c.flying) == 0:
			select {
			case a = <-answers:
			case err := <-failed:
				return nil, err
			}
		default:
			select {
			case a = <-answers:
			default:
				if err := c.completions(ctx); err != nil {
					return nil, peerError(err, failed)
				}
				continue
			}
		}
		if a.Offer == nil {
			return nil, fmt.Errorf("%w: %s", errPeer, a.Error)
		}
		if err := c.start(ctx, a.Offer); err != nil {
			return nil, err
		}
	}
	if err := c.ctl.enc.Encode(block{End: true}); err != nil {
		return nil, err
	}
	for {
		select {
		case a := <-answers:
			switch {
			case a.Reply != nil:
				return a.Reply, nil
			case a.Offer == nil:
				return nil, fmt.Errorf("%w: %s", errPeer, a.Error)
			}
		case err := <-failed:
			return nil, err
		}
	}
}

// peerError prefers what broke the connection, if that did.
func peerError(err error, failed <-chan error) error {
	select {
	case cause := <-failed:
		return cause
	default:
		return err
	}
}

// start reads a block and writes it to the memory on offer.
func (c *copying) start(ctx context.Context, o *offer) error {
	i := c.free[len(c.free)-1]
	n := int(min(int64(len(c.p.bufs[i])), c.size-c.next))
	if _, err := c.file.ReadAt(c.p.bufs[i][:n], c.next); err != nil {
		return err
	}
	t, err := c.p.prepare(ctx, i, n, device.LocalRead)
	if err != nil {
		return err
	}
	c.p.out(t)
	if err := c.q.Write(uint64(i), t.mem, t.local, o.Addr, o.Key); err != nil {
		return errors.Join(err, t.release())
	}
	c.free = slices.Delete(c.free, len(c.free)-1, len(c.free))
	c.flying[i] = inFlight{t, block{Slot: o.Slot, Off: c.next, Len: n}}
	c.next += int64(n)
	return nil
}

// completions waits for writes that are over and tells the server.
func (c *copying) completions(ctx context.Context) error {
	var done [slots]verbs.Completion
	n, err := c.q.Wait(ctx, done[:])
	if err != nil {
		return err
	}
	for _, d := range done[:n] {
		i := int(d.ID)
		f := c.flying[i]
		delete(c.flying, i)
		c.free = append(c.free, i)
		if err := errors.Join(d.Err(), c.p.done(i, f.t)); err != nil {
			return err
		}
		if err := c.ctl.enc.Encode(f.block); err != nil {
			return err
		}
		c.sent += int64(f.block.Len)
		c.bar.show(c.sent)
	}
	return nil
}

// verify compares the file with what the server has.
func (c *copying) verify(crc uint32) error {
	mine, err := sum(io.NewSectionReader(c.file, 0, c.size))
	if err != nil {
		return err
	}
	if mine != crc {
		return fmt.Errorf("%w has other bytes: checksum %#x, here %#x", errPeer, crc, mine)
	}
	return nil
}
