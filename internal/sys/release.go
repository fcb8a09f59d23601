package sys

import "golang.org/x/sys/unix"

// Release returns the kernel's release, such as "6.18.4"; "unknown" if it can't
// be had.
func Release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}
