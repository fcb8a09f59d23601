package epoch

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// defines returns the numeric #defines of layout.h without their prefix.
func defines(t *testing.T) map[string]uint64 {
	t.Helper()
	src, err := os.ReadFile("layout.h")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	re := regexp.MustCompile(`(?m)^#define[ \t]+PINDOWN_EPOCH_(\w+)[ \t]+(\S+)`)
	for _, m := range re.FindAllStringSubmatch(string(src), -1) {
		n, err := strconv.ParseUint(strings.TrimRight(m[2], "uUlL"), 0, 64)
		if err != nil {
			t.Fatalf("layout.h: %s: %v", m[0], err)
		}
		if _, dup := out[m[1]]; dup {
			t.Errorf("layout.h defines %s twice", m[1])
		}
		out[m[1]] = n
	}
	return out
}

func TestLayoutHeaderMatchesGo(t *testing.T) {
	got := defines(t)
	want := map[string]uint64{
		"MAGIC":               Magic,
		"VERSION":             Version,
		"PAGE_SHIFT":          PageShift,
		"FANOUT_SHIFT":        FanoutShift,
		"LEVELS":              Levels,
		"BUCKET_SLOTS":        bucketSlots,
		"BUCKET_SIZE":         bucketSize,
		"HEADER_SIZE":         headerSize,
		"MIN_BUCKET_BITS":     minBucketBits,
		"MAX_BUCKET_BITS":     maxBucketBits,
		"BUSY_MASK":           wordBusyMask,
		"LOST":                wordLost,
		"GENERATION_ONE":      wordGenerationOne,
		"TAG_LEVEL_SHIFT":     tagLevelShift,
		"HASH_MULTIPLIER":     hashMultiplier,
		"FAR_SHIFT":           farShift,
		"LARGE_LEVEL":         largeLevel,
		"SMALL_AWAY":          smallTries - 1,
		"LARGE_AWAY":          largeTries - 1,
		"FEATURE_BASE":        uint64(FeatureBase),
		"FEATURE_HIT_CHECK":   uint64(FeatureHitCheck),
		"REQUIRES_SHIFT":      requiresShift,
		"OFF_MAGIC":           uint64(offsets.magic),
		"OFF_VERSION":         uint64(offsets.version),
		"OFF_HEADER_SIZE":     uint64(offsets.headerSize),
		"OFF_FEATURES":        uint64(offsets.features),
		"OFF_BUCKET_SIZE":     uint64(offsets.bucketSize),
		"OFF_PAGE_SHIFT":      uint64(offsets.pageShift),
		"OFF_FANOUT_SHIFT":    uint64(offsets.fanoutShift),
		"OFF_LEVELS":          uint64(offsets.levels),
		"OFF_BUCKET_SLOTS":    uint64(offsets.bucketSlots),
		"OFF_BUCKET_BITS":     uint64(offsets.bucketBits),
		"OFF_WORD":            uint64(offsets.word),
		"BUCKET_TAG":          uint64(offsets.tag),
		"BUCKET_SELF":         uint64(offsets.self),
		"BUCKET_BELOW":        uint64(offsets.below),
		"BUCKET_WANT":         uint64(offsets.want),
		"BUCKET_WANT_BELOW":   uint64(offsets.wantBelow),
		"OFF_READER_FEATURES": uint64(offsets.readerFeatures),
		"OFF_WRITER_FEATURES": uint64(offsets.writerFeatures),
	}
	for name, w := range want {
		g, ok := got[name]
		if !ok {
			t.Errorf("layout.h lacks PINDOWN_EPOCH_%s", name)
		} else if g != w {
			t.Errorf("PINDOWN_EPOCH_%s = %#x in layout.h, %#x in Go", name, g, w)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("PINDOWN_EPOCH_%s in layout.h is not compared with Go", name)
		}
	}
}

func TestLayoutOfOverlays(t *testing.T) {
	if offsets.sizeofBucket != bucketSize {
		t.Errorf("a bucket is %d bytes, want %d", offsets.sizeofBucket, bucketSize)
	}
	if offsets.sizeofHeader > headerSize {
		t.Errorf("the header overlay is %d bytes, more than %d", offsets.sizeofHeader, headerSize)
	}
	if offsets.word/64 == offsets.bucketSize/64 || offsets.sizeofHeader-offsets.word < 64 {
		t.Error("the word shares a cache line")
	}
	if got := MaxAddress >> PageShift; got != 1<<((Levels-1)*FanoutShift) {
		t.Errorf("the root spans %#x pages", got)
	}
	if offsets.sizeofWatch != 16 {
		t.Errorf("a Watch is %d bytes, want 16", offsets.sizeofWatch)
	}
}

// TestLayoutBytes pins the format: what a reader in another language sees.
func TestLayoutBytes(t *testing.T) {
	mem := make([]byte, Size(3))
	table, err := Format(mem, 3)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(mem[:8]); got != "PNDEPOCH" {
		t.Errorf("magic bytes %q", got)
	}
	var w Watch
	if err := table.Watch(&w, pages(0x123, 1)); err != nil {
		t.Fatal(err)
	}
	table.Touch(pages(0x123, 1))
	var lines []string
	for off := 0; off < len(mem); off += 8 {
		if off == headerSize {
			lines = append(lines, "--")
		}
		v := uint64(0)
		for i := range 8 {
			v |= uint64(mem[off+i]) << (8 * i)
		}
		if v != 0 {
			lines = append(lines, fmt.Sprintf("%#06x %#018x", off, v))
		}
	}
	got := strings.Join(lines, "\n") + "\n"
	const golden = "testdata/golden.txt"
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("bytes of the table changed; that needs a new layout version.\ngot:\n%s\nwant:\n%s", got, want)
	}
}
