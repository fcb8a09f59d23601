#include "textflag.h"

// See thread_amd64.s, of which this is the translation.
#define ctl_uffd 0
#define ctl_uffdRevents 6
#define ctl_stop 8
#define ctl_stopRevents 14
#define ctl_wake 16
#define ctl_word 24
#define ctl_ring 32
#define ctl_mask 40
#define ctl_oldSet 48
#define ctl_fullSet 56
#define ctl_flag 64
#define ctl_overflow 68
#define ctl_dead 72
#define ctl_tid 76
#define ctl_hold 80
#define ctl_held 84
#define ctl_one 88
#define ctl_head 128
#define ctl_reads 136
#define ctl_tail 192
#define ctl_scratch 256

#define SYS_dup3 24
#define SYS_close 57
#define SYS_read 63
#define SYS_write 64
#define SYS_ppoll 73
#define SYS_exit 93
#define SYS_futex 98
#define SYS_rt_sigprocmask 135
#define SYS_clone 220

#define CLONE_FLAGS 0x350f00

// R19 is the control block, R20 the table's word.

// func startThread(ctl *control, stack uintptr) (tid uintptr)
TEXT ·startThread(SB),NOSPLIT,$0-24
	MOVD	ctl+0(FP), R19
	MOVD	stack+8(FP), R21

	MOVD	$2, R0			// SIG_SETMASK
	ADD	$ctl_fullSet, R19, R1
	ADD	$ctl_oldSet, R19, R2
	MOVD	$8, R3
	MOVD	$SYS_rt_sigprocmask, R8
	SVC

	MOVD	$CLONE_FLAGS, R0
	MOVD	R21, R1
	ADD	$ctl_tid, R19, R2	// parent tid
	MOVD	ZR, R3			// tls
	ADD	$ctl_tid, R19, R4	// child tid
	MOVD	$SYS_clone, R8
	SVC
	CBZ	R0, child

	MOVD	R0, R21
	MOVD	$2, R0
	ADD	$ctl_oldSet, R19, R1
	MOVD	ZR, R2
	MOVD	$8, R3
	MOVD	$SYS_rt_sigprocmask, R8
	SVC
	MOVD	R21, tid+16(FP)
	RET

child:
	MOVD	ctl_word(R19), R20

loop:
	MOVD	R19, R0
	MOVD	$2, R1
	MOVD	ZR, R2
	MOVD	ZR, R3
	MOVD	$8, R4
	MOVD	$SYS_ppoll, R8
	SVC
	CMN	$4, R0			// EINTR
	BEQ	loop
	CMP	$0, R0
	BLT	fail
	BEQ	loop
	MOVHU	ctl_stopRevents(R19), R1
	CBNZ	R1, stop
	MOVD	$-5, R0			// EIO
	MOVHU	ctl_uffdRevents(R19), R1
	CMP	$1, R1			// POLLIN and nothing else
	BNE	fail

held:
	ADD	$ctl_hold, R19, R1
	LDARW	(R1), R2
	CBZW	R2, busy
	MOVD	$1, R2
	ADD	$ctl_held, R19, R3
	STLRW	R2, (R3)
	MOVD	R1, R0
	MOVD	ZR, R1			// FUTEX_WAIT
	MOVD	$1, R2
	MOVD	ZR, R3
	MOVD	$SYS_futex, R8
	SVC
	ADD	$ctl_held, R19, R3
	STLRW	ZR, (R3)
	B	held

busy:
	LDAXR	(R20), R1
	ADD	$1, R1
	STLXR	R1, (R20), R2
	CBNZW	R2, busy
	// The count must be seen before the read lets an operation go; the system
	// call is no barrier.
	DMB	$0xb			// ISH

	MOVD	ctl_head(R19), R22
	MOVD	ctl_mask(R19), R3
	ADD	$ctl_tail, R19, R4
	LDAR	(R4), R4
	ADD	$1, R3, R5		// size
	ADD	R5, R4, R2
	SUBS	R22, R2, R2		// size - (head - tail), the room
	BEQ	full
	AND	R3, R22, R1		// index
	SUB	R1, R5, R5		// room before the ring's end
	CMP	R2, R5
	CSEL	LT, R5, R2, R2
	LSL	$5, R2
	MOVD	ctl_ring(R19), R6
	ADD	R1<<5, R6, R1
	MOVWU	ctl_uffd(R19), R0
	MOVD	$SYS_read, R8
	SVC
	CMP	$0, R0
	BLE	unread
	ADD	R0>>5, R22, R22
	ADD	$ctl_head, R19, R1
	STLR	R22, (R1)

publish:
	MOVD	ctl_reads(R19), R1
	ADD	$1, R1
	MOVD	R1, ctl_reads(R19)
	MOVD	$1, R1
	ADD	$ctl_flag, R19, R2
swap:
	LDAXRW	(R2), R3
	STLXRW	R1, (R2), R4
	CBNZW	R4, swap
	CBZW	R3, wake
drop:
	LDAXR	(R20), R1
	SUB	$1, R1
	STLXR	R1, (R20), R2
	CBNZW	R2, drop
	B	loop

wake:
	MOVWU	ctl_wake(R19), R0
	ADD	$ctl_one, R19, R1
	MOVD	$8, R2
	MOVD	$SYS_write, R8
	SVC
	B	loop

full:
	MOVWU	ctl_uffd(R19), R0
	ADD	$ctl_scratch, R19, R1
	MOVD	$512, R2
	MOVD	$SYS_read, R8
	SVC
	CMP	$0, R0
	BLE	unread
	MOVD	$1, R1
	ADD	$ctl_overflow, R19, R2
	STLRW	R1, (R2)
	B	publish

unread:
	LDAXR	(R20), R1
	SUB	$1, R1
	STLXR	R1, (R20), R2
	CBNZW	R2, unread
	CMN	$11, R0			// EAGAIN
	BEQ	loop
	CMN	$4, R0			// EINTR
	BEQ	loop
	CBNZ	R0, fail
	MOVD	$-5, R0
	B	fail

stop:
	MOVD	$1, R0			// dead = -1
fail:
	NEG	R0, R21
lost:
	LDAXR	(R20), R1
	ORR	$0x80, R1
	ADD	$0x100, R1
	STLXR	R1, (R20), R2
	CBNZW	R2, lost
	ADD	$ctl_dead, R19, R1
	STLRW	R21, (R1)
	DMB	$0xb			// ISH
	MOVWU	ctl_stop(R19), R0
	MOVWU	ctl_uffd(R19), R1
	MOVD	$0x80000, R2		// O_CLOEXEC
	MOVD	$SYS_dup3, R8
	SVC
	CMP	$0, R0
	BGE	exit
	MOVWU	ctl_uffd(R19), R0
	MOVD	$SYS_close, R8
	SVC
exit:
	MOVWU	ctl_wake(R19), R0
	ADD	$ctl_one, R19, R1
	MOVD	$8, R2
	MOVD	$SYS_write, R8
	SVC
	MOVD	ZR, R0
	MOVD	$SYS_exit, R8
	SVC
	BRK
