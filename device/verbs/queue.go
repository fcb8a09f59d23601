package verbs

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs/internal/ibv"
	"github.com/pindown/pindown/vm"
)

// Errors of a Queue.
var (
	// ErrQueueFull: as many requests as the queue holds are posted and not
	// polled.
	ErrQueueFull = errors.New("verbs: queue full")
	// ErrCompletion: a request has failed; the text says how. The queue is in
	// error then, and flushes what else is posted.
	ErrCompletion = errors.New("verbs: request failed")
	// ErrHandshake: the peer speaks something else.
	ErrHandshake = errors.New("verbs: handshake")
)

// QueueOptions configure a queue. The zero value, or nil, means the defaults.
type QueueOptions struct {
	// Depth is how many sends (reads, writes, bindings), and how many receives,
	// can be posted and not polled. Default: 128.
	Depth int
	// Port is the adapter's port. Default: 1.
	Port int
	// Address is the port's address (GID) to use. Default: the first of RoCE
	// version 2 over IPv4, else the first of the table.
	Address netip.Addr
}

// Queue is a reliable connected queue pair with one completion queue: enough for
// the examples and tests of this module. Posting and polling are safe for
// concurrent use; each completion goes to one poller.
//
// A queue is made by NewQueue, connected by Handshake (or Connect), and closed.
// It implements [device.WorkQueue] with memory windows of type 2; what Done is
// told comes from the goroutine that polls.
type Queue struct {
	d     *Device          // immutable.
	local Endpoint         // immutable.
	port  uint8            // immutable.
	gid   int              // immutable; index of the address.
	depth int              // immutable.
	ch    *ibv.CompChannel // immutable.
	cq    *ibv.CQ          // immutable.
	qp    *ibv.QP          // immutable.
	event *os.File         // immutable; a duplicate of the channel's descriptor.

	mu     sync.Mutex
	closed bool         // guarded by mu.
	peer   Endpoint     // guarded by mu.
	sends  int          // guarded by mu; posted and not polled.
	recvs  int          // guarded by mu; posted and not polled.
	err    error        // guarded by mu; the first failed completion.
	wr     ibv.SendWR   // guarded by mu; scratch.
	rr     ibv.RecvWR   // guarded by mu; scratch.
	sge    ibv.SGE      // guarded by mu; scratch.
	wcs    [16]ibv.WC   // guarded by mu; scratch.
	wait   sync.Mutex   // held by who waits for events.
	fast   fastRequests // guarded by mu.
}

var _ device.WorkQueue = (*Queue)(nil)

// Endpoint is what a peer must know of a queue to connect to it.
type Endpoint struct {
	QPNum uint32 `json:"qpn"`
	PSN   uint32 `json:"psn"`
	LID   uint16 `json:"lid"`
	// MTU is as in enum ibv_mtu: 256 << (MTU-1) bytes.
	MTU uint32 `json:"mtu"`
	// GID is the address as IPv6.
	GID netip.Addr `json:"gid"`
}

// Completion says that a request is over.
type Completion struct {
	// ID is the request's: its low 62 bits.
	ID uint64
	// Recv says that it was a receive, of Bytes bytes.
	Recv  bool
	Bytes int
	// Status is as in enum ibv_wc_status; zero is success.
	Status int
}

// statusNames are those of enum ibv_wc_status.
var statusNames = [...]string{
	"success", "local length error", "local queue operation error", "local EE context operation error",
	"local protection error", "request flushed", "memory window binding error", "bad response", "local access error",
	"remote invalid request", "remote access error", "remote operation error", "transport retries exceeded",
	"receiver not ready retries exceeded", "local RDD violation", "remote invalid RD request", "remote aborted",
	"invalid EE context number", "invalid EE context state", "fatal error", "response timeout", "general error",
	"tag matching error", "tag matching rendezvous incomplete",
}

// Err returns nil for a success, else a wrapped ErrCompletion.
func (c Completion) Err() error {
	if c.Status == ibv.WCSuccess {
		return nil
	}
	name := "status " + strconv.Itoa(c.Status)
	if c.Status < len(statusNames) {
		name = statusNames[c.Status]
	}
	return fmt.Errorf("%w: %s", ErrCompletion, name)
}

// What the queue itself keeps in a request's identifier.
const (
	idRecv = 1 << 63 // a receive
	idFast = 1 << 62 // a FastRegister or LocalInvalidate
	idMask = idFast - 1
)

// maxSegment is the longest request: a port's max_msg_sz is at least that.
const maxSegment = 1 << 30

