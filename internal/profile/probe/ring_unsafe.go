package probe

import (
	"encoding/binary"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const perfAttrSize = unsafe.Sizeof(unix.PerfEventAttr{})

// perfRing is the buffer of a perf event, mapped. Its first page holds the
// positions (struct perf_event_mmap_page).
type perfRing struct {
	fd         int
	mem        []byte
	head, tail *atomic.Uint64
	data       []byte
	scratch    []byte
}

const (
	// Offsets in struct perf_event_mmap_page.
	dataHead = 1024
	dataTail = 1032
)

func newPerfRing(fd int, mem []byte) *perfRing {
	return &perfRing{
		fd: fd, mem: mem,
		head: (*atomic.Uint64)(unsafe.Pointer(&mem[dataHead])),
		tail: (*atomic.Uint64)(unsafe.Pointer(&mem[dataTail])),
		data: mem[os.Getpagesize():],
	}
}

// drain calls f for each record, header included, valid until f returns.
func (r *perfRing) drain(f func([]byte)) {
	head, tail := r.head.Load(), r.tail.Load()
	mask := uint64(len(r.data) - 1)
	for tail+perfHeader <= head {
		at := tail & mask
		// Records are multiples of 8 bytes, so the header isn't cut.
		size := uint64(binary.LittleEndian.Uint16(r.data[at+6:]))
		if size < perfHeader || tail+size > head {
			break
		}
		b := r.data[at:min(at+size, uint64(len(r.data)))]
		if at+size > uint64(len(r.data)) {
			r.scratch = append(append(r.scratch[:0], b...), r.data[:at+size-uint64(len(r.data))]...)
			b = r.scratch
		}
		f(b)
		tail += size
	}
	r.tail.Store(head)
}
