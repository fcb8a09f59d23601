package uring

// Offsets for mapping a ring's parts.
const (
	OffSQRing = 0
	OffCQRing = 0x8000000
	OffSQEs   = 0x10000000
)

// Limits of the kernel (io_uring/rsrc.c).
const (
	// MaxBuffers is IORING_MAX_REG_BUFFERS, the most slots of a buffer table.
	MaxBuffers = 1 << 14
	// MaxBufferLen is the length of the longest buffer.
	MaxBufferLen = 1 << 30
)

// Setup flags.
const (
	SetupCQSize       = 1 << 3
	SetupClamp        = 1 << 4
	SetupSubmitAll    = 1 << 7
	SetupSingleIssuer = 1 << 12
)

// Features that a set-up ring reports.
const (
	FeatSingleMmap = 1 << 0
	FeatNoDrop     = 1 << 1
	FeatRsrcTags   = 1 << 10
)

// Flags of io_uring_enter.
const (
	EnterGetEvents = 1 << 0
)

// Bits of the submission queue's flags word.
const (
	SQCQOverflow = 1 << 1
)

// Operations of a submission.
const (
	OpNop        = 0
	OpFsync      = 3
	OpReadFixed  = 4
	OpWriteFixed = 5
	OpRead       = 22
	OpWrite      = 23
)

// FsyncDatasync makes OpFsync an fdatasync.
const FsyncDatasync = 1 << 0

// Operations of io_uring_register.
const (
	RegisterBuffers2      = 15
	RegisterBuffersUpdate = 16
)

// RsrcRegisterSparse is the flag of RsrcRegister that asks for empty slots.
const RsrcRegisterSparse = 1 << 0

// Params is struct io_uring_params.
type Params struct {
	SQEntries    uint32
	CQEntries    uint32
	Flags        uint32
	SQThreadCPU  uint32
	SQThreadIdle uint32
	Features     uint32
	WqFd         uint32
	_            [3]uint32
	SQOff        SQRingOffsets
	CQOff        CQRingOffsets
}

// SQRingOffsets is struct io_sqring_offsets.
type SQRingOffsets struct {
	Head, Tail, RingMask, RingEntries, Flags, Dropped, Array, _ uint32
	UserAddr                                                    uint64
}

// CQRingOffsets is struct io_cqring_offsets.
type CQRingOffsets struct {
	Head, Tail, RingMask, RingEntries, Overflow, CQEs, Flags, _ uint32
	UserAddr                                                    uint64
}

// SQE is struct io_uring_sqe, with the names of the fields that reads and
// writes use.
type SQE struct {
	Opcode      uint8
	Flags       uint8
	Ioprio      uint16
	Fd          int32
	Off         uint64
	Addr        uint64
	Len         uint32
	OpFlags     uint32
	UserData    uint64
	BufIndex    uint16
	Personality uint16
	FileIndex   uint32
	Addr3       uint64
	_           uint64
}

// CQE is struct io_uring_cqe.
type CQE struct {
	UserData uint64
	Res      int32
	Flags    uint32
}

// Iovec is struct iovec of a 64-bit system. Base is a number: it keeps nothing
// alive.
type Iovec struct {
	Base, Len uint64
}

// RsrcRegister is struct io_uring_rsrc_register.
type RsrcRegister struct {
	Nr    uint32
	Flags uint32
	_     uint64
	Data  uint64
	Tags  uint64
}

// RsrcUpdate2 is struct io_uring_rsrc_update2.
type RsrcUpdate2 struct {
	Offset uint32
	_      uint32
	Data   uint64
	Tags   uint64
	Nr     uint32
	_      uint32
}
