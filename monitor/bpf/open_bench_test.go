package bpf

import "testing"

// BenchmarkOpen measures start and end of a monitor.
func BenchmarkOpen(b *testing.B) {
	for b.Loop() {
		m, err := Open(&Options{Mode: ModeSyscalls})
		if err != nil {
			b.Skip(err)
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
