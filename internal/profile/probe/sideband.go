package probe

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// RecordKind is what a Record is about.
type RecordKind uint8

// Kinds of record.
const (
	RecordInvalid RecordKind = iota
	// RecordMap: executable memory was mapped.
	RecordMap
	// RecordExec: the process executed a program; what was mapped is gone.
	RecordExec
	// RecordFork: the process was made by Parent, with its mappings.
	RecordFork
	// RecordExit: the process ended.
	RecordExit
	// RecordLost: Length records were lost.
	RecordLost
)

// Record says what is mapped where in a process.
type Record struct {
	Kind        RecordKind
	PID, Parent uint32
	Time        time.Duration // CLOCK_MONOTONIC
	// Start, Length, Offset and Path are those of a mapping.
	Start, Length, Offset uint64
	Path                  string
	Dev, Inode            uint64
}

// Sideband reads records about executable mappings of all processes from the
// kernel's perf events. It isn't safe for concurrent use.
type Sideband struct {
	rings []*perfRing
}

const (
	// sidebandPages is the size of each CPU's buffer, a power of two.
	sidebandPages = 64

	perfTypeSoftware  = 1
	perfCountSWDummy  = 9
	perfSampleTime    = 1 << 2
	perfRecordMmap2   = 10
	perfRecordLost    = 2
	perfRecordComm    = 3
	perfRecordExit    = 4
	perfRecordFork    = 7
	perfMiscCommExec  = 1 << 13
	perfFlagFDCloexec = 1 << 3
	perfHeader        = 8
)

// OpenSideband starts to record. An error means that functions can be named
// only of programs that are still there when somebody looks.
func OpenSideband() (_ *Sideband, err error) {
	s := &Sideband{}
	defer func() {
		if err != nil {
			_ = s.Close()
		}
	}()
	for cpu := range possibleCPUs() {
		attr := unix.PerfEventAttr{
			Type: perfTypeSoftware, Config: perfCountSWDummy, Size: uint32(perfAttrSize),
			Sample_type: perfSampleTime,
			Bits: unix.PerfBitMmap | unix.PerfBitMmap2 | unix.PerfBitComm | unix.PerfBitCommExec |
				unix.PerfBitTask | unix.PerfBitSampleIDAll | unix.PerfBitUseClockID,
			Clockid: unix.CLOCK_MONOTONIC,
		}
		fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, perfFlagFDCloexec)
		if errors.Is(err, unix.ENODEV) {
			continue // no such CPU, or offline
		}
		if err != nil {
			return nil, fmt.Errorf("record mappings: %w", os.NewSyscallError("perf_event_open", err))
		}
		mem, err := unix.Mmap(fd, 0, (1+sidebandPages)*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			_ = unix.Close(fd)
			return nil, fmt.Errorf("record mappings: %w", os.NewSyscallError("mmap", err))
		}
		s.rings = append(s.rings, newPerfRing(fd, mem))
	}
	return s, nil
}

// possibleCPUs returns a number that is larger than that of any CPU.
func possibleCPUs() int {
	b, err := os.ReadFile("/sys/devices/system/cpu/possible")
	var last int
	if err != nil {
		return runtime.NumCPU()
	}
	b = bytes.TrimSpace(b)
	if i := bytes.LastIndexAny(b, "-,"); i >= 0 {
		b = b[i+1:]
	}
	if _, err := fmt.Sscanf(string(b), "%d", &last); err != nil {
		return runtime.NumCPU()
	}
	return last + 1
}

// Drain calls f for each record that is there; those of one CPU in order.
func (s *Sideband) Drain(f func(*Record)) {
	var rec Record
	for _, r := range s.rings {
		r.drain(func(b []byte) {
			if rec.decode(b) {
				f(&rec)
			}
		})
	}
}

// Close ends the recording.
func (s *Sideband) Close() error {
	var errs []error
	for _, r := range s.rings {
		errs = append(errs, os.NewSyscallError("munmap", unix.Munmap(r.mem)), os.NewSyscallError("close", unix.Close(r.fd)))
	}
	s.rings = nil
	return errors.Join(errs...)
}

// decode decodes a record of perf_event_open(2), with its time at the end.
func (r *Record) decode(b []byte) bool {
	const trailer = 8
	if len(b) < perfHeader+trailer {
		return false
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	kind, misc := u32(0), binary.LittleEndian.Uint16(b[4:])
	*r = Record{Time: time.Duration(u64(len(b) - trailer))}
	body := len(b) - perfHeader - trailer
	switch kind {
	case perfRecordMmap2:
		const fixed = 64
		if body < fixed {
			return false
		}
		r.Kind, r.PID = RecordMap, u32(8)
		r.Start, r.Length, r.Offset = u64(16), u64(24), u64(32)
		r.Dev, r.Inode = unix.Mkdev(u32(40), u32(44)), u64(48)
		path := b[perfHeader+fixed : len(b)-trailer]
		if i := bytes.IndexByte(path, 0); i >= 0 {
			path = path[:i]
		}
		r.Path = string(path)
	case perfRecordComm:
		if body < 8 || misc&perfMiscCommExec == 0 {
			return false
		}
		r.Kind, r.PID = RecordExec, u32(8)
	case perfRecordFork, perfRecordExit:
		if body < 24 {
			return false
		}
		pid, parent, tid := u32(8), u32(12), u32(16)
		if pid != tid {
			return false // a thread
		}
		r.PID, r.Parent = pid, parent
		r.Kind = RecordFork
		if kind == perfRecordExit {
			r.Kind = RecordExit
		}
	case perfRecordLost:
		if body < 16 {
			return false
		}
		r.Kind, r.Length = RecordLost, u64(16)
	default:
		return false
	}
	return true
}
