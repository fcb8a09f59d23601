/*
 * Who holds an entry, and when it may be deregistered: the protocol of holds.go
 * and settle.go, on processors that delay stores (x86-TSO: each has a queue of
 * its stores, in order; what locks the bus waits until its own is empty).
 *
 * One entry, two users who hit and release it, the one who gives it up, another
 * whose business clears the state that tells releases to look, and the reaper.
 * Only the users' stores to their holds are plain ones; everything else is a
 * locked instruction, or under mu.
 *
 *	LANES		users take holds by plain stores; else by a locked
 *			exchange, and then no barrier is made
 *	UNLOCKED	mu isn't held while the barrier is made (settleDying)
 *	CLOSE		the reaper has stopped: one look, after a barrier, is the
 *			last
 */
#ifndef ACQUIRES
#define ACQUIRES	2
#endif

bool seen = true;	/* the listing's: a hit may succeed */
bool dead;		/* the entry's */
bool state;		/* the cache's: releases look whether what they held is dead */
bool limbo;		/* the entry is dead, and was found held */
bool mu;
bit hold[2];
bool registered = true;

bool using[2];		/* between a hit and its release */
byte finished;		/* users */
bool settled, closed, elsewhere;

chan queue[2] = [2] of { bit };	/* of stores to the hold */

#define LOCKED		empty(queue[me])	/* what a locked instruction waits for */
#define put(x)		queue[me]!x

/* Stores reach memory in order, some time. */
proctype processor(byte me) {
	bit v;
end:	do
	:: atomic { queue[me]?v -> hold[me] = v }
	od
}

inline lock() { atomic { !mu -> mu = true } }

/* Every processor passes a barrier some time between the call and its return. */
inline membarrier() {
	empty(queue[0]);
	empty(queue[1])
}

inline scan(h) {
	h = hold[0];
	h = h | hold[1]
}

inline deregister() {
	atomic {
		assert(registered);
		assert(!using[0] && !using[1]);
		registered = false
	}
}

/* Under mu: deregister the entry if it is dead and not held any more. */
inline look(h) {
	if
	:: limbo ->
		scan(h);
		if
		:: !h -> atomic { limbo = false; state = false } deregister()
		:: else
		fi;
		h = 0
	:: else
	fi
}

inline bury(h) {
	atomic { !mu && LOCKED -> mu = true }
	look(h);
	mu = false
}

proctype user(byte me) {
	byte n = ACQUIRES;
	bit h;

	do
	:: n == 0 -> break
	:: else ->
		n--;
#ifdef LANES
		put(1);
#else
		atomic { LOCKED -> hold[me] = 1 }
#endif
		if
		:: atomic { seen -> using[me] = true }
			assert(registered);
			using[me] = false;
			put(0);
#ifndef NO_LOOK
			if
			:: state ->
				if
				:: dead -> bury(h)
				:: else
				fi
			:: else
			fi
#endif
		:: atomic { !seen && LOCKED -> skip }	/* counts the mistake */
			put(0);
			if
			:: dead -> bury(h)
			:: else
			fi
		fi
	od;
	finished++
}

/* Gives the entry up: end, then settle or settleDying. */
proctype killer() {
	bit h;

	lock();
#ifdef SCAN_FIRST
	scan(h);
#endif
	seen = false;
	dead = true;
	state = true;
#ifdef UNLOCKED
	mu = false;
#endif
#if defined(LANES) && !defined(NO_FENCE)
	membarrier();
#endif
#ifdef UNLOCKED
	lock();
#ifndef STATE_SET_ONCE
	state = true;
#endif
#endif
#ifndef SCAN_FIRST
	scan(h);
#endif
	if
	:: h -> limbo = true
	:: else -> state = false; deregister()
	fi;
	h = 0;
	mu = false;
	settled = true
}

/* Another entry leaves limbo. */
proctype other() {
	lock();
	if
	:: !limbo -> state = false
	:: else
	fi;
	mu = false;
	elsewhere = true
}

/* The reaper looks now and then; or, after it has stopped, Close does once. */
proctype reaper() {
	bit h;

#ifdef CLOSE
	settled;
#ifndef NO_LAST_BARRIER
	membarrier();
#endif
#endif
	lock();
	look(h);
	mu = false;
	closed = true
}

init {
	bit h;

	atomic {
		run processor(0);
		run processor(1);
		run user(0);
		run user(1);
		run killer();
		run other();
		run reaper()
	}
	finished == 2 && settled && closed && elsewhere && empty(queue[0]) && empty(queue[1]);
#if !defined(CLOSE) && !defined(NO_SECOND_LOOK)
	/* The reaper looks as long as there is something in limbo. */
	lock();
	look(h);
	mu = false;
#endif
	/* Nothing dead stays. */
	assert(!registered)
}
