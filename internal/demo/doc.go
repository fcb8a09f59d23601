// Package demo shows what a registration cache without coherence does to a
// file, and that pindown doesn't.
//
// A writer with a small pool of buffers writes blocks to a real file, in four
// [Mode]s in one run: through a cache that learns of no VM operation, through
// pindown's cache, with a registration per use, and without registrations.
// Between writes some of the buffers come and go as in a real program ([Churn]):
// the same addresses return with other pages. Each block has content of its
// own, and the file is read back and compared.
//
// The modes take turns in slices, each with a pool and a cache of its own; all of
// them make the same sequence of writes and operations, and write the same part
// of the file. The monitor runs during pindown's slices only, so that the other
// modes don't pay for it.
package demo