// NewQueue makes a queue. Errors wrap those of package device.
func (d *Device) NewQueue(opts *QueueOptions) (*Queue, error) {
	q, err := d.newQueue(opts)
	if err != nil {
		return nil, fmt.Errorf("verbs: new queue: %w", err)
	}
	return q, nil
}

func (d *Device) newQueue(opts *QueueOptions) (*Queue, error) {
	var o QueueOptions
	if opts != nil {
		o = *opts
	}
	if o.Depth == 0 {
		o.Depth = 128
	}
	if o.Port == 0 {
		o.Port = 1
	}
	if o.Depth < 1 || o.Depth > 1<<15 || o.Port < 1 || o.Port > 255 {
		return nil, fmt.Errorf("depth %d, port %d: %w", o.Depth, o.Port, device.ErrInvalid)
	}
	if err := d.begin(); err != nil {
		return nil, err
	}
	defer d.end()
	q := &Queue{d: d, depth: o.Depth}
	if err := q.create(&o); err != nil {
		return nil, errors.Join(err, q.destroy())
	}
	d.mu.Lock()
	d.queues[q] = struct{}{}
	d.mu.Unlock()
	return q, nil
}

func (q *Queue) create(o *QueueOptions) (err error) {
	l, ctx := q.d.lib, q.d.pd.Context
	port, err := l.QueryPort(ctx, uint8(o.Port))
	if err != nil {
		return callError("ibv_query_port", err)
	}
	if port.State != ibv.PortActive {
		return fmt.Errorf("port %d isn't active: %w", o.Port, device.ErrNotSupported)
	}
	q.port = uint8(o.Port)
	q.local = Endpoint{PSN: rand.Uint32N(1 << 24), LID: port.LID, MTU: port.ActiveMTU}
	if q.gid, q.local.GID, err = q.d.address(o, int(port.GIDTblLen)); err != nil {
		return err
	}
	if q.ch, err = l.CreateCompChannel(ctx); err != nil {
		return callError("ibv_create_comp_channel", err)
	}
	fd, err := unix.FcntlInt(uintptr(q.ch.Fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return joinCall(device.ErrInvalid, "fcntl", err)
	}
	// The flag is the description's: the library's own reads don't block either.
	if err := unix.SetNonblock(fd, true); err != nil {
		return errors.Join(joinCall(device.ErrInvalid, "fcntl", err), unix.Close(fd))
	}
	q.event = os.NewFile(uintptr(fd), "completion-channel")
	if q.cq, err = l.CreateCQ(ctx, 2*o.Depth, q.ch); err != nil {
		return callError("ibv_create_cq", err)
	}
	attr := &ibv.QPInitAttr{
		SendCQ: q.cq, RecvCQ: q.cq, QPType: ibv.QPTypeRC,
		Cap: ibv.QPCap{MaxSendWR: uint32(o.Depth), MaxRecvWR: uint32(o.Depth), MaxSendSGE: 1, MaxRecvSGE: 1},
	}
	if q.qp, err = l.CreateQP(q.d.pd, attr); err != nil {
		return callError("ibv_create_qp", err)
	}
	q.local.QPNum = q.qp.QPNum
	access := uint32(ibv.AccessLocalWrite | ibv.AccessRemoteRead | ibv.AccessRemoteWrite)
	if q.d.atomics {
		access |= ibv.AccessRemoteAtomic
	}
	err = l.ModifyQP(q.qp, &ibv.QPAttr{QPState: ibv.QPSInit, PortNum: uint8(o.Port), QPAccessFlags: access},
		ibv.QPState|ibv.QPPkeyIndex|ibv.QPPort|ibv.QPAccessFlags)
	if err != nil {
		return callError("ibv_modify_qp", err)
	}
	return nil
}

// address chooses an entry of a port's table of addresses.
func (d *Device) address(o *QueueOptions, n int) (index int, addr netip.Addr, err error) {
	best, bestAddr := -1, netip.Addr{}
	for i := range n {
		g, err := d.lib.QueryGID(d.pd.Context, uint8(o.Port), i)
		if err != nil || g == (ibv.GID{}) {
			continue
		}
		a := netip.AddrFrom16(g)
		if o.Address.IsValid() {
			if a.Unmap() == o.Address.Unmap() {
				// The later entry of a pair is RoCE version 2.
				best, bestAddr = i, a
			}
			continue
		}
		if best < 0 || a.Is4In6() && (!bestAddr.Is4In6() || d.roceV2(o.Port, i)) {
			best, bestAddr = i, a
		}
	}
	if best < 0 && o.Address.IsValid() {
		return 0, addr, fmt.Errorf("port %d hasn't the address %v: %w", o.Port, o.Address, device.ErrInvalid)
	}
	if best < 0 {
		return 0, addr, fmt.Errorf("port %d has no address: %w", o.Port, device.ErrNotSupported)
	}
	return best, bestAddr, nil
}

// roceV2 reports whether an address is one of RoCE version 2, as sysfs says.
func (d *Device) roceV2(port, index int) bool {
	path := filepath.Join(ibv.SysfsPath(d.pd.Context.Device), "ports", strconv.Itoa(port), "gid_attrs", "types", strconv.Itoa(index))
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b)) == "RoCE v2"
}

