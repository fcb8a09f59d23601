package trace

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"time"

	"github.com/klauspost/compress/zstd"
)

// Reader reads a trace, from its beginning to its end, in memory bounded by the
// format's limits. It is not safe for concurrent use.
type Reader struct {
	in     *bufio.Reader
	zstd   *zstd.Decoder
	offset int64 // of in
	stored []byte
	raw    []byte

	rest    []byte // of the current block
	left    uint32 // records in it
	prev    previous
	fields  decoder
	records uint64 // read, skipped or known to be missing
	last    time.Duration
	ended   bool // the end block was seen
	skipped uint64
	minor   uint16

	hole   bool // bytes were skipped since the last good block
	damage DamageError
	err    error // what Next returns from now on

	meta    Meta
	process Process
	thread  Thread
	mapping Mapping
	stack   Stack
	event   Event
	lost    Lost
	exit    Exit
}

// NewReader reads the file's header from r. It returns a wrapped [ErrFormat] if
// r isn't a trace, and a wrapped [ErrVersion] if it is one that this package
// can't read. It reads ahead.
func NewReader(r io.Reader) (*Reader, error) {
	t := &Reader{in: bufio.NewReaderSize(r, 64<<10)}
	b, err := t.in.Peek(fileHeaderSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	switch {
	case len(b) == 0:
		return nil, fmt.Errorf("read trace: %w: it is empty", ErrFormat)
	case len(b) < len(fileMagic) || [8]byte(b) != fileMagic:
		return nil, fmt.Errorf("read trace: %w", ErrFormat)
	case len(b) < fileHeaderSize:
		return nil, fmt.Errorf("read trace: %w in its header", ErrTruncated)
	case binary.LittleEndian.Uint32(b[12:]) != checksum(b[:12]):
		return nil, fmt.Errorf("read trace: %w in its header", ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint16(b[8:]); v != Version {
		return nil, fmt.Errorf("read trace: %w %d; this program reads version %d", ErrVersion, v, Version)
	}
	t.minor = binary.LittleEndian.Uint16(b[10:])
	t.discard(fileHeaderSize)
	t.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxRaw),
		zstd.WithDecoderMaxWindow(maxRaw), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	return t, nil
}

// Skipped returns the number of records so far that a later version of the
// format defines.
func (t *Reader) Skipped() uint64 { return t.skipped }

// Offset returns how many bytes of the file have been used so far.
func (t *Reader) Offset() int64 { return t.offset }

func (t *Reader) discard(n int) {
	// It was peeked at, so it is there.
	n, _ = t.in.Discard(n)
	t.offset += int64(n)
}

// Next returns the next record that is intact. It is valid until the following
// call. At the end of the trace it returns io.EOF, or a *[DamageError] if
// anything was missing on the way, or an error of the underlying reader.
func (t *Reader) Next() (Record, error) {
	for t.err == nil {
		if t.left > 0 {
			if r := t.decode(); r != nil {
				return r, nil
			}
			continue
		}
		if len(t.rest) > 0 {
			// More bytes than records.
			t.rest = nil
			t.broken(t.offset, 0)
		}
		if r := t.load(); r != nil {
			return r, nil
		}
	}
	return nil, t.err
}

// All returns the records up to the end or an error other than io.EOF, which
// comes last with a nil Record.
func (t *Reader) All() iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		for {
			r, err := t.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			if !yield(r, err) || err != nil {
				return
			}
		}
	}
}

// decode returns the next record of the block; nil if there is none or it is of
// an unknown kind.
func (t *Reader) decode() Record {
	t.left--
	if len(t.rest) == 0 {
		return t.spoiled()
	}
	n, size := binary.Uvarint(t.rest[1:])
	if size <= 0 || n > maxRecord || n > uint64(len(t.rest)-1-size) {
		return t.spoiled()
	}
	kind, body := tag(t.rest[0]), t.rest[1+size:][:n]
	d := &t.fields
	*d = decoder{b: body}
	t.rest = t.rest[1+size+int(n):]
	var r Record
	switch kind {
	case tagEvent:
		t.event.decode(d, &t.prev)
		if d.bad {
			return t.spoiled()
		}
		t.records++
		if t.event.Kind >= kindEnd {
			t.skipped++
			return nil
		}
		t.last = t.event.Start
		return &t.event
	case tagMeta:
		r = &t.meta
	case tagProcess:
		r = &t.process
	case tagThread:
		r = &t.thread
	case tagMapping:
		r = &t.mapping
	case tagStack:
		r = &t.stack
	case tagLost:
		r = &t.lost
	case tagExit:
		r = &t.exit
	default:
		t.records++
		t.skipped++
		return nil
	}
	if r.decode(d, &t.prev); d.bad {
		return t.spoiled()
	}
	t.records++
	return r
}

