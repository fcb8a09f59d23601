package pindown_test

import (
	"context"
	"fmt"

	"github.com/pindown/pindown"
	"github.com/pindown/pindown/device/simhca"
	"github.com/pindown/pindown/monitor/manual"
	"github.com/pindown/pindown/vm"
)

// A peer has been told a remote key, and the pages behind it are replaced.
func ExampleRegion_Update() {
	mon, err := manual.New(nil)
	if err != nil {
		panic(err)
	}
	space := simhca.NewSpace(&simhca.SpaceOptions{
		Before: func(e vm.Event) { mon.Before(e.Range) },
		After:  func(e vm.Event) { mon.After(e.Range) },
	})
	mem, err := space.Map(4, simhca.ProtRead|simhca.ProtWrite)
	if err != nil {
		panic(err)
	}
	cache, err := pindown.New(simhca.Open(space, nil), &pindown.Options{Monitor: mon})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	region, err := cache.AcquireRange(ctx, mem, pindown.LocalWrite|pindown.RemoteWrite)
	if err != nil {
		panic(err)
	}
	advertised := region.RemoteKey()

	if err := space.Dontneed(mem); err != nil { // madvise(2)
		panic(err)
	}
	fmt.Println("stale:", region.Stale())
	updated, err := region.Update(ctx, pindown.UpdateAtomic)
	if err != nil {
		panic(err)
	}
	fmt.Println(updated.Outcome, "- stale:", region.Stale())
	if updated.KeyChanged() || updated.RemoteKey != advertised {
		fmt.Println("the peer must be told", updated.RemoteKey)
	}
	if err := region.Release(); err != nil {
		panic(err)
	}
	if err := cache.Close(); err != nil {
		panic(err)
	}
	// Output:
	// stale: true
	// updated - stale: false
}
