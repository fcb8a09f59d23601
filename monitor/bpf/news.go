package bpf

import (
	"encoding/binary"
	"errors"
	"os"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

const (
	newsSize = 24
	nrNone   = -1 // NR_NONE of src/kernel.h
	// shmRemap is SHM_REMAP of shmat(2).
	shmRemap = 0o40000
)

// The reader is woken by the first news after a quiet time. From then on it
// looks by itself, at intervals that double from newsSoon to newsLate, and
// sleeps after newsQuiet looks for nothing: to be woken costs the thread that
// carries out the operation more than all the rest.
//
// A sleep ends after newsNap whatever happens: news that was being sent while
// the reader fell asleep may not have woken it.
const (
	newsSoon  = time.Millisecond
	newsLate  = 4 * time.Millisecond
	newsQuiet = 3
	newsNap   = time.Second
)

// readNews passes on what the programs send until the reader is closed. One
// operation may send the same news many times, once for each page table that
// it empties; what is in the ring together is passed on once, by the last.
func (m *Monitor) readNews() {
	var rec ringbuf.Record
	var last vm.Event
	flush := func() {
		if last != (vm.Event{}) {
			m.Send(last)
		}
		last = vm.Event{}
		m.countLost()
	}
	wait := func(d time.Duration) {
		// The reader rounds down to whole milliseconds.
		m.news.SetDeadline(time.Now().Add(d + time.Millisecond - time.Microsecond))
	}
	pause, quiet := newsSoon, 0
	settled := false // asked to be woken, and looked once more after that
	settle := func() {
		pause, quiet, settled = newsSoon, 0, true
		if err := m.asleep.Set(uint32(1)); err != nil {
			m.log.Warn("bpf monitor's news reader can't be woken", "err", err)
		}
		m.fence.Add(1) // or the ring may be looked at before the flag is seen
		m.news.SetDeadline(time.Now())
	}
	settle()
	for {
		switch err := m.news.ReadInto(&rec); {
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			// The ring is empty.
			flush()
			if quiet++; quiet == 1 && settled {
				wait(newsNap)
			} else if settled || quiet > newsQuiet {
				settle()
			} else {
				wait(pause)
				pause = min(2*pause, newsLate)
			}
			continue
		case err != nil:
			// Nothing depends on news but promptness.
			m.log.Warn("bpf monitor has no news any more", "err", err)
			m.SendLost()
			return
		}
		if e, ok := decodeNews(rec.RawSample); ok && e != last {
			if last != (vm.Event{}) {
				m.Send(last)
			}
			last = e
		}
		if rec.Remaining == 0 {
			flush()
			quiet, settled = 0, false
			wait(pause)
		}
	}
}

// countLost tells the feeds if news was lost since the last time.
func (m *Monitor) countLost() {
	var lost uint64
	if err := m.newsLost.Get(&lost); err != nil {
		return
	}
	if m.dropped.Swap(lost) != lost {
		m.SendLost()
	}
}

// decodeNews decodes a struct news of src/monitor.c.
func decodeNews(b []byte) (vm.Event, bool) {
	if len(b) < newsSize {
		return vm.Event{}, false
	}
	nr := int32(binary.LittleEndian.Uint32(b[16:]))
	arg := binary.LittleEndian.Uint32(b[20:])
	return vm.Event{
		Range: vm.Range{
			Start: uintptr(binary.LittleEndian.Uint64(b)),
			End:   uintptr(binary.LittleEndian.Uint64(b[8:])),
		},
		Op: opOf(nr, arg),
	}, true
}

// opOf names the operation by the system call that the thread was in.
func opOf(nr int32, arg uint32) vm.Op {
	switch nr {
	case unix.SYS_MUNMAP:
		return vm.OpMunmap
	case unix.SYS_MMAP, unix.SYS_REMAP_FILE_PAGES:
		return vm.OpMmapFixed
	case unix.SYS_MREMAP:
		if arg&unix.MREMAP_FIXED != 0 {
			return vm.OpMremapFixed
		}
		return vm.OpMremap
	case unix.SYS_MADVISE:
		switch arg {
		case unix.MADV_DONTNEED, unix.MADV_DONTNEED_LOCKED:
			return vm.OpDontneed
		case unix.MADV_FREE:
			return vm.OpFree
		case unix.MADV_REMOVE:
			return vm.OpRemove
		}
	case unix.SYS_PROCESS_MADVISE:
		return vm.OpProcessMadvise
	case unix.SYS_BRK:
		return vm.OpBrk
	case unix.SYS_SHMAT:
		return vm.OpShmat
	case unix.SYS_SHMDT:
		return vm.OpShmdt
	case unix.SYS_FTRUNCATE, unix.SYS_TRUNCATE:
		return vm.OpTruncate
	case unix.SYS_FALLOCATE:
		return vm.OpPunchHole
	}
	return vm.OpUnknown
}
