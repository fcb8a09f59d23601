package epoch

// The layout's constants; layout.h states them for C and layout_test.go holds
// the two together.
const (
	// Magic is the first word of a table, "PNDEPOCH" in little endian.
	Magic = 0x48434f5045444e50
	// Version is the layout version that this package reads and writes.
	Version = 1

	// PageShift is log2 of the smallest block: 4 KiB.
	PageShift = 12
	// FanoutShift is log2 of a block's number of children.
	FanoutShift = 4
	// Levels is the number of block sizes; the root, level Levels-1, spans
	// 2^48 bytes.
	Levels = 10
	// MaxAddress is the first address that the tree doesn't cover.
	MaxAddress = uintptr(1) << (PageShift + FanoutShift*(Levels-1))

	bucketSlots   = 8
	bucketSize    = 256
	headerSize    = 4096
	minBucketBits = 3
	maxBucketBits = 20

	wordBusyMask      = 0x7f
	wordLost          = 0x80
	wordGenerationOne = 0x100

	tagLevelShift  = 56
	hashMultiplier = 0x9e3779b97f4a7c15
	farShift       = 16
	// The number of buckets for blocks below largeLevel, and from there on.
	largeLevel = 2
	smallTries = 3
	largeTries = 5

	rootLevel = Levels - 1

	// slotsPerRegion is what BucketBitsFor reckons with.
	slotsPerRegion = 16
	// recommendedBucketBits is the most that BucketBitsFor recommends: 16 MiB.
	recommendedBucketBits = 16
)

// rootTag is the tag of the root, which stays in the first slot of bucket 0.
const rootTag = Levels << tagLevelShift

func makeTag(level int, block uint64) uint64 {
	return uint64(level+1)<<tagLevelShift | block
}

// parentTag returns the tag of the block above one that isn't the root.
func parentTag(tag uint64) uint64 { return makeTag(tagLevel(tag)+1, tagBlock(tag)>>FanoutShift) }

func tagLevel(tag uint64) int    { return int(tag>>tagLevelShift) - 1 }
func tagBlock(tag uint64) uint64 { return tag & (1<<tagLevelShift - 1) }
