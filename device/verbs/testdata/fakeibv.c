/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libibverbs for tests, compiled against the real header: one adapter whose
 * queues work on this process's memory by address, in the thread that posts.
 * What it should do or fail with is set by fake_set, what it has is told by
 * fake_get. It pins nothing, so its registrations never go stale.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#undef ibv_reg_mr
#undef ibv_query_port

#define MAX 4096

enum {
	SET_REG_ERRNO,	  /* ibv_reg_mr fails */
	SET_REREG_RC,	  /* ibv_rereg_mr returns */
	SET_REREG_ERRNO,  /* and sets */
	SET_REREG_KEYS,	  /* ibv_rereg_mr changes keys */
	SET_REREG_DENY,	  /* flags that ibv_rereg_mr doesn't know */
	SET_DEREG_ERRNO,  /* ibv_dereg_mr returns */
	SET_ODP,	  /* bits of general_caps */
	SET_NO_WINDOWS,	  /* no memory windows */
	SET_UNBOUNDED,	  /* windows reach the whole registration */
	SET_NO_DEVICES,	  /* the list of adapters is empty */
	SET_MAX_MR,
	SET_MAX_MR_SIZE,
	SET_OPEN_ERRNO,
	SETTINGS,
};

enum { GET_MRS, GET_MWS, GET_PDS, GET_QPS, GET_CQS, GET_CHANNELS, GET_CONTEXTS, GET_LAST_ACCESS, GETS };

