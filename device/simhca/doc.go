// Package simhca is a simulated RDMA adapter, for tests, demonstrations and
// replay: keys, a translation table, queues that move bytes, and memory whose
// pages can be changed under them.
//
// [Open] gives a [Device] over a [Memory]: a [Space], which is simulated memory
// with VM operations of its own, or this [Process]. A [Queue] executes work
// requests asynchronously, packet by packet, either in goroutines or step by
// step in an order that a seed decides ([Stepper]). Queues of one device can be
// connected, or of two, which then are each other's peers.
//
// # Keys
//
// A key is 24 bits of index into the translation table and 8 bits that must
// equal the entry's consumer part, which changes each time the entry is used
// again. A key means a range, an access, and pages; each packet looks it up. A
// use that the key doesn't allow is answered as an adapter does: the request
// completes with [StatusLocalProtection] or [StatusRemoteAccess], and the queue
// is in error. So a program that uses a key after it was revoked notices.
//
// # Stale registrations
//
// A page lives while it is mapped or pinned. When it is unmapped while a
// registration pins it, it becomes an orphan: the device goes on reading and
// writing it, without an error, and nobody sees what is written there. That is
// what a stale registration does on hardware. [SpaceStats] counts such writes. A
// page that neither is poisoned and soon reused; nothing reaches it through
// the past, which [Space.Check] verifies.
//
// # Updates
//
// [Device.Update] is atomic: it swaps what the keys mean between two packets.
// [Device.Revoke] and [Device.Load] are the other way. A page is never torn:
// packets of one request that meet in a page reach the same page, since a
// request finishes a page where it began it; if it can't, because the key was
// revoked meanwhile, it starts over from its first byte.
//
// # Failures
//
// Options.Fault can make each verb fail at each step. What is left then:
//
//	verb             step     error        state afterwards
//	register         begin    any          nothing registered
//	register         pinned   any          nothing registered, nothing pinned
//	deregister       begin    any          registered as before, the keys work
//	update           begin    any          old pages, the keys work
//	update           pinned   any          old pages, the keys work; new pages unpinned
//	update           either   lost         keys dead, nothing pinned, not registered
//	revoke           begin    any          enabled, the keys work
//	revoke           begin    lost         keys dead, nothing pinned, not registered
//	load             begin    any          revoked, nothing pinned; Load again works
//	load             pinned   any          revoked, nothing pinned; Load again works
//	load             either   lost         keys dead, not registered
//	flush            begin    any          nothing changed
//	expose           begin    any          nothing exposed
//	withdraw         begin    any          exposed as before; Withdraw again works
//	alloc-fast-key   begin    any          nothing reserved
//	free-fast-key    begin    any          reserved as before
//	post             begin    any          nothing posted, the queue as before
//	execute data     begin    any          error completion, queue in error; bytes of earlier packets moved
//	execute data     moving   any          the same; no byte of this packet moved
//	execute fast-register     any          error completion, queue in error; the key means nothing
//	execute local-invalidate  any          error completion, queue in error; the key means what it did
//	execute bind              any          error completion, queue in error; the window is unbound
//
// "lost" is an error that wraps device.ErrRegistrationLost; exposures over the
// registration end with it. After any error completion the requests behind it
// complete with [StatusFlushed] and have done nothing: a flushed fast-register
// gives its pages back, a flushed local-invalidate leaves the key as it is.
//
// # Cost
//
// [Costs] are charged to a simulated clock, which [Device.Stats] shows by verb;
// nothing sleeps unless Options.Sleep asks for it.
package simhca
