package profile

import (
	"bufio"
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/internal/profile/probe"
	"github.com/pindown/pindown/internal/profile/symbols"
)

// Limits on what is kept.
const (
	maxOpenModules = 512
	maxStrangers   = 1 << 16
	strangersFor   = 5 * time.Second
)

// spaces knows what executable memory is mapped where, in the processes that
// are followed and when.
type spaces struct {
	by      map[uint32][]*space // by process, in order of time
	modules map[string]*module
	open    int
	fresh   []*module // that weren't there at the last takeNew
	// side tells, until is the time of which it has told everything, and early
	// what it has told of later. Each CPU has a buffer, which are read one after the
	// other: only so is all in order.
	side  sideband
	until time.Duration
	early []probe.Record
	// strangers are records of processes that may turn out to be followed.
	strangers []probe.Record
	lost      uint64
}

// sideband is a probe.Sideband.
type sideband interface {
	Drain(func(*probe.Record))
}

// space is an address space: from a fork or an exec on.
type space struct {
	from   time.Duration
	parent *space // after a fork
	maps   []mapping
}

type mapping struct {
	since              time.Duration
	start, end, offset uint64
	module             *module
}

// module is a file with code.
type module struct {
	path   string
	file   *os.File // nil if it can't be opened
	syms   *symbols.File
	parsed bool
}

func newSpaces() *spaces {
	return &spaces{by: map[uint32][]*space{}, modules: map[string]*module{}}
}

func (s *spaces) close() {
	for _, m := range s.modules {
		if m.file != nil {
			_ = m.file.Close()
		}
	}
}

// follow says that a process is of interest.
func (s *spaces) follow(pid uint32) {
	if s.by[pid] != nil {
		return
	}
	s.by[pid] = []*space{{}}
	rest := s.strangers[:0]
	for _, r := range s.strangers {
		if r.PID == pid {
			s.apply(&r)
		} else {
			rest = append(rest, r)
		}
	}
	s.strangers = rest
}

// upTo sees to it that everything up to a time that has passed is known.
func (s *spaces) upTo(t time.Duration) {
	if t > s.until {
		s.drain(now())
	}
}

// drain takes what the side band has. Whatever happened up to now is in its
// buffers.
func (s *spaces) drain(now time.Duration) {
	s.until = now
	if s.side == nil {
		return
	}
	s.side.Drain(func(r *probe.Record) { s.early = append(s.early, *r) })
	slices.SortStableFunc(s.early, func(a, b probe.Record) int { return cmp.Compare(a.Time, b.Time) })
	n := 0
	for ; n < len(s.early) && s.early[n].Time <= now; n++ {
		r := &s.early[n]
		switch {
		case r.Kind == probe.RecordLost:
			s.lost += r.Length
		case s.by[r.PID] != nil:
			s.apply(r)
		case r.Kind != probe.RecordExit:
			s.strangers = append(s.strangers, *r)
		}
	}
	s.early = slices.Delete(s.early, 0, n)
	s.strangers = slices.DeleteFunc(s.strangers, func(r probe.Record) bool { return r.Time < now-strangersFor })
	if over := len(s.strangers) - maxStrangers; over > 0 {
		s.strangers = slices.Delete(s.strangers, 0, over)
	}
}

// apply changes the spaces of a process that is followed.
func (s *spaces) apply(r *probe.Record) {
	switch r.Kind {
	case probe.RecordFork:
		s.insert(r.PID, &space{from: r.Time, parent: s.at(r.Parent, r.Time)})
	case probe.RecordExec:
		s.insert(r.PID, &space{from: r.Time})
	case probe.RecordMap:
		sp := s.at(r.PID, r.Time)
		sp.maps = append(sp.maps, mapping{
			since: r.Time, start: r.Start, end: r.Start + r.Length, offset: r.Offset,
			module: s.module(r.PID, r.Path, r.Inode),
		})
	default:
	}
}

