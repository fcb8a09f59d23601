// Package tablemem provides the memory of an epoch table that a user-space
// monitor writes.
package tablemem

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
)

// New returns an empty table of 2^bucketBits hash buckets in private anonymous
// memory outside the Go heap.
//
// The memory is wiped on fork (MADV_WIPEONFORK, Linux 4.14): a forked child
// that still holds the table reads a word of zero, which equals no word that
// was ever published, so the child is served nothing. It is also left out of
// huge pages: a table is read at random and mostly empty.
//
// The memory is unmapped once the table is unreachable, not when its monitor
// closes: a cache may still be reading the word that says so.
func New(bucketBits int) (*epoch.Table, error) {
	mem, err := unix.Mmap(-1, 0, epoch.Size(bucketBits), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map table of %d bytes: %w", epoch.Size(bucketBits), os.NewSyscallError("mmap", err))
	}
	if err := unix.Madvise(mem, unix.MADV_WIPEONFORK); err != nil {
		_ = unix.Munmap(mem)
		return nil, fmt.Errorf("keep table from children: %w", os.NewSyscallError("madvise", err))
	}
	// Refused by kernels without transparent huge pages, where it isn't needed.
	_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	t, err := epoch.Format(mem, bucketBits)
	if err != nil {
		_ = unix.Munmap(mem)
		return nil, err
	}
	runtime.AddCleanup(t, func(mem []byte) { _ = unix.Munmap(mem) }, mem)
	return t, nil
}
