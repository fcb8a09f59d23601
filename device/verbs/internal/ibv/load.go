package ibv

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/ebitengine/purego"
)

// DefaultLibrary is what Load is given for the library of the system.
const DefaultLibrary = "libibverbs.so.1"

// Lib is a loaded library. Its functions may be called from many goroutines,
// as libibverbs's own may.
type Lib struct {
	getDeviceList, freeDeviceList, openDevice, closeDevice uintptr
	queryDevice, queryPort, queryGID                       uintptr
	allocPD, deallocPD                                     uintptr
	regMR, deregMR                                         uintptr
	regMRIova2, regDMABufMR, reregMR                       uintptr // optional
	createCompChannel, destroyCompChannel                  uintptr
	createCQ, destroyCQ, getCQEvent, ackCQEvents           uintptr
	createQP, modifyQP, destroyQP                          uintptr
	errnoLocation                                          uintptr
}

// ErrLoad says that the library isn't there, or lacks a function.
var ErrLoad = errors.New("ibv: library not usable")

// loaded remembers libraries by path: one is never unloaded, since its
// providers may have started what lives on.
var loaded struct {
	sync.Mutex
	libs map[string]*Lib
}

// Load loads a library by the name or path that dlopen(3) takes. A second call
// for the same returns the first one's result. It returns a wrapped ErrLoad
// with the linker's own words.
func Load(path string) (*Lib, error) {
	loaded.Lock()
	defer loaded.Unlock()
	if l := loaded.libs[path]; l != nil {
		return l, nil
	}
	// What dlerror(3) says is the thread's.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w: %w", path, ErrLoad, err)
	}
	l := &Lib{}
	for _, f := range []struct {
		name     string
		to       *uintptr
		optional bool
	}{
		{"ibv_get_device_list", &l.getDeviceList, false},
		{"ibv_free_device_list", &l.freeDeviceList, false},
		{"ibv_open_device", &l.openDevice, false},
		{"ibv_close_device", &l.closeDevice, false},
		{"ibv_query_device", &l.queryDevice, false},
		{"ibv_query_port", &l.queryPort, false},
		{"ibv_query_gid", &l.queryGID, false},
		{"ibv_alloc_pd", &l.allocPD, false},
		{"ibv_dealloc_pd", &l.deallocPD, false},
		{"ibv_reg_mr", &l.regMR, false},
		{"ibv_dereg_mr", &l.deregMR, false},
		{"ibv_reg_mr_iova2", &l.regMRIova2, true},
		{"ibv_reg_dmabuf_mr", &l.regDMABufMR, true},
		{"ibv_rereg_mr", &l.reregMR, true},
		{"ibv_create_comp_channel", &l.createCompChannel, false},
		{"ibv_destroy_comp_channel", &l.destroyCompChannel, false},
		{"ibv_create_cq", &l.createCQ, false},
		{"ibv_destroy_cq", &l.destroyCQ, false},
		{"ibv_get_cq_event", &l.getCQEvent, false},
		{"ibv_ack_cq_events", &l.ackCQEvents, false},
		{"ibv_create_qp", &l.createQP, false},
		{"ibv_modify_qp", &l.modifyQP, false},
		{"ibv_destroy_qp", &l.destroyQP, false},
		{"__errno_location", &l.errnoLocation, false}, // of libc, which the library needs
	} {
		*f.to, err = purego.Dlsym(h, f.name)
		if err != nil && !f.optional {
			return nil, fmt.Errorf("load %s: %w: %w", path, ErrLoad, err)
		}
		if err != nil {
			*f.to = 0
		}
	}
	if loaded.libs == nil {
		loaded.libs = map[string]*Lib{}
	}
	loaded.libs[path] = l
	return l, nil
}

// HasDMABuf reports whether the library can register dma-bufs.
func (l *Lib) HasDMABuf() bool { return l.regDMABufMR != 0 }
