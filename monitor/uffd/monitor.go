package uffd

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/monitor"
)

var _ monitor.Monitor = (*Monitor)(nil)

// Options configure a Monitor. The zero value means defaults.
type Options struct {
	// Regions is the number of regions that the table is sized for. More are
	// watched less precisely. Default 4096.
	Regions int

	// Window is the alignment of what Cover arms at a time, a power of two
	// from the page size to 64 MiB; it is clipped to the mapping. Arming part
	// of a mapping splits it, and mremap(2) fails with EFAULT on a range that
	// crosses a split. Arming more makes more of the program's unrelated
	// operations wait for the reader.
	// Default zero: mappings up to 1 GiB are armed as a whole, so that nothing
	// is split, larger ones in windows of 64 MiB.
	Window uintptr

	// MaxMappings is how many mappings Cover may add to the process by
	// splitting those that are there. Default a quarter of vm.max_map_count.
	MaxMappings int

	// ArmGoHeap lets Cover arm memory of the Go heap. The reader needs nothing
	// of Go's scheduler, so the runtime's own madvise can't deadlock with it;
	// but every span that the scavenger returns then costs the runtime a round
	// trip to the reader. Default false: the Go heap is not covered.
	ArmGoHeap bool
}

const (
	defaultRegions = 4096
	// wholeLimit is the size up to which a mapping is armed as a whole.
	wholeLimit = 1 << 30
	// maxWindow is the size and alignment of the Go heap's arenas on 64-bit
	// Linux: a window of at most that is either inside one or clear of it.
	maxWindow = 64 << 20
	// armedRoom is how many ranges the armed set holds at first.
	armedRoom = 256
	// pendingRoom is how many removals are told apart before they are joined.
	pendingRoom = 64
)

func (o *Options) withDefaults() (Options, error) {
	var opt Options
	if o != nil {
		opt = *o
	}
	if opt.Regions <= 0 {
		opt.Regions = defaultRegions
	}
	if w := opt.Window; w != 0 && (w&(w-1) != 0 || w < pageSize || w > maxWindow) {
		return opt, fmt.Errorf("window of %d bytes: %w", w, unix.EINVAL)
	}
	if opt.MaxMappings <= 0 {
		opt.MaxMappings = maxMapCount() / 4
	}
	return opt, nil
}

var pageSize = uintptr(os.Getpagesize())

// Monitor records the operations that userfaultfd reports. All methods may be
// called from many goroutines.
type Monitor struct {
	monitor.Hub
	table   *epoch.Table
	opt     Options
	reader  *thread
	fd      atomic.Int32 // the userfaultfd; -1 once closed
	hugeDev uint64       // device of private hugetlb memory; zero if it can't be armed
	heap    goHeap
	threads func() bool // proves that no thread is inside an madvise

	// coverMu serialises what changes or needs the descriptors: arming and
	// closing. It is held across ioctls and is never taken by what drains.
	coverMu sync.Mutex
	stopFd  int       // guarded by coverMu; -1 once closed
	maps    *sys.Maps // guarded by coverMu; nil once closed

	// proofMu serialises proofs. Taken before drainMu.
	proofMu sync.Mutex

	// drainMu serialises draining. It is held for work in memory alone: taken
	// after coverMu and proofMu, before the hub's.
	drainMu sync.Mutex
	armed   ranges // guarded by drainMu; known to be armed in the kernel
	lost    int    // guarded by drainMu; ranges that may be armed beside those
	changes uint64 // guarded by drainMu; operations on mappings drained, ever
	fresh   ranges // guarded by drainMu; removals that may not be carried out yet
	proving ranges // guarded by drainMu; those that a proof is under way for

	closed atomic.Bool
	done   chan struct{}
}

// Open starts a monitor. Nil options mean defaults.
//
// It returns an error that wraps monitor.ErrNotSupported, and says what is
// missing, where the kernel or the sandbox doesn't allow userfaultfd as the
// monitor needs it. Requires at least Linux 5.15 on amd64; on arm64, where
// userfaultfd has had no write-protect mode before, 6.10.
func Open(o *Options) (_ *Monitor, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("open uffd monitor: %w", err)
		}
	}()
	opt, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	fd, features, err := openUserfaultfd()
	if err != nil {
		return nil, err
	}
	m := &Monitor{opt: opt, stopFd: -1, done: make(chan struct{})}
	m.fd.Store(int32(fd))
	var wake *os.File
	defer func() {
		if err != nil {
			m.closeFds(wake)
		}
	}()
	if m.stopFd, err = eventfd(); err != nil {
		return nil, err
	}
	wakeFd, err := eventfd()
	if err != nil {
		return nil, err
	}
	wake = os.NewFile(uintptr(wakeFd), "eventfd")
	if m.maps, err = sys.OpenMaps(); err != nil {
		return nil, err
	}
	if !opt.ArmGoHeap {
		if err := m.heap.init(); err != nil {
			return nil, err
		}
	}
	if features&sys.UFFDFeatureWPHugetlbfsShmem != 0 {
		m.hugeDev = probeHugeDevice(m.maps)
	}
	m.armed.grow(armedRoom)
	m.fresh.grow(pendingRoom)
	m.proving.grow(pendingRoom)

	mem, table, err := newTable(opt.Regions)
	if err != nil {
		return nil, err
	}
	m.table = table
	if err := checkWord(table, word(mem)); err != nil {
		return nil, err
	}
	if m.reader, err = newThread(fd, m.stopFd, wakeFd, word(mem)); err != nil {
		return nil, err
	}
	inspector := threadInspector{reader: &m.reader.ctl.tid}
	m.threads = inspector.quiescent
	if err := m.reader.start(); err != nil {
		return nil, err
	}
	go m.run(wake)
	return m, nil
}

