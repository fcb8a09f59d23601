/*
 * The epoch-table protocol with a writer in the kernel: two touches around the
 * change. Configuration, by -D:
 *
 *	FUNCTION  the touches happen under the lock that the change is made under
 *	          (kernel functions); otherwise outside (system-call entry and exit)
 *	REUSE     another thread may map new memory at a range that was unmapped
 *	INFLIGHT  operations announce their range; a registration asks
 *	LOCKED    one touch under the lock (tracepoints inside the operation);
 *	          a registration looks the mapping up
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
#ifdef LOCKED
/*
 * vma: the mapping is in the tree. mm_lock is the mmap lock held for writing,
 * mm_read by an operation for reading; pt_lock is that of the page tables, which
 * a fault has to wait for.
 */
bool vma0 = true, vma1 = true;
bool mm_read, pt_lock;
#define MAY_MAP		!mm_lock && !mm_read
#define MAPPED_0	vma0 = true;
#define MAPPED_1	vma1 = true;
#define PIN_GUARD	!pt_lock ->
#define ANNOUNCE(op)	skip
#define WITHDRAW	skip
#ifdef NO_COVER
#define ASK(range)	skip
#else
#define ASK(range)	atomic { !mm_lock -> cacheable = cacheable && vma0 }; \
			if \
			:: range == C0 \
			:: else -> atomic { !mm_lock -> cacheable = cacheable && vma1 } \
			fi
#endif
#elif defined(INFLIGHT)
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

#ifdef LOCKED

#define TOUCH	touch(op, want_p, want_below_p, want_0, want_1)

#define MAPPED(child)	(child == C0 -> mapped0 : mapped1)

proctype writer(byte id, range) {
	byte op, made0, made1, child;
	bool found, unmap;

	CHOOSE_OPERATION(op);
	if
	:: unmap = true;
		atomic { !mm_lock && !mm_read -> mm_lock = true };
		d_step {
			if
			:: op & C0 -> vma0 = false
			:: else
			fi;
			if
			:: op & C1 -> vma1 = false
			:: else
			fi
		};
#if !defined(TOUCH_AFTER_DOWNGRADE) && !defined(TOUCH_AFTER_UNLOCK)
		TOUCH;
#endif
		d_step { mm_read = true; mm_lock = false };	/* downgraded */
		change(op, true);
#ifdef TOUCH_AFTER_DOWNGRADE
		TOUCH;
#endif
		mm_read = false;
#ifdef TOUCH_AFTER_UNLOCK
		TOUCH;
#endif
	:: unmap = false;
		atomic { !mm_lock && !mm_read -> mm_read = true };
		/* MADV_DONTNEED: each page is cleared, recorded, and only then faulted in anew. */
		child = C0;
		do
		:: child > C1 -> break
		:: child <= C1 ->
			if
			:: atomic {
				(op & child) && MAPPED(child) && !pt_lock -> pt_lock = true;
				if
				:: child == C0 -> mapped0 = false
				:: else -> mapped1 = false
				fi
			   }
				TOUCH;
				d_step {
					if
					:: child == C0 -> page0++; made0 = page0; mapped0 = true
					:: else -> page1++; made1 = page1; mapped1 = true
					fi;
					pt_lock = false
				}
			:: atomic { !(op & child) || !MAPPED(child) && !pt_lock -> skip }
			fi;
			child = child * 2
		od;
		child = 0;
		mm_read = false
	fi;
	returned();
	d_step { op = 0; unmap = false }
}

#else

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

#endif
