// Package ucx lets UCX's registration cache, ucs_rcache, be measured: that of
// the libucs that the system has installed. Its device does nothing either, and
// its loop runs in C.
package ucx

// #cgo LDFLAGS: -lucs -lucm
// #include <ucs/type/status.h>
// #include <ucp/api/ucp_version.h>
// #include "ucx.h"
import "C"

import (
	"fmt"
	"math"
	"os"
	"syscall"
	"unsafe"

	"github.com/pindown/pindown/internal/bench"
	"github.com/pindown/pindown/vm"
)

// Factory returns the factory of UCX's caches.
func Factory() bench.Factory {
	return bench.Factory{Impls: []string{"ucx"}, New: open}
}

// Version returns the version of UCX's headers, such as "1.13".
func Version() string { return fmt.Sprintf("%d.%d", C.UCP_API_MAJOR, C.UCP_API_MINOR) }

type subject struct{ p *C.struct_peer }

func open(regions int) (bench.Subject, error) {
	var status C.int
	p := C.peer_open(C.ulong(min(regions, math.MaxInt32)), &status)
	if p == nil {
		return nil, fmt.Errorf("ucs_rcache_create: %w", failure(status))
	}
	return &subject{p}, nil
}

// failure is a ucs_status_t as an error.
func failure(status C.int) error {
	return fmt.Errorf("UCX: %s", C.GoString(C.ucs_status_string(C.ucs_status_t(status))))
}

func (s *subject) Worker(string) (bench.Worker, error) { return worker{s.p}, nil }

func (s *subject) Registrations() (made uint64, live int) {
	gone := uint64(C.peer_gone(s.p))
	made = uint64(C.peer_made(s.p))
	return made, int(made - gone)
}

func (s *subject) Invalidate(r vm.Range) error {
	if errno := C.peer_remap(C.uintptr_t(r.Start), C.size_t(r.Len())); errno != 0 {
		return os.NewSyscallError("mmap", syscall.Errno(errno))
	}
	return nil
}

func (s *subject) Close() error {
	C.peer_close(s.p)
	return nil
}

type worker struct{ p *C.struct_peer }

func (w worker) Run(base, length uintptr, pages []uint32) error {
	status := C.peer_run(w.p, C.uintptr_t(base), C.size_t(length),
		(*C.uint32_t)(unsafe.SliceData(pages)), C.size_t(len(pages)))
	if status != C.UCS_OK {
		return failure(status)
	}
	return nil
}

func (worker) Close() error { return nil }