// Endpoint returns what a peer must know to connect.
func (q *Queue) Endpoint() Endpoint { return q.local }

// Device returns the device that the queue belongs to.
func (q *Queue) Device() *Device { return q.d }

// Connect connects the queue to a peer's, which must connect to this one
// likewise before it is sent anything. Receives can be posted before.
func (q *Queue) Connect(peer Endpoint) error {
	if err := q.connect(peer); err != nil {
		return fmt.Errorf("verbs: connect: %w", err)
	}
	return nil
}

func (q *Queue) connect(peer Endpoint) error {
	if !peer.GID.IsValid() || peer.QPNum >= 1<<24 || peer.PSN >= 1<<24 || peer.MTU < 1 || peer.MTU > 5 {
		return fmt.Errorf("endpoint %+v: %w", peer, ErrHandshake)
	}
	if err := q.begin(); err != nil {
		return err
	}
	defer q.mu.Unlock()
	const (
		minRNRTimer = 12 // 0.64 ms
		timeout     = 17 // 0.5 s: adapters in software can be slow
		retries     = 7  // for RNR that means for ever
	)
	attr := &ibv.QPAttr{
		QPState: ibv.QPSRTR, PathMTU: min(peer.MTU, q.local.MTU), DestQPNum: peer.QPNum, RQPSN: peer.PSN,
		MaxDestRdAtomic: 1, MinRNRTimer: minRNRTimer,
		AH: ibv.AHAttr{
			DGID: peer.GID.As16(), SGIDIndex: uint8(q.gid), HopLimit: 64, DLID: peer.LID, IsGlobal: 1, PortNum: q.port,
		},
	}
	err := q.d.lib.ModifyQP(q.qp, attr, ibv.QPState|ibv.QPAV|ibv.QPPathMTU|ibv.QPDestQPN|ibv.QPRQPSN|ibv.QPMaxDestRdAtomic|ibv.QPMinRNRTimer)
	if err != nil {
		return callError("ibv_modify_qp", err)
	}
	attr = &ibv.QPAttr{QPState: ibv.QPSRTS, SQPSN: q.local.PSN, Timeout: timeout, RetryCnt: retries, RNRRetry: retries, MaxRdAtomic: 1}
	err = q.d.lib.ModifyQP(q.qp, attr, ibv.QPState|ibv.QPSQPSN|ibv.QPTimeout|ibv.QPRetryCnt|ibv.QPRNRRetry|ibv.QPMaxQPRdAtomic)
	if err != nil {
		return callError("ibv_modify_qp", err)
	}
	q.peer = peer
	return nil
}

// begin locks the queue, unless it is closed.
func (q *Queue) begin() error {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return device.ErrClosed
	}
	return nil
}

// post posts a send request, which fill completes.
func (q *Queue) post(verb string, id uint64, fill func(*ibv.SendWR)) error {
	if err := q.begin(); err != nil {
		return fmt.Errorf("verbs: %s: %w", verb, err)
	}
	defer q.mu.Unlock()
	if err := q.postLocked(id, fill); err != nil {
		return fmt.Errorf("verbs: %s: %w", verb, err)
	}
	return nil
}

func (q *Queue) postLocked(id uint64, fill func(*ibv.SendWR)) error {
	if q.sends == q.depth {
		return fmt.Errorf("%d requests: %w", q.sends, ErrQueueFull)
	}
	q.wr = ibv.SendWR{WRID: id &^ idRecv, SendFlags: ibv.SendSignaled}
	fill(&q.wr)
	if err := q.d.lib.PostSend(q.qp, &q.wr); err != nil {
		return callError("ibv_post_send", err)
	}
	q.sends++
	return nil
}

// data makes a request carry local memory.
func (q *Queue) data(wr *ibv.SendWR, r vm.Range, key uint32) {
	q.sge = ibv.SGE{Addr: uint64(r.Start), Length: uint32(r.Len()), LKey: key}
	wr.SGList, wr.NumSGE = &q.sge, 1
}

