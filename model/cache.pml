/*
 * The epoch table and its readers (the cache), shared by epoch.pml and
 * uffd.pml. Each of those defines, before it includes this file, how a reader
 * meets its monitor:
 *
 *	LOAD_ON_HIT(g)       load the generation to validate a hit
 *	LOAD_ON_REGISTER(g)  load the generation to register
 *	ASK(range)           clear cacheable if an operation on range is under way
 *
 * Address space: a block, PARENT, of which two children, C0 and C1, are
 * modelled. A range is a bit set, so two ranges overlap iff they share a bit;
 * PARENT has a third bit for the children that aren't modelled, hence C0|C1 is
 * a range of two canonical blocks and PARENT a range of one.
 */
#ifndef MAY_MAP
#define MAY_MAP		!mm_lock	/* mmap may go on */
#define MAPPED_0
#define MAPPED_1
#define PIN_GUARD
#endif
#ifndef A1
#define A1	1	/* how often the two threads acquire */
#endif
#ifndef A2
#define A2	2
#endif

#define C0	1
#define C1	2
#define PARENT	7

/*
 * Which page backs each child: a version that grows with every change, so
 * "made after the operation" is ">=". done0 and done1 are the specification's:
 * the newest version that an operation which has returned brought about.
 */
byte page0 = 1, page1 = 1;
bool mapped0 = true, mapped1 = true;
byte done0, done1;
bool mm_lock;

/* The table. The counters of a child's "below" can't move: it is a leaf. */
byte generation;
byte self_p, below_p, self_0, self_1;
byte want_p, want_below_p, want_0, want_1;

/*
 * Touch, top down, with each look-up of interest apart from the increment that
 * follows it, and the generation last. wp, wb, w0, w1 are the look-ups.
 */
inline touch(op, wp, wb, w0, w1) {
#ifdef GENERATION_FIRST
	generation++;
#endif
	if
	:: op == PARENT ->
		if
		:: wp || wb -> d_step { self_p++; found = true }
		:: else
		fi
	:: else ->
		if
		:: wp -> d_step { below_p++; found = true }
		:: else
		fi;
		if
		:: wb ->
			if
			:: op & C0 ->
				if
				:: w0 -> d_step { self_0++; found = true }
				:: else
				fi
			:: else
			fi;
			if
			:: op & C1 ->
				if
				:: w1 -> d_step { self_1++; found = true }
				:: else
				fi
			:: else
			fi
		:: else
		fi
	fi;
#ifndef GENERATION_FIRST
	if
	:: found -> generation++
	:: else
	fi;
#endif
	found = false
}

/*
 * Every way to overlap the watched range, and to miss it; what is the same by
 * symmetry is left out.
 */
#define CHOOSE_OPERATION(op) \
	if \
	:: op = C0 \
	:: range != PARENT -> op = C1 \
	:: range == (C0 | C1) -> op = C0 | C1 \
	:: op = PARENT \
	fi

/* The operation's effect on the pages, one page at a time. */
inline change_page(page, mapped, made, unmap) {
	d_step {
		if
		:: mapped -> page++; made = page; mapped = !unmap
		:: else
		fi
	}
}

inline change(op, unmap) {
	if
	:: op & C0 -> change_page(page0, mapped0, made0, unmap)
	:: else
	fi;
	if
	:: op & C1 -> change_page(page1, mapped1, made1, unmap)
	:: else
	fi
}

inline returned() {
	d_step {
		if
		:: made0 > done0 -> done0 = made0
		:: else
		fi;
		if
		:: made1 > done1 -> done1 = made1
		:: else
		fi;
		made0 = 0; made1 = 0
	}
}

/* The sum over the range's canonical blocks and their ancestors' self. */
inline stamp(s) {
	if
	:: range == PARENT -> s = below_p
	:: range == C0 -> s = self_0
	:: else -> s = self_0; s = s + self_1
	fi;
	s = s + self_p
}

/* n is 1 to state interest and -1 to take it back. */
inline watch(n) {
	if
	:: range == PARENT -> want_p = want_p + n
	:: range == C0 -> want_below_p = want_below_p + n; want_0 = want_0 + n
	:: else ->
		want_below_p = want_below_p + n;
		want_0 = want_0 + n;
		want_1 = want_1 + n
	fi
}

/*
 * Pinning takes no lock that excludes an operation (the kernel's fast path
 * walks the page tables locklessly), so it may see any intermediate state.
 */
inline pin() {
	atomic { PIN_GUARD pinned = mapped0; v0 = (mapped0 -> page0 : 0) }
	if
	:: range == C0
	:: else -> atomic { PIN_GUARD pinned = pinned && mapped1; v1 = (mapped1 -> page1 : 0) }
	fi
}

/*
 * The cache's entries for the one range. An entry is never changed but for the
 * generation seen; current is the one that look-up finds.
 */
#define NONE		255
#define ENTRIES		5
byte entries;
byte entry_generation[ENTRIES], entry_stamp[ENTRIES];
byte entry_v0[ENTRIES], entry_v1[ENTRIES];
byte current = NONE;
bool registering;	/* concurrent misses register once, the others wait */

/*
 * With UNWATCH a dropped entry's interest is taken back, by whoever registers
 * next; otherwise it stays.
 */
