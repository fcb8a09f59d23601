package sys

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Commands of membarrier(2), from linux/membarrier.h.
const (
	membarrierPrivateExpedited         = 1 << 3
	membarrierRegisterPrivateExpedited = 1 << 4
)

// RegisterMembarrier announces that the process will call [Membarrier]. It may
// wait for a grace period, some milliseconds, the first time. It fails with
// ENOSYS before Linux 4.14 and where a filter of system calls forbids it.
func RegisterMembarrier() error { return membarrier(membarrierRegisterPrivateExpedited) }

// Membarrier makes every running thread of this process pass a full memory
// barrier before it returns, and is one itself. It costs an interrupt on every
// processor that runs one. EPERM without [RegisterMembarrier].
func Membarrier() error { return membarrier(membarrierPrivateExpedited) }

func membarrier(cmd uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, cmd, 0, 0); errno != 0 {
		return fmt.Errorf("membarrier command %d: %w", cmd, os.NewSyscallError("membarrier", errno))
	}
	return nil
}
