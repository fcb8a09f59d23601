// Package trace reads and writes recordings of what a program does to its
// address space, to registrations and with its buffers: the .pdtrace files of
// "pindown profile --trace" and "pindown replay".
//
// A trace is a stream of records: what the program and the machine are
// ([Meta], [Process], [Thread], [Mapping]), what happened ([Event]), where in
// the program ([Stack]), and what the recorder couldn't keep ([Lost], [Exit]).
// FORMAT.md describes the bytes.
//
// # Writing
//
//	w, err := trace.NewWriter(f, nil)
//	err = w.Meta(&trace.Meta{Command: args, Kernel: release, PageSize: 4096, Mode: "bpf-syscalls"})
//	err = w.Process(&trace.Process{PID: pid, Comm: "server"})
//	err = w.Event(&trace.Event{
//		Kind: trace.KindOp, Op: trace.OpDontneed, PID: pid, TID: tid,
//		Start: since, Duration: took, Range: r, Stack: id,
//	})
//	err = w.Stack(&trace.Stack{ID: id, Frames: frames}) // before or after its use
//	err = w.Close()                                     // doesn't close f
//
// Records are gathered into compressed blocks. What isn't flushed is lost when
// the recorder dies, so a recorder calls [Writer.Flush] once a second or so.
// Events should come in the order of their Start, as far as the recorder knows
// it; a reader must not rely on it.
//
// # Reading
//
//	r, err := trace.NewReader(f)
//	for {
//		rec, err := r.Next()
//		if err != nil {
//			break // io.EOF, or a *DamageError that says what is missing
//		}
//		switch rec := rec.(type) {
//		case *trace.Event:
//		…
//
// A reader needs memory for one block, whatever the file says. Blocks are
// independent: one that is damaged or missing costs its own records only, and
// is reported in its place by a [Lost] record and at the end by a
// [DamageError].
package trace
