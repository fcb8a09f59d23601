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
