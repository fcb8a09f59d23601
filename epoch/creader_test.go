package epoch_test

import (
	"bufio"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/vm"
)

// Verdicts of the C reader.
const (
	cInvalid = 0
	cValid   = 1
	cLost    = 2
	cBusy    = 3
)

// compileReader compiles the reader, or skips the test; in CI it fails.
func compileReader(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "reader")
	out, err := exec.Command("gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", bin, "creader/main.c").CombinedOutput()
	if err != nil {
		if _, lookErr := exec.LookPath("gcc"); lookErr == nil || os.Getenv("CI") == "true" {
			t.Fatalf("gcc: %v\n%s", err, out)
		}
		t.Skip("needs gcc (apt-get install gcc libc6-dev)")
	}
	return bin
}

// sharedTable returns a table in memory that other processes can map, and its
// file.
func sharedTable(t *testing.T, bits int) (*epoch.Table, []byte, *os.File) {
	t.Helper()
	fd, err := unix.MemfdCreate("epoch", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "epoch")
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(int64(epoch.Size(bits))); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, epoch.Size(bits), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	table, err := epoch.Format(mem, bits)
	if err != nil {
		t.Fatal(err)
	}
	return table, mem, f
}

// cReader is a running reader.
type cReader struct {
	t   *testing.T
	in  *bufio.Writer
	out io.Reader
}

func startReader(t *testing.T, bin string, table *os.File) *cReader {
	t.Helper()
	cmd := exec.Command(bin)
	cmd.ExtraFiles = []*os.File{table}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the C reader: %v", err)
		}
	})
	return &cReader{t: t, in: bufio.NewWriterSize(in, 1<<16), out: out}
}

