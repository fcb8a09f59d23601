package ibv

// Access flags (enum ibv_access_flags).
const (
	AccessLocalWrite      = 1 << 0
	AccessRemoteWrite     = 1 << 1
	AccessRemoteRead      = 1 << 2
	AccessRemoteAtomic    = 1 << 3
	AccessMWBind          = 1 << 4
	AccessOnDemand        = 1 << 6
	AccessRelaxedOrdering = 1 << 20
)

// Flags of ibv_rereg_mr.
const (
	ReregTranslation = 1 << 0
	ReregPD          = 1 << 1
	ReregAccess      = 1 << 2
)

// Results of ibv_rereg_mr (enum ibv_rereg_mr_err_code).
const (
	ReregErrInput           = -1
	ReregErrDontForkNew     = -2
	ReregErrDoForkOld       = -3
	ReregErrCmd             = -4
	ReregErrCmdAndDoForkNew = -5
)

// Device capabilities (enum ibv_device_cap_flags).
const (
	CapMemWindow       = 1 << 17
	CapMemWindowType2A = 1 << 23
	CapMemWindowType2B = 1 << 24
)

// Bits of OdpCaps.
const (
	ODPSupport         = 1 << 0
	ODPSupportImplicit = 1 << 1

	ODPSend  = 1 << 0
	ODPRecv  = 1 << 1
	ODPWrite = 1 << 2
	ODPRead  = 1 << 3
)

// Kinds of memory window.
const (
	MWType1 = 1
	MWType2 = 2
)

// PortActive is the state of a port that works.
const PortActive = 4

// QPTypeRC is a reliable connected queue pair.
const QPTypeRC = 2

// States of a queue pair.
const (
	QPSInit = 1
	QPSRTR  = 2
	QPSRTS  = 3
)

// Bits of the mask of ibv_modify_qp.
const (
	QPState           = 1 << 0
	QPAccessFlags     = 1 << 3
	QPPkeyIndex       = 1 << 4
	QPPort            = 1 << 5
	QPAV              = 1 << 7
	QPPathMTU         = 1 << 8
	QPTimeout         = 1 << 9
	QPRetryCnt        = 1 << 10
	QPRNRRetry        = 1 << 11
	QPRQPSN           = 1 << 12
	QPMaxQPRdAtomic   = 1 << 13
	QPMinRNRTimer     = 1 << 15
	QPSQPSN           = 1 << 16
	QPMaxDestRdAtomic = 1 << 17
	QPDestQPN         = 1 << 20
)

// Operations of a send work request.
const (
	WRRdmaWrite = 0
	WRSend      = 2
	WRRdmaRead  = 4
	WRLocalInv  = 7
	WRBindMW    = 8
)

// SendSignaled asks for a completion.
const SendSignaled = 1 << 1

// WCSuccess is the status of a completion without error.
const WCSuccess = 0

// Device is struct ibv_device.
type Device struct {
	_             [2]uintptr
	NodeType      int32
	TransportType int32
	Name          [64]byte
	DevName       [64]byte
	DevPath       [256]byte
	IbdevPath     [256]byte
}

// Indices into Context.Ops.
const (
	opAllocMW   = 7
	opBindMW    = 8
	opDeallocMW = 9
	opPollCQ    = 11
	opReqNotify = 12
	opPostSend  = 25
	opPostRecv  = 26
	numOps      = 32
)

// Context is struct ibv_context. What libibverbs.h inlines is called through
// Ops.
type Context struct {
	Device         *Device
	Ops            [numOps]uintptr
	CmdFd          int32
	AsyncFd        int32
	NumCompVectors int32
	_              int32
	_              [mutexSize]byte
	AbiCompat      uintptr
}

// abiExtended in Context.AbiCompat says that the context is the end of a
// struct verbs_context.
const abiExtended = ^uintptr(0)

// The struct verbs_context grows at its front, so its fields are counted from
// the context, in words.
const (
	extSize          = 1
	extQueryDeviceEx = 13
)

// PD is struct ibv_pd.
type PD struct {
	Context *Context
	Handle  uint32
}

// MR is struct ibv_mr.
type MR struct {
	Context *Context
	PD      *PD
	Addr    uintptr
	Length  uintptr
	Handle  uint32
	LKey    uint32
	RKey    uint32
}

// MW is struct ibv_mw.
type MW struct {
	Context *Context
	PD      *PD
	RKey    uint32
	Handle  uint32
	Type    uint32
}

// CompChannel is struct ibv_comp_channel.
type CompChannel struct {
	Context *Context
	Fd      int32
	Refcnt  int32
}

// CQ is the beginning of struct ibv_cq.
type CQ struct {
	Context   *Context
	Channel   *CompChannel
	CQContext uintptr
	Handle    uint32
	CQE       int32
}

// QP is the beginning of struct ibv_qp.
type QP struct {
	Context   *Context
	QPContext uintptr
	PD        *PD
	SendCQ    *CQ
	RecvCQ    *CQ
	SRQ       uintptr
	Handle    uint32
	QPNum     uint32
	State     uint32
	QPType    uint32
}