// newTable returns a table and the memory that it is in, which is unmapped when
// the table is unreachable.
//
// A forked child finds the memory wiped (MADV_WIPEONFORK, Linux 4.14) and so a
// word that equals no word that was ever published.
func newTable(regions int) ([]byte, *epoch.Table, error) {
	bits := epoch.BucketBitsFor(regions)
	mem, err := unix.Mmap(-1, 0, epoch.Size(bits), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, fmt.Errorf("map table: %w", os.NewSyscallError("mmap", err))
	}
	if err := unix.Madvise(mem, unix.MADV_WIPEONFORK); err != nil {
		_ = unix.Munmap(mem)
		return nil, nil, fmt.Errorf("keep table from children: %w", os.NewSyscallError("madvise", err))
	}
	_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	t, err := epoch.Format(mem, bits)
	if err != nil {
		_ = unix.Munmap(mem)
		return nil, nil, err
	}
	runtime.AddCleanup(t, func(mem []byte) { _ = unix.Munmap(mem) }, mem)
	return mem, t, nil
}

func eventfd() (int, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return -1, os.NewSyscallError("eventfd", err)
	}
	return fd, nil
}

// Name returns "uffd".
func (m *Monitor) Name() string { return "uffd" }

// Table returns the table that the monitor writes.
func (m *Monitor) Table() *epoch.Table { return m.table }

// HitCheck returns the function that a hit calls before it loads the table's
// word.
//
// The kernel queues the events of munmap and mremap only after it dropped the
// mmap lock, so another thread may map the addresses anew, and acquire them,
// before the reader could mark the table busy. But userfaultfd_unmap_prep and
// its like count the operation in ctx->mmap_changing under that lock, before
// anything changes, and the count drops only once the event was read, for
// which the reader has set busy. The function asks the kernel whether the count
// is zero: one system call, no lock, no allocation.
func (m *Monitor) HitCheck() func() bool { return m.hitCheck }

func (m *Monitor) hitCheck() bool {
	for i := range 200 {
		if !sys.UFFDChanging(int(m.fd.Load())) {
			if m.reader.ctl.flag.Load() != 0 {
				m.help()
			}
			return true
		}
		if m.table.Word().Lost() {
			return false
		}
		if i >= 8 {
			// The reader or the thread that it released needs a processor.
			runtime.Gosched()
		}
	}
	return false
}

// alive returns nil, or why the monitor sees nothing any more.
func (m *Monitor) alive() error {
	switch {
	case m.closed.Load():
		return monitor.ErrClosed
	case m.table.Word().Lost():
		return monitor.ErrLost
	}
	return nil
}

// Close stops the monitor, gives up all that was armed, and marks the table
// lost. It returns once the reader is gone and every descriptor is closed. It
// is idempotent and returns nil.
func (m *Monitor) Close() error {
	m.closed.Store(true)
	m.stopReader()
	<-m.done
	return nil
}

// stopReader tells the reader to end. The reader marks the table lost and
// closes the userfaultfd itself, so that operations that wait for it go on
// without Go's help.
func (m *Monitor) stopReader() {
	m.coverMu.Lock()
	defer m.coverMu.Unlock()
	if m.stopFd >= 0 {
		m.reader.requestStop()
	}
}

// closeFds closes every descriptor.
func (m *Monitor) closeFds(wake *os.File) {
	m.coverMu.Lock()
	defer m.coverMu.Unlock()
	if fd := m.fd.Swap(-1); fd >= 0 {
		_ = unix.Close(int(fd))
	}
	if m.stopFd >= 0 {
		_ = unix.Close(m.stopFd)
		m.stopFd = -1
	}
	if m.maps != nil {
		_ = m.maps.Close()
		m.maps = nil
	}
	if wake != nil {
		_ = wake.Close()
	}
}

// run drains what the reader has read, for as long as it lives.
func (m *Monitor) run(wake *os.File) {
	defer close(m.done)
	defer m.CloseFeeds()
	defer m.closeFds(wake)
	defer m.reader.join()
	defer m.stopReader()
	defer m.table.SetLost()
	defer func() {
		// Whatever it is, a lost table is the answer to it. The program, which
		// did nothing wrong, goes on uncached.
		_ = recover()
	}()
	var b [8]byte
	for m.reader.ctl.dead.Load() == 0 {
		_, err := wake.Read(b[:])
		m.drainMu.Lock()
		m.drain()
		m.drainMu.Unlock()
		if err != nil && !errors.Is(err, unix.EAGAIN) {
			return
		}
	}
}
