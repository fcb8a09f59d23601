package bpf

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/internal/sys"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

var _ monitor.Monitor = (*Monitor)(nil)

// Monitor is a set of BPF programs that write an epoch table, with the
// goroutines that pass on their news and watch over them. All methods may be
// called from many goroutines.
type Monitor struct {
	monitor.Hub
	mode  Mode
	log   *slog.Logger
	table *epoch.Table
	coll  *ebpf.Collection
	links []link.Link
	maps  *sys.Maps // nil in functions mode
	news  *ringbuf.Reader

	scratch   *scratch
	newsLost  *ebpf.Variable
	probed    *ebpf.Variable
	asleep    *ebpf.Variable
	fence     atomic.Uint32
	stop      chan struct{}
	wg        sync.WaitGroup
	beats     atomic.Uint64
	dropped   atomic.Uint64 // news lost in the ring
	recursion atomic.Uint64

	closed atomic.Bool
	lost   atomic.Pointer[error]
	close  func() error
}

// Open loads and attaches the programs and makes sure that they see what
// happens. Nil options mean defaults. If this machine can't run the monitor
// the error wraps monitor.ErrNotSupported and says why.
func Open(opts *Options) (*Monitor, error) {
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	modes := []Mode{o.Mode}
	if o.Mode == ModeAuto {
		modes = []Mode{ModeFunctions, ModeSyscalls}
	}
	var errs []error
	for _, mode := range modes {
		m, err := open(mode, &o)
		if err == nil {
			o.Logger.Info("bpf monitor started", "mode", mode)
			return m, nil
		}
		o.Logger.Info("bpf monitor mode not usable", "mode", mode, "err", err)
		errs = append(errs, fmt.Errorf("open bpf monitor in %v mode: %w", mode, err))
	}
	return nil, errors.Join(errs...)
}

func newMonitor(mode Mode, o *Options) *Monitor {
	m := &Monitor{mode: mode, log: o.Logger, stop: make(chan struct{})}
	m.close = sync.OnceValue(m.shutdown)
	return m
}

func open(mode Mode, o *Options) (*Monitor, error) {
	m := newMonitor(mode, o)
	if err := m.start(o); err != nil {
		_ = m.Close()
		return nil, err
	}
	m.wg.Go(m.readNews)
	if o.Heartbeat > 0 {
		m.wg.Go(func() { m.watchOver(o.Heartbeat) })
	}
	return m, nil
}

// start loads, attaches and tries the programs.
func (m *Monitor) start(o *Options) error {
	// Reading the kernel's types takes longest of all; once is enough.
	cache := btf.NewCache()
	if _, err := cache.Kernel(); err != nil {
		return fmt.Errorf("load kernel's BTF: %w: %w", err, monitor.ErrNotSupported)
	}
	mm, err := identify(cache)
	if err != nil {
		return err
	}
	bits := epoch.BucketBitsFor(o.Regions)
	if m.mode == ModeSyscalls && before(5, 16) {
		return fmt.Errorf("tracepoint mmap_lock_released fires after the lock was released before Linux 5.16: %w", monitor.ErrNotSupported)
	}
	if m.scratch, err = newScratch(); err != nil {
		return err
	}
	if m.coll, err = load(cache, &program{
		mode: m.mode, mm: mm, probe: m.scratch.r.Start, bits: bits, newsBytes: o.NewsBytes, canProbe: true,
	}); err != nil {
		return err
	}
	if m.table, err = mapTable(m.coll.Maps["table"], bits); err != nil {
		return err
	}
	m.newsLost, m.probed, m.asleep = m.coll.Variables["news_lost"], m.coll.Variables["probed"], m.coll.Variables["asleep"]
	if m.mode == ModeSyscalls {
		if m.maps, err = sys.OpenMaps(); err != nil {
			return fmt.Errorf("open maps: %w", err)
		}
	}
	if m.news, err = ringbuf.NewReader(m.coll.Maps["news"]); err != nil {
		return fmt.Errorf("open news: %w", err)
	}
	if err := m.attach(); err != nil {
		return err
	}
	for _, check := range []func() error{m.tryTouches, m.beat} {
		if err := check(); err != nil {
			return fmt.Errorf("self-test: %w: %w", err, monitor.ErrNotSupported)
		}
	}
	return nil
}

func (m *Monitor) attach() error {
	for _, p := range m.coll.Programs {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return fmt.Errorf("attach %v: %w", p, explain(err))
		}
		m.links = append(m.links, l)
	}
	return nil
}

func (m *Monitor) detach() error {
	var errs []error
	for _, l := range m.links {
		errs = append(errs, l.Close())
	}
	m.links = nil
	return errors.Join(errs...)
}