static long settings[SETTINGS];
static long counts[GETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fake_set(long what, long value)
{
	settings[what] = value;
}

long fake_get(long what)
{
	return counts[what];
}

struct fake_mr {
	struct ibv_mr mr;
	unsigned int access;
	int windows;
};

struct fake_mw {
	struct ibv_mw mw;
	struct fake_mr *mr;
	struct ibv_mw_bind_info info;
	int bound;
};

struct fake_cq {
	struct ibv_cq cq;
	struct ibv_wc wc[MAX];
	unsigned int head, tail;
	int armed, efd;
};

struct fake_qp {
	struct ibv_qp qp;
	uint32_t dest;
	struct ibv_recv_wr recv[MAX];
	struct ibv_sge sge[MAX];
	unsigned int head, tail;
	int error;
};

static struct fake_mr *mrs[MAX];
static struct fake_mw *mws[MAX];
static struct fake_qp *qps[MAX];
static uint32_t turns;

static struct ibv_device device = { .node_type = IBV_NODE_CA, .name = "fake0", .dev_name = "uverbs-fake0" };

static void *make(size_t size, int count)
{
	__atomic_fetch_add(&counts[count], 1, __ATOMIC_SEQ_CST);
	return calloc(1, size);
}

static int gone(void *p, int count)
{
	free(p);
	__atomic_fetch_sub(&counts[count], 1, __ATOMIC_SEQ_CST);
	return 0;
}

struct ibv_device **ibv_get_device_list(int *n)
{
	struct ibv_device **list = calloc(2, sizeof *list);

	*n = settings[SET_NO_DEVICES] ? 0 : 1;
	list[0] = *n ? &device : NULL;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

static struct ibv_mr *find_key(uint32_t key, int remote, struct ibv_pd *pd, unsigned int access, uint64_t addr, uint64_t len)
{
	struct fake_mr *m = mrs[(key >> 8) % MAX];
	struct fake_mw *w = mws[(key >> 8) % MAX];
	uint64_t start, end;
	unsigned int have;

	if (m && (remote ? m->mr.rkey : m->mr.lkey) == key) {
		if (m->mr.pd != pd)
			return NULL;
		start = (uintptr_t)m->mr.addr;
		end = start + m->mr.length;
		have = m->access;
	} else if (remote && w && w->bound && w->mw.rkey == key) {
		m = w->mr;
		start = settings[SET_UNBOUNDED] ? (uintptr_t)m->mr.addr : w->info.addr;
		end = settings[SET_UNBOUNDED] ? start + m->mr.length : start + w->info.length;
		have = w->info.mw_access_flags;
	} else {
		return NULL;
	}
	if ((access & ~have) != 0 || addr < start || addr + len > end)
		return NULL;
	return &m->mr;
}

static void complete(struct ibv_cq *cq, struct ibv_qp *qp, uint64_t id, int status, uint32_t bytes)
{
	struct fake_cq *c = (struct fake_cq *)cq;
	struct ibv_wc *wc = &c->wc[c->tail++ % MAX];
	uint64_t one = 1;

	memset(wc, 0xa5, sizeof *wc); /* what an error leaves undefined */
	wc->wr_id = id;
	wc->status = status;
	wc->qp_num = qp->qp_num;
	if (status == IBV_WC_SUCCESS)
		wc->byte_len = bytes;
	if (c->armed && c->efd >= 0) {
		c->armed = 0;
		if (write(c->efd, &one, sizeof one) < 0)
			abort();
	}
}

static int bind(struct fake_mw *w, const struct ibv_mw_bind_info *info, uint32_t key)
{
	struct fake_mr *m = (struct fake_mr *)info->mr;

	if (w->mr)
		w->mr->windows--;
	w->mr = m;
	w->bound = info->length != 0;
	w->info = *info;
	if (m) {
		if (!(m->access & IBV_ACCESS_MW_BIND))
			return IBV_WC_MW_BIND_ERR;
		m->windows++;
	}
	w->mw.rkey = key;
	return IBV_WC_SUCCESS;
}

static int carry_out(struct fake_qp *q, struct ibv_send_wr *wr, struct fake_qp *peer)
{
	struct ibv_sge *s = wr->sg_list;
	struct ibv_pd *far = peer ? peer->qp.pd : NULL;
	struct fake_mw *w;

	switch (wr->opcode) {
	case IBV_WR_RDMA_WRITE:
		if (!find_key(s->lkey, 0, q->qp.pd, 0, s->addr, s->length))
			return IBV_WC_LOC_PROT_ERR;
		if (!find_key(wr->wr.rdma.rkey, 1, far, IBV_ACCESS_REMOTE_WRITE, wr->wr.rdma.remote_addr, s->length))
			return IBV_WC_REM_ACCESS_ERR;
		memcpy((void *)(uintptr_t)wr->wr.rdma.remote_addr, (void *)(uintptr_t)s->addr, s->length);
		return IBV_WC_SUCCESS;
	case IBV_WR_RDMA_READ:
		if (!find_key(s->lkey, 0, q->qp.pd, IBV_ACCESS_LOCAL_WRITE, s->addr, s->length))
			return IBV_WC_LOC_PROT_ERR;
		if (!find_key(wr->wr.rdma.rkey, 1, far, IBV_ACCESS_REMOTE_READ, wr->wr.rdma.remote_addr, s->length))
			return IBV_WC_REM_ACCESS_ERR;
		memcpy((void *)(uintptr_t)s->addr, (void *)(uintptr_t)wr->wr.rdma.remote_addr, s->length);
		return IBV_WC_SUCCESS;
	case IBV_WR_SEND:
		if (!find_key(s->lkey, 0, q->qp.pd, 0, s->addr, s->length))
			return IBV_WC_LOC_PROT_ERR;
		if (!peer || peer->head == peer->tail)
			return IBV_WC_RNR_RETRY_EXC_ERR;
		{
			unsigned int i = peer->head++ % MAX;
			struct ibv_sge *to = &peer->sge[i];

			if (to->length < s->length || !find_key(to->lkey, 0, far, IBV_ACCESS_LOCAL_WRITE, to->addr, s->length))
				return IBV_WC_REM_OP_ERR;
			memcpy((void *)(uintptr_t)to->addr, (void *)(uintptr_t)s->addr, s->length);
			complete(peer->qp.recv_cq, &peer->qp, peer->recv[i].wr_id, IBV_WC_SUCCESS, s->length);
		}
		return IBV_WC_SUCCESS;
	case IBV_WR_BIND_MW:
		w = (struct fake_mw *)wr->bind_mw.mw;
		if (w->bound || w->mw.type != IBV_MW_TYPE_2)
			return IBV_WC_MW_BIND_ERR;
		return bind(w, &wr->bind_mw.bind_info, wr->bind_mw.rkey);
	case IBV_WR_LOCAL_INV:
		w = mws[(wr->invalidate_rkey >> 8) % MAX];
		if (!w || !w->bound || w->mw.rkey != wr->invalidate_rkey)
			return IBV_WC_LOC_QP_OP_ERR;
		w->bound = 0;
		w->mr->windows--;
		w->mr = NULL;
		return IBV_WC_SUCCESS;
	default:
		return IBV_WC_LOC_QP_OP_ERR;
	}
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct fake_qp *q = (struct fake_qp *)qp;

	if (q->qp.state != IBV_QPS_RTS) {
		*bad = wr;
		return EINVAL;
	}
	pthread_mutex_lock(&lock);
	for (; wr; wr = wr->next) {
		struct fake_qp *peer = qps[q->dest % MAX];
		int status = q->error ? IBV_WC_WR_FLUSH_ERR : carry_out(q, wr, peer);

		complete(qp->send_cq, qp, wr->wr_id, status, 0);
		if (status != IBV_WC_SUCCESS)
			q->error = 1;
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct fake_qp *q = (struct fake_qp *)qp;
	unsigned int i;

	(void)bad;
	pthread_mutex_lock(&lock);
	i = q->tail++ % MAX;
	q->recv[i] = *wr;
	q->sge[i] = *wr->sg_list;
	pthread_mutex_unlock(&lock);
	return 0;
}

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	struct fake_cq *c = (struct fake_cq *)cq;
	int i;

	pthread_mutex_lock(&lock);
	for (i = 0; i < n && c->head != c->tail; i++)
		wc[i] = c->wc[c->head++ % MAX];
	pthread_mutex_unlock(&lock);
	return i;
}

static int req_notify(struct ibv_cq *cq, int solicited)
{
	(void)solicited;
	pthread_mutex_lock(&lock);
	((struct fake_cq *)cq)->armed = 1;
	pthread_mutex_unlock(&lock);
	return 0;
}

/* Puts an object at a place of its own, with a key that was never used before. */
static uint32_t place(void **mine, void **other, void *p)
{
	uint32_t i;

	do {
		i = ++turns % MAX;
	} while (i == 0 || mine[i] || other[i]);
	mine[i] = p;
	return i << 8 | (turns / MAX & 0xff);
}

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct fake_mw *w = make(sizeof *w, GET_MWS);

	w->mw.context = pd->context;
	w->mw.pd = pd;
	w->mw.type = type;
	pthread_mutex_lock(&lock);
	w->mw.rkey = place((void **)mws, (void **)mrs, w);
	pthread_mutex_unlock(&lock);
	return &w->mw;
}

static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *b)
{
	struct fake_qp *q = (struct fake_qp *)qp;
	struct fake_mw *w = (struct fake_mw *)mw;
	int status;

	if (mw->type != IBV_MW_TYPE_1 || q->qp.state != IBV_QPS_RTS)
		return EINVAL;
	pthread_mutex_lock(&lock);
	status = q->error ? IBV_WC_WR_FLUSH_ERR : bind(w, &b->bind_info, ibv_inc_rkey(mw->rkey));
	complete(qp->send_cq, qp, b->wr_id, status, 0);
	if (status != IBV_WC_SUCCESS)
		q->error = 1;
	pthread_mutex_unlock(&lock);
	return 0;
}

