// Package epoch implements the epoch table: time stamps of an address space.
//
// The address space is a tree of aligned blocks with 16 children each, 4 KiB
// at level 0 and 2^48 bytes at the root. A writer (a BPF program in the kernel
// or a user-space monitor) records each VM operation with [Table.Touch],
// before and again after it changes the page tables. A reader states interest
// in a range with [Table.Watch] and can then tell, from memory alone, whether
// any operation touched the range since: [Table.Stamp] is a sum of counters
// that never decrease, so it changes if and only if an overlapping range was
// touched. The writer knows blocks, never registrations; its cost does not
// depend on their number.
//
// # Order
//
// The reader that wants a stamp to vouch for something (a pinned page, a
// registration) must take these steps in this order:
//
//	watch → Take (word, then stamp) → pin or register → publish (word, stamp)
//
// and must check with [Table.Check], which again reads the word before it
// re-stamps. Any operation in between changes the sum and the first check
// fails. model/ proves the order and shows every other one wrong.
//
// # Precision
//
// Tags make the table exact: there are no false invalidations by collision.
// Two documented roundings are coarser, never finer: a watched range of many
// canonical blocks is rounded outward ([MaxBlocks]), and a block whose bucket
// is full is watched through an ancestor, at worst the root.
//
// # Concurrency
//
// All methods may be called from many goroutines. Touch, Stamp, Take, Check
// and Word take no lock and allocate nothing. Watch and Unwatch take the
// table's mutex, which is held for about a microsecond at most and by nothing
// else but Stats. A [Watch] belongs to whoever made it: it must not be
// unwatched while it is stamped.
//
// # Memory
//
// A table lives in memory that the caller supplies, so that another process or
// the kernel can share it. FORMAT.md states its format and layout.h its
// constants, for a party in another language. Parties that don't share a
// program attach with [OpenReader] and [OpenWriter], which exchange versions
// and features.
package epoch
