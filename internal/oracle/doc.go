// Package oracle tells which physical pages back an address, independently of
// any monitor: the judge in tests of coherence.
//
// [Pagemap] reads /proc/self/pagemap, which shows frame numbers only to
// CAP_SYS_ADMIN. [Witness] holds the pages that back a range at one moment,
// the way a device's registration does, and later says whether they are still
// the ones mapped. Holding matters: a page that is free again can come back at
// the same address under the same frame number, and comparing numbers alone
// would call that unchanged.
package oracle
