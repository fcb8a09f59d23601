/*
 * The epoch-table protocol with a writer in the kernel: two touches around the
 * change. Configuration, by -D:
 *
 *	FUNCTION  the touches happen under the lock that the change is made under
 *	          (kernel functions); otherwise outside (system-call entry and exit)
 *	REUSE     another thread may map new memory at a range that was unmapped
 *	INFLIGHT  operations announce their range; a registration asks
 *	WRITERS   1 or 2 operations
 */
#ifndef WRITERS
#define WRITERS 1
#endif

/* Ranges announced by the operations under way. */
byte inflight[2];

#define LOAD_ON_HIT(g)		g = generation
#define LOAD_ON_REGISTER(g)	g = generation

/* One entry at a time: the scan is no snapshot. */
#ifdef INFLIGHT
#if WRITERS == 2
#define ASK(range)	cacheable = cacheable && !(inflight[0] & range); \
			cacheable = cacheable && !(inflight[1] & range)
#else
#define ASK(range)	cacheable = cacheable && !(inflight[0] & range)
#endif
#define ANNOUNCE(op)	inflight[id] = op
#define WITHDRAW	inflight[id] = 0
#else
#define ASK(range)	skip
#define ANNOUNCE(op)	skip
#define WITHDRAW	skip
#endif

#if WRITERS == 2
#define START_WRITERS	run writer(0, range); run writer(1, range);
#else
#define START_WRITERS	run writer(0, range);
#endif

#include "cache.pml"

#if defined(NO_FIRST_TOUCH)
#define FIRST_TOUCH	skip
#elif defined(INTEREST_READ_ONCE)
#define FIRST_TOUCH	seen_p = want_p; seen_below_p = want_below_p; \
			seen_0 = want_0; seen_1 = want_1; \
			touch(op, seen_p, seen_below_p, seen_0, seen_1)
#else
#define FIRST_TOUCH	touch(op, want_p, want_below_p, want_0, want_1)
#endif

#if defined(NO_SECOND_TOUCH)
#define SECOND_TOUCH	skip
#elif defined(INTEREST_READ_ONCE)
#define SECOND_TOUCH	touch(op, seen_p, seen_below_p, seen_0, seen_1)
#else
#define SECOND_TOUCH	touch(op, want_p, want_below_p, want_0, want_1)
#endif

proctype writer(byte id, range) {
	byte op, made0, made1;
	bool found, unmap;
#ifdef INTEREST_READ_ONCE
	byte seen_p, seen_below_p, seen_0, seen_1;
#endif

	CHOOSE_OPERATION(op);
	if
	:: unmap = true
#ifndef REUSE
	:: unmap = false	/* pages replaced in place: MADV_DONTNEED, MAP_FIXED, … */
#endif
	fi;

#ifdef FUNCTION
	/*
	 * Only unmapping needs the lock here: in-place changes are left without,
	 * which allows more than the kernel does.
	 */
	if
	:: unmap -> atomic { !mm_lock -> mm_lock = true }
	:: else
	fi;
#endif
#ifdef ANNOUNCE_AFTER_FIRST_TOUCH
	FIRST_TOUCH;
	ANNOUNCE(op);
#else
	ANNOUNCE(op);
	FIRST_TOUCH;
#endif
#ifndef FUNCTION
	if
	:: unmap -> atomic { !mm_lock -> mm_lock = true }
	:: else
	fi;
#endif
	change(op, unmap);
#ifndef FUNCTION
	if
	:: unmap -> mm_lock = false
	:: else
	fi;
#endif
#ifdef WITHDRAW_BEFORE_SECOND_TOUCH
	WITHDRAW;
	SECOND_TOUCH;
#else
	SECOND_TOUCH;
	WITHDRAW;
#endif
#ifdef FUNCTION
	if
	:: unmap -> mm_lock = false
	:: else
	fi;
#endif
	returned();
	d_step { op = 0; unmap = false }
}
