package simhca

// Status is the outcome of a work request, as ibv_wc_status of
// ibv_poll_cq(3).
type Status uint8

// Statuses. All but StatusSuccess put the queue into error.
const (
	StatusInvalid Status = iota // invalid
	// StatusSuccess is IBV_WC_SUCCESS.
	StatusSuccess // success
	// StatusLocalLength is IBV_WC_LOC_LEN_ERR: a message longer than the
	// receive that it met.
	StatusLocalLength // local length error
	// StatusLocalProtection is IBV_WC_LOC_PROT_ERR: a segment isn't in what
	// its local key means, or the key means nothing, or not to this domain.
	StatusLocalProtection // local protection error
	// StatusFlushed is IBV_WC_WR_FLUSH_ERR: the queue was in error.
	StatusFlushed // flushed
	// StatusMemoryManagement is IBV_WC_MW_BIND_ERR: a fast-register,
	// local-invalidate or bind that doesn't fit its key's state.
	StatusMemoryManagement // memory management error
	// StatusRemoteInvalidRequest is IBV_WC_REM_INV_REQ_ERR: the peer's receive
	// was too short.
	StatusRemoteInvalidRequest // remote invalid request
	// StatusRemoteAccess is IBV_WC_REM_ACCESS_ERR: the remote key doesn't allow
	// it. The peer's queue goes into error too.
	StatusRemoteAccess // remote access error
	// StatusRemoteOperation is IBV_WC_REM_OP_ERR: the peer couldn't carry it
	// out.
	StatusRemoteOperation // remote operation error
	// StatusRetryExceeded is IBV_WC_RETRY_EXC_ERR: the peer's queue doesn't
	// answer: it is in error, or there is none.
	StatusRetryExceeded // retries exceeded
	// StatusNotReady is IBV_WC_RNR_RETRY_EXC_ERR: the peer had no receive
	// posted, or was not ready under that key; see QueueOptions.FailNotReady.
	StatusNotReady // receiver not ready
	// StatusGeneral is IBV_WC_GENERAL_ERR: an injected fault, or memory that
	// couldn't be reached.
	StatusGeneral // general error

	// Answers to a packet, not outcomes: try it again later; start over with
	// the first one.
	statusTryLater
	statusRestart
)

// StatusError is the error of a status other than success. It wraps nothing.
type StatusError struct{ Status Status }

// Error returns the status's name.
func (e StatusError) Error() string { return "simhca: " + e.Status.String() }

// Err returns nil for StatusSuccess, and else a [StatusError].
func (s Status) Err() error {
	if s == StatusSuccess {
		return nil
	}
	return StatusError{s}
}

// Opcode is a kind of work request.
type Opcode uint8

// Opcodes.
const (
	OpInvalid         Opcode = iota // invalid
	OpSend                          // send
	OpReceive                       // receive
	OpWrite                         // write
	OpRead                          // read
	OpFastRegister                  // fast-register
	OpLocalInvalidate               // local-invalidate
	OpBind                          // bind
)
