package trace

import (
	"encoding/binary"
	"hash/crc32"
)

// Version and Minor are of the format that this package writes. A reader
// refuses another Version, and skips what a later Minor added.
const (
	Version = 1
	Minor   = 0
)

// Limits of the format. Readers refuse what exceeds them, so they need no more
// memory than these say.
const (
	maxRaw    = 1 << 20          // of a block, decompressed
	maxStored = maxRaw + 64<<10  // of a block, in the file
	maxRecord = 256 << 10        // of a record's body
	maxString = 64 << 10         // of a string
	maxList   = 4096             // arguments, labels, frames
	blockSize = 256 << 10        // at which the writer ends a block
	maxTime   = int64(1<<62 - 1) // of times, so that sums don't overflow
)

// The file begins with fileMagic, version, minor and a checksum; each block
// with blockMagic. Neither is valid UTF-8, so that text is never taken for one.
var (
	fileMagic  = [8]byte{0xd7, 'P', 'D', 'T', 'R', 'C', '\r', '\n'}
	blockMagic = [4]byte{0xd7, 'B', 'L', 'K'}
)

const (
	fileHeaderSize  = 8 + 2 + 2 + 4
	blockHeaderSize = 40
)

const (
	blockRecords = 1
	blockEnd     = 2
)

const (
	codecNone = 0
	codecZstd = 1
)

type blockHeader struct {
	kind, codec uint8
	seq         uint32 // of the block
	stored, raw uint32 // bytes
	count       uint32 // records in the block
	first       uint64 // records before it
	sum         uint32 // of the stored bytes
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

func appendFileHeader(b []byte, version, minor uint16) []byte {
	n := len(b)
	b = append(b, fileMagic[:]...)
	b = binary.LittleEndian.AppendUint16(b, version)
	b = binary.LittleEndian.AppendUint16(b, minor)
	return binary.LittleEndian.AppendUint32(b, checksum(b[n:]))
}

func (h *blockHeader) append(b []byte) []byte {
	n := len(b)
	b = append(b, blockMagic[:]...)
	b = append(b, h.kind, h.codec, 0, 0)
	for _, v := range []uint32{h.seq, h.stored, h.raw, h.count} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	b = binary.LittleEndian.AppendUint64(b, h.first)
	b = binary.LittleEndian.AppendUint32(b, h.sum)
	return binary.LittleEndian.AppendUint32(b, checksum(b[n:]))
}

// parseBlockHeader reports whether b begins with the header of a block that
// can be read, or skipped.
func parseBlockHeader(b []byte) (h blockHeader, ok bool) {
	if len(b) < blockHeaderSize || [4]byte(b) != blockMagic ||
		binary.LittleEndian.Uint32(b[36:]) != checksum(b[:36]) {
		return h, false
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	h = blockHeader{
		kind: b[4], codec: b[5],
		seq: u32(8), stored: u32(12), raw: u32(16), count: u32(20),
		first: binary.LittleEndian.Uint64(b[24:]), sum: u32(32),
	}
	return h, h.stored <= maxStored && h.raw <= maxRaw
}

// tag is the type of a record.
type tag uint8

const (
	tagMeta    tag = 1
	tagProcess tag = 2
	tagThread  tag = 3
	tagMapping tag = 4
	tagStack   tag = 5
	tagEvent   tag = 6
	tagLost    tag = 7
	tagExit    tag = 8
)

// previous is what an event's fields are relative to. It is zero at the start
// of a block.
type previous struct {
	start    int64
	addr     uint64
	pid, tid uint32
}