func checkSegment(verb string, r vm.Range) error {
	if err := r.Check(); err != nil {
		return fmt.Errorf("verbs: %s: %w: %w", verb, device.ErrInvalid, err)
	}
	if r.Len() > maxSegment {
		return fmt.Errorf("verbs: %s %d bytes: %w", verb, r.Len(), device.ErrTooLarge)
	}
	return nil
}

// Write posts an RDMA write of r, registered under the local key, to a peer's
// memory at addr under its remote key.
func (q *Queue) Write(id uint64, r vm.Range, key uint32, addr uint64, remoteKey uint32) error {
	return q.rdma("write", ibv.WRRdmaWrite, id, r, key, addr, remoteKey)
}

// Read posts an RDMA read of a peer's memory into r, which needs LocalWrite.
func (q *Queue) Read(id uint64, r vm.Range, key uint32, addr uint64, remoteKey uint32) error {
	return q.rdma("read", ibv.WRRdmaRead, id, r, key, addr, remoteKey)
}

func (q *Queue) rdma(verb string, op uint32, id uint64, r vm.Range, key uint32, addr uint64, remoteKey uint32) error {
	if err := checkSegment(verb, r); err != nil {
		return err
	}
	return q.post(verb, id&idMask, func(wr *ibv.SendWR) {
		wr.Opcode, wr.RemoteAddr, wr.RKey = op, addr, remoteKey
		q.data(wr, r, key)
	})
}

// Send posts a send of r to a receive of the peer.
func (q *Queue) Send(id uint64, r vm.Range, key uint32) error {
	if err := checkSegment("send", r); err != nil {
		return err
	}
	return q.post("send", id&idMask, func(wr *ibv.SendWR) {
		wr.Opcode = ibv.WRSend
		q.data(wr, r, key)
	})
}

// Recv posts a receive into r, which needs LocalWrite.
func (q *Queue) Recv(id uint64, r vm.Range, key uint32) error {
	if err := checkSegment("receive", r); err != nil {
		return err
	}
	if err := q.begin(); err != nil {
		return fmt.Errorf("verbs: receive: %w", err)
	}
	defer q.mu.Unlock()
	if q.recvs == q.depth {
		return fmt.Errorf("verbs: receive: %d requests: %w", q.recvs, ErrQueueFull)
	}
	q.sge = ibv.SGE{Addr: uint64(r.Start), Length: uint32(r.Len()), LKey: key}
	q.rr = ibv.RecvWR{WRID: id&idMask | idRecv, SGList: &q.sge, NumSGE: 1}
	if err := q.d.lib.PostRecv(q.qp, &q.rr); err != nil {
		return fmt.Errorf("verbs: receive: %w", callError("ibv_post_recv", err))
	}
	q.recvs++
	return nil
}

// Poll takes completions that are there, and returns how many. It doesn't wait.
func (q *Queue) Poll(done []Completion) (int, error) {
	n, _, err := q.poll(done)
	return n, err
}

// poll is Poll that reports also whether anything was over.
func (q *Queue) poll(done []Completion) (n int, something bool, err error) {
	if err := q.begin(); err != nil {
		return 0, false, fmt.Errorf("verbs: poll: %w", err)
	}
	n, calls, err := q.pollLocked(done)
	q.mu.Unlock()
	for _, call := range calls {
		call()
	}
	if err != nil {
		return n, true, fmt.Errorf("verbs: poll: %w", err)
	}
	return n, n+len(calls) > 0, nil
}

// pollLocked returns also the calls of Done that are due.
func (q *Queue) pollLocked(done []Completion) (n int, calls []func(), err error) {
	for n < len(done) {
		wcs := q.wcs[:min(len(q.wcs), len(done)-n)]
		got, err := q.d.lib.PollCQ(q.cq, wcs)
		if err != nil {
			return n, calls, callError("ibv_poll_cq", err)
		}
		for _, wc := range wcs[:got] {
			c := Completion{ID: wc.WRID & idMask, Bytes: int(wc.ByteLen), Status: int(wc.Status)}
			if err := c.Err(); err != nil && q.err == nil {
				q.err = err
			}
			// Only the identifier is valid in a completion with error.
			switch {
			case wc.WRID&idRecv != 0:
				c.Recv = true
				q.recvs--
			default:
				q.sends--
				c.Bytes = 0
			}
			if wc.WRID&idFast != 0 {
				if call := q.fast.over(wc.WRID, c.Err()); call != nil {
					calls = append(calls, call)
				}
				continue
			}
			done[n] = c
			n++
		}
		if got < len(wcs) {
			break
		}
	}
	return n, calls, nil
}

