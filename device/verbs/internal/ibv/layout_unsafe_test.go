package ibv

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"
)

// layout is what Go made of the structures, by the expression that is it in C.
var layout = map[string]uintptr{
	"sizeof(struct ibv_device)":                                                                 unsafe.Sizeof(Device{}),
	"offsetof(struct ibv_device, name)":                                                         unsafe.Offsetof(Device{}.Name),
	"offsetof(struct ibv_device, dev_name)":                                                     unsafe.Offsetof(Device{}.DevName),
	"offsetof(struct ibv_device, ibdev_path)":                                                   unsafe.Offsetof(Device{}.IbdevPath),
	"sizeof(struct ibv_context)":                                                                unsafe.Sizeof(Context{}),
	"sizeof(pthread_mutex_t)":                                                                   mutexSize,
	"offsetof(struct ibv_context, ops)":                                                         unsafe.Offsetof(Context{}.Ops),
	"sizeof(struct ibv_context_ops)":                                                            numOps * 8,
	"offsetof(struct ibv_context_ops, alloc_mw)":                                                opAllocMW * 8,
	"offsetof(struct ibv_context_ops, bind_mw)":                                                 opBindMW * 8,
	"offsetof(struct ibv_context_ops, dealloc_mw)":                                              opDeallocMW * 8,
	"offsetof(struct ibv_context_ops, poll_cq)":                                                 opPollCQ * 8,
	"offsetof(struct ibv_context_ops, req_notify_cq)":                                           opReqNotify * 8,
	"offsetof(struct ibv_context_ops, post_send)":                                               opPostSend * 8,
	"offsetof(struct ibv_context_ops, post_recv)":                                               opPostRecv * 8,
	"offsetof(struct ibv_context, cmd_fd)":                                                      unsafe.Offsetof(Context{}.CmdFd),
	"offsetof(struct ibv_context, num_comp_vectors)":                                            unsafe.Offsetof(Context{}.NumCompVectors),
	"offsetof(struct ibv_context, abi_compat)":                                                  unsafe.Offsetof(Context{}.AbiCompat),
	"(size_t)__VERBS_ABI_IS_EXTENDED":                                                           abiExtended,
	"offsetof(struct verbs_context, context) - offsetof(struct verbs_context, sz)":              extSize * 8,
	"offsetof(struct verbs_context, context) - offsetof(struct verbs_context, query_device_ex)": extQueryDeviceEx * 8,

	"offsetof(struct ibv_pd, handle)":       unsafe.Offsetof(PD{}.Handle),
	"sizeof(struct ibv_pd)":                 unsafe.Sizeof(PD{}),
	"sizeof(struct ibv_mr)":                 unsafe.Sizeof(MR{}),
	"offsetof(struct ibv_mr, addr)":         unsafe.Offsetof(MR{}.Addr),
	"offsetof(struct ibv_mr, length)":       unsafe.Offsetof(MR{}.Length),
	"offsetof(struct ibv_mr, handle)":       unsafe.Offsetof(MR{}.Handle),
	"offsetof(struct ibv_mr, lkey)":         unsafe.Offsetof(MR{}.LKey),
	"offsetof(struct ibv_mr, rkey)":         unsafe.Offsetof(MR{}.RKey),
	"sizeof(struct ibv_mw)":                 unsafe.Sizeof(MW{}),
	"offsetof(struct ibv_mw, rkey)":         unsafe.Offsetof(MW{}.RKey),
	"offsetof(struct ibv_mw, type)":         unsafe.Offsetof(MW{}.Type),
	"sizeof(struct ibv_comp_channel)":       unsafe.Sizeof(CompChannel{}),
	"offsetof(struct ibv_comp_channel, fd)": unsafe.Offsetof(CompChannel{}.Fd),
	"offsetof(struct ibv_cq, handle)":       unsafe.Offsetof(CQ{}.Handle),
	"offsetof(struct ibv_cq, cqe)":          unsafe.Offsetof(CQ{}.CQE),
	"offsetof(struct ibv_qp, handle)":       unsafe.Offsetof(QP{}.Handle),
	"offsetof(struct ibv_qp, qp_num)":       unsafe.Offsetof(QP{}.QPNum),
	"offsetof(struct ibv_qp, state)":        unsafe.Offsetof(QP{}.State),
	"offsetof(struct ibv_qp, qp_type)":      unsafe.Offsetof(QP{}.QPType),

	"sizeof(struct ibv_device_attr)":                                unsafe.Sizeof(DeviceAttr{}),
	"offsetof(struct ibv_device_attr, max_mr_size)":                 unsafe.Offsetof(DeviceAttr{}.MaxMRSize),
	"offsetof(struct ibv_device_attr, device_cap_flags)":            unsafe.Offsetof(DeviceAttr{}.DeviceCapFlags),
	"offsetof(struct ibv_device_attr, max_mr)":                      unsafe.Offsetof(DeviceAttr{}.MaxMR),
	"offsetof(struct ibv_device_attr, atomic_cap)":                  unsafe.Offsetof(DeviceAttr{}.AtomicCap),
	"offsetof(struct ibv_device_attr, max_mw)":                      unsafe.Offsetof(DeviceAttr{}.MaxMW),
	"offsetof(struct ibv_device_attr, phys_port_cnt)":               unsafe.Offsetof(DeviceAttr{}.PhysPortCnt),
	"sizeof(struct ibv_device_attr_ex)":                             unsafe.Sizeof(DeviceAttrEx{}),
	"offsetof(struct ibv_device_attr_ex, odp_caps)":                 unsafe.Offsetof(DeviceAttrEx{}.ODP),
	"offsetof(struct ibv_odp_caps, per_transport_caps.rc_odp_caps)": unsafe.Offsetof(ODPCaps{}.RC),
	"sizeof(struct ibv_odp_caps)":                                   unsafe.Sizeof(ODPCaps{}),
	"sizeof(struct ibv_port_attr)":                                  unsafe.Sizeof(PortAttr{}),
	"offsetof(struct ibv_port_attr, active_mtu)":                    unsafe.Offsetof(PortAttr{}.ActiveMTU),
	"offsetof(struct ibv_port_attr, gid_tbl_len)":                   unsafe.Offsetof(PortAttr{}.GIDTblLen),
	"offsetof(struct ibv_port_attr, lid)":                           unsafe.Offsetof(PortAttr{}.LID),
	"offsetof(struct ibv_port_attr, link_layer)":                    unsafe.Offsetof(PortAttr{}.LinkLayer),
	"sizeof(union ibv_gid)":                                         unsafe.Sizeof(GID{}),

	"sizeof(struct ibv_qp_init_attr)":               unsafe.Sizeof(QPInitAttr{}),
	"offsetof(struct ibv_qp_init_attr, send_cq)":    unsafe.Offsetof(QPInitAttr{}.SendCQ),
	"offsetof(struct ibv_qp_init_attr, recv_cq)":    unsafe.Offsetof(QPInitAttr{}.RecvCQ),
	"offsetof(struct ibv_qp_init_attr, cap)":        unsafe.Offsetof(QPInitAttr{}.Cap),
	"offsetof(struct ibv_qp_init_attr, qp_type)":    unsafe.Offsetof(QPInitAttr{}.QPType),
	"offsetof(struct ibv_qp_init_attr, sq_sig_all)": unsafe.Offsetof(QPInitAttr{}.SQSigAll),
	"sizeof(struct ibv_qp_cap)":                     unsafe.Sizeof(QPCap{}),
	"sizeof(struct ibv_ah_attr)":                    unsafe.Sizeof(AHAttr{}),
	"offsetof(struct ibv_ah_attr, grh.sgid_index)":  unsafe.Offsetof(AHAttr{}.SGIDIndex),
	"offsetof(struct ibv_ah_attr, grh.hop_limit)":   unsafe.Offsetof(AHAttr{}.HopLimit),
	"offsetof(struct ibv_ah_attr, dlid)":            unsafe.Offsetof(AHAttr{}.DLID),
	"offsetof(struct ibv_ah_attr, is_global)":       unsafe.Offsetof(AHAttr{}.IsGlobal),
	"offsetof(struct ibv_ah_attr, port_num)":        unsafe.Offsetof(AHAttr{}.PortNum),

	"sizeof(struct ibv_qp_attr)":                       unsafe.Sizeof(QPAttr{}),
	"offsetof(struct ibv_qp_attr, path_mtu)":           unsafe.Offsetof(QPAttr{}.PathMTU),
	"offsetof(struct ibv_qp_attr, rq_psn)":             unsafe.Offsetof(QPAttr{}.RQPSN),
	"offsetof(struct ibv_qp_attr, sq_psn)":             unsafe.Offsetof(QPAttr{}.SQPSN),
	"offsetof(struct ibv_qp_attr, dest_qp_num)":        unsafe.Offsetof(QPAttr{}.DestQPNum),
	"offsetof(struct ibv_qp_attr, qp_access_flags)":    unsafe.Offsetof(QPAttr{}.QPAccessFlags),
	"offsetof(struct ibv_qp_attr, cap)":                unsafe.Offsetof(QPAttr{}.Cap),
	"offsetof(struct ibv_qp_attr, ah_attr)":            unsafe.Offsetof(QPAttr{}.AH),
	"offsetof(struct ibv_qp_attr, pkey_index)":         unsafe.Offsetof(QPAttr{}.PkeyIndex),
	"offsetof(struct ibv_qp_attr, max_rd_atomic)":      unsafe.Offsetof(QPAttr{}.MaxRdAtomic),
	"offsetof(struct ibv_qp_attr, max_dest_rd_atomic)": unsafe.Offsetof(QPAttr{}.MaxDestRdAtomic),
	"offsetof(struct ibv_qp_attr, min_rnr_timer)":      unsafe.Offsetof(QPAttr{}.MinRNRTimer),
	"offsetof(struct ibv_qp_attr, port_num)":           unsafe.Offsetof(QPAttr{}.PortNum),
	"offsetof(struct ibv_qp_attr, timeout)":            unsafe.Offsetof(QPAttr{}.Timeout),
	"offsetof(struct ibv_qp_attr, retry_cnt)":          unsafe.Offsetof(QPAttr{}.RetryCnt),
	"offsetof(struct ibv_qp_attr, rnr_retry)":          unsafe.Offsetof(QPAttr{}.RNRRetry),
	"offsetof(struct ibv_qp_attr, rate_limit)":         unsafe.Offsetof(QPAttr{}.RateLimit),

	"sizeof(struct ibv_sge)":                             unsafe.Sizeof(SGE{}),
	"offsetof(struct ibv_sge, length)":                   unsafe.Offsetof(SGE{}.Length),
	"offsetof(struct ibv_sge, lkey)":                     unsafe.Offsetof(SGE{}.LKey),
	"sizeof(struct ibv_mw_bind_info)":                    unsafe.Sizeof(MWBindInfo{}),
	"offsetof(struct ibv_mw_bind_info, addr)":            unsafe.Offsetof(MWBindInfo{}.Addr),
	"offsetof(struct ibv_mw_bind_info, length)":          unsafe.Offsetof(MWBindInfo{}.Length),
	"offsetof(struct ibv_mw_bind_info, mw_access_flags)": unsafe.Offsetof(MWBindInfo{}.Access),
	"sizeof(struct ibv_mw_bind)":                         unsafe.Sizeof(MWBind{}),
	"offsetof(struct ibv_mw_bind, send_flags)":           unsafe.Offsetof(MWBind{}.SendFlags),
	"offsetof(struct ibv_mw_bind, bind_info)":            unsafe.Offsetof(MWBind{}.Info),
	"sizeof(struct ibv_send_wr)":                         unsafe.Sizeof(SendWR{}),
	"offsetof(struct ibv_send_wr, next)":                 unsafe.Offsetof(SendWR{}.Next),
	"offsetof(struct ibv_send_wr, sg_list)":              unsafe.Offsetof(SendWR{}.SGList),
	"offsetof(struct ibv_send_wr, num_sge)":              unsafe.Offsetof(SendWR{}.NumSGE),
	"offsetof(struct ibv_send_wr, opcode)":               unsafe.Offsetof(SendWR{}.Opcode),
	"offsetof(struct ibv_send_wr, send_flags)":           unsafe.Offsetof(SendWR{}.SendFlags),
	"offsetof(struct ibv_send_wr, invalidate_rkey)":      unsafe.Offsetof(SendWR{}.Invalidate),
	"offsetof(struct ibv_send_wr, wr.rdma.remote_addr)":  unsafe.Offsetof(SendWR{}.RemoteAddr),
	"offsetof(struct ibv_send_wr, wr.rdma.rkey)":         unsafe.Offsetof(SendWR{}.RKey),
	"offsetof(struct ibv_send_wr, bind_mw.mw)":           unsafe.Offsetof(SendWR{}.BindMW),
	"offsetof(struct ibv_send_wr, bind_mw.rkey)":         unsafe.Offsetof(SendWR{}.BindRKey),
	"offsetof(struct ibv_send_wr, bind_mw.bind_info)":    unsafe.Offsetof(SendWR{}.BindInfo),
	"sizeof(struct ibv_recv_wr)":                         unsafe.Sizeof(RecvWR{}),
	"offsetof(struct ibv_recv_wr, sg_list)":              unsafe.Offsetof(RecvWR{}.SGList),
	"offsetof(struct ibv_recv_wr, num_sge)":              unsafe.Offsetof(RecvWR{}.NumSGE),
	"sizeof(struct ibv_wc)":                              unsafe.Sizeof(WC{}),
	"offsetof(struct ibv_wc, status)":                    unsafe.Offsetof(WC{}.Status),
	"offsetof(struct ibv_wc, byte_len)":                  unsafe.Offsetof(WC{}.ByteLen),
	"offsetof(struct ibv_wc, qp_num)":                    unsafe.Offsetof(WC{}.QPNum),
	"offsetof(struct ibv_wc, wc_flags)":                  unsafe.Offsetof(WC{}.Flags),
	"offsetof(struct ibv_wc, dlid_path_bits)":            unsafe.Offsetof(WC{}.DLIDPathBits),

	"IBV_ACCESS_LOCAL_WRITE":      AccessLocalWrite,
	"IBV_ACCESS_REMOTE_WRITE":     AccessRemoteWrite,
	"IBV_ACCESS_REMOTE_READ":      AccessRemoteRead,
	"IBV_ACCESS_REMOTE_ATOMIC":    AccessRemoteAtomic,
	"IBV_ACCESS_MW_BIND":          AccessMWBind,
	"IBV_ACCESS_ON_DEMAND":        AccessOnDemand,
	"IBV_ACCESS_RELAXED_ORDERING": AccessRelaxedOrdering,
	"IBV_ACCESS_OPTIONAL_RANGE":   optionalAccess,

	"IBV_REREG_MR_CHANGE_TRANSLATION":       ReregTranslation,
	"IBV_REREG_MR_CHANGE_PD":                ReregPD,
	"IBV_REREG_MR_CHANGE_ACCESS":            ReregAccess,
	"-IBV_REREG_MR_ERR_INPUT":               -ReregErrInput,
	"-IBV_REREG_MR_ERR_DONT_FORK_NEW":       -ReregErrDontForkNew,
	"-IBV_REREG_MR_ERR_DO_FORK_OLD":         -ReregErrDoForkOld,
	"-IBV_REREG_MR_ERR_CMD":                 -ReregErrCmd,
	"-IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW": -ReregErrCmdAndDoForkNew,

	"IBV_DEVICE_MEM_WINDOW":         CapMemWindow,
	"IBV_DEVICE_MEM_WINDOW_TYPE_2A": CapMemWindowType2A,
	"IBV_DEVICE_MEM_WINDOW_TYPE_2B": CapMemWindowType2B,
	"IBV_ODP_SUPPORT":               ODPSupport,
	"IBV_ODP_SUPPORT_IMPLICIT":      ODPSupportImplicit,
	"IBV_ODP_SUPPORT_SEND":          ODPSend,
	"IBV_ODP_SUPPORT_RECV":          ODPRecv,
	"IBV_ODP_SUPPORT_WRITE":         ODPWrite,
	"IBV_ODP_SUPPORT_READ":          ODPRead,
	"IBV_MW_TYPE_1":                 MWType1,
	"IBV_MW_TYPE_2":                 MWType2,
	"IBV_PORT_ACTIVE":               PortActive,
	"IBV_QPT_RC":                    QPTypeRC,
	"IBV_QPS_INIT":                  QPSInit,
	"IBV_QPS_RTR":                   QPSRTR,
	"IBV_QPS_RTS":                   QPSRTS,
	"IBV_QP_STATE":                  QPState,
	"IBV_QP_ACCESS_FLAGS":           QPAccessFlags,
	"IBV_QP_PKEY_INDEX":             QPPkeyIndex,
	"IBV_QP_PORT":                   QPPort,
	"IBV_QP_AV":                     QPAV,
	"IBV_QP_PATH_MTU":               QPPathMTU,
	"IBV_QP_TIMEOUT":                QPTimeout,
	"IBV_QP_RETRY_CNT":              QPRetryCnt,
	"IBV_QP_RNR_RETRY":              QPRNRRetry,
	"IBV_QP_RQ_PSN":                 QPRQPSN,
	"IBV_QP_MAX_QP_RD_ATOMIC":       QPMaxQPRdAtomic,
	"IBV_QP_MIN_RNR_TIMER":          QPMinRNRTimer,
	"IBV_QP_SQ_PSN":                 QPSQPSN,
	"IBV_QP_MAX_DEST_RD_ATOMIC":     QPMaxDestRdAtomic,
	"IBV_QP_DEST_QPN":               QPDestQPN,
	"IBV_WR_RDMA_WRITE":             WRRdmaWrite,
	"IBV_WR_SEND":                   WRSend,
	"IBV_WR_RDMA_READ":              WRRdmaRead,
	"IBV_WR_LOCAL_INV":              WRLocalInv,
	"IBV_WR_BIND_MW":                WRBindMW,
	"IBV_SEND_SIGNALED":             SendSignaled,
	"IBV_WC_SUCCESS":                WCSuccess,
}

