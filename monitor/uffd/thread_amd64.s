#include "textflag.h"

// Offsets in control, system call numbers. TestControlLayout and
// TestSyscallNumbers hold them against Go.
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

#define SYS_read 0
#define SYS_write 1
#define SYS_close 3
#define SYS_rt_sigprocmask 14
#define SYS_clone 56
#define SYS_exit 60
#define SYS_futex 202
#define SYS_ppoll 271
#define SYS_dup3 292

// CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_SIGHAND|CLONE_THREAD|CLONE_SYSVSEM|
// CLONE_PARENT_SETTID|CLONE_CHILD_CLEARTID
#define CLONE_FLAGS 0x350f00

// func startThread(ctl *control, stack uintptr) (tid uintptr)
TEXT ·startThread(SB),NOSPLIT,$0-24
	MOVQ	ctl+0(FP), R12
	MOVQ	stack+8(FP), R13

	// The thread inherits the mask. It must take no signal: the handlers
	// belong to Go and expect a Go thread.
	MOVQ	$SYS_rt_sigprocmask, AX
	MOVQ	$2, DI			// SIG_SETMASK
	LEAQ	ctl_fullSet(R12), SI
	LEAQ	ctl_oldSet(R12), DX
	MOVQ	$8, R10
	SYSCALL

	MOVQ	$SYS_clone, AX
	MOVQ	$CLONE_FLAGS, DI
	MOVQ	R13, SI
	LEAQ	ctl_tid(R12), DX
	LEAQ	ctl_tid(R12), R10
	XORQ	R8, R8
	SYSCALL
	TESTQ	AX, AX
	JEQ	child

	MOVQ	AX, R13
	MOVQ	$SYS_rt_sigprocmask, AX
	MOVQ	$2, DI
	LEAQ	ctl_oldSet(R12), SI
	XORQ	DX, DX
	MOVQ	$8, R10
	SYSCALL
	MOVQ	R13, tid+16(FP)
	RET

	// From here on it is the thread. It uses no stack, no Go, no thread-local
	// storage. R12 is the control block, R15 the table's word.
child:
	MOVQ	ctl_word(R12), R15

loop:
	MOVQ	$SYS_ppoll, AX
	MOVQ	R12, DI
	MOVQ	$2, SI
	XORQ	DX, DX
	XORQ	R10, R10
	MOVQ	$8, R8
	SYSCALL
	CMPQ	AX, $-4			// EINTR
	JEQ	loop
	CMPQ	AX, $0
	JLT	fail
	JEQ	loop
	MOVWLZX	ctl_stopRevents(R12), CX
	TESTL	CX, CX
	JNE	stop
	MOVQ	$-5, AX			// EIO
	MOVWLZX	ctl_uffdRevents(R12), CX
	CMPL	CX, $1			// POLLIN and nothing else
	JNE	fail

held:	// A test may stop the thread here.
	MOVL	ctl_hold(R12), CX
	TESTL	CX, CX
	JEQ	busy
	MOVL	$1, ctl_held(R12)
	MOVQ	$SYS_futex, AX
	LEAQ	ctl_hold(R12), DI
	MOVQ	$0, SI			// FUTEX_WAIT
	MOVQ	$1, DX
	XORQ	R10, R10
	SYSCALL
	MOVL	$0, ctl_held(R12)
	JMP	held

busy:
	LOCK
	ADDQ	$1, (R15)

	MOVQ	ctl_head(R12), R8
	MOVQ	ctl_mask(R12), R10
	MOVQ	R10, DX
	ADDQ	$1, DX
	MOVQ	DX, CX			// CX = size
	ADDQ	ctl_tail(R12), DX
	SUBQ	R8, DX			// DX = size - (head - tail), the room
	JEQ	full
	MOVQ	R8, SI
	ANDQ	R10, SI			// SI = index
	SUBQ	SI, CX			// CX = room before the ring's end
	CMPQ	CX, DX
	CMOVQLT	CX, DX
	SHLQ	$5, DX
	SHLQ	$5, SI
	ADDQ	ctl_ring(R12), SI
	MOVL	ctl_uffd(R12), DI
	MOVQ	$SYS_read, AX
	SYSCALL
	CMPQ	AX, $0
	JLE	unread
	SHRQ	$5, AX
	ADDQ	AX, R8
	MOVQ	R8, ctl_head(R12)

publish:
	ADDQ	$1, ctl_reads(R12)
	MOVL	$1, AX
	XCHGL	AX, ctl_flag(R12)
	TESTL	AX, AX
	JEQ	wake
	// Whoever will clear the flag drops the busy count that came with it.
	LOCK
	SUBQ	$1, (R15)
	JMP	loop

wake:
	MOVQ	$SYS_write, AX
	MOVL	ctl_wake(R12), DI
	LEAQ	ctl_one(R12), SI
	MOVQ	$8, DX
	SYSCALL
	JMP	loop

full:
	MOVQ	$SYS_read, AX
	MOVL	ctl_uffd(R12), DI
	LEAQ	ctl_scratch(R12), SI
	MOVQ	$512, DX
	SYSCALL
	CMPQ	AX, $0
	JLE	unread
	MOVL	$1, ctl_overflow(R12)
	JMP	publish

unread:
	LOCK
	SUBQ	$1, (R15)
	CMPQ	AX, $-11		// EAGAIN
	JEQ	loop
	CMPQ	AX, $-4			// EINTR
	JEQ	loop
	CMPQ	AX, $0
	JNE	fail
	MOVQ	$-5, AX
	JMP	fail

stop:
	MOVQ	$1, AX			// dead = -1
fail:
	NEGQ	AX
	// Lost first: closing the userfaultfd lets every waiting operation go.
	LOCK
	ORQ	$0x80, (R15)
	LOCK
	ADDQ	$0x100, (R15)
	MOVL	AX, ctl_dead(R12)
	// The stop descriptor takes the userfaultfd's number, so that nobody else
	// can while others still use it.
	MOVQ	$SYS_dup3, AX
	MOVL	ctl_stop(R12), DI
	MOVL	ctl_uffd(R12), SI
	MOVQ	$0x80000, DX		// O_CLOEXEC
	SYSCALL
	CMPQ	AX, $0
	JGE	exit
	MOVQ	$SYS_close, AX
	MOVL	ctl_uffd(R12), DI
	SYSCALL
exit:
	MOVQ	$SYS_write, AX
	MOVL	ctl_wake(R12), DI
	LEAQ	ctl_one(R12), SI
	MOVQ	$8, DX
	SYSCALL
	MOVQ	$SYS_exit, AX
	XORQ	DI, DI
	SYSCALL
	INT	$3
