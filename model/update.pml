/*
 * The update verb: a registration's key is pointed at the pages now mapped,
 * while work is in flight under it, threads acquire it, and a VM operation runs.
 * What epoch.pml and uffd.pml prove of touches and stamps is taken for granted:
 * here an operation touches before and after, and a stamp is one counter.
 *
 * A range of two pages, one registration of it, one key. A request moves both
 * pages, each in two packets; a packet looks up, moves, ends. Users acquire,
 * post, and release without waiting for the request. Configuration, by -D:
 *
 *	STRICT   the policy: the key means X, nothing, Y; otherwise atomic, X, Y
 *	PEER     a peer sends a request under the key whenever it likes
 *	HOLD     the device holds a peer's request back while the key means nothing
 */
#define V	4	/* versions of a page: 0 is none, 1 the first */
#define AT(p, v)	((p) * V + (v))

#ifndef A1
#define A1	1	/* how often the two users acquire */
#endif
#ifndef A2
#define A2	2
#endif
#ifndef OPERATIONS
#define OPERATIONS 1
#endif

/* Memory: what is mapped, and the newest that a finished operation made. */
byte map[2] = 1;
byte done[2] = 1;
byte touches;

/*
 * The device. A page of version v is freed when it isn't mapped and has no pin;
 * the key has one, and so has a request that is in the middle of a page.
 */
byte key[2] = 1;
byte pin[8], moving[8];
byte meaning = 1;	/* counts what the key has meant; specification, but for ... */
byte revoked;		/* ... the newest meaning that was revoked */

/* The cache's region. */
byte stamp;
bool updating;
byte holders;

/* One request of each user at a time. */
#define IDLE	0
#define POSTED	1
#define RUNNING	2
byte request[2];
byte need[4];		/* by user and page: older is stale */
byte posted_under[2];	/* the meaning */
byte begun, begun_meaning;

#define PINNED_OR_MAPPED(p, v)	(pin[AT(p, v)] > 0 || map[p] == v)

/* A packet's bytes move. */
#define MOVE(p, v)	assert(PINNED_OR_MAPPED(p, v))	/* freed page */

inline end_packet(p, v) {
	moving[AT(p, v)]--
}

/*
 * A request in the middle of a page keeps the page (a pin) after an atomic
 * update, but not after a revocation: m is the meaning under which it began.
 */
inline begin_page(p, v, m) {
	v = key[p]; m = meaning;
	moving[AT(p, v)]++;
#ifndef UNPIN_AT_ONCE
	pin[AT(p, v)]++;
#endif
}

inline end_page(p, v, m) {
#ifndef UNPIN_AT_ONCE
	if
	:: m > revoked -> pin[AT(p, v)]--
	:: else
	fi
#else
	skip
#endif
}

/* The specification for a user's request: what each of its pages may be. */
#ifdef STRICT
#define IN_ORDER(id)	assert(posted_under[id] == meaning);	/* work of X under Y */ \
			assert(begun == 0 || begun_meaning == meaning)	/* X and Y at once */
#else
#define IN_ORDER(id)	skip
#endif

/* The device executes what user id has posted. */
proctype queue(byte id) {
	byte p, v, m;
	bool first;

end_idle:
	do
	:: atomic { request[id] == POSTED -> request[id] = RUNNING; first = true }
		do
		:: p < 2 ->
			atomic {
				assert(key[p] != 0);	/* invalid key */
				IN_ORDER(id);
				begin_page(p, v, m);
				if
				:: first -> begun++; begun_meaning = meaning; first = false
				:: else
				fi
			}
			MOVE(p, v);
			end_packet(p, v);
#ifdef LOOKUP_PER_PACKET
			atomic {
				end_page(p, v, m);
				assert(key[p] == v);	/* torn page */
				begin_page(p, v, m)
			}
#else
			atomic {
				assert(m > revoked);	/* invalid key */
				moving[AT(p, v)]++
			}
#endif
			MOVE(p, v);
			assert(v >= need[id * 2 + p]);	/* stale page */
			atomic { end_packet(p, v); end_page(p, v, m); p++ }
		:: else -> break
		od;
		atomic { begun--; p = 0; v = 0; m = 0; request[id] = IDLE }
	od
}

#ifdef PEER
/* A peer's request; nobody flushes it. If its page was revoked it starts over. */
proctype peer() {
	byte p, v, m, last[2];

	do
	:: p < 2 ->
#ifdef HOLD
		atomic { key[p] != 0 -> begin_page(p, v, m) }
#else
		atomic {
			if
			:: key[p] == 0 -> break		/* refused */
			:: else -> begin_page(p, v, m)
			fi
		}
#endif
		MOVE(p, v);
		end_packet(p, v);
#ifndef GO_ON_AFTER_REVOKE
		if
		:: atomic { m <= revoked -> p = 0; goto next }
		:: atomic { m > revoked -> moving[AT(p, v)]++ }
		fi;
		MOVE(p, v);
#else
		/* The page's second packet looks the key up afresh. */
		atomic {
			if
			:: m <= revoked && key[p] == 0 -> break
			:: m <= revoked && key[p] != 0 ->
				assert(key[p] == v);	/* torn page */
				begin_page(p, v, m)
			:: m > revoked -> moving[AT(p, v)]++
			fi
		}
		MOVE(p, v);
#endif
		assert(v >= last[p]);	/* back to an old page */
		atomic { end_packet(p, v); end_page(p, v, m); last[p] = v; p++ }
next:		skip
	:: else -> break
	od;
	atomic { p = 0; v = 0; m = 0; last[0] = 0; last[1] = 0 }
}
#endif

