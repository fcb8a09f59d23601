// Package device defines what pindown asks of something that registers memory:
// an RDMA adapter, an io_uring's table of fixed buffers, a simulation.
//
// [Device] is the interface, [Registration] what it hands out. Implementations
// live one level below; [github.com/pindown/pindown/device/devicetest] is the
// conformance suite that each of them passes, and third parties' should too.
package device
