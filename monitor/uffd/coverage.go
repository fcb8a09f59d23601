package uffd

import (
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// Coverage returns what this package documents, for reports: Refused for the
// kinds of mapping that Cover doesn't take, Caught for what is seen on the
// others, Blind for what isn't. monitor.SelfTest shows what is true of this
// machine.
func Coverage() monitor.Coverage {
	ops := []vm.Op{
		vm.OpMunmap, vm.OpMmapFixed, vm.OpMremap, vm.OpMremapFixed, vm.OpDontneed, vm.OpFree, vm.OpRemove, vm.OpGuard,
		vm.OpBrk, vm.OpShmat, vm.OpShmdt, vm.OpTruncate, vm.OpPunchHole, vm.OpProcessMadvise,
	}
	c := monitor.Coverage{}
	for _, mapping := range []vm.Mapping{
		vm.MappingAnonShared, vm.MappingMemfd, vm.MappingFilePrivate, vm.MappingFileShared, vm.MappingSysV, vm.MappingGoHeap,
	} {
		for _, op := range ops {
			c[monitor.Cell{Op: op, Mapping: mapping}] = monitor.Refused
		}
	}
	for _, mapping := range []vm.Mapping{
		vm.MappingAnonPrivate, vm.MappingHugeTLB, vm.MappingBrk, vm.MappingTHP,
	} {
		for _, op := range ops {
			switch op {
			case vm.OpShmat, vm.OpGuard:
				c[monitor.Cell{Op: op, Mapping: mapping}] = monitor.Blind
			case vm.OpRemove, vm.OpShmdt, vm.OpTruncate, vm.OpPunchHole:
				// There is no such operation on private anonymous memory.
			case vm.OpBrk:
				if mapping == vm.MappingBrk {
					c[monitor.Cell{Op: op, Mapping: mapping}] = monitor.Caught
				}
			default:
				c[monitor.Cell{Op: op, Mapping: mapping}] = monitor.Caught
			}
		}
	}
	return c
}

// BlindTo implements [monitor.Blinded]: the cells of Coverage that are blind.
func (m *Monitor) BlindTo() []monitor.Cell { return Coverage().Blind() }

var _ monitor.Blinded = (*Monitor)(nil)
