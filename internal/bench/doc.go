// Package bench measures caches of registrations: what a hit, a miss, a
// re-stamp and an invalidation cost, what churn elsewhere does to hits, and how
// much memory a region takes.
//
// Nothing real is registered: the regions lie in reserved address space without
// memory, and the device does nothing, so the figures are the cache's own. A
// [Subject] is a cache that is measured; pindown's is built in, peers are added
// through [Options].Peers. All run the same loop over the same addresses, in
// turn within each round, so that what the machine does meanwhile touches all of
// them alike; ratios are taken within a round, and medians over the rounds.
package bench
