package trace

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

// WriterOptions configure a [Writer]. The zero value of each field means its
// default, so nil is a good choice.
type WriterOptions struct {
	// MaxBytes is the size of the file from which on events are dropped, and
	// counted in a last [Lost] record with cause LostLimit. Other records are
	// still written, so the file gets a little larger. Default: no limit.
	MaxBytes int64
}

// Writer writes a trace. It is not safe for concurrent use. After an error of
// the underlying writer every method returns that error.
type Writer struct {
	w       io.Writer
	opts    WriterOptions
	zstd    *zstd.Encoder
	err     error
	closed  bool
	block   []byte // records of the block in the making
	body    []byte
	out     []byte
	prev    previous
	next    previous // after the record in the making
	head    blockHeader
	written int64
	dropped Lost
}

// NewWriter returns a writer to w and writes the file's header. Nil Options
// are the defaults. The caller closes w after [Writer.Close].
func NewWriter(w io.Writer, opts *WriterOptions) (*Writer, error) {
	// The options are constants: they are right or wrong for ever.
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false),
		zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(maxRaw), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("write trace: %w", err)
	}
	t := &Writer{w: w, zstd: z, head: blockHeader{kind: blockRecords}}
	if opts != nil {
		t.opts = *opts
	}
	t.write(appendFileHeader(nil, Version, Minor))
	return t, t.err
}

func (t *Writer) write(b []byte) {
	if t.err != nil {
		return
	}
	n, err := t.w.Write(b)
	t.written += int64(n)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	if err != nil {
		t.err = fmt.Errorf("write trace: %w", err)
	}
}

// Meta writes what the recording is of. It should be the first record, and may
// be repeated when more is known.
func (t *Writer) Meta(m *Meta) error { return t.record(m) }

// Process writes that a process exists.
func (t *Writer) Process(p *Process) error { return t.record(p) }

// Thread writes the name of a thread.
func (t *Writer) Thread(th *Thread) error { return t.record(th) }

// Mapping writes what is mapped somewhere.
func (t *Writer) Mapping(m *Mapping) error { return t.record(m) }

// Stack writes a call stack: before or after the events that refer to it.
func (t *Writer) Stack(s *Stack) error { return t.record(s) }

// Lost writes that records are missing. The counts of all Lost records add up.
func (t *Writer) Lost(l *Lost) error { return t.record(l) }

// Exit writes how a process ended.
func (t *Writer) Exit(x *Exit) error { return t.record(x) }

// Event writes an event. Beyond WriterOptions.MaxBytes it drops and counts it.
func (t *Writer) Event(e *Event) error {
	if t.opts.MaxBytes > 0 && t.written+int64(len(t.block))/4 >= t.opts.MaxBytes {
		if t.dropped.Records++; t.dropped.Records == 1 {
			t.dropped.Time = max(e.Start, 0)
		}
		return t.state()
	}
	return t.record(e)
}

func (t *Writer) state() error {
	if t.closed {
		return fmt.Errorf("write trace: %w", ErrClosed)
	}
	return t.err
}

// record returns a wrapped ErrRecord, and stays usable, if r can't be written.
func (t *Writer) record(r Record) error {
	if err := t.state(); err != nil {
		return err
	}
	if err := r.check(); err != nil {
		return fmt.Errorf("write trace: %w", err)
	}
	t.next = t.prev
	t.body = r.append(t.body[:0], &t.next)
	if len(t.body) > maxRecord {
		return fmt.Errorf("write trace: %w", bad("%d bytes", len(t.body)))
	}
	t.prev = t.next
	t.block = append(t.block, byte(r.tag()))
	t.block = binary.AppendUvarint(t.block, uint64(len(t.body)))
	t.block = append(t.block, t.body...)
	t.head.count++
	if len(t.block) >= blockSize {
		return t.Flush()
	}
	return nil
}

// Flush writes what has been gathered as a block of its own, so that it can be
// read whatever happens later. Blocks compress the better the larger they are.
func (t *Writer) Flush() error {
	if err := t.state(); err != nil || t.head.count == 0 {
		return err
	}
	stored := t.zstd.EncodeAll(t.block, t.out[:0])
	t.out = stored
	t.head.codec = codecZstd
	if len(stored) >= len(t.block) {
		stored, t.head.codec = t.block, codecNone
	}
	t.head.raw, t.head.stored, t.head.sum = uint32(len(t.block)), uint32(len(stored)), checksum(stored)
	t.write(t.head.append(nil))
	t.write(stored)
	t.head.seq++
	t.head.first += uint64(t.head.count)
	t.head.count = 0
	t.block, t.prev = t.block[:0], previous{}
	return t.err
}

// Written returns the number of bytes written so far, without what has not
// been flushed.
func (t *Writer) Written() int64 { return t.written }

// Close flushes and writes the end of the trace. It doesn't close the
// underlying writer. A second Close does nothing.
func (t *Writer) Close() error {
	if t.closed {
		return nil
	}
	if t.dropped.Records > 0 {
		t.dropped.Cause = LostLimit
		if err := t.record(&t.dropped); err != nil {
			return err
		}
	}
	err := t.Flush()
	t.closed = true
	if err != nil {
		return err
	}
	end := blockHeader{kind: blockEnd, seq: t.head.seq, first: t.head.first, sum: checksum(nil)}
	t.write(end.append(nil))
	return t.err
}