func (s *spaces) insert(pid uint32, sp *space) {
	list := s.by[pid]
	i := len(list)
	for i > 0 && list[i-1].from > sp.from {
		i--
	}
	s.by[pid] = slices.Insert(list, i, sp)
}

// at returns the space of a process at a time; nil if nothing is known.
func (s *spaces) at(pid uint32, t time.Duration) *space {
	for i, sp := range slices.Backward(s.by[pid]) {
		if sp.from <= t || i == 0 {
			return sp
		}
	}
	return nil
}

// find returns the mapping with an address at a time.
func (sp *space) find(addr uint64, t time.Duration) *mapping {
	for ; sp != nil; sp, t = sp.parent, min(t, sp.from) {
		for i, m := range slices.Backward(sp.maps) {
			if m.since <= t && addr >= m.start && addr < m.end {
				return &sp.maps[i]
			}
		}
	}
	return nil
}

// module opens the file of a mapping as long as it is there.
func (s *spaces) module(pid uint32, path string, inode uint64) *module {
	key := path + "\x00" + strconv.FormatUint(inode, 16)
	if m := s.modules[key]; m != nil {
		return m
	}
	m := &module{path: path}
	s.modules[key] = m
	s.fresh = append(s.fresh, m)
	if !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "//") || s.open >= maxOpenModules {
		return m
	}
	for _, name := range []string{path, fmt.Sprintf("/proc/%d/root%s", pid, path)} {
		f, err := os.Open(name)
		if err != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Fstat(int(f.Fd()), &st) == nil && (inode == 0 || st.Ino == inode) && st.Mode&unix.S_IFMT == unix.S_IFREG {
			m.file = f
			s.open++
			return m
		}
		_ = f.Close()
	}
	return m
}

// symbols returns nil if the module has none.
func (m *module) symbols() *symbols.File {
	if m.file != nil && !m.parsed {
		m.parsed = true
		if f, err := symbols.Open(m.file); err == nil {
			m.syms = f
		}
	}
	return m.syms
}

// readMaps takes the mappings of a process that runs from /proc/PID/maps.
func (s *spaces) readMaps(pid uint32) error {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	s.follow(pid)
	sp := s.by[pid][0]
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var m mapping
		var perms, dev, path string
		var inode uint64
		n, _ := fmt.Sscanf(lines.Text(), "%x-%x %s %x %s %d %s", &m.start, &m.end, &perms, &m.offset, &dev, &inode, &path)
		const all = 7
		if n < all || !strings.Contains(perms, "x") {
			continue
		}
		if _, rest, ok := strings.Cut(lines.Text(), " /"); ok {
			path = "/" + rest // which may contain spaces
		}
		m.module = s.module(pid, path, inode)
		sp.maps = append(sp.maps, m)
	}
	return lines.Err()
}

// frame names an address: that of an instruction, or a return address.
func (sp *space) frame(addr uint64, t time.Duration, isReturn bool) Frame {
	fr := Frame{Address: addr}
	m := sp.find(addr, t)
	if m == nil {
		return fr
	}
	fr.Module, fr.Offset = m.module.path, addr-m.start+m.offset
	syms := m.module.symbols()
	if syms == nil {
		return fr
	}
	virtual, ok := syms.Address(fr.Offset)
	if !ok {
		return fr
	}
	if isReturn {
		virtual--
	}
	l := syms.Lookup(virtual)
	fr.Function, fr.File, fr.Line = l.Function, l.Source, l.Line
	return fr
}

// returnsTo reports whether addr is a return address.
func (sp *space) returnsTo(addr uint64, t time.Duration) bool {
	m := sp.find(addr, t)
	if m == nil {
		return false
	}
	syms := m.module.symbols()
	if syms == nil {
		return false
	}
	virtual, ok := syms.Address(addr - m.start + m.offset)
	return ok && syms.AfterCall(virtual)
}

// takeNew returns the modules that came since the last call.
func (s *spaces) takeNew() []*module {
	fresh := s.fresh
	s.fresh = nil
	return fresh
}