#ifdef UNWATCH
byte owed;
#define DROP_INTEREST	owed++
#else
#define DROP_INTEREST	skip
#endif

#define FRESH(a, b)	(a >= need0 && b >= need1)

/*
 * A thread that acquires the range. With REUSE it may first, whenever it finds
 * the range unmapped, map new memory there, by an mmap that no monitor
 * reports: there was nothing at the address that it could change.
 */
proctype user(byte range, acquires) {
	byte r, g, s, v0, v1, need0, need1;
	bool pinned, cacheable;

next:	if
	:: acquires == 0 -> goto done
	:: else -> acquires--
	fi;
#ifdef REUSE
	byte made0, made1;
	if
	:: atomic {
		MAY_MAP && (!mapped0 || ((range & C1) && !mapped1)) ->
		mm_lock = true
	   }
		d_step {
			if
			:: !mapped0 -> mapped0 = true; MAPPED_0 page0++; made0 = page0
			:: else
			fi;
			if
			:: (range & C1) && !mapped1 -> mapped1 = true; MAPPED_1 page1++; made1 = page1
			:: else
			fi
		}
		mm_lock = false;
		returned()
	:: true
	fi;
#endif
	d_step { need0 = done0; need1 = (range & C1 -> done1 : 0) }

find:	if
	:: atomic { current != NONE -> r = current }
	:: atomic { current == NONE && !registering -> registering = true }
		goto register
#ifdef WAITER_TAKES_RESULT
	:: atomic { current == NONE && registering -> skip }
		!registering;
		if
		:: atomic { current != NONE -> r = current }
			goto serve
		:: else -> goto find
		fi
#endif
	fi;

	/* Found: is it valid? */
#ifdef RECHECK_GENERATION_AFTER_STAMP
	if
	:: generation == entry_generation[r] -> goto serve
	:: else
	fi;
	stamp(s);
	if
	:: s == entry_stamp[r] -> LOAD_ON_HIT(g); entry_generation[r] = g; goto serve
	:: else
	fi;
#else
	LOAD_ON_HIT(g);
	if
	:: g == entry_generation[r] -> goto serve
	:: else
	fi;
	stamp(s);
	if
	:: s == entry_stamp[r] -> entry_generation[r] = g; goto serve
	:: else
	fi;
#endif
	d_step {
		if
		:: current == r -> current = NONE; DROP_INTEREST
		:: else
		fi;
		g = 0; s = 0; r = 0
	}
	goto find;

register:
#ifdef UNWATCH
	if
	:: owed > 0 -> owed--; watch(-1)
	:: else
	fi;
#endif
	cacheable = true;
#if defined(STAMP_AFTER_PIN)
	watch(1); LOAD_ON_REGISTER(g); ASK(range); pin(); stamp(s);
#elif defined(GENERATION_AFTER_STAMP)
	watch(1); stamp(s); LOAD_ON_REGISTER(g); ASK(range); pin();
#elif defined(GENERATION_AFTER_ASK)
	watch(1); stamp(s); ASK(range); LOAD_ON_REGISTER(g); pin();
#elif defined(GENERATION_AFTER_PIN)
	watch(1); stamp(s); ASK(range); pin(); LOAD_ON_REGISTER(g);
#elif defined(INTEREST_AFTER_STAMP)
	LOAD_ON_REGISTER(g); stamp(s); watch(1); ASK(range); pin();
#elif defined(INTEREST_AFTER_ASK)
	LOAD_ON_REGISTER(g); stamp(s); ASK(range); watch(1); pin();
#elif defined(INTEREST_AFTER_PIN)
	LOAD_ON_REGISTER(g); stamp(s); ASK(range); pin(); watch(1);
#elif defined(ASK_BEFORE_STAMP)
	watch(1); LOAD_ON_REGISTER(g); ASK(range); stamp(s); pin();
#elif defined(ASK_AFTER_PIN)
	watch(1); LOAD_ON_REGISTER(g); stamp(s); pin(); ASK(range);
#else
	watch(1); LOAD_ON_REGISTER(g); stamp(s); ASK(range); pin();
#endif
	if
	:: pinned && cacheable ->
		d_step {
			entry_generation[entries] = g; entry_stamp[entries] = s;
			entry_v0[entries] = v0; entry_v1[entries] = v1;
			current = entries; entries++; registering = false
		}
	:: else -> d_step { registering = false; DROP_INTEREST }
	fi;
	/* Published or used once. Not mapped: Acquire returns the device's error. */
	assert(!pinned || FRESH(v0, v1));
	d_step { g = 0; s = 0; v0 = 0; v1 = 0; pinned = false; cacheable = false }
	goto next;

serve:	assert(FRESH(entry_v0[r], entry_v1[r]));
	d_step { g = 0; s = 0; r = 0 }
	goto next;

done:	need0 = 0; need1 = 0
}

/*
 * Any watched range against any operation; with and without a region beside
 * it, whose touches move the generation but not this range's stamp.
 */
init {
	byte range;
	atomic {
		if
		:: range = C0
#ifndef ONE_RANGE
		:: range = C0 | C1
		:: range = PARENT
#endif
		fi;
		if
		:: range == C0 -> want_below_p = 1; want_1 = 1
#ifndef ONE_RANGE
		:: true
#endif
		fi;
		run user(range, A1);
		run user(range, A2);
		START_WRITERS
	}
}
