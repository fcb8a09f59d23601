package monitortest

import (
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// watchdog ends the process with a dump of all goroutines when it isn't patted
// for a while. The kernel keeps the time and sends SIGQUIT: a Go timer would
// hang with the rest, for what hangs may well be the scheduler (a thread in a
// VM operation that keeps its processor while the world is to be stopped).
type watchdog struct {
	id       int32
	patience time.Duration
}

func startWatchdog(t *testing.T, patience time.Duration) *watchdog {
	t.Helper()
	w := &watchdog{patience: patience}
	// struct sigevent: value, signo, notify (SIGEV_SIGNAL is 0).
	var event [64]byte
	*(*int32)(unsafe.Pointer(&event[8])) = int32(unix.SIGQUIT)
	_, _, errno := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC,
		uintptr(unsafe.Pointer(&event)), uintptr(unsafe.Pointer(&w.id)))
	if errno != 0 {
		t.Fatalf("create watchdog: %v", errno)
	}
	t.Cleanup(func() {
		if _, _, errno := unix.Syscall(unix.SYS_TIMER_DELETE, uintptr(w.id), 0, 0); errno != 0 {
			t.Errorf("delete watchdog: %v", errno)
		}
	})
	w.pat()
	return w
}

// pat starts the time afresh.
func (w *watchdog) pat() {
	spec := struct{ interval, value unix.Timespec }{value: unix.NsecToTimespec(int64(w.patience))}
	_, _, _ = unix.Syscall6(unix.SYS_TIMER_SETTIME, uintptr(w.id), 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0)
	runtime.KeepAlive(&spec)
}
