package vm

//go:generate go tool stringer -type Op,Mapping -linecomment -output op_string.go

// Op is a kind of VM operation: something that changes which page backs an
// address. Its String is the name that reports and JSON use.
type Op uint8

// VM operations. Operations on pinned pages that leave the page in place
// (migration, compaction, KSM, reclaim, MADV_FREE of a pinned page) are not VM
// operations.
const (
	OpInvalid        Op = iota // invalid
	OpMunmap                   // munmap
	OpMmapFixed                // mmap-fixed
	OpMremap                   // mremap
	OpMremapFixed              // mremap-fixed
	OpDontneed                 // madvise-dontneed
	OpFree                     // madvise-free
	OpRemove                   // madvise-remove
	OpBrk                      // brk-shrink
	OpShmat                    // shmat-remap
	OpShmdt                    // shmdt
	OpTruncate                 // truncate
	OpPunchHole                // punch-hole
	OpProcessMadvise           // process-madvise
	OpGuard                    // madvise-guard
	OpManual                   // manual
	OpUnknown                  // unknown
)

// Mapping is a kind of memory mapping. Its String is the name that reports and
// JSON use.
type Mapping uint8

// Kinds of mapping.
const (
	MappingInvalid     Mapping = iota // invalid
	MappingAnonPrivate                // anon-private
	MappingAnonShared                 // anon-shared
	MappingMemfd                      // memfd
	MappingFilePrivate                // file-private
	MappingFileShared                 // file-shared
	MappingSysV                       // sysv
	MappingHugeTLB                    // hugetlb
	MappingGoHeap                     // go-heap
	MappingBrk                        // brk
	MappingTHP                        // anon-thp
)

// Event says that an operation changed the pages behind a range. Events are
// news, not truth: they may be lost, and validity never depends on them.
type Event struct {
	Range Range
	Op    Op
}
