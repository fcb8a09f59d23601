/*
 * The epoch-table protocol with a userfaultfd reader as the writer. The kernel
 * holds an operation's thread until its event is read:
 *
 *	UNMAP   the pages change under the lock; mmap_changing is raised under it
 *	        before and lowered by the thread once its event is read
 *	REMOVE  the event is read first, then the thread goes on to zap the pages
 *
 * The reader touches once, when it has the event. Configuration, by -D:
 *
 *	WITH_UNMAP, WITH_REMOVE  which operations there are
 *	REUSE                    see cache.pml
 *	ASK_KERNEL               a hit asks whether mmap_changing is zero, and waits
 *	ASK_PENDING              a registration asks whether a REMOVE is unfinished
 *	OPERATIONS               1 or 2
 */
#ifndef OPERATIONS
#define OPERATIONS 1
#endif

byte changing;		/* the kernel's mmap_changing */
bool busy;		/* in the low bits of the generation's word */

/* An operation's event: queued, then read. */
#define IDLE	0
#define QUEUED	1
#define READ	2
byte event[2], event_range[2];
bool is_remove[2];

/* REMOVEs read: their ranges; and whether the operation's thread has left the call. */
byte pending[2];
bool finished[2];

/* The generation and busy are one word, so one load sees both. */
#define QUIET(g)	atomic { !busy -> g = generation }

#if defined(BUSY_LOADED_APART)
#define LOAD_ON_HIT(g)	g = generation; !busy
#elif defined(ASK_KERNEL_AFTER_LOAD)
#define LOAD_ON_HIT(g)	QUIET(g); changing == 0
#elif defined(ASK_KERNEL)
#define LOAD_ON_HIT(g)	changing == 0; QUIET(g)
#else
#define LOAD_ON_HIT(g)	QUIET(g)
#endif
#define LOAD_ON_REGISTER(g)	QUIET(g)

#define ASK_ONE(i, range)	cacheable = cacheable && (!(pending[i] & range) || finished[i])
#ifdef ASK_PENDING
#if OPERATIONS == 2
#define ASK(range)	ASK_ONE(0, range); ASK_ONE(1, range)
#else
#define ASK(range)	ASK_ONE(0, range)
#endif
#else
#define ASK(range)	skip
#endif

#if OPERATIONS == 2
#define START_WRITERS	run reader(); run operation(0, range); run operation(1, range);
#else
#define START_WRITERS	run reader(); run operation(0, range);
#endif

#include "cache.pml"

proctype operation(byte id, range) {
	byte op, made0, made1;

	CHOOSE_OPERATION(op);
	event_range[id] = op;
	if
#ifdef WITH_UNMAP
	:: true ->
		atomic { !mm_lock -> mm_lock = true }
		changing++;
		change(op, true);
		mm_lock = false;
		event[id] = QUEUED;
		event[id] == READ;
		changing--
#endif
#ifdef WITH_REMOVE
	:: true ->
		is_remove[id] = true;
		changing++;
		event[id] = QUEUED;
		event[id] == READ;
		changing--;
		change(op, false);
		finished[id] = true
#endif
	fi;
	returned();
	op = 0
}

#ifdef WITH_REMOVE
#define RECORD_PENDING	if \
			:: is_remove[i] -> pending[i] = op \
			:: else \
			fi
#else
#define RECORD_PENDING	skip
#endif

inline handle() {
	op = event_range[i];
#ifdef BUSY_AFTER_READ
	event[i] = READ;
	busy = true;
#else
	busy = true;
	event[i] = READ;
#endif
#ifdef PENDING_AFTER_TOUCH
	touch(op, want_p, want_below_p, want_0, want_1);
	RECORD_PENDING;
#else
	RECORD_PENDING;
	touch(op, want_p, want_below_p, want_0, want_1);
#endif
	busy = false;
	d_step { i = 0; op = 0 }
}

proctype reader() {
	byte i, op;
	bool found;

end_poll:
	do
	:: atomic { event[0] == QUEUED -> i = 0 }
		handle()
#if OPERATIONS == 2
	:: atomic { event[1] == QUEUED -> i = 1 }
		handle()
#endif
	od
}