static int dealloc_mw(struct ibv_mw *mw)
{
	struct fake_mw *w = (struct fake_mw *)mw;

	pthread_mutex_lock(&lock);
	mws[(mw->rkey >> 8) % MAX] = NULL;
	if (w->mr)
		w->mr->windows--;
	pthread_mutex_unlock(&lock);
	return gone(w, GET_MWS);
}

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a)
{
	(void)c;
	memset(a, 0, sizeof *a);
	strcpy(a->fw_ver, "1.2.3");
	a->max_mr = settings[SET_MAX_MR] ? settings[SET_MAX_MR] : 2000;
	a->max_mr_size = settings[SET_MAX_MR_SIZE] ? (uint64_t)settings[SET_MAX_MR_SIZE] : ~0ULL;
	a->max_mw = settings[SET_NO_WINDOWS] ? 0 : 1000;
	a->device_cap_flags = settings[SET_NO_WINDOWS] ? 0 : IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
	a->atomic_cap = IBV_ATOMIC_HCA;
	return 0;
}

static int query_device_ex(struct ibv_context *c, const struct ibv_query_device_ex_input *in, struct ibv_device_attr_ex *a, size_t size)
{
	(void)in;
	if (size != sizeof *a)
		return EINVAL;
	memset(a, 0, size);
	ibv_query_device(c, &a->orig_attr);
	a->odp_caps.general_caps = settings[SET_ODP];
	if (settings[SET_ODP])
		a->odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ;
	return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct verbs_context *v;

	if (settings[SET_OPEN_ERRNO]) {
		errno = settings[SET_OPEN_ERRNO];
		return NULL;
	}
	v = make(sizeof *v, GET_CONTEXTS);
	v->sz = sizeof *v;
	v->query_device_ex = query_device_ex;
	v->context.device = d;
	v->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	v->context.ops.alloc_mw = alloc_mw;
	v->context.ops.bind_mw = bind_mw;
	v->context.ops.dealloc_mw = dealloc_mw;
	v->context.ops.poll_cq = poll_cq;
	v->context.ops.req_notify_cq = req_notify;
	v->context.ops.post_send = post_send;
	v->context.ops.post_recv = post_recv;
	return &v->context;
}

