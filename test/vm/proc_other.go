//go:build !linux

package vm

import "syscall"

// dieWithThread does nothing: Require skips here.
func dieWithThread() *syscall.SysProcAttr {
	return nil
}
