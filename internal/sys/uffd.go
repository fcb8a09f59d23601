package sys

// Userfaultfd's API version and flags, from include/uapi/linux/userfaultfd.h.
const (
	UFFDAPI          = 0xaa
	UFFDUserModeOnly = 1
)

// Features of userfaultfd that UFFDIO_API negotiates.
const (
	UFFDFeaturePagefaultFlagWP  = 1 << 0
	UFFDFeatureEventFork        = 1 << 1
	UFFDFeatureEventRemap       = 1 << 2
	UFFDFeatureEventRemove      = 1 << 3
	UFFDFeatureEventUnmap       = 1 << 6
	UFFDFeatureWPHugetlbfsShmem = 1 << 12
)

// Modes of UFFDIO_REGISTER and UFFDIO_WRITEPROTECT, and the bit that says that
// a registered range takes the latter.
const (
	UFFDRegisterModeWP           = 1 << 1
	UFFDWriteprotectModeWP       = 1 << 0
	UFFDWriteprotectModeDontwake = 1 << 1
	UFFDIoctlWriteprotect        = 1 << 6
)

const (
	uffdioRegister     = 0xc020aa00
	uffdioUnregister   = 0x8010aa01
	uffdioWriteprotect = 0xc018aa06
	uffdioAPI          = 0xc018aa3f
)

// UFFDEvent is the kind of a message read from a userfaultfd.
type UFFDEvent uint8

// Kinds of message.
const (
	UFFDEventInvalid   UFFDEvent = 0
	UFFDEventPagefault UFFDEvent = 0x12
	UFFDEventFork      UFFDEvent = 0x13
	UFFDEventRemap     UFFDEvent = 0x14
	UFFDEventRemove    UFFDEvent = 0x15
	UFFDEventUnmap     UFFDEvent = 0x16
)

// UFFDMsg is struct uffd_msg. Arg is from, to and length of a remap, start and
// end of a removal or an unmapping.
type UFFDMsg struct {
	Event UFFDEvent
	_     [7]byte
	Arg   [3]uint64
}

type uffdioAPIArg struct {
	API      uint64
	Features uint64
	Ioctls   uint64
}

type uffdioRange struct {
	Start uint64
	Len   uint64
}

type uffdioRegisterArg struct {
	Range  uffdioRange
	Mode   uint64
	Ioctls uint64
}

type uffdioWriteprotectArg struct {
	Range uffdioRange
	Mode  uint64
}
