package verbs

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"time"
)

// maxHello is the longest message of a handshake.
const maxHello = 4096

// hello is what each side of a handshake sends.
type hello struct {
	Protocol string   `json:"protocol"`
	Endpoint Endpoint `json:"endpoint"`
}

const protocol = "pindown-verbs-1"

// Handshake connects the queue with that of a peer who does the same on the
// other end of conn, usually TCP. When it returns nil, both queues are connected
// and can be sent to. The connection remains the caller's, with not a byte more
// read than was meant for the handshake.
//
// What the peer says is trusted: use a connection that only those can reach who
// may.
func (q *Queue) Handshake(ctx context.Context, conn net.Conn) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := q.handshake(conn)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("verbs: handshake with %v: %w", conn.RemoteAddr(), err)
	}
	return nil
}

func (q *Queue) handshake(conn net.Conn) error {
	if err := sendMessage(conn, hello{protocol, q.local}); err != nil {
		return err
	}
	var peer hello
	if err := receiveMessage(conn, &peer); err != nil {
		return err
	}
	if peer.Protocol != protocol {
		return fmt.Errorf("protocol %q, want %q: %w", peer.Protocol, protocol, ErrHandshake)
	}
	if err := q.connect(peer.Endpoint); err != nil {
		return err
	}
	// The peer's queue must be connected before it is sent anything.
	if _, err := conn.Write([]byte{ready}); err != nil {
		return err
	}
	var b [1]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return err
	}
	if b[0] != ready {
		return fmt.Errorf("byte %#x: %w", b[0], ErrHandshake)
	}
	return nil
}

const ready = 'R'

// sendMessage writes v as JSON after its length.
func sendMessage(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...))
	return err
}

// receiveMessage reads what sendMessage wrote.
func receiveMessage(r io.Reader, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxHello {
		return fmt.Errorf("message of %d bytes: %w", n, ErrHandshake)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	return nil
}
