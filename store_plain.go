//go:build amd64 && !race

package pindown

// plainStores says that put is a plain store, so that a load after it may be
// done before it.
const plainStores = true

// put stores a hold's word, as a release: what the program did before is done
// before. On amd64 every store is one (Intel SDM vol. 3, 9.2.2), and this
// one is not exchanged with the atomic loads around it by the compiler, which
// keeps memory operations in order; atomic.Store would be an exchange, a full
// barrier that costs as much as a compare-and-swap.
func (h *hold) put(word uint64) { h.word = word }
