package verbs

import (
	"math"
	"os"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
	"github.com/pindown/pindown/internal/sys"
)

// limitsOf derives the device's limits from the adapter's and the process's.
func limitsOf(a *ibv.DeviceAttr, o *Options) device.Limits {
	l := device.Limits{PageSize: uintptr(os.Getpagesize()), MaxPinnedBytes: o.MaxPinnedBytes}
	if o.Exact {
		l.PageSize = 0
	}
	if a.MaxMR > 0 && a.MaxMR < math.MaxInt32 {
		l.MaxRegistrations = int(a.MaxMR)
	}
	if o.MaxRegistrations != 0 && (l.MaxRegistrations == 0 || o.MaxRegistrations < l.MaxRegistrations) {
		l.MaxRegistrations = o.MaxRegistrations
	}
	// Nobody has an address space of 2^56 bytes: that is "no limit".
	if a.MaxMRSize < 1<<56 {
		l.MaxRange = a.MaxMRSize
	}
	if n, limited := sys.Memlock(); limited && l.MaxPinnedBytes == 0 && !o.OnDemand {
		// Zero would read as "no limit", and Register says what is wrong.
		l.MaxPinnedBytes = max(n, uint64(os.Getpagesize()))
	}
	return l
}
