package bpf

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/vm"
)

func TestOpOf(t *testing.T) {
	for _, tt := range []struct {
		nr   int32
		arg  uint32
		want vm.Op
	}{
		{unix.SYS_MUNMAP, 0, vm.OpMunmap},
		{unix.SYS_MMAP, unix.MAP_FIXED, vm.OpMmapFixed},
		{unix.SYS_REMAP_FILE_PAGES, 0, vm.OpMmapFixed},
		{unix.SYS_MREMAP, unix.MREMAP_MAYMOVE, vm.OpMremap},
		{unix.SYS_MREMAP, unix.MREMAP_MAYMOVE | unix.MREMAP_FIXED, vm.OpMremapFixed},
		{unix.SYS_MADVISE, unix.MADV_DONTNEED, vm.OpDontneed},
		{unix.SYS_MADVISE, unix.MADV_DONTNEED_LOCKED, vm.OpDontneed},
		{unix.SYS_MADVISE, unix.MADV_FREE, vm.OpFree},
		{unix.SYS_MADVISE, unix.MADV_REMOVE, vm.OpRemove},
		{unix.SYS_MADVISE, unix.MADV_GUARD_INSTALL, vm.OpUnknown},
		{unix.SYS_PROCESS_MADVISE, unix.MADV_DONTNEED, vm.OpProcessMadvise},
		{unix.SYS_BRK, 0, vm.OpBrk},
		{unix.SYS_SHMAT, shmRemap, vm.OpShmat},
		{unix.SYS_SHMDT, 0, vm.OpShmdt},
		{unix.SYS_FTRUNCATE, 0, vm.OpTruncate},
		{unix.SYS_FALLOCATE, 0, vm.OpPunchHole},
		{nrNone, 0, vm.OpUnknown},
	} {
		if got := opOf(tt.nr, tt.arg); got != tt.want {
			t.Errorf("%d with %#x: %v, want %v", tt.nr, tt.arg, got, tt.want)
		}
	}
}

func FuzzDecodeNews(f *testing.F) {
	f.Add(make([]byte, newsSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, ok := decodeNews(b)
		if ok != (len(b) >= newsSize) {
			t.Errorf("%d bytes: %v, %v", len(b), e, ok)
		}
	})
}