// spoiled gives the rest of the block up.
func (t *Reader) spoiled() Record {
	missing := uint64(t.left) + 1
	t.left, t.rest = 0, nil
	t.records += missing
	t.broken(t.offset, missing)
	return t.gap(missing)
}

// broken notes damage.
func (t *Reader) broken(at int64, records uint64) {
	if t.damage.Places == 0 {
		t.damage.Offset = at
	}
	t.damage.Places++
	t.missing(records)
}

func (t *Reader) missing(records uint64) {
	if t.damage.Records += records; t.damage.Records < records {
		t.damage.Records = math.MaxUint64
	}
}

// gap returns the record that says so.
func (t *Reader) gap(records uint64) Record {
	t.lost = Lost{Time: t.last, Cause: LostDamage, Records: records}
	return &t.lost
}

// hurt notes that the bytes from here on are of no use.
func (t *Reader) hurt() {
	if !t.hole {
		t.hole = true
		t.broken(t.offset, 0)
	}
}

// load reads the next block that can be used. It returns a record if some are
// missing before that, and sets err at the end.
func (t *Reader) load() Record {
	for {
		b, err := t.in.Peek(blockHeaderSize)
		if err != nil && !errors.Is(err, io.EOF) {
			t.err = fmt.Errorf("read trace: %w", err)
			return nil
		}
		if t.ended {
			if len(b) > 0 {
				t.hurt() // something follows the end
			}
			return t.finish(0)
		}
		if len(b) == 0 {
			return t.finish(0)
		}
		h, ok := parseBlockHeader(b)
		if !ok || h.first < t.records {
			if len(b) < blockHeaderSize && !t.hole {
				// Nothing but a part of a header.
				return t.finish(0)
			}
			t.hurt()
			t.resync(b)
			continue
		}
		at := t.offset
		t.discard(blockHeaderSize)
		if h.kind == blockEnd {
			t.ended = true
			return t.reached(&h)
		}
		if cap(t.stored) < int(h.stored) {
			t.stored = make([]byte, max(int(h.stored), min(2*cap(t.stored), maxStored)))
		}
		t.stored = t.stored[:h.stored]
		n, err := io.ReadFull(t.in, t.stored)
		t.offset += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return t.finish(h.first - t.records + uint64(h.count))
		}
		if err != nil {
			t.err = fmt.Errorf("read trace: %w", err)
			return nil
		}
		if h.sum != checksum(t.stored) || !t.unpack(&h) {
			// The next block tells how much is missing.
			if !t.hole {
				t.hole = true
				t.broken(at, 0)
			}
			continue
		}
		if h.kind != blockRecords {
			t.skipped += uint64(h.count)
			t.rest, t.left = nil, 0
			r := t.reached(&h)
			t.records += uint64(h.count)
			if r != nil {
				return r
			}
			continue
		}
		t.left, t.prev = h.count, previous{}
		return t.reached(&h)
	}
}

// resync moves on to where a block may begin. b is what can be seen.
func (t *Reader) resync(b []byte) {
	for n := 1; ; n++ {
		if n == len(b) || b[n] == blockMagic[0] {
			t.discard(n)
			return
		}
	}
}

// unpack fills rest from stored.
func (t *Reader) unpack(h *blockHeader) bool {
	switch h.codec {
	case codecNone:
		t.rest = t.stored
	case codecZstd:
		raw, err := t.zstd.DecodeAll(t.stored, t.raw[:0])
		if err != nil {
			return false
		}
		t.raw, t.rest = raw, raw
	default:
		return false
	}
	return len(t.rest) == int(h.raw)
}

// reached accounts for what is missing before a good block.
func (t *Reader) reached(h *blockHeader) Record {
	missing := h.first - t.records
	hole := t.hole
	t.hole = false
	if missing == 0 {
		return nil
	}
	t.records = h.first
	if !hole {
		// Whole blocks are gone, without a trace of them.
		t.broken(t.offset, 0)
	}
	t.missing(missing)
	return t.gap(missing)
}

// finish sets what Next returns at the end, and returns the record that goes
// before it if the end is missing.
func (t *Reader) finish(missing uint64) Record {
	if !t.ended {
		t.damage.Truncated = true
		if t.damage.Places == 0 {
			t.damage.Offset = t.offset
		}
		t.missing(missing)
	}
	t.left, t.rest = 0, nil
	if t.err = io.EOF; t.damage.Truncated || t.damage.Places > 0 {
		t.err = &t.damage
	}
	if t.ended {
		return nil
	}
	return t.gap(missing)
}
