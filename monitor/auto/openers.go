package auto

import (
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/bpf"
	"github.com/pindown/pindown/monitor/uffd"
)

// Openers returns the monitors that this build knows, best first.
func Openers() []Opener { return OpenersFor(0) }

// OpenersFor is Openers with tables that suit so many regions; zero is the
// monitors' default.
func OpenersFor(regions int) []Opener {
	return []Opener{
		{Name: "bpf", Mode: bpf.ModeFunctions.String(), Open: openBPF(bpf.ModeFunctions, regions)},
		{Name: "bpf", Mode: bpf.ModeSyscalls.String(), Open: openBPF(bpf.ModeSyscalls, regions)},
		{Name: "uffd", Open: func() (monitor.Monitor, error) { return opened(uffd.Open(&uffd.Options{Regions: regions})) }},
	}
}

func openBPF(mode bpf.Mode, regions int) func() (monitor.Monitor, error) {
	return func() (monitor.Monitor, error) {
		return opened(bpf.Open(&bpf.Options{Mode: mode, Regions: regions}))
	}
}

// opened keeps a nil pointer from becoming a non-nil interface.
func opened[M monitor.Monitor](m M, err error) (monitor.Monitor, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
}
