//go:build !amd64 || race

package pindown

import "sync/atomic"

// plainStores says that put is a plain store, so that a load after it may be
// done before it.
const plainStores = false

// put stores a hold's word. It is ordered with the atomic loads after it.
func (h *hold) put(word uint64) { atomic.StoreUint64(&h.word, word) }