int ibv_close_device(struct ibv_context *c)
{
	return gone((char *)c - offsetof(struct verbs_context, context), GET_CONTEXTS);
}

int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	struct ibv_port_attr *a = (struct ibv_port_attr *)attr;

	(void)c;
	if (port != 1)
		return EINVAL;
	a->state = IBV_PORT_ACTIVE;
	a->active_mtu = IBV_MTU_4096;
	a->gid_tbl_len = 4;
	a->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}

int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *gid)
{
	(void)c;
	(void)port;
	memset(gid, 0, sizeof *gid);
	if (index == 0) {
		gid->raw[0] = 0xfe;
		gid->raw[1] = 0x80;
		gid->raw[15] = 1;
	} else if (index == 1) {
		memcpy(gid->raw + 10, "\xff\xff\xc0\x00\x02\x09", 6);
	}
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c)
{
	struct ibv_pd *pd = make(sizeof *pd, GET_PDS);

	pd->context = c;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	int i;

	for (i = 0; i < MAX; i++)
		if ((mrs[i] && mrs[i]->mr.pd == pd) || (qps[i] && qps[i]->qp.pd == pd))
			return EBUSY;
	return gone(pd, GET_PDS);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova, unsigned int access)
{
	struct fake_mr *m;

	(void)iova;
	if (settings[SET_REG_ERRNO]) {
		errno = settings[SET_REG_ERRNO];
		return NULL;
	}
	m = make(sizeof *m, GET_MRS);
	m->mr.context = pd->context;
	m->mr.pd = pd;
	m->mr.addr = addr;
	m->mr.length = len;
	m->access = access;
	counts[GET_LAST_ACCESS] = access;
	pthread_mutex_lock(&lock);
	m->mr.lkey = m->mr.rkey = place((void **)mrs, (void **)mws, m);
	pthread_mutex_unlock(&lock);
	return &m->mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access)
{
	return ibv_reg_mr_iova2(pd, addr, len, (uintptr_t)addr, access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova, int fd, int access)
{
	(void)offset;
	if (fd == 0) { /* not a dma-buf of ours */
		errno = EOPNOTSUPP;
		return NULL;
	}
	return ibv_reg_mr_iova2(pd, (void *)(uintptr_t)iova, len, iova, access);
}

int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t len, int access)
{
	struct fake_mr *m = (struct fake_mr *)mr;

	if (flags & settings[SET_REREG_DENY]) {
		errno = EOPNOTSUPP;
		return IBV_REREG_MR_ERR_CMD;
	}
	errno = settings[SET_REREG_ERRNO];
	switch (settings[SET_REREG_RC]) {
	case IBV_REREG_MR_ERR_INPUT:
	case IBV_REREG_MR_ERR_DONT_FORK_NEW:
	case IBV_REREG_MR_ERR_CMD:
	case IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW:
		return settings[SET_REREG_RC];
	}
	if (m->windows) {
		errno = EBUSY;
		return IBV_REREG_MR_ERR_CMD;
	}
	if (flags & IBV_REREG_MR_CHANGE_PD)
		mr->pd = pd;
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
		mr->addr = addr;
		mr->length = len;
	}
	if (flags & IBV_REREG_MR_CHANGE_ACCESS)
		m->access = access;
	if (settings[SET_REREG_KEYS])
		mr->lkey = mr->rkey = ibv_inc_rkey(mr->rkey);
	return settings[SET_REREG_RC];
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	if (settings[SET_DEREG_ERRNO])
		return settings[SET_DEREG_ERRNO];
	if (((struct fake_mr *)mr)->windows)
		return EBUSY;
	pthread_mutex_lock(&lock);
	mrs[(mr->lkey >> 8) % MAX] = NULL;
	pthread_mutex_unlock(&lock);
	return gone(mr, GET_MRS);
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
	struct ibv_comp_channel *ch = make(sizeof *ch, GET_CHANNELS);

	ch->context = c;
	ch->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	return ch;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ch)
{
	close(ch->fd);
	return gone(ch, GET_CHANNELS);
}

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int cqe, void *cq_context, struct ibv_comp_channel *ch, int vector)
{
	struct fake_cq *q = make(sizeof *q, GET_CQS);

	(void)vector;
	q->cq.context = c;
	q->cq.channel = ch;
	q->cq.cq_context = cq_context;
	q->cq.cqe = cqe;
	q->efd = ch ? ch->fd : -1;
	return &q->cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	return gone(cq, GET_CQS);
}