// Wait is Poll that waits until there is a completion, or ctx ends. It returns
// zero if only requests with a Done were over, and Done has been called. One
// goroutine at a time can wait; another's Wait, and its context, begin when the
// first has ended.
func (q *Queue) Wait(ctx context.Context, done []Completion) (int, error) {
	if len(done) == 0 {
		return 0, fmt.Errorf("verbs: wait: no room for completions: %w", device.ErrInvalid)
	}
	for {
		if n, something, err := q.poll(done); something || err != nil {
			return n, err
		}
		if err := q.arm(); err != nil {
			return 0, fmt.Errorf("verbs: wait: %w", err)
		}
		// A completion that came before the queue was armed raises no event.
		if n, something, err := q.poll(done); something || err != nil {
			return n, err
		}
		if err := q.await(ctx); err != nil {
			return 0, fmt.Errorf("verbs: wait: %w", err)
		}
	}
}

func (q *Queue) arm() error {
	if err := q.begin(); err != nil {
		return err
	}
	defer q.mu.Unlock()
	if err := q.d.lib.ReqNotifyCQ(q.cq); err != nil {
		return callError("ibv_req_notify_cq", err)
	}
	return nil
}

// await waits for an event.
func (q *Queue) await(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !q.wait.TryLock() {
		// Another waits, and takes the event that this one has asked for.
		q.wait.Lock()
		q.wait.Unlock() //nolint:staticcheck // The wait was for the other's end.
		return nil
	}
	defer q.wait.Unlock()
	if err := q.event.SetReadDeadline(time.Time{}); err != nil {
		return device.ErrClosed
	}
	stop := context.AfterFunc(ctx, func() { _ = q.event.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	conn, err := q.event.SyscallConn()
	if err != nil {
		return device.ErrClosed
	}
	err = conn.Read(func(uintptr) bool {
		if q.begin() != nil {
			return true
		}
		defer q.mu.Unlock()
		return q.d.lib.GetCQEvent(q.ch) == nil
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	// What a raw read says of a closed file isn't os.ErrClosed.
	if err := q.begin(); err != nil {
		return err
	}
	q.mu.Unlock()
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return nil
}

// Do waits until all requests posted before the call, sends and receives, are
// over, and returns the first error. It takes all completions meanwhile; it is
// for queues that one goroutine uses.
func (q *Queue) Do(ctx context.Context) error {
	var done [16]Completion
	var first error
	for q.posted() > 0 {
		n, err := q.Wait(ctx, done[:])
		if err != nil {
			return err
		}
		for _, c := range done[:n] {
			if err := c.Err(); err != nil && first == nil {
				first = fmt.Errorf("verbs: request %d: %w", c.ID, err)
			}
		}
	}
	return first
}

func (q *Queue) posted() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sends + q.recvs
}

// Err returns the first failed completion's error: the queue is in error then,
// and takes no work.
func (q *Queue) Err() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

// Close destroys the queue. Requests in flight end without completion. It is
// idempotent.
func (q *Queue) Close() error {
	q.d.mu.Lock()
	if _, ok := q.d.queues[q]; !ok || q.d.closed {
		q.d.mu.Unlock()
		return nil // Device.Close does it, or did.
	}
	delete(q.d.queues, q)
	q.d.inflight++
	q.d.mu.Unlock()
	defer q.d.end()
	if err := q.destroy(); err != nil {
		return fmt.Errorf("verbs: close queue: %w", err)
	}
	return nil
}

// destroy gives back what create made, as far as it came.
func (q *Queue) destroy() error {
	l := q.d.lib
	var errs []error
	add := func(call string, err error) {
		if err != nil {
			errs = append(errs, callError(call, err))
		}
	}
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	if q.event != nil {
		// It wakes who waits, and waits for them; they want the lock.
		add("close", q.event.Close())
	}
	q.mu.Lock()
	if q.qp != nil {
		add("ibv_destroy_qp", l.DestroyQP(q.qp))
	}
	if q.cq != nil {
		add("ibv_destroy_cq", l.DestroyCQ(q.cq))
	}
	if q.ch != nil {
		add("ibv_destroy_comp_channel", l.DestroyCompChannel(q.ch))
	}
	calls := q.fast.all(fmt.Errorf("verbs: %w: %w", device.ErrQueue, device.ErrClosed))
	q.mu.Unlock()
	for _, call := range calls {
		call()
	}
	q.d.orphan(q)
	return errors.Join(errs...)
}
