package uffd

import (
	"fmt"
	"reflect"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// goHeap tells memory of the Go heap from other memory.
//
// runtime.Pinner.Pin keeps a reference to what lies in the Go heap and ignores
// other pointers; whether it did shows in the length of its unexported field
// refs. init makes sure that this still works. Beside it, every arena (64 MiB,
// aligned) that was ever seen to hold an object counts as heap altogether.
type goHeap struct {
	mu     sync.Mutex
	arenas map[uintptr]struct{} // guarded by mu
}

// init probes a known object and a known page that isn't Go's.
func (h *goHeap) init() error {
	h.arenas = make(map[uintptr]struct{})
	page, err := unix.Mmap(-1, 0, int(pageSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map page: %w", err)
	}
	defer func() { _ = unix.Munmap(page) }()
	// Of sizes that don't depend on constants, so that neither is on the stack.
	small, large := make([]byte, pageSize/64), make([]byte, pageSize*256)
	inSmall, ok := pinned(vm.RangeOf(small).Start + 8)
	inLarge, ok2 := pinned(vm.RangeOf(large).End - 1)
	inPage, ok3 := pinned(vm.RangeOf(page).Start)
	runtime.KeepAlive(small)
	runtime.KeepAlive(large)
	if !ok || !ok2 || !ok3 || !inSmall || !inLarge || inPage {
		return fmt.Errorf("the Go heap can't be told from other memory with %s: %w", runtime.Version(), monitor.ErrNotSupported)
	}
	return nil
}

// holds reports whether r is in the Go heap: its first or last byte, or the
// first byte of an arena in between.
func (h *goHeap) holds(r vm.Range) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for at := r.Start; at < r.End; at = at&^(maxWindow-1) + maxWindow {
		if h.holdsByte(at) {
			return true
		}
	}
	return h.holdsByte(r.End - 1)
}

func (h *goHeap) holdsByte(addr uintptr) bool {
	arena := addr &^ (maxWindow - 1)
	if _, ok := h.arenas[arena]; ok {
		return true
	}
	in, ok := pinned(addr)
	if in {
		h.arenas[arena] = struct{}{}
	}
	return in || !ok
}

// pinned reports whether addr lies in an object of the Go heap; ok is false if
// there is no telling.
func pinned(addr uintptr) (in, ok bool) {
	var p runtime.Pinner
	defer p.Unpin()
	// The detour is for go vet and for the checks of -race: as a conversion it
	// would claim that addr was derived from a pointer.
	p.Pin(*(*unsafe.Pointer)(unsafe.Pointer(&addr)))
	inner := reflect.ValueOf(&p).Elem().Field(0)
	if inner.Kind() != reflect.Pointer || inner.IsNil() || inner.Elem().Kind() != reflect.Struct {
		return false, false
	}
	refs := inner.Elem().FieldByName("refs")
	if !refs.IsValid() || refs.Kind() != reflect.Slice {
		return false, false
	}
	return refs.Len() > 0, true
}
