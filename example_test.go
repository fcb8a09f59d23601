package pindown_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// A program writes buffers to a file through an io_uring's fixed buffers. The
// cache registers each buffer once, and again only if its pages changed.
func Example() {
	dev, err := iouring.Open(&iouring.Options{Entries: 8, Slots: 64})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	cache, err := pindown.New(dev, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()

	f, err := os.CreateTemp("", "pindown-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()

	buf, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		log.Fatal(err)
	}
	write := func(text string, off int64) error {
		copy(buf, text)
		region, err := cache.Acquire(context.Background(), buf, pindown.LocalRead)
		if err != nil {
			return err
		}
		// The key may be used until Release.
		if err := dev.Ring().WriteFixed(int(f.Fd()), vm.RangeOf(buf), off, region.LocalKey(), 0); err != nil {
			return errors.Join(err, region.Release())
		}
		var done [1]iouring.Completion
		err = dev.Ring().Do(done[:])
		return errors.Join(err, done[0].Err(), region.Release())
	}

	if err := write("first", 0); err != nil {
		log.Fatal(err)
	}
	// The pages go, and others come, at the same address. A cache that doesn't
	// notice would write "first" again.
	if err := unix.Madvise(buf, unix.MADV_DONTNEED); err != nil {
		log.Fatal(err)
	}
	if err := write("second", 4096); err != nil {
		log.Fatal(err)
	}

	got := make([]byte, 6)
	if _, err := f.ReadAt(got, 4096); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", got)
	// Output: second
}

// A hit or nothing, for a path that mustn't block: the caller copies through a
// buffer of its own instead.
func ExampleCache_TryAcquire() {
	dev, err := iouring.Open(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	cache, err := pindown.New(dev, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()

	buf := make([]byte, 64<<10)
	if _, ok := cache.TryAcquire(buf, pindown.LocalWrite); !ok {
		fmt.Println("not registered: copy")
	}
	// Output: not registered: copy
}

// Memory that Go doesn't own is given by address and length.
func ExampleCache_AcquireRange() {
	dev, err := iouring.Open(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	cache, err := pindown.New(dev, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()

	addr, err := unix.MmapPtr(-1, 0, nil, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		log.Fatal(err)
	}
	r, err := vm.NewRange(uintptr(addr), 1<<20)
	if err != nil {
		log.Fatal(err)
	}
	region, err := cache.AcquireRange(context.Background(), r, pindown.LocalWrite)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(region.Range().Contains(r))
	if err := region.Release(); err != nil {
		log.Fatal(err)
	}

	// What can't be registered is an error, never less than was asked for.
	if err := unix.MunmapPtr(addr, 1<<20); err != nil {
		log.Fatal(err)
	}
	_, err = cache.AcquireRange(context.Background(), r, pindown.LocalWrite)
	fmt.Println(errors.Is(err, device.ErrFault))
	// Output:
	// true
	// true
}

// Events tell what happens to regions, after the fact and outside all locks.
func ExampleOptions_onEvent() {
	dev, err := iouring.Open(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	told := make(chan pindown.Event, 1)
	cache, err := pindown.New(dev, &pindown.Options{
		MaxRegions: 100,
		OnEvent: func(e pindown.Event) {
			select {
			case told <- e:
			default: // whoever listens is behind
			}
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()

	buf := make([]byte, 4096)
	region, err := cache.Acquire(context.Background(), buf, pindown.LocalWrite)
	if err != nil {
		log.Fatal(err)
	}
	cached := region.Cached()
	if err := region.Release(); err != nil {
		log.Fatal(err)
	}
	if cached {
		if _, err := cache.Invalidate(vm.RangeOf(buf)); err != nil {
			log.Fatal(err)
		}
		fmt.Println((<-told).Kind)
	} else {
		// The monitor of this machine doesn't cover the Go heap.
		fmt.Println(pindown.EventInvalidated)
	}
	// Output: invalidated
}