func (c *cReader) tell(what byte, numbers ...uint64) {
	b := []byte{what}
	for _, n := range numbers {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	c.in.Write(b) // Flush reports errors.
}

// answers flushes what was told and returns n answers.
func (c *cReader) answers(n int) []byte {
	c.t.Helper()
	c.tell('F')
	if err := c.in.Flush(); err != nil {
		c.t.Fatalf("tell the C reader: %v", err)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(c.out, b); err != nil {
		c.t.Fatalf("answers of the C reader: %v", err)
	}
	return b
}

// cWatch is a range that both readers watch.
type cWatch struct {
	r     vm.Range // in whole pages
	dirty bool     // touched since it was last found so
	exact bool     // Go watches no more than the range
	watch epoch.Watch
	word  atomic.Uint64
	stamp uint64
}

func (w *cWatch) take(table *epoch.Table) {
	word, stamp := table.Take(&w.watch)
	w.word.Store(uint64(word))
	w.stamp = stamp
}

// randomRange returns a range of whole pages among those that the test is
// about; short ones mostly.
func randomRange(rnd *rand.Rand) vm.Range {
	const base, pages = 0x7f0000000000 >> 12, 1 << 14
	n := uint64(1)
	switch rnd.IntN(8) {
	case 0, 1:
		n += rnd.Uint64N(8)
	case 2:
		n += rnd.Uint64N(300)
	case 3:
		n = 16 << (4 * rnd.IntN(3))
	}
	lo := rnd.Uint64N(pages)
	if rnd.IntN(3) == 0 {
		lo &^= 15
	}
	return vm.Range{Start: uintptr(base+lo) << 12, End: uintptr(base+lo+n) << 12}
}

// TestCReader: a program in C that knows FORMAT.md finds valid what the Go reader
// finds valid, which is what was not touched.
func TestCReader(t *testing.T) {
	steps := 1_000_000
	if testing.Short() {
		steps = 50_000
	}
	bin := compileReader(t)
	for _, c := range []struct {
		name    string
		bits    int
		watches int
		steps   int
	}{
		{"room for all", 14, 48, steps},
		{"full buckets", 3, 100, steps / 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			agree(t, bin, c.bits, c.watches, c.steps, rand.New(rand.NewPCG(seed, 0)))
		})
	}
}

// agree makes that many touches, and that many checks by both readers, each of
// its own table with the same touches.
func agree(t *testing.T, bin string, bits, n, steps int, rnd *rand.Rand) {
	t.Helper()
	roomy := bits > 10
	shared, mem, file := sharedTable(t, bits)
	if _, err := epoch.OpenWriter(mem, nil); err != nil {
		t.Fatal(err)
	}
	own, err := epoch.Format(make([]byte, epoch.Size(bits)), bits)
	if err != nil {
		t.Fatal(err)
	}
	reader := startReader(t, bin, file)
	watches := make([]*cWatch, n)
	renew := func(i int) {
		w := &cWatch{r: randomRange(rnd)}
		if old := watches[i]; old != nil {
			own.Unwatch(&old.watch)
			reader.tell('U', uint64(i))
		}
		watches[i] = w
		if err := own.Watch(&w.watch, w.r); err != nil {
			t.Fatal(err)
		}
		w.take(own)
		w.exact = roomy && blocksOf(w.r) <= epoch.MaxBlocks
		reader.tell('W', uint64(i), uint64(w.r.Start), uint64(w.r.End))
	}
	for i := range watches {
		renew(i)
	}
	const batch = 100
	var touches, checks, invalid, needless, compared int
	for touches < steps {
		if rnd.IntN(4) == 0 {
			renew(rnd.IntN(n))
		}
		reader.tell('B', 0) // The answer says that what came before is done.
		reader.answers(1)
		// Sometimes so few that not all is touched.
		some := 1 + rnd.IntN(3)
		if rnd.IntN(2) == 0 {
			some = 1 + rnd.IntN(2*batch)
		}
		for range some {
			r := randomRange(rnd)
			if rnd.IntN(4) != 0 { // Bytes, not pages.
				r.Start += uintptr(rnd.IntN(4096))
				r.End -= uintptr(rnd.IntN(4096))
				if r.Start >= r.End {
					r.End = r.Start + 1
				}
			}
			shared.Touch(r)
			own.Touch(r)
			touches++
			for _, w := range watches {
				w.dirty = w.dirty || w.r.Overlaps(r)
			}
		}
		order := make([]int, 0, batch)
		for range batch {
			i := rnd.IntN(n)
			order = append(order, i)
			reader.tell('C', uint64(i))
		}
		for k, v := range reader.answers(len(order)) {
			w := watches[order[k]]
			checks++
			mine := own.Check(&w.watch, w.stamp, &w.word) == epoch.VerdictValid
			switch {
			case w.dirty && v != cInvalid:
				t.Fatalf("check %d of %v: the C reader says %d, it was touched", checks, w.r, v)
			case w.dirty && mine:
				t.Fatalf("check %d of %v: the Go reader says valid, it was touched", checks, w.r)
			case roomy && !w.dirty && v != cValid:
				t.Fatalf("check %d of %v: the C reader says %d, it was not touched", checks, w.r, v)
			case w.exact && mine != (v == cValid):
				t.Fatalf("check %d of %v: the C reader says %d, the Go reader %t", checks, w.r, v, mine)
			}
			if w.exact {
				compared++
			}
			if w.dirty {
				invalid++
			} else if v == cInvalid {
				needless++
			}
			w.dirty = false
			if !mine {
				w.take(own)
			}
		}
	}
	t.Logf("%d touches, %d checks by the C reader: %d invalid, %d needlessly so; %d compared with the Go reader one to one, the others with the touches",
		touches, checks, invalid, needless, compared)
	if touches < steps || checks < steps || invalid == 0 || invalid == checks || roomy && compared < checks/2 {
		t.Error("the test shows nothing")
	}
	// Busy and lost, on the same word.
	reader.tell('C', 0)
	reader.answers(1)
	shared.AddBusy()
	reader.tell('B', 0)
	if v := reader.answers(1)[0]; v != cBusy {
		t.Errorf("while a writer is busy the C reader says %d", v)
	}
	shared.DropBusy()
	reader.tell('C', 0)
	if v := reader.answers(1)[0]; v != cValid {
		t.Errorf("after a writer was busy the C reader says %d", v)
	}
	shared.SetLost()
	reader.tell('C', 0)
	if v := reader.answers(1)[0]; v != cLost {
		t.Errorf("without a writer the C reader says %d", v)
	}
	// It leaves nothing behind.
	for i := range watches {
		reader.tell('U', uint64(i))
	}
	reader.tell('W', 0, 0x1000, 0x2000)
	reader.tell('B', 0)
	reader.answers(1)
	if used := slotsInUse(mem); used != epoch.Levels {
		t.Errorf("%d slots in use for one page, want %d", used, epoch.Levels)
	}
}

// slotsInUse counts tags.
func slotsInUse(mem []byte) int {
	n := 0
	for b := 4096; b+256 <= len(mem); b += 256 {
		for i := range 8 {
			if binary.LittleEndian.Uint64(mem[b+8*i:]) != 0 {
				n++
			}
		}
	}
	return n
}

// blocksOf counts the canonical blocks of a range of pages.
func blocksOf(r vm.Range) int {
	n := 0
	for pos, end := uint64(r.Start>>12), uint64(r.End>>12); pos < end; n++ {
		size := uint64(1)
		for size < 1<<36 && pos%(size*16) == 0 && end-pos >= size*16 {
			size *= 16
		}
		pos += size
	}
	return n
}

// TestCReaderRefuses: what the document says must be refused.
func TestCReaderRefuses(t *testing.T) {
	bin := compileReader(t)
	for _, c := range []struct {
		name   string
		args   []string
		change func(mem []byte)
		want   string
	}{
		{"a good one", nil, func([]byte) {}, ""},
		{"magic", nil, func(m []byte) { m[0]++ }, "magic"},
		{"newer version", nil, func(m []byte) { m[8]++ }, "version"},
		{"older version", nil, func(m []byte) { m[8]-- }, "version"},
		{"geometry", nil, func(m []byte) { m[40]++ }, "page_shift"},
		{"too few bytes", nil, func(m []byte) { m[56]++ }, "memory"},
		{"unknown feature", nil, func(m []byte) { m[16] |= 1 << 5 }, "features"},
		{"writer that needs the hit check", nil, func(m []byte) {
			if _, err := epoch.OpenWriter(m, &epoch.AttachOptions{Understands: epoch.FeatureHitCheck, Requires: epoch.FeatureHitCheck}); err != nil {
				t.Fatal(err)
			}
		}, "writer_features"},
		{"writer that needs the hit check, which the reader knows", []string{"hit-check"}, func(m []byte) {
			if _, err := epoch.OpenWriter(m, &epoch.AttachOptions{Understands: epoch.FeatureHitCheck, Requires: epoch.FeatureHitCheck}); err != nil {
				t.Fatal(err)
			}
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, mem, file := sharedTable(t, 4)
			c.change(mem)
			cmd := exec.Command(bin, c.args...)
			cmd.ExtraFiles = []*os.File{file}
			out, err := cmd.Output()
			if got := strings.TrimSpace(string(out)); got != c.want || (err != nil) != (c.want != "") {
				t.Errorf("refused for %q (%v), want %q", got, err, c.want)
			}
			if c.want == "" {
				// A later writer sees who is there.
				if _, err := epoch.OpenWriter(mem, &epoch.AttachOptions{Requires: 1 << 7}); err == nil {
					t.Error("a writer that requires what the C reader doesn't know is let in")
				}
			}
		})
	}
}
