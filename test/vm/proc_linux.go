package vm

import "syscall"

// dieWithThread makes a child die with the thread that starts it. A test process that is killed, or panics at its timeout, runs no
// cleanup, and must not leave a machine behind.
func dieWithThread() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
