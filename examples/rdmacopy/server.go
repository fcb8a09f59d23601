package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
)

// server is the receiving end.
type server struct {
	a   *adapter
	dir *os.Root
}

func serveCommand(ctx context.Context, args []string) (err error) {
	f := flag.NewFlagSet("rdmacopy serve", flag.ContinueOnError)
	addr := f.String("listen", "localhost:7471", "`address` to listen at; whoever can reach it can write files")
	opts := adapterFlags(f)
	dir := f.String("dir", ".", "`directory` that files are written to")
	count := f.Int("count", 0, "end after this many `files`; 0: never")
	if err := parse(f, args, 0); err != nil {
		return err
	}
	root, err := os.OpenRoot(*dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	a, err := openAdapter(opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", *addr)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	fmt.Fprintf(os.Stderr, "listening at %v\n", l.Addr())
	s := &server{a: a, dir: root}
	// One file at a time, so that the figures are those of one.
	for n := 0; *count == 0 || n < *count; n++ {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if err := s.serve(ctx, conn); err != nil {
			fmt.Fprintf(os.Stderr, "%v: %v\n", conn.RemoteAddr(), err)
		}
	}
	return l.Close()
}

// serve takes one file.
func (s *server) serve(ctx context.Context, conn net.Conn) (err error) {
	defer func() { err = errors.Join(err, conn.Close()) }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	q, err := s.a.dev.NewQueue(&verbs.QueueOptions{Depth: slots})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.Close()) }()
	if err := q.Handshake(ctx, conn); err != nil {
		return err
	}
	ctl := newControl(conn)
	var req request
	if err := ctl.dec.Decode(&req); err != nil {
		return err
	}
	rep, err := s.receive(ctx, ctl, q, req)
	a := answer{Reply: rep}
	if err != nil {
		a = answer{Error: err.Error()}
	}
	return errors.Join(err, ctl.enc.Encode(a))
}

func (s *server) receive(ctx context.Context, ctl *control, q *verbs.Queue, req request) (rep *reply, err error) {
	if err := checkWay(req.Way); err != nil {
		return nil, err
	}
	if req.Block < 1 || req.Block > maxBlock || req.Size < 0 || req.Renew < 0 {
		return nil, fmt.Errorf("request %+v", req)
	}
	// It gets its name when all of it is there: what the client sends may be the
	// file of that name in this very directory. It can't lead out of there.
	part := req.Name + ".part"
	file, err := s.dir.Create(part)
	if err != nil {
		return nil, err
	}
	defer func() {
		err = errors.Join(err, file.Close())
		if err != nil {
			err = errors.Join(err, s.dir.Remove(part))
		}
	}()
	p, err := newPool(ctx, s.a, req.Way, slots, req.Block, req.Renew)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	open := make(map[int]transfer, slots) // what the client may write to
	defer func() {
		if len(open) > 0 {
			// The client may still be writing: its queue must be gone first.
			err = errors.Join(err, q.Close())
		}
		for _, t := range open {
			err = errors.Join(err, t.release())
		}
	}()
	offerSlot := func(i int) error {
		t, err := p.prepare(ctx, i, req.Block, device.LocalWrite|device.RemoteWrite)
		if err != nil {
			return err
		}
		open[i] = t
		return ctl.enc.Encode(answer{Offer: &offer{Slot: i, Addr: uint64(t.mem.Start), Key: t.remote}})
	}
	// No more than the file needs.
	left := (req.Size+int64(req.Block)-1)/int64(req.Block) - slots
	for i := range min(slots, int(left+slots)) {
		if err := offerSlot(i); err != nil {
			return nil, err
		}
	}
	for {
		var b block
		if err := ctl.dec.Decode(&b); err != nil {
			return nil, err
		}
		if b.End {
			break
		}
		t, ok := open[b.Slot]
		if !ok || b.Len < 1 || b.Len > req.Block || b.Off < 0 || b.Off+int64(b.Len) > req.Size {
			return nil, fmt.Errorf("block %+v", b)
		}
		if _, err := file.WriteAt(p.in(t, b.Len), b.Off); err != nil {
			return nil, err
		}
		delete(open, b.Slot)
		if err := p.done(b.Slot, t); err != nil {
			return nil, err
		}
		if left--; left >= 0 {
			if err := offerSlot(b.Slot); err != nil {
				return nil, err
			}
		}
	}
	if _, err := file.Seek(0, 0); err != nil {
		return nil, err
	}
	crc, err := sum(file)
	if err != nil {
		return nil, err
	}
	if err := s.dir.Rename(part, req.Name); err != nil {
		return nil, err
	}
	fmt.Fprintf(os.Stderr, "%s: %d bytes, way %s, %d of %d acquires were hits\n", req.Name, req.Size, req.Way, p.stats.Hits, p.stats.Acquires)
	return &reply{CRC: crc, Stats: p.stats}, nil
}
