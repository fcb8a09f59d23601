module github.com/pindown/pindown/bench

go 1.26.0

replace github.com/pindown/pindown => ..

require (
	github.com/google/btree v1.1.3
	github.com/pindown/pindown v0.0.0-00010101000000-000000000000
	github.com/spf13/pflag v1.1.0
	golang.org/x/sys v0.50.0
)

require (
	github.com/HdrHistogram/hdrhistogram-go v1.2.0 // indirect
	github.com/cilium/ebpf v0.22.0 // indirect
)
