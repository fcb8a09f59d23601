package sys

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// Flags of a mapping in VMA.Flags, from include/uapi/linux/fs.h.
const (
	VMAReadable   = 0x01
	VMAWritable   = 0x02
	VMAExecutable = 0x04
	VMAShared     = 0x08
)

const (
	procmapQuery = 0xc0686611
	vmaNameMax   = 64
)

// Errors of this package, always returned wrapped.
var (
	// ErrNoVMA: nothing is mapped at the address.
	ErrNoVMA = errors.New("sys: nothing mapped")
	// ErrParse: a line that isn't as proc_pid_maps(5) says.
	ErrParse = errors.New("sys: unexpected text")
)

// procmapQueryArg is struct procmap_query.
type procmapQueryArg struct {
	Size        uint64
	QueryFlags  uint64
	QueryAddr   uint64
	VMAStart    uint64
	VMAEnd      uint64
	VMAFlags    uint64
	VMAPageSize uint64
	VMAOffset   uint64
	Inode       uint64
	DevMajor    uint32
	DevMinor    uint32
	VMANameSize uint32
	BuildIDSize uint32
	VMANameAddr uint64
	BuildIDAddr uint64
}

// VMA is one mapping of this process, as in a line of /proc/self/maps.
type VMA struct {
	Range vm.Range
	Flags uint64 // VMAReadable and so on
	Inode uint64 // zero for anonymous memory
	Major uint32 // of the inode's device
	Minor uint32
	// PageSize is that of the mapping; zero if the kernel has no PROCMAP_QUERY.
	PageSize uintptr
	// Name is the last column: a path, a name in brackets, or empty. A name
	// longer than 63 bytes is given as "?".
	Name string
}

// Maps answers which mapping holds an address of this process: by the
// PROCMAP_QUERY ioctl (Linux 6.11), which takes about a microsecond, else by
// reading /proc/self/maps up to there. Its methods may be called from many
// goroutines.
type Maps struct {
	f *os.File

	mu   sync.Mutex
	arg  procmapQueryArg  // guarded by mu
	name [vmaNameMax]byte // guarded by mu
	text bool             // guarded by mu; the kernel has no PROCMAP_QUERY
	gone bool             // guarded by mu; f is closed
}

// OpenMaps opens /proc/self/maps.
//
//go:noinline
func OpenMaps() (*Maps, error) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	// Not inlined, so that the result is on the heap, where it doesn't move:
	// the kernel is told the address of name as a number.
	return &Maps{f: f}, nil
}

// Close closes the file, once no query uses it any more: its descriptor's
// number may belong to another file right after. It may be called once.
func (m *Maps) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gone = true
	return m.f.Close()
}

// At returns the mapping that holds addr, or a wrapped ErrNoVMA, or, after
// Close, a wrapped os.ErrClosed. The answer is a snapshot of one moment during
// the call.
func (m *Maps) At(addr uintptr) (VMA, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone {
		return VMA{}, fmt.Errorf("mapping at %#x: %w", addr, os.ErrClosed)
	}
	if m.text {
		return m.scan(addr)
	}
	v, errno := m.query(addr, true)
	if errno == unix.ENAMETOOLONG {
		v, errno = m.query(addr, false)
	}
	switch errno {
	case 0:
		return v, nil
	case unix.ENOENT:
		return VMA{}, fmt.Errorf("mapping at %#x: %w", addr, ErrNoVMA)
	case unix.ENOTTY, unix.EINVAL, unix.ENOSYS:
		m.text = true
		return m.scan(addr)
	}
	return VMA{}, fmt.Errorf("mapping at %#x: %w", addr, os.NewSyscallError("ioctl(PROCMAP_QUERY)", errno))
}

func (m *Maps) scan(addr uintptr) (VMA, error) {
	if _, err := m.f.Seek(0, io.SeekStart); err != nil {
		return VMA{}, fmt.Errorf("mapping at %#x: %w", addr, err)
	}
	return findVMA(m.f, addr)
}

// findVMA returns the mapping in maps, the text of a maps file, that holds
// addr.
func findVMA(maps io.Reader, addr uintptr) (VMA, error) {
	s := bufio.NewScanner(maps)
	for s.Scan() {
		v, err := parseVMA(s.Bytes())
		if err != nil {
			return VMA{}, err
		}
		if addr < v.Range.Start {
			break
		}
		if addr < v.Range.End {
			return v, nil
		}
	}
	if err := s.Err(); err != nil {
		return VMA{}, fmt.Errorf("mapping at %#x: %w", addr, err)
	}
	return VMA{}, fmt.Errorf("mapping at %#x: %w", addr, ErrNoVMA)
}

// parseVMA decodes a line of a maps file, without its newline.
func parseVMA(line []byte) (VMA, error) {
	bad := func() (VMA, error) { return VMA{}, fmt.Errorf("parse maps line %q: %w", line, ErrParse) }
	var f [5][]byte
	rest := line
	for i := range f {
		rest = bytes.TrimLeft(rest, " ")
		f[i], rest, _ = bytes.Cut(rest, []byte{' '})
	}
	lo, hi, ok := bytes.Cut(f[0], []byte{'-'})
	major, minor, ok2 := bytes.Cut(f[3], []byte{':'})
	if !ok || !ok2 || len(f[1]) != 4 {
		return bad()
	}
	var n [5]uint64
	for i, p := range []struct {
		text []byte
		base int
		bits int
	}{{lo, 16, 64}, {hi, 16, 64}, {major, 16, 32}, {minor, 16, 32}, {f[4], 10, 64}} {
		var err error
		if n[i], err = strconv.ParseUint(string(p.text), p.base, p.bits); err != nil {
			return bad()
		}
	}
	if n[0] >= n[1] {
		return bad()
	}
	v := VMA{
		Range: vm.Range{Start: uintptr(n[0]), End: uintptr(n[1])},
		Major: uint32(n[2]),
		Minor: uint32(n[3]),
		Inode: n[4],
		Name:  string(bytes.TrimLeft(rest, " ")),
	}
	for i, flag := range []struct {
		set  byte
		flag uint64
	}{{'r', VMAReadable}, {'w', VMAWritable}, {'x', VMAExecutable}, {'s', VMAShared}} {
		switch f[1][i] {
		case flag.set:
			v.Flags |= flag.flag
		case '-', 'p':
		default:
			return bad()
		}
	}
	if len(v.Name) >= vmaNameMax {
		v.Name = "?"
	}
	return v, nil
}