proctype operation() {
	byte n, made[2];

	do
	:: n < OPERATIONS ->
		touches++;
		d_step { map[0] = map[0] + 1; made[0] = map[0] }
		d_step { map[1] = map[1] + 1; made[1] = map[1] }
		touches++;
		d_step { done[0] = made[0]; done[1] = made[1] }
		n++
	:: else -> break
	od;
	atomic { n = 0; made[0] = 0; made[1] = 0 }
}

/* Pin what is mapped, a page at a time; a page that was just unmapped isn't found. */
inline pin_pages() {
	d_step { v0 = map[0]; pin[AT(0, v0)]++ }
	d_step { v1 = map[1]; pin[AT(1, v1)]++ }
}

inline wait_for_work() {
#ifndef NO_HOLDERS_WAIT
	holders == 0;
#endif
#ifndef NO_FLUSH
	request[0] == IDLE;
	request[1] == IDLE
#endif
}

inline revoke() {
	d_step { x0 = key[0]; x1 = key[1]; key[0] = 0; key[1] = 0; revoked = meaning }
#ifndef REVOKE_WITHOUT_WAIT
	moving[AT(0, x0)] == 0;
	moving[AT(1, x1)] == 0;
#endif
	d_step { pin[AT(0, x0)] = 0; pin[AT(1, x1)] = 0; x0 = 0; x1 = 0 }
}

/* The key means the new pages from now on. */
inline enable() {
	atomic {
#ifdef STRICT
		assert(key[0] == 0 && key[1] == 0);	/* X to Y */
#endif
		x0 = key[0]; x1 = key[1];
		key[0] = v0; key[1] = v1;
		meaning++
	}
}

/* The same page by page: the device has no one step for all. */
inline enable_by_page() {
	d_step { x0 = key[0]; key[0] = v0; meaning++ }
	d_step { x1 = key[1]; key[1] = v1 }
}

inline unpin_old() {
	d_step {
		if
		:: x0 != 0 -> pin[AT(0, x0)]--; pin[AT(1, x1)]--
		:: else
		fi;
		x0 = 0; x1 = 0
	}
}

inline publish() {
	stamp = s;
	updating = false
}

#ifdef NO_HOLDOFF
#define MAY_HOLD	(stamp == touches)
#else
#define MAY_HOLD	(!updating && stamp == touches)
#endif

/*
 * Whoever finds the region stale updates it; and, with FORCED, somebody does
 * for no reason, once.
 */
#ifdef FORCED
bool forced;
#define STALE		(!updating && (stamp != touches || !forced))
#define FORCE		forced = (stamp == touches -> true : forced)
#else
#define STALE		(!updating && stamp != touches)
#define FORCE		skip
#endif

/*
 * A thread that acquires the range, posts a request and releases. While one
 * updates the others wait.
 */
proctype user(byte id, acquires) {
	byte s, v0, v1, x0, x1;

	do
	:: acquires > 0 ->
		request[id] == IDLE;	/* it has its buffer back */
		d_step { need[id * 2] = done[0]; need[id * 2 + 1] = done[1] }
find:		if
		:: atomic { MAY_HOLD -> holders++ }
			goto held
#ifdef HOLDOFF_AFTER_WAIT
		:: atomic { STALE -> skip }
			wait_for_work();
			if
			:: atomic { STALE -> FORCE; updating = true }
			:: else -> goto find
			fi
#else
		:: atomic { STALE -> FORCE; updating = true }
#endif
		fi;

		/* Update. */
#if defined(STRICT) || defined(REVOKE_IN_ATOMIC)
#if defined(STRICT) && !defined(HOLDOFF_AFTER_WAIT)
		wait_for_work();
#endif
#ifndef NO_REVOKE
		revoke();
#endif
#endif
#ifdef STAMP_AFTER_PIN
		pin_pages(); s = touches;
#else
		s = touches; pin_pages();
#endif
#ifdef PUBLISH_BEFORE_ENABLE
		publish();
#endif
#ifdef SWAP_BY_PAGE
		enable_by_page();
#else
		enable();
#endif
		unpin_old();
#ifndef PUBLISH_BEFORE_ENABLE
		publish();
#endif
		d_step { s = 0; v0 = 0; v1 = 0 }
		goto find;

held:		posted_under[id] = meaning;
		request[id] = POSTED;
		holders--;
		acquires--
	:: else -> break
	od;
	request[id] == IDLE
}

init {
	atomic {
		pin[AT(0, 1)] = 1; pin[AT(1, 1)] = 1;
		run queue(0); run queue(1);
		run user(0, A1); run user(1, A2);
		run operation();
#ifdef PEER
		run peer();
#endif
	}
}