int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **context)
{
	uint64_t n;

	*cq = NULL;
	*context = NULL;
	return read(ch->fd, &n, sizeof n) == sizeof n ? 0 : -1;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
	(void)cq;
	(void)n;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	struct fake_qp *q = make(sizeof *q, GET_QPS);

	q->qp.context = pd->context;
	q->qp.pd = pd;
	q->qp.send_cq = a->send_cq;
	q->qp.recv_cq = a->recv_cq;
	q->qp.qp_type = a->qp_type;
	pthread_mutex_lock(&lock);
	do {
		q->qp.qp_num = ++turns % MAX;
	} while (qps[q->qp.qp_num]);
	qps[q->qp.qp_num] = q;
	pthread_mutex_unlock(&lock);
	return &q->qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	struct fake_qp *q = (struct fake_qp *)qp;

	if (mask & IBV_QP_DEST_QPN)
		q->dest = a->dest_qp_num;
	if (mask & IBV_QP_AV && a->ah_attr.grh.sgid_index != 1)
		return EINVAL; /* the address of RoCE over IPv4 was to be chosen */
	if (mask & IBV_QP_STATE)
		qp->state = a->qp_state;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	pthread_mutex_lock(&lock);
	qps[qp->qp_num % MAX] = NULL;
	pthread_mutex_unlock(&lock);
	return gone(qp, GET_QPS);
}
