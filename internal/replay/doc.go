// Package replay asks of a trace what a registration cache would have cost the
// program: under several policies, several cost models, and for every size of
// the cache at once. It is deterministic: the same trace and options give the
// same result, to the byte.
//
// # Requests
//
// A request is a moment at which a program with registered buffers would ask
// for a registration: a use of a buffer (a read, a write, a send, as the
// trace's rule recorded it) from its start to its end, and a registration that
// the program made itself, from there until it is deregistered. Each process
// has a cache of its own. Ranges are in whole pages.
//
// # Policies
//
// [PerUse] registers for each request and deregisters after it. The others keep
// regions in a cache with limits, from which the least recently used idle one
// goes first. (The real cache is scan-resistant; replay uses LRU, so that the
// table agrees with the curve.) Live regions don't overlap: a request that
// overlaps some without being inside of one replaces them, by their union up to
// Options.MergeBytes, else by the range asked for; and beyond MergeBytes where
// ranges push each other out, as in the cache itself. (That also joins neighbours
// when regions get scarce, and registers ahead of windows that grow; replay
// doesn't.)
//
//   - [Lazy] learns that a region is stale when it is next looked up, and
//     deregisters it then; what nobody asks for again stays pinned until it is
//     evicted. That is what caches do which deregister in the look-up.
//   - [Drop] gives up a region as soon as it is stale: an idle one at once, one
//     in use when it is released. A goroutine beside the program deregisters.
//   - [DropKernel] is the same, but the kernel deregisters idle regions inside
//     of the VM operation, which waits for it.
//   - [Update] keeps a stale region, and points its registration at the new
//     pages when it is next asked for.
//
// # Time
//
// Recorded times stay as they are: what registering would cost doesn't delay
// what the program does next. A request that hits a region whose registration
// isn't complete by then waits for the rest. Costs are linear, so they are
// computed at the end from the numbers of calls and pages.
//
// # The curve
//
// The hit rate for every size of the cache comes from one pass, by stack
// distances (Mattson et al., 1970) in an order-statistics tree. It is exact for
// this cache: it holds pages, the most recently used up to its size; a request
// hits if all of its pages are there; its pages then become the most recently
// used, the highest address last; pages that a VM operation changes leave, and
// make room. That room is a hole in the stack, which the next page that is
// missed fills in every cache large enough to reach it.
package replay
