// Package monitor defines what learns of VM operations and records them in an
// epoch table: the writers of the protocol.
//
// A [Monitor] owns an [epoch.Table] and touches it for every VM operation of
// the process that could change a page behind a watched range. Implementations
// live one level below: uffd and manual here, the kernel itself in bpf.
// Package auto picks the best one that proves itself.
//
// A monitor is trusted only after [SelfTest]: real operations on scratch
// mappings, each of which must be seen before the call returns. What a monitor
// can't see it must refuse to cover ([Monitor.Cover]); the cache then registers
// per use.
//
// # The order of a registration
//
//	Table.Watch → Table.Take → Monitor.Cover → pin → publish
//
// Cover stands between the stamp and the pin. After the stamp: whatever
// replaces the mapping once Cover has looked at it changes the stamp. Before
// the pin: an operation that was recorded before the stamp but not yet carried
// out when Cover looked would leave the pin on the old page.
package monitor
