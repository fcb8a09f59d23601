package oracle

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

// Witness holds the pages that backed a range when it was made, as a
// registration does.
//
// The pages sit in a pipe, put there by vmsplice(2): that takes a reference to
// each without copying, needs no privilege, counts against no limit on locked
// memory, and works on every kind of mapping. The pages can't be freed, so
// their frame numbers can't come back, until Close.
type Witness struct {
	pages  []uintptr // one address in each page held
	frames []Entry
	pfn    bool
	r, w   *os.File
}

// maxPages is what an unprivileged pipe can hold, /proc/sys/fs/pipe-max-size.
const maxPages = 256

// Hold returns a witness of the pages behind r, one in each step bytes (zero
// means each page; more suits huge pages and long ranges), 256 at most. Pages
// that aren't present are faulted in for reading. The caller closes it.
func Hold(r vm.Range, step uintptr) (*Witness, error) {
	if err := r.Check(); err != nil {
		return nil, err
	}
	step = max(step, PageSize)
	h := &Witness{pfn: CheckPFN() == nil}
	for a := r.Start &^ (PageSize - 1); a < r.End; a += step {
		h.pages = append(h.pages, a)
	}
	if len(h.pages) > maxPages {
		return nil, fmt.Errorf("hold %v: %d pages, at most %d: %w", r, len(h.pages), maxPages, unix.ENOSPC)
	}
	var err error
	if h.r, h.w, err = os.Pipe(); err != nil {
		return nil, fmt.Errorf("hold %v: %w", r, err)
	}
	if err := h.fill(); err != nil {
		return nil, fmt.Errorf("hold %v: %w", r, errors.Join(err, h.Close()))
	}
	for _, a := range h.pages {
		e, err := Frames(vm.Range{Start: a, End: a + 1})
		if err != nil {
			return nil, errors.Join(err, h.Close())
		}
		h.frames = append(h.frames, e[0])
	}
	return h, nil
}

func (h *Witness) fill() error {
	fd := int(h.w.Fd())
	if len(h.pages) > 16 {
		if _, err := unix.FcntlInt(h.w.Fd(), unix.F_SETPIPE_SZ, len(h.pages)*int(PageSize)); err != nil {
			return os.NewSyscallError("fcntl", err)
		}
	}
	for _, a := range h.pages {
		// The address goes to the kernel as a number in an iovec of its own
		// making: it needn't be a pointer that Go knows.
		iov := [2]uintptr{a, PageSize}
		n, _, errno := unix.Syscall6(unix.SYS_VMSPLICE, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1, unix.SPLICE_F_NONBLOCK, 0, 0)
		runtime.KeepAlive(&iov)
		if errno != 0 {
			return os.NewSyscallError("vmsplice", errno)
		}
		if n != PageSize {
			return fmt.Errorf("vmsplice at %#x took %d bytes: %w", a, n, io.ErrShortWrite)
		}
	}
	return nil
}

// Frames returns the entries of the pages held, in address order, as they were
// when the witness was made.
func (h *Witness) Frames() []Entry { return h.frames }

// Pages returns an address in each page held.
func (h *Witness) Pages() []uintptr { return h.pages }

// Difference says how what is mapped now differs from what a witness holds.
type Difference struct {
	Gone    []uintptr // pages that can't be accessed any more
	Changed []uintptr // pages behind which there is another frame
}

// Any reports whether anything differs.
func (d Difference) Any() bool { return len(d.Gone)+len(d.Changed) > 0 }

// String returns a summary.
func (d Difference) String() string {
	return fmt.Sprintf("%d gone %#x, %d changed %#x", len(d.Gone), d.Gone, len(d.Changed), d.Changed)
}

// Compare faults the pages in as a reader of the memory would, and compares
// them with those held: by frame number where the kernel shows it, else by
// content, which overwrites the first word of each page and can be done once.
func (h *Witness) Compare() (Difference, error) {
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return Difference{}, fmt.Errorf("compare pages: %w", err)
	}
	defer func() { _ = mem.Close() }()
	if !h.pfn {
		return h.compareContent(mem)
	}
	var d Difference
	b := make([]byte, 1)
	for i, a := range h.pages {
		// Through /proc/self/mem, a page that isn't there is an error and not
		// a SIGSEGV or SIGBUS. The read installs the page that it finds.
		if _, err := mem.ReadAt(b, int64(a)); err != nil {
			d.Gone = append(d.Gone, a)
			continue
		}
		e, err := Frames(vm.Range{Start: a, End: a + 1})
		if err != nil {
			return d, err
		}
		switch {
		case e[0].PFN() == h.frames[i].PFN():
		case e[0].Present():
			d.Changed = append(d.Changed, a)
		default:
			// Gone again between the two, or a kind of mapping that no fault
			// by /proc/self/mem populates.
			d.Gone = append(d.Gone, a)
		}
	}
	return d, nil
}

// compareContent writes a mark into each page that is mapped now, and looks
// for it in the pages held.
func (h *Witness) compareContent(mem *os.File) (Difference, error) {
	var d Difference
	page := make([]byte, PageSize)
	// A mark that was never written before: the page held may show an old one.
	nonce := rand.Uint64()
	gone := make([]bool, len(h.pages))
	for i, a := range h.pages {
		binary.NativeEndian.PutUint64(page, nonce+uint64(i))
		if _, err := mem.WriteAt(page[:8], int64(a)); err != nil {
			gone[i] = true
			d.Gone = append(d.Gone, a)
		}
	}
	for i, a := range h.pages {
		if _, err := io.ReadFull(h.r, page); err != nil {
			return d, fmt.Errorf("read page held for %#x: %w", a, err)
		}
		if !gone[i] && binary.NativeEndian.Uint64(page) != nonce+uint64(i) {
			d.Changed = append(d.Changed, a)
		}
	}
	return d, nil
}

// Close lets the pages go. It is idempotent.
func (h *Witness) Close() error {
	return errors.Join(closeFile(&h.r), closeFile(&h.w))
}

func closeFile(f **os.File) error {
	if *f == nil {
		return nil
	}
	err := (*f).Close()
	*f = nil
	return err
}
