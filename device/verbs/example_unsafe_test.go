package verbs_test

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device/verbs"
)

// A cache on an adapter of its own.
func Example() {
	dev, err := verbs.Open(nil)
	if err != nil {
		fmt.Println(err) // Says what is missing.
		return
	}
	defer dev.Close()
	cache, err := pindown.New(dev, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer cache.Close()

	buf := make([]byte, 64<<10)
	r, err := cache.Acquire(context.Background(), buf, pindown.LocalWrite|pindown.RemoteWrite)
	if err != nil {
		fmt.Println(err)
		return
	}
	// Tell a peer the address and r.RemoteKey(); when it has written:
	if err := r.Release(); err != nil {
		fmt.Println(err)
	}
}

// A cache beside the RDMA library that a program has already.
func ExampleNew() {
	var pd unsafe.Pointer // the library's struct ibv_pd *
	dev, err := verbs.New(uintptr(pd), nil)
	if err != nil {
		return
	}
	defer dev.Close() // Before the protection domain.
	cache, err := pindown.New(dev, nil)
	if err != nil {
		return
	}
	defer cache.Close()
	// The keys of its regions go into the library's own work requests.
}
