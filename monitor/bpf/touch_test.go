package bpf

import (
	"bytes"
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/vm"
)

// touchTable is a table in the kernel with a program that touches it at will.
type touchTable struct {
	*epoch.Table
	coll *ebpf.Collection
}

func newTouchTable(tb testing.TB, bits int) *touchTable {
	tb.Helper()
	spec, err := loadProgram()
	if err != nil {
		tb.Fatal(err)
	}
	keep(spec, "touch_range", "measure_touch")
	maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool { return name != "table" && name != ".rodata" && name != ".bss" })
	maps.DeleteFunc(spec.Variables, func(name string, _ *ebpf.VariableSpec) bool {
		return name != "bucket_shift" && name != "measured"
	})
	spec.Maps["table"].MaxEntries = uint32(epoch.Size(bits) / 256)
	if err := spec.Variables["bucket_shift"].Set(uint32(64 - bits)); err != nil {
		tb.Fatal(err)
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, collectionOptions(btf.NewCache()))
	if err := explain(err); err != nil && os.Getenv("CI") != "true" && !inVM() {
		tb.Skipf("CAP_BPF and CAP_PERFMON needed: %v", err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(coll.Close)
	table, err := mapTable(coll.Maps["table"], bits)
	if err != nil {
		tb.Fatal(err)
	}
	return &touchTable{Table: table, coll: coll}
}

func (t *touchTable) touch(tb testing.TB, r vm.Range) bool {
	tb.Helper()
	ret, err := t.coll.Programs["touch_range"].Run(&ebpf.RunOptions{Context: [2]uint64{uint64(r.Start), uint64(r.End)}})
	if err != nil {
		tb.Error(err)
	}
	return ret != 0
}

// seed returns PINDOWN_SEED, or a new seed, and prints it.
func seed(t *testing.T) uint64 {
	t.Helper()
	s := uint64(time.Now().UnixNano())
	if v, err := strconv.ParseUint(os.Getenv("PINDOWN_SEED"), 10, 64); err == nil {
		s = v
	}
	t.Logf("PINDOWN_SEED=%d", s)
	return s
}

// randomRange returns a range of any size: within a page, across block
// boundaries, up to the whole address space and beyond, and some that wrap.
func randomRange(rnd *rand.Rand) vm.Range {
	// Ends are near multiples of powers of two, in a few parts of the space.
	point := func() uintptr {
		base := [...]uintptr{0, 0xc000000000, 0x7f0000000000, epoch.MaxAddress - 1<<30}[rnd.IntN(4)]
		return base + uintptr(rnd.Uint64N(1<<(rnd.UintN(24)+8)))&^(1<<rnd.UintN(24)-1)
	}
	r := vm.Range{Start: point()}
	r.End = r.Start + uintptr(rnd.Uint64N(1<<(rnd.UintN(32)+2)))
	switch rnd.IntN(100) {
	case 0:
		r = vm.Range{Start: 0, End: ^uintptr(0)}
	case 1:
		r.End = r.Start
	case 2:
		r.End = uintptr(rnd.Uint64N(uint64(r.Start) + 1))
	case 3:
		r.End = epoch.MaxAddress
	case 4:
		r.Start = 0
	}
	return r
}

// The kernel's touch and epoch.Table's, on the same ranges with the same
// interest, leave the same bytes.
func TestTouchEquivalence(t *testing.T) {
	rounds := 10_000
	if testing.Short() {
		rounds = 2_000
	}
	rnd := rand.New(rand.NewPCG(seed(t), 0))
	for _, bits := range []int{3, 8} { // the small one is full, so that the root is watched
		kernel := newTouchTable(t, bits)
		mem := make([]byte, epoch.Size(bits))
		table, err := epoch.Format(mem, bits)
		if err != nil {
			t.Fatal(err)
		}
		if err := table.AttachWriter(nil); err != nil {
			t.Fatal(err)
		}
		type pair struct{ kernel, table epoch.Watch }
		var watches []*pair
		var found int
		for i := range rounds {
			switch n := rnd.IntN(10); {
			case n == 0 && len(watches) > 0:
				k := rnd.IntN(len(watches))
				kernel.Unwatch(&watches[k].kernel)
				table.Unwatch(&watches[k].table)
				watches = append(watches[:k], watches[k+1:]...)
			case n < 3 && len(watches) < 20:
				r := randomRange(rnd)
				p := new(pair)
				errK, errT := kernel.Watch(&p.kernel, r), table.Watch(&p.table, r)
				if (errK == nil) != (errT == nil) {
					t.Fatalf("round %d: watch %v: %v, %v", i, r, errK, errT)
				}
				if errK == nil {
					watches = append(watches, p)
				}
			}
			r := randomRange(rnd)
			k, e := kernel.touch(t, r), table.Touch(r)
			if k != e {
				t.Fatalf("round %d: touch %v found %v in the kernel, %v in Go", i, r, k, e)
			}
			if k {
				found++
			}
			if i%100 == 99 || i == rounds-1 {
				if at, ok := differ(countOnes(kernel.memory(t)), mem); ok {
					t.Fatalf("round %d: tables differ from byte %#x", i, at)
				}
			}
		}
		t.Logf("%d bits: %d of %d touches found interest", bits, found, rounds)
		if bits > 3 && (found < rounds/20 || found > rounds*19/20) {
			t.Errorf("%d of %d touches found interest: too lopsided to show anything", found, rounds)
		}
	}
}

// The kernel and a program touch at the same time, so that one stores while the
// other adds: each finds, right after its touch, that the stamp has grown. So
// does whoever touches in the kernel while another program there is alone.
func TestTouchTogether(t *testing.T) {
	rounds := 20_000
	if testing.Short() {
		rounds = 5_000
	}
	table := newTouchTable(t, 8)
	r := vm.Range{Start: 0x7f0000003000, End: 0x7f0000300000}
	var watches []*epoch.Watch
	for at := r.Start; at < r.End; at += 0x11000 {
		w := new(epoch.Watch)
		if err := table.Watch(w, vm.Range{Start: at, End: at + 4096}); err != nil {
			t.Fatal(err)
		}
		watches = append(watches, w)
	}
	var wg sync.WaitGroup
	for k := range 3 {
		wg.Go(func() {
			for i := range rounds {
				w := watches[i%len(watches)]
				before := table.Stamp(w)
				if k == 0 {
					table.Touch(r)
				} else {
					table.touch(t, r)
				}
				if after := table.Stamp(w); after <= before {
					t.Errorf("touch %d of %d: stamp %#x after %#x", i, k, after, before)
					return
				}
			}
		})
	}
	wg.Wait()
}

// memory reads the table by bpf(2), not through the mapping.
func (t *touchTable) memory(tb testing.TB) []byte {
	tb.Helper()
	m := t.coll.Maps["table"]
	mem := make([]byte, 0, int(m.MaxEntries())*256)
	for i := range m.MaxEntries() {
		b, err := m.LookupBytes(i)
		if err != nil {
			tb.Fatal(err)
		}
		mem = append(mem, b...)
	}
	return mem
}

func differ(a, b []byte) (int, bool) {
	if bytes.Equal(a, b[:len(a)]) {
		return 0, false
	}
	for i := range a {
		if a[i] != b[i] {
			return i, true
		}
	}
	return 0, false
}

// aloneAdds is ALONE_ADDS of src/touch.h: nobody else touches the kernel's table here.
const aloneAdds = 1 << 28

// countOnes makes counters that grew by aloneAdds grow by one.
func countOnes(mem []byte) []byte {
	for at := epoch.Size(0) - 9*256 + 256; at < len(mem); at += 256 { // behind header and root
		for i := at + 64; i < at+192; i += 8 {
			n := binary.LittleEndian.Uint64(mem[i:])
			binary.LittleEndian.PutUint64(mem[i:], n/aloneAdds+n%aloneAdds)
		}
	}
	return mem
}
