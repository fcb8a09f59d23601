// Package pindown is a pin-down cache: it keeps memory registered with a device
// (an io_uring's fixed buffers, an RDMA adapter) after use, and hands the same
// registration out again when the memory is used again, as long as that is
// right.
//
// Registering pins pages. When the process changes its address space (munmap,
// mremap, madvise, brk, truncation), the same address is backed by another
// page while the device still works on the old one: no error, wrong bytes. In
// this cache such a registration is never handed out:
//
//	If a VM operation that changed the pages behind any byte of a range has
//	returned before Acquire of that range began, then Acquire returns a
//	registration made after that operation.
//
// A monitor (package monitor) time-stamps the address space in a table
// (package epoch) that the cache reads from memory, so a hit costs no system
// call where the monitor lives in the kernel. A monitor is used only after it
// has proved itself on this machine; where none can, the cache registers per
// use and says so.
//
// # Use
//
//	cache, err := pindown.New(dev, nil)
//	...
//	r, err := cache.Acquire(ctx, buf, pindown.LocalWrite)
//	if err != nil {
//		return err
//	}
//	// post work with r.LocalKey(), wait for its completion
//	err = r.Release()
//
// [Cache.Acquire] takes a []byte, [Cache.AcquireRange] an address and a length
// for memory that Go doesn't own. [Cache.TryAcquire] is a hit or nothing. A
// [Region] covers every byte asked for with at least the access asked for, and
// often more: requests for any part of a cached region hit it.
//
// # What races with what
//
// A VM operation that runs while the program acquires or uses the same range
// is the program's own race: the device may see the old page or the new one.
// It never spoils the cache: the next Acquire is right again. [Region.Stale]
// tells a holder that its region has been overtaken.
//
// # Limits
//
// The cache holds at most Options.MaxRegions registrations and
// Options.MaxBytes of pinned memory. At a limit it gives up idle regions; if
// all are in use it registers for one use beside the cache, or waits
// (Options.WaitForBudget). When the device refuses for lack of memory, idle
// regions are given up and the device is tried again for a while, since
// kernels unpin asynchronously.
//
// # Updates
//
// Where the device can, [Cache.Update] points the registration of a region whose
// pages have changed at the pages mapped now, under the same keys, so that peers
// needn't be told new ones: [UpdateStrict] takes the old meaning away before it
// gives the new one, [UpdateAtomic] passes from one to the other. Options.OnStale
// has the cache do it by itself. What an update that doesn't succeed leaves:
//
//	policy  what fails                     outcome      the region's keys afterwards
//	any     the wait for others ends       failed       mean the old pages
//	any     Cover, before the device acts  failed       mean the old pages
//	strict  flush                          failed       mean the old pages
//	strict  revoke                         failed       mean the old pages
//	strict  revoke, registration lost      gone         are dead
//	strict  Cover, after revoke            gone         mean nothing
//	strict  load                           gone         mean nothing
//	strict  load, registration lost        gone         are dead
//	atomic  update                         failed       mean the old pages
//	atomic  update, registration lost      gone         are dead
//	any     the device can't update        key-changed  mean the old pages; the new region has others
//	any     the same, and register fails   failed       mean the old pages
//	any     a VM operation overtakes it    stale-again  mean pages that were mapped meanwhile
//	any     the same, then the context     stale-again  the same
//	any     the same, then Cover           stale-again  the same
//	strict  the same, then flush, revoke   stale-again  the same
//	atomic  the same, then update          stale-again  the same
//
// An update that is overtaken tries again, a few times. What ends or takes away the
// registration then does so as in a first try.
//
// In each case but key-changed no acquire finds the region afterwards: the next one
// registers anew, under other keys. Its holders keep what the last column says until
// the last of them releases it; without a holder it is deregistered at once. While
// it is held Update can be called again, and where the keys aren't dead a success
// makes them mean the pages mapped then. What the device refuses for the moment
// (device.ErrBusy, ErrNoMemory, ErrNoSlots) is tried again for
// Options.RegisterTimeout before it counts as failed.
//
// A device that can't do what the policy asks for gets a registration anew beside
// the old one; a warning is logged once, and [EventKeyChanged] tells of each.
//
// [Region.Expose] gives peers a key for part of a region until
// [Exposure.Revoke]; a [FastKey] changes its meaning in the order of a work queue.
//
// # Goroutines and locks
//
// All methods may be called from many goroutines. A cache runs one goroutine,
// which reclaims and delivers events. Locks, outermost first:
//
//	Cache.mu
//		reaper.mu (queue of events)
//		epoch.Table's mutex (never while a hit runs)
//
// No lock is held while the device or a callback is called, since both may
// change the address space, or call the cache.
//
// # Fork
//
// A forked child that doesn't exec must not use the parent's cache: every
// method there returns an error wrapping [ErrForked]. The parent isn't
// affected.
package pindown