// DeviceAttr is struct ibv_device_attr.
type DeviceAttr struct {
	FwVer                 [64]byte
	NodeGUID              uint64
	SysImageGUID          uint64
	MaxMRSize             uint64
	PageSizeCap           uint64
	VendorID              uint32
	VendorPartID          uint32
	HwVer                 uint32
	MaxQP                 int32
	MaxQPWR               int32
	DeviceCapFlags        uint32
	MaxSGE                int32
	MaxSGERd              int32
	MaxCQ                 int32
	MaxCQE                int32
	MaxMR                 int32
	MaxPD                 int32
	MaxQPRdAtom           int32
	MaxEERdAtom           int32
	MaxResRdAtom          int32
	MaxQPInitRdAtom       int32
	MaxEEInitRdAtom       int32
	AtomicCap             uint32
	MaxEE                 int32
	MaxRDD                int32
	MaxMW                 int32
	MaxRawIPv6QP          int32
	MaxRawEthyQP          int32
	MaxMcastGrp           int32
	MaxMcastQPAttach      int32
	MaxTotalMcastQPAttach int32
	MaxAH                 int32
	MaxFMR                int32
	MaxMapPerFMR          int32
	MaxSRQ                int32
	MaxSRQWR              int32
	MaxSRQSGE             int32
	MaxPkeys              uint16
	LocalCAAckDelay       uint8
	PhysPortCnt           uint8
}

// ODPCaps is struct ibv_odp_caps.
type ODPCaps struct {
	General uint64
	RC      uint32
	UC      uint32
	UD      uint32
	_       uint32
}

// DeviceAttrEx is struct ibv_device_attr_ex.
type DeviceAttrEx struct {
	Orig     DeviceAttr
	CompMask uint32
	_        uint32
	ODP      ODPCaps
	_        [136]byte
}

// PortAttr is struct ibv_port_attr.
type PortAttr struct {
	State         uint32
	MaxMTU        uint32
	ActiveMTU     uint32
	GIDTblLen     int32
	PortCapFlags  uint32
	MaxMsgSz      uint32
	BadPkeyCntr   uint32
	QkeyViolCntr  uint32
	PkeyTblLen    uint16
	LID           uint16
	SMLID         uint16
	LMC           uint8
	MaxVLNum      uint8
	SMSL          uint8
	SubnetTimeout uint8
	InitTypeReply uint8
	ActiveWidth   uint8
	ActiveSpeed   uint8
	PhysState     uint8
	LinkLayer     uint8
	Flags         uint8
	PortCapFlags2 uint16
}

// GID is union ibv_gid.
type GID [16]byte

// QPCap is struct ibv_qp_cap.
type QPCap struct {
	MaxSendWR     uint32
	MaxRecvWR     uint32
	MaxSendSGE    uint32
	MaxRecvSGE    uint32
	MaxInlineData uint32
}

// QPInitAttr is struct ibv_qp_init_attr.
type QPInitAttr struct {
	QPContext uintptr
	SendCQ    *CQ
	RecvCQ    *CQ
	SRQ       uintptr
	Cap       QPCap
	QPType    uint32
	SQSigAll  int32
	_         int32
}

// AHAttr is struct ibv_ah_attr.
type AHAttr struct {
	DGID         GID
	FlowLabel    uint32
	SGIDIndex    uint8
	HopLimit     uint8
	TrafficClass uint8
	_            uint8
	DLID         uint16
	SL           uint8
	SrcPathBits  uint8
	StaticRate   uint8
	IsGlobal     uint8
	PortNum      uint8
	_            uint8
}

// QPAttr is struct ibv_qp_attr.
type QPAttr struct {
	QPState          uint32
	CurQPState       uint32
	PathMTU          uint32
	PathMigState     uint32
	QKey             uint32
	RQPSN            uint32
	SQPSN            uint32
	DestQPNum        uint32
	QPAccessFlags    uint32
	Cap              QPCap
	AH               AHAttr
	AltAH            AHAttr
	PkeyIndex        uint16
	AltPkeyIndex     uint16
	EnSqdAsyncNotify uint8
	SQDraining       uint8
	MaxRdAtomic      uint8
	MaxDestRdAtomic  uint8
	MinRNRTimer      uint8
	PortNum          uint8
	Timeout          uint8
	RetryCnt         uint8
	RNRRetry         uint8
	AltPortNum       uint8
	AltTimeout       uint8
	_                uint8
	RateLimit        uint32
	_                uint32
}

// SGE is struct ibv_sge.
type SGE struct {
	Addr   uint64
	Length uint32
	LKey   uint32
}

// MWBindInfo is struct ibv_mw_bind_info.
type MWBindInfo struct {
	MR     *MR
	Addr   uint64
	Length uint64
	Access uint32
	_      uint32
}

// SendWR is struct ibv_send_wr, with the union members that are used here.
type SendWR struct {
	WRID       uint64
	Next       *SendWR
	SGList     *SGE
	NumSGE     int32
	Opcode     uint32
	SendFlags  uint32
	Invalidate uint32 // the key of WRLocalInv
	RemoteAddr uint64 // of WRRdmaWrite and WRRdmaRead
	RKey       uint32
	_          [20]byte
	_          uint64 // qp_type
	BindMW     *MW
	BindRKey   uint32
	_          uint32
	BindInfo   MWBindInfo
}

// RecvWR is struct ibv_recv_wr.
type RecvWR struct {
	WRID   uint64
	Next   *RecvWR
	SGList *SGE
	NumSGE int32
	_      int32
}

// MWBind is struct ibv_mw_bind.
type MWBind struct {
	WRID      uint64
	SendFlags uint32
	_         uint32
	Info      MWBindInfo
}

// WC is struct ibv_wc.
type WC struct {
	WRID         uint64
	Status       uint32
	Opcode       uint32
	VendorErr    uint32
	ByteLen      uint32
	ImmData      uint32
	QPNum        uint32
	SrcQP        uint32
	Flags        uint32
	PkeyIndex    uint16
	SLID         uint16
	SL           uint8
	DLIDPathBits uint8
	_            [2]byte
}
