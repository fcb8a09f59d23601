// Package wire is the protocol between the harness and its agent in the virtual machine.
//
// Both sides exchange frames over one byte stream. A frame is a header of 12 bytes, little endian, and a payload:
//
//	0      2      3      4          8          12
//	| magic | kind |  0   |    id    |  length  | payload …
//
// The agent speaks first, with [Hello]. After that the harness makes calls, each under an id of its own that the agent repeats in
// all frames it sends for that call; calls may overlap.
package wire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// MaxPayload is the largest payload of a frame in bytes.
const MaxPayload = 1 << 20

const (
	magic      = 0x6470 // "pd"
	headerSize = 12
)

// Errors returned by [Reader.Read], wrapped.
var (
	// ErrProtocol means that the stream does not hold a frame here. There is no way to go on.
	ErrProtocol = errors.New("wire: protocol violated")
)

// Kind says what a frame means.
type Kind uint8

// The kinds of frame.
const (
	_ Kind = iota

	// Hello is sent once by the agent when the guest is set up. Payload: HelloMsg.
	Hello

	// Exec asks the agent to run a command. Payload: ExecMsg. Answered by Stdout and Stderr, then one Exit.
	Exec

	// Signal asks the agent to signal a command's process group. Payload: SignalMsg. Not answered; the id is the command's.
	Signal

	// Put asks the agent to write a file. Payload: PutMsg. Followed by Data frames and End, answered by Done.
	Put

	// Data is a part of a file.
	Data

	// End is the end of a file.
	End

	// Dump asks the agent to have the kernel print all blocked tasks and busy CPUs to the console. Answered by Done.
	Dump

	// PowerOff asks the agent to switch the machine off. Not answered.
	PowerOff

	// Stdout is a part of a command's standard output.
	Stdout

	// Stderr is a part of a command's standard error.
	Stderr

	// Exit is the end of a command. Payload: ExitMsg.
	Exit

	// Done is the end of another call. Payload: DoneMsg.
	Done

	kindEnd
)

// HelloMsg is the payload of [Hello].
type HelloMsg struct {
	Release string // the kernel's, as uname -r prints it
}

// ExecMsg is the payload of [Exec].
type ExecMsg struct {
	Args     []string
	Env      []string
	Dir      string
	User     string         // name in the guest's /etc/passwd
	Caps     []uintptr      // ambient capabilities
	Limits   map[int]uint64 // resource limits, soft and hard
	Combined bool           // standard error goes where standard output goes
}

// SignalMsg is the payload of [Signal].
type SignalMsg struct {
	Signal int
}

// PutMsg is the payload of [Put].
type PutMsg struct {
	Path string
	Mode uint32
}

// ExitMsg is the payload of [Exit].
type ExitMsg struct {
	Code   int    // exit status, -1 if it was killed or never ran
	Signal int    // signal that killed it, or 0
	Err    string // why it could not be run, or ""
}

// DoneMsg is the payload of [Done].
type DoneMsg struct {
	Err string
}

// Frame is one message.
type Frame struct {
	Kind    Kind
	ID      uint32
	Payload []byte
}

// Decode unmarshals the payload into v.
func (f Frame) Decode(v any) error {
	if err := json.Unmarshal(f.Payload, v); err != nil {
		return fmt.Errorf("decode frame of kind %d: %w: %w", f.Kind, ErrProtocol, err)
	}
	return nil
}

// Reader reads frames.
type Reader struct {
	r io.Reader
}

// NewReader returns a Reader on r, which should be buffered.
func NewReader(r io.Reader) *Reader {
	return &Reader{r: r}
}

// Read returns the next frame. The error is io.EOF exactly where the stream ends between two frames, and wraps io.ErrUnexpectedEOF where it
// ends within one.
func (r *Reader) Read() (Frame, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(r.r, h[:]); err != nil {
		if err == io.EOF {
			return Frame{}, io.EOF
		}
		return Frame{}, fmt.Errorf("read frame header: %w", err)
	}
	kind := Kind(h[2])
	size := binary.LittleEndian.Uint32(h[8:])
	switch {
	case binary.LittleEndian.Uint16(h[0:]) != magic:
		return Frame{}, fmt.Errorf("read frame header: %w: no magic in %x", ErrProtocol, h)
	case kind == 0 || kind >= kindEnd || h[3] != 0:
		return Frame{}, fmt.Errorf("read frame header: %w: kind %d.%d", ErrProtocol, kind, h[3])
	case size > MaxPayload:
		return Frame{}, fmt.Errorf("read frame header: %w: payload of %d bytes", ErrProtocol, size)
	}
	f := Frame{Kind: kind, ID: binary.LittleEndian.Uint32(h[4:])}
	if size == 0 {
		return f, nil
	}
	f.Payload = make([]byte, size)
	if _, err := io.ReadFull(r.r, f.Payload); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, fmt.Errorf("read frame payload: %w", err)
	}
	return f, nil
}

// Writer writes frames. Its methods may be called by several goroutines at once.
type Writer struct {
	mu  sync.Mutex
	w   io.Writer // guarded by mu
	buf []byte    // guarded by mu
}

// NewWriter returns a Writer on w. Each frame is one call of w.Write.
func NewWriter(w io.Writer) *Writer {
	return &Writer{w: w}
}

// Write sends payload, in several frames if it is larger than [MaxPayload]. An empty payload makes one frame.
func (w *Writer) Write(kind Kind, id uint32, payload []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for first := true; first || len(payload) > 0; first = false {
		part := payload[:min(len(payload), MaxPayload)]
		payload = payload[len(part):]
		b := w.buf[:0]
		b = binary.LittleEndian.AppendUint16(b, magic)
		b = append(b, byte(kind), 0)
		b = binary.LittleEndian.AppendUint32(b, id)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(part)))
		b = append(b, part...)
		w.buf = b
		if _, err := w.w.Write(b); err != nil {
			return fmt.Errorf("write frame of kind %d: %w", kind, err)
		}
	}
	return nil
}

// Send sends v as JSON in one frame.
func (w *Writer) Send(kind Kind, id uint32, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode frame of kind %d: %w", kind, err)
	}
	if len(b) > MaxPayload {
		return fmt.Errorf("encode frame of kind %d: %w: payload of %d bytes", kind, ErrProtocol, len(b))
	}
	return w.Write(kind, id, b)
}