// TestLayout compares every structure and constant with the installed header.
func TestLayout(t *testing.T) {
	dir := t.TempDir()
	var c strings.Builder
	c.WriteString("#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\nint main(void) {\n")
	for expr := range layout {
		fmt.Fprintf(&c, "\tprintf(\"%%llu %s\\n\", (unsigned long long)(%s));\n", expr, expr)
	}
	c.WriteString("\treturn 0;\n}\n")
	src, bin := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(src, []byte(c.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-o", bin, src).CombinedOutput(); err != nil {
		need(t, "gcc and the header infiniband/verbs.h (apt-get install gcc libc6-dev libibverbs-dev)", err, out)
	}
	out, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); n++ {
		value, expr, _ := strings.Cut(s.Text(), " ")
		want, err := strconv.ParseUint(value, 10, 64)
		if got := uint64(layout[expr]); err != nil || got != want {
			t.Errorf("%s is %d, here %d", expr, want, got)
		}
	}
	if n != len(layout) {
		t.Errorf("%d of %d compared", n, len(layout))
	}
	t.Logf("%d sizes, offsets and constants agree", n)
}

// need skips a test for lack of something; in CI it fails.
func need(t *testing.T, what string, err error, out []byte) {
	t.Helper()
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s: %v\n%s", what, err, out)
	}
	t.Skipf("needs %s: %v: %s", what, err, line)
}
