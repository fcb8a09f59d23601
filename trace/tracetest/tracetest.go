// Package tracetest makes traces of programs that don't exist, the same for the
// same seed.
package tracetest

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pindown/pindown/trace"
	"github.com/pindown/pindown/vm"
)

// Program is a kind of program.
type Program uint8

// Programs.
const (
	// Pool uses a fixed pool of buffers, some much more than others, and never
	// changes its memory.
	Pool Program = iota + 1
	// Churn allocates a buffer for each use or few, and frees it: by munmap, and
	// the address soon comes back.
	Churn
	// Collected uses buffers from a heap whose idle pages are now and then
	// given back by madvise(MADV_DONTNEED).
	Collected
	// Scan goes through a file that is mapped, and never comes back.
	Scan
	// Mixed is all of them, in a process each, with registrations that the
	// program makes itself.
	Mixed
)

const page = 4096

// Append writes n events of the program to w.
func Append(w *trace.Writer, p Program, seed uint64, n int) error {
	g := &generator{w: w, rnd: rand.New(rand.NewPCG(seed, uint64(p))), live: make(map[uint64]vm.Range)}
	if err := w.Meta(&trace.Meta{
		Command: []string{"program", string('0' + rune(p))}, Arch: "amd64", CPUs: 2, Kernel: "0.0.0", PageSize: page,
		Mode: "synthetic", UseRule: "every read and write", Tool: "tracetest",
	}); err != nil {
		return err
	}
	for g.n < n {
		switch p {
		case Pool:
			g.pool(100)
		case Churn:
			g.churn(101)
		case Collected:
			g.collected(102)
		case Scan:
			g.scan(103)
		case Mixed:
			switch g.rnd.IntN(5) {
			case 0:
				g.pool(100)
			case 1:
				g.churn(101)
			case 2:
				g.collected(102)
			case 3:
				g.scan(103)
			case 4:
				g.registered(104)
			}
		}
	}
	if g.err != nil {
		return g.err
	}
	return w.Exit(&trace.Exit{Time: g.now, PID: 100})
}

// Bytes returns a whole trace.
func Bytes(tb testing.TB, p Program, seed uint64, n int) []byte {
	tb.Helper()
	var b bytes.Buffer
	w, err := trace.NewWriter(&b, nil)
	if err != nil {
		tb.Fatal(err)
	}
	if err := Append(w, p, seed, n); err != nil {
		tb.Fatal(err)
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

type generator struct {
	w    *trace.Writer
	rnd  *rand.Rand
	now  time.Duration
	n    int
	err  error
	at   uint64 // of the scan
	live map[uint64]vm.Range
	next uint64
}

func (g *generator) event(e trace.Event) {
	g.n++
	g.now += time.Duration(500 + g.rnd.IntN(3000))
	e.Start = g.now
	e.Duration = time.Duration(200 + g.rnd.IntN(2000))
	e.TID = e.PID + uint32(g.rnd.IntN(2))
	if err := g.w.Event(&e); err != nil && g.err == nil {
		g.err = err
	}
}

func pages(at, n uint64) vm.Range {
	const base = 0x7f0000000000
	return vm.Range{Start: uintptr(base + at*page), End: uintptr(base + (at+n)*page)}
}

func (g *generator) use(pid uint32, r vm.Range) {
	kind := trace.UseRead
	if g.rnd.IntN(2) == 0 {
		kind = trace.UseWrite
	}
	g.event(trace.Event{Kind: trace.KindUse, Use: kind, FD: trace.FDFile, PID: pid, Range: r, Result: int64(r.Len())})
}

// skewed returns a number below n, small ones more often.
func (g *generator) skewed(n int) uint64 {
	f := g.rnd.Float64()
	return uint64(f * f * f * float64(n))
}

func (g *generator) pool(pid uint32) {
	i := g.skewed(2000)
	g.use(pid, pages(i*32, 1<<(i%6)))
}

func (g *generator) churn(pid uint32) {
	n := uint64(1) << g.rnd.IntN(7)
	r := pages(uint64(g.rnd.IntN(64))*64, n)
	for range 1 + g.rnd.IntN(3) {
		g.use(pid, r)
	}
	g.event(trace.Event{Kind: trace.KindOp, Op: trace.OpMunmap, PID: pid, Range: r, Stack: 1 + uint32(n)})
	g.event(trace.Event{Kind: trace.KindOp, Op: trace.OpMmap, PID: pid, Range: r})
}

func (g *generator) collected(pid uint32) {
	if g.rnd.IntN(20) == 0 {
		g.event(trace.Event{Kind: trace.KindOp, Op: trace.OpDontneed, PID: pid, Range: pages(uint64(g.rnd.IntN(64))*64, 64)})
		return
	}
	at := g.skewed(4096)
	g.use(pid, pages(at, 1+uint64(g.rnd.IntN(16))))
}

func (g *generator) scan(pid uint32) {
	g.use(pid, pages(1<<20+g.at, 16))
	g.at += 16
}

func (g *generator) registered(pid uint32) {
	if h := uint64(g.rnd.IntN(100)); len(g.live) > 0 && h < 60 {
		if r, ok := g.live[h]; ok {
			delete(g.live, h)
			g.event(trace.Event{Kind: trace.KindDeregister, Via: trace.ViaIOUring, PID: pid, Owner: 5, Handle: h, Range: r})
			return
		}
	}
	g.next = (g.next + 1) % 60
	r := pages(g.next*100, 1+uint64(g.rnd.IntN(90)))
	g.live[g.next] = r
	g.event(trace.Event{Kind: trace.KindRegister, Via: trace.ViaIOUring, PID: pid, Owner: 5, Handle: g.next, Range: r, Pages: uint32(r.Pages(page))})
}