// identify returns the address of this process's mm_struct. The program runs
// in the calling thread, so there is no identifier that could mean somebody
// else.
func identify(cache *btf.Cache) (uint64, error) {
	spec, err := loadProgram()
	if err != nil {
		return 0, fmt.Errorf("read object: %w", err)
	}
	keep(spec, "identify")
	maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool { return name != ".bss" })
	maps.DeleteFunc(spec.Variables, func(name string, _ *ebpf.VariableSpec) bool { return name != "current_mm" })
	coll, err := ebpf.NewCollectionWithOptions(spec, collectionOptions(cache))
	if err != nil {
		return 0, fmt.Errorf("load program: %w", explain(err))
	}
	defer coll.Close()
	if _, err := coll.Programs["identify"].Run(&ebpf.RunOptions{}); err != nil {
		return 0, fmt.Errorf("run program: %w", explain(err))
	}
	var mm uint64
	if err := coll.Variables["current_mm"].Get(&mm); err != nil {
		return 0, fmt.Errorf("read current_mm: %w", err)
	}
	if mm == 0 {
		return 0, fmt.Errorf("no address space found: %w", monitor.ErrNotSupported)
	}
	return mm, nil
}

func collectionOptions(cache *btf.Cache) ebpf.CollectionOptions {
	return ebpf.CollectionOptions{Cache: cache}
}

// keep removes all programs but those named.
func keep(spec *ebpf.CollectionSpec, names ...string) {
	programs := make(map[string]*ebpf.ProgramSpec, len(names))
	for _, name := range names {
		programs[name] = spec.Programs[name]
	}
	spec.Programs = programs
}

// program is what the programs are made for.
type program struct {
	mode      Mode
	mm        uint64  // the address space
	probe     uintptr // the heartbeat's page
	bits      int     // of the table
	newsBytes int
	canProbe  bool // bpf_probe_read_kernel may be used
}

