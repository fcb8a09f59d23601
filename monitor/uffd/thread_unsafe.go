package uffd

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/sys"
)

const (
	ringSize    = 1024 // messages, a power of two
	scratchSize = 16   // messages

	// wordOffset is where the table's word is, see epoch/layout.h. New holds
	// it against the table.
	wordOffset = 128

	// deadStopped is control.dead of a thread that was asked to stop; other
	// values are the errno that ended it.
	deadStopped = ^uint32(0)
)

type pollFd struct {
	fd      int32
	events  int16
	revents int16
}

// control is what the reader thread and Go share. It is in memory of its own,
// outside the Go heap. thread_*.s knows the offsets.
type control struct {
	uffd     pollFd
	stop     pollFd // an eventfd: readable ends the thread
	wake     int32  // an eventfd: written when flag goes from 0 to 1
	_        int32
	word     *uint64
	ring     *sys.UFFDMsg
	ringMask uint64
	oldSet   uint64
	fullSet  uint64
	// flag is set by the thread after each read, together with one busy count
	// of the table's word. Who swaps it to zero drops that count, once all that
	// the ring held after the swap is on record.
	flag     atomic.Uint32
	overflow atomic.Uint32 // messages were lost for lack of room
	dead     atomic.Uint32 // not zero: the thread is at its end
	tid      atomic.Uint32 // cleared by the kernel when the thread is gone
	hold     atomic.Uint32 // for tests: stop before the next read
	held     atomic.Uint32 // for tests: the thread is stopped there
	one      uint64
	_        [32]byte
	head     atomic.Uint64 // messages read, ever
	reads    atomic.Uint64 // successful reads, ever
	_        [48]byte
	tail     atomic.Uint64 // messages drained, ever
	_        [56]byte
	scratch  [scratchSize]sys.UFFDMsg
}

// startThread blocks all signals, starts the thread on a stack that ends at
// stack, and restores the signals. It returns the thread's id or minus errno.
//
//go:noescape
func startThread(ctl *control, stack uintptr) (tid uintptr)

// thread is the reader thread and what it shares.
type thread struct {
	ctl      *control
	ring     []sys.UFFDMsg
	stackTop uintptr
}

// word returns the address of a table's word, given the memory it is in.
func word(mem []byte) *uint64 { return (*uint64)(unsafe.Pointer(&mem[wordOffset])) }

// checkWord makes sure that p is where t keeps its word.
func checkWord(t *epoch.Table, p *uint64) error {
	before := atomic.LoadUint64(p)
	t.AddBusy()
	during := atomic.LoadUint64(p)
	t.DropBusy()
	if before != uint64(t.Word()) || during != before+1 {
		return fmt.Errorf("table's word at offset %d: %w", wordOffset, epoch.ErrIncompatible)
	}
	return nil
}

// newThread maps the shared memory. The thread isn't started yet.
func newThread(uffd, stop, wake int, word *uint64) (*thread, error) {
	page := os.Getpagesize()
	ringBytes := ringSize * int(unsafe.Sizeof(sys.UFFDMsg{}))
	size := page + ringBytes + page // control, ring, stack
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map reader's memory: %w", os.NewSyscallError("mmap", err))
	}
	t := &thread{
		ctl:  (*control)(unsafe.Pointer(&mem[0])),
		ring: unsafe.Slice((*sys.UFFDMsg)(unsafe.Pointer(&mem[page])), ringSize),
	}
	t.stackTop = uintptr(unsafe.Pointer(unsafe.SliceData(mem))) + uintptr(len(mem))
	runtime.AddCleanup(t, func(mem []byte) { _ = unix.Munmap(mem) }, mem)
	c := t.ctl
	c.uffd = pollFd{fd: int32(uffd), events: unix.POLLIN}
	c.stop = pollFd{fd: int32(stop), events: unix.POLLIN}
	c.wake = int32(wake)
	c.word = word
	c.ring = &t.ring[0]
	c.ringMask = ringSize - 1
	c.fullSet = ^uint64(0)
	c.one = 1
	return t, nil
}

// start starts the thread.
func (t *thread) start() error {
	if tid := int(startThread(t.ctl, t.stackTop)); tid < 0 {
		return fmt.Errorf("start reader: %w", os.NewSyscallError("clone", unix.Errno(-tid)))
	}
	return nil
}

// join waits until the thread is gone. It must have been told to stop, or be
// dead. The memory stays until t is unreachable: hits may still look at it.
func (t *thread) join() {
	for {
		tid := t.ctl.tid.Load()
		if tid == 0 {
			return
		}
		// The kernel's wake-up at a thread's end isn't a private futex's.
		_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&t.ctl.tid)), 0, uintptr(tid), 0, 0, 0)
	}
}

// setHold stops the thread before its next read, or lets it go.
func (t *thread) setHold(on bool) {
	if on {
		t.ctl.hold.Store(1)
		return
	}
	t.ctl.hold.Store(0)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&t.ctl.hold)), 1, 1, 0, 0, 0)
}

// requestStop tells the thread to end.
func (t *thread) requestStop() {
	if t.ctl.dead.Load() != 0 {
		return
	}
	_, _ = unix.Write(int(t.ctl.stop.fd), (*[8]byte)(unsafe.Pointer(&t.ctl.one))[:])
}
