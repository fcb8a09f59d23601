package iouring_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/iouring"
	"github.com/pindown/pindown/vm"
)

// A buffer is registered once and written to a file through its slot.
func Example() {
	dev, err := iouring.Open(nil)
	if err != nil {
		log.Fatal(err) // Wraps device.ErrNotSupported where there is no io_uring.
	}
	defer dev.Close()

	buf, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		log.Fatal(err)
	}
	copy(buf, "hello")
	reg, err := dev.Register(context.Background(), vm.RangeOf(buf), device.LocalRead)
	if err != nil {
		log.Fatal(err)
	}

	file, err := os.CreateTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.Remove(file.Name())
	ring := dev.Ring()
	if err := ring.WriteFixed(int(file.Fd()), vm.RangeOf(buf[:5]), 0, reg.LocalKey, 42); err != nil {
		log.Fatal(err)
	}
	var done [1]iouring.Completion
	if err := ring.Do(done[:]); err != nil {
		log.Fatal(err)
	}
	content, err := os.ReadFile(file.Name())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("request %d wrote %d bytes: %s\n", done[0].UserData, done[0].Res, content)

	if err := dev.Deregister(reg); err != nil {
		log.Fatal(err)
	}
	// Output: request 42 wrote 5 bytes: hello
}

// A device on a ring that the program has already uses a part of its table.
func ExampleNew() {
	ring, err := iouring.NewRing(&iouring.RingOptions{Entries: 32}) // Or any library's.
	if err != nil {
		log.Fatal(err)
	}
	defer ring.Close()
	dev, err := iouring.New(ring.Fd(), &iouring.Options{First: 100, Slots: 28})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	fmt.Println(dev.Limits().MaxRegistrations, "registrations")
	// Output: 28 registrations
}
