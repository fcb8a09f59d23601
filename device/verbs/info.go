package verbs

import "github.com/pindown/pindown/device/verbs/internal/ibv"

// Info is what an adapter and its provider can do.
type Info struct {
	// Name is the kernel's name of the adapter, such as "mlx5_0" or "rxe0".
	Name string
	// Firmware is the adapter's firmware version; empty if it has none.
	Firmware string
	// MaxRegistrations, MaxRange, MaxWindows are the adapter's own limits, of
	// all its users together; zero windows if it has none.
	MaxRegistrations int
	MaxRange         uint64
	MaxWindows       int
	// Update, Revoke and ChangeAccess say what ibv_rereg_mr(3) was seen to do.
	Update, Revoke, ChangeAccess bool
	// WindowType1 and WindowType2 say which memory windows can be made.
	WindowType1, WindowType2 bool
	// OnDemand says that the adapter follows the page tables (On-Demand
	// Paging) for reads, writes, sends and receives of reliable connections;
	// OnDemandImplicit that it can do so for the whole address space.
	OnDemand, OnDemandImplicit bool
	// DMABuf says that the library can register dma-bufs. The adapter and the
	// kernel must, too.
	DMABuf bool
}

// infoOf describes an adapter, as far as it says.
func infoOf(l *ibv.Lib, c *ibv.Context, a *ibv.DeviceAttr) Info {
	const rc = ibv.ODPSend | ibv.ODPRecv | ibv.ODPWrite | ibv.ODPRead
	odp := l.QueryODP(c)
	i := Info{
		Name:             ibv.DeviceName(c.Device),
		Firmware:         a.Firmware(),
		MaxRegistrations: int(a.MaxMR),
		MaxRange:         a.MaxMRSize,
		MaxWindows:       int(a.MaxMW),
		WindowType1:      a.DeviceCapFlags&ibv.CapMemWindow != 0 && a.MaxMW > 0,
		WindowType2:      a.DeviceCapFlags&(ibv.CapMemWindowType2A|ibv.CapMemWindowType2B) != 0 && a.MaxMW > 0,
		OnDemand:         odp.General&ibv.ODPSupport != 0 && odp.RC&rc == rc,
		DMABuf:           l.HasDMABuf(),
	}
	i.OnDemandImplicit = i.OnDemand && odp.General&ibv.ODPSupportImplicit != 0
	return i
}
