package sys

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// query makes the ioctl. m.mu must be held.
func (m *Maps) query(addr uintptr, named bool) (VMA, unix.Errno) {
	m.arg = procmapQueryArg{
		Size:      uint64(unsafe.Sizeof(m.arg)),
		QueryAddr: uint64(addr),
	}
	if named {
		m.arg.VMANameSize = vmaNameMax
		m.arg.VMANameAddr = uint64(uintptr(unsafe.Pointer(&m.name)))
	}
	errno := ioctl(int(m.f.Fd()), procmapQuery, unsafe.Pointer(&m.arg))
	runtime.KeepAlive(m)
	if errno != 0 {
		return VMA{}, errno
	}
	v := VMA{
		Range:    vm.Range{Start: uintptr(m.arg.VMAStart), End: uintptr(m.arg.VMAEnd)},
		Flags:    m.arg.VMAFlags,
		Inode:    m.arg.Inode,
		Major:    m.arg.DevMajor,
		Minor:    m.arg.DevMinor,
		PageSize: uintptr(m.arg.VMAPageSize),
		Name:     "?",
	}
	if named {
		// The size counts the terminating zero; zero means that there is none.
		v.Name = string(m.name[:max(m.arg.VMANameSize, 1)-1])
	}
	return v, 0
}