// load loads the programs.
func load(cache *btf.Cache, p *program) (*ebpf.Collection, error) {
	coll, err := tryLoad(cache, p)
	var refused *ebpf.VerifierError
	if p.mode == ModeSyscalls && errors.As(err, &refused) {
		// A kernel locked down for confidentiality has no bpf_probe_read_kernel.
		without := *p
		without.canProbe = false
		if coll, err := tryLoad(cache, &without); err == nil {
			return coll, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("load programs: %w", explain(err))
	}
	return coll, nil
}

func tryLoad(cache *btf.Cache, p *program) (*ebpf.Collection, error) {
	kernel, err := cache.Kernel()
	if err != nil {
		return nil, err
	}
	spec, err := loadProgram()
	if err != nil {
		return nil, err
	}
	spec.Maps["table"].MaxEntries = uint32(epoch.Size(p.bits) / int(spec.Maps["table"].ValueSize))
	spec.Maps["news"].MaxEntries = uint32(p.newsBytes)
	set := map[string]any{
		"target_mm":    p.mm,
		"probe_start":  uint64(p.probe),
		"bucket_shift": uint32(64 - p.bits),
		"can_probe":    boolean(p.canProbe),
		"news_half":    uint64(p.newsBytes / 2),
		"page_size":    uint64(os.Getpagesize()),
	}
	switch p.mode {
	case ModeFunctions:
		found, err := targets(kernel)
		if err != nil {
			return nil, err
		}
		var hooks [maxHooks]hook
		var names []string
		for i, t := range found {
			hooks[i] = t.hook
			enter, exit := fmt.Sprintf("on_enter%d", i), fmt.Sprintf("on_exit%d", i)
			spec.Programs[enter].AttachTo, spec.Programs[exit].AttachTo = t.name, t.name
			names = append(names, enter, exit)
		}
		set["hooks"] = hooks
		keep(spec, names...)
	case ModeAuto, ModeSyscalls:
		path, err := lockHasPath(kernel)
		if err != nil {
			return nil, err
		}
		set["lock_has_path"] = boolean(path)
		keep(spec, "on_rss_stat", "on_lock", "on_unlock")
	}
	for name, value := range set {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	var coll *ebpf.Collection
	err = withoutSignals(func() (err error) {
		coll, err = ebpf.NewCollectionWithOptions(spec, collectionOptions(cache))
		return err
	})
	return coll, err
}

func boolean(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// mapTable maps the array that the programs write and formats it. The mapping
// holds the array; it goes when the table is unreachable, not when the monitor
// closes: a cache may still be reading the word that says so.
func mapTable(m *ebpf.Map, bits int) (*epoch.Table, error) {
	size := epoch.Size(bits)
	mem, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map table of %d bytes: %w", size, os.NewSyscallError("mmap", err))
	}
	t, err := epoch.Format(mem, bits)
	if err == nil {
		err = t.AttachWriter(nil)
	}
	if err != nil {
		_ = unix.Munmap(mem)
		return nil, err
	}
	runtime.AddCleanup(t, func(mem []byte) { _ = unix.Munmap(mem) }, mem)
	return t, nil
}

// Name returns "bpf".
func (m *Monitor) Name() string { return "bpf" }

// Mode returns where the programs are attached, ModeFunctions or ModeSyscalls.
func (m *Monitor) Mode() Mode { return m.mode }

// Table returns the table that the kernel writes.
func (m *Monitor) Table() *epoch.Table { return m.table }

// HitCheck returns nil: an operation is on record before it returns.
func (m *Monitor) HitCheck() func() bool { return nil }

// Cover reports whether every operation on r is seen. In functions mode that
// is all memory. In system-call mode it is private anonymous memory without
// holes; anything else gives a wrapped monitor.ErrUncovered. There is never
// anything pending: an operation is recorded under the locks that a
// registration needs as well.
func (m *Monitor) Cover(r vm.Range) error {
	if err := m.state(); err != nil {
		return fmt.Errorf("cover %v: %w", r, err)
	}
	if r.Empty() || r.End > epoch.MaxAddress {
		return fmt.Errorf("cover %v: %w", r, monitor.ErrUncovered)
	}
	if m.mode == ModeFunctions {
		return nil
	}
	for addr := r.Start; addr < r.End; {
		v, err := m.maps.At(addr)
		switch {
		case errors.Is(err, sys.ErrNoVMA):
			return fmt.Errorf("cover %v: nothing mapped at %#x: %w", r, addr, monitor.ErrUncovered)
		case errors.Is(err, os.ErrClosed) && m.closed.Load():
			return fmt.Errorf("cover %v: %w", r, monitor.ErrClosed)
		case err != nil:
			// Somebody closed our descriptors, those of the programs perhaps too.
			return fmt.Errorf("cover %v: %w: %w", r, err, m.fail(err))
		case v.Inode != 0 || v.Major != 0 || v.Minor != 0 || v.Flags&sys.VMAShared != 0:
			return fmt.Errorf("cover %v: mapping %v isn't private anonymous memory: %w", r, v.Range, monitor.ErrUncovered)
		}
		addr = v.Range.End
	}
	return nil
}

// state returns a wrapped error if the monitor sees nothing any more.
func (m *Monitor) state() error {
	if m.closed.Load() {
		return monitor.ErrClosed
	}
	if err := m.lost.Load(); err != nil {
		return *err
	}
	return nil
}

// fail marks the monitor lost, once, and returns the error that says why.
func (m *Monitor) fail(reason error) error {
	err := fmt.Errorf("%w: %w", monitor.ErrLost, reason)
	if m.lost.CompareAndSwap(nil, &err) {
		m.table.SetLost()
		m.CloseFeeds()
		m.log.Error("bpf monitor lost", "err", reason)
	}
	return *m.lost.Load()
}

// Stats counts what a monitor did.
type Stats struct {
	Mode      Mode
	Programs  int
	Beats     uint64 // heartbeats that passed
	NewsLost  uint64 // news that found the ring full
	Recursion uint64 // times that the kernel left a program out to avoid recursion
}

// Stats returns a snapshot.
func (m *Monitor) Stats() Stats {
	return Stats{
		Mode:      m.mode,
		Programs:  len(m.coll.Programs),
		Beats:     m.beats.Load(),
		NewsLost:  m.dropped.Load(),
		Recursion: m.recursion.Load(),
	}
}

// Close detaches and unloads the programs and marks the table lost. It is
// idempotent. The table's memory stays as long as anybody holds it.
func (m *Monitor) Close() error { return m.close() }

func (m *Monitor) shutdown() error {
	m.closed.Store(true)
	if m.table != nil {
		// First: once the programs are gone nothing may be served.
		m.table.SetLost()
	}
	close(m.stop)
	var errs []error
	if m.news != nil {
		errs = append(errs, m.news.Close())
	}
	m.wg.Wait()
	errs = append(errs, m.detach())
	if m.coll != nil {
		m.coll.Close()
	}
	if m.maps != nil {
		errs = append(errs, m.maps.Close())
	}
	if m.scratch != nil {
		errs = append(errs, m.scratch.release())
	}
	m.CloseFeeds()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close bpf monitor: %w", err)
	}
	return nil
}
