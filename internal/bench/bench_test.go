package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/monitor/manual"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tiny are options to see that everything works.
func tiny() *Options {
	return &Options{Regions: []int{1, 200}, Duration: time.Millisecond, Rounds: 2}
}

// apart reports whether two threads of the run never had processors at the same
// time: the machine is busy, and there are no figures.
func apart(r *Report) bool {
	return slices.ContainsFunc(r.Notes, func(n string) bool { return strings.Contains(n, "at the same time") })
}

func TestEverythingIsMeasured(t *testing.T) {
	r, err := Run(t.Context(), tiny())
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(r.Notes, func(n string) bool { return strings.Contains(n, "one processor") }) {
		if os.Getenv("CI") == "true" {
			t.Fatalf("not measured: %q", r.Notes)
		}
		t.Skip("needs two processors")
	}
	type key struct {
		w       Workload
		p, impl string
		threads int
	}
	have := make(map[key]int)
	for _, x := range r.Results {
		have[key{x.Workload, x.Pattern, x.Impl, x.Threads}]++
		if x.Threads == 2 && apart(r) {
			continue
		}
		memory := x.Workload == Memory
		if memory != (x.NsPerOp == 0) || memory != (x.OpsPerSecond == 0) || !memory && len(x.Samples) != 2 || x.Monitor != "manual" {
			t.Errorf("row %+v", x)
		}
	}
	for _, w := range Workloads() {
		for _, p := range Patterns(w) {
			for _, impl := range cacheImpls {
				if impl == implLane && (w == Miss || w == Invalidate || w == Memory) {
					continue
				}
				if have[key{w, p, impl, 1}] == 0 {
					t.Errorf("no row for %s %s with %s", w, p, impl)
				}
				if two := have[key{w, p, impl, 2}] > 0; two != (w == Hit && slices.Contains([]string{"same", "different", "random"}, p)) {
					t.Errorf("%s %s with %s and two threads: %v", w, p, impl, two)
				}
			}
		}
	}
	for _, of := range []string{implPindown + " 2 threads", implLane + " 2 threads", implPindown + " unrelated"} {
		if !apart(r) && !slices.ContainsFunc(r.Ratios, func(x Ratio) bool { return x.Of == of && len(x.Pairs) > 0 && x.Median > 0 }) {
			t.Errorf("no ratio of %s", of)
		}
	}
}

// peer is a subject that is a cache of ours under another name.
func peer() Factory {
	f := pindownFactory(&Monitor{Name: "manual"})
	return Factory{
		Impls: []string{"peer"},
		New: func(n int) (Subject, error) {
			s, err := f.New(n)
			return peerSubject{s}, err
		},
		Unfit: func(c Case) string {
			if c.Workload == Miss {
				return "it knows no misses"
			}
			return ""
		},
	}
}

type peerSubject struct{ Subject }

func (p peerSubject) Worker(string) (Worker, error) { return p.Subject.Worker(implPindown) }

func TestPeers(t *testing.T) {
	o := tiny()
	o.Peers = []Factory{peer()}
	o.Workloads = []Workload{Hit, Miss, Invalidate, Memory}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for _, x := range r.Results {
		if x.Impl != "peer" {
			continue
		}
		rows++
		if x.Monitor != "" || x.Workload == Miss {
			t.Errorf("row %+v", x)
		}
	}
	ratios := 0
	for _, x := range r.Ratios {
		if x.To == "peer" {
			ratios++
		}
		if x.Of == "peer" {
			t.Errorf("ratio %+v", x)
		}
	}
	if rows < 10 || ratios < 10 {
		t.Errorf("%d rows, %d ratios", rows, ratios)
	}
	if !slices.ContainsFunc(r.Notes, func(n string) bool { return strings.Contains(n, "it knows no misses") }) {
		t.Errorf("notes %q", r.Notes)
	}
}

func TestSelection(t *testing.T) {
	o := tiny()
	o.Workloads, o.Patterns, o.Impls, o.Threads, o.Regions = []Workload{Hit}, []string{"uniform"}, []string{implLane}, []int{1}, []int{50}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != 1 || r.Results[0].Impl != implLane || r.Results[0].Pattern != "uniform" || r.Results[0].Regions != 50 {
		t.Errorf("%+v", r.Results)
	}
}

// TestShortIsNotJudged: milliseconds say nothing about aims.
func TestShortIsNotJudged(t *testing.T) {
	for _, short := range []bool{false, true} {
		o := tiny()
		o.Workloads, o.Patterns, o.Short = []Workload{Invalidate}, []string{"acquire-after"}, short
		r, err := Run(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := r.WriteText(&b); err != nil {
			t.Fatal(err)
		}
		judged := slices.ContainsFunc(r.Ratios, func(x Ratio) bool { return x.Met != nil })
		if judged == short || strings.Contains(b.String(), "doesn't tell") != short {
			t.Errorf("short %v:\n%s", short, &b)
		}
	}
}

func TestFormats(t *testing.T) {
	o := tiny()
	o.Workloads = []Workload{Hit, Churn, Memory}
	o.Threads = []int{1}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var object struct {
		Results []map[string]any `json:"results"`
	}
	if err := json.Unmarshal(b.Bytes(), &object); err != nil {
		t.Fatal(err)
	}
	if len(object.Results) != len(r.Results) {
		t.Errorf("%d rows of %d", len(object.Results), len(r.Results))
	}
	for _, row := range object.Results {
		for _, name := range []string{"workload", "regions", "threads", "pattern", "impl", "ns_per_op", "ops_per_second"} {
			if _, ok := row[name]; !ok {
				t.Errorf("no %s in %v", name, row)
			}
		}
	}

	b.Reset()
	if err := r.WriteBenchfmt(&b); err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`^Benchmark[A-Z][a-z]+/pattern=[a-z-]+/regions=\d+/threads=\d/impl=[a-z]+\t\d+(\t[0-9.e+]+ \S+)+$`)
	lines := 0
	for text := range strings.Lines(b.String()) {
		if text = strings.TrimSuffix(text, "\n"); !strings.HasPrefix(text, "Benchmark") {
			if k, v, ok := strings.Cut(text, ": "); !ok || k == "" || v == "" {
				t.Errorf("line %q", text)
			}
			continue
		}
		lines++
		if !line.MatchString(text) {
			t.Errorf("line %q", text)
		}
	}
	if lines < len(r.Results) {
		t.Errorf("%d lines for %d rows", lines, len(r.Results))
	}

	b.Reset()
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	for _, x := range r.Results {
		if !strings.Contains(b.String(), x.Pattern) {
			t.Errorf("no %s in\n%s", x.Pattern, &b)
		}
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o := &Options{Regions: []int{10}, Rounds: 1000, Duration: time.Millisecond, Progress: func(what string) {
		if strings.Contains(what, "round 3 ") {
			cancel()
		}
	}}
	if r, err := Run(ctx, o); !errors.Is(err, context.Canceled) || r != nil {
		t.Errorf("%+v, %v", r, err)
	}

	// What was measured before is there, and what is missing is said.
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	o = &Options{
		Workloads: []Workload{Hit, Restamp}, Patterns: []string{patternUniform, "related"}, Impls: []string{implPindown},
		Regions: []int{10}, Rounds: 2, Duration: time.Millisecond,
		Progress: func(what string) {
			if strings.HasPrefix(what, "restamp") {
				cancel()
			}
		},
	}
	r, err := Run(ctx, o)
	if !errors.Is(err, context.Canceled) || r == nil || len(r.Results) != 1 || !strings.Contains(strings.Join(r.Notes, "\n"), "from restamp on: interrupted") {
		t.Errorf("%+v, %v", r, err)
	}
}

// Options that select nothing are an error that says what there is.
func TestNothing(t *testing.T) {
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Workloads: []Workload{Memory}, Patterns: []string{"hot"}}, "workload memory has no pattern hot: one of total, heap"},
		{Options{Workloads: []Workload{Churn}, Regions: []int{1}}, "churn takes 1 thread, and 2 to 100000 regions"},
		{Options{Patterns: []string{"room"}, Regions: []int{1}}, "miss takes 1 thread, and at least 100 regions"},
		{Options{Patterns: []string{"hot"}, Threads: []int{2}}, "hit takes 1 thread"},
	} {
		if r, err := Run(t.Context(), &c.o); r != nil || !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.o, err, c.want)
		}
	}
}

// What is named twice is measured once.
func TestOnce(t *testing.T) {
	r, err := Run(t.Context(), &Options{
		Workloads: []Workload{Hit, Hit}, Patterns: []string{patternUniform, patternUniform}, Impls: []string{implPindown},
		Regions: []int{10, 20, 10}, Threads: []int{1, 1}, Rounds: 1, Duration: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != 2 || r.Results[0].Regions != 10 || r.Results[1].Regions != 20 {
		t.Errorf("%+v", r.Results)
	}
}

// Columns without a figure aren't shown, nor spaces at the ends of lines.
func TestColumns(t *testing.T) {
	r := &Report{CPU: "c", CPUs: 1, Load: "1", Rounds: 1, Results: []Result{{Workload: Memory, Pattern: "heap", Regions: 1, Threads: 1, Impl: "x", BytesPerRegion: 5}}}
	for _, long := range []bool{false, true} {
		if long {
			r.Results = append(r.Results, Result{Workload: Hit, Pattern: "p", Regions: 1, Threads: 1, Impl: "x", NsPerOp: 1, P50: 2, P99: 3, Max: 4})
			r.Ratios = append(r.Ratios, Ratio{Workload: Hit, Pattern: "p", Of: "x", To: "y", Pairs: []float64{1}})
		}
		var b strings.Builder
		if err := r.WriteText(&b); err != nil {
			t.Fatal(err)
		}
		text := b.String()
		if !strings.Contains(text, "c, 1 CPU, ") || !strings.Contains(text, "\n1 round of ") || !strings.Contains(text, "BYTES/REGION\n") ||
			strings.Contains(text, "P99") != long || strings.Contains(text, "AIM") || strings.Contains(text, " \n") {
			t.Errorf("%s", text)
		}
	}
	r.Ratios[0].Bound = "≤ 1"
	var b strings.Builder
	if err := r.WriteText(&b); err != nil || !strings.Contains(b.String(), "AIM\n") {
		t.Errorf("%v: %s", err, b.String())
	}
}

func TestValidate(t *testing.T) {
	err := (&Options{
		Workloads: []Workload{"sleep"}, Patterns: []string{"plaid"}, Regions: []int{0}, Threads: []int{3},
		Impls: []string{"magic"}, Duration: time.Hour, Rounds: -1,
	}).Validate()
	if !errors.Is(err, ErrOptions) {
		t.Fatal(err)
	}
	for _, want := range []string{"sleep", "plaid", "0 regions", "3 threads", "magic", "1h0m0s", "-1 rounds"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
	if _, err := Run(t.Context(), &Options{Rounds: -1}); !errors.Is(err, ErrOptions) {
		t.Errorf("run: %v", err)
	}
}

// TestNotCached: figures of registrations per use are not shown as those of hits.
func TestNotCached(t *testing.T) {
	o := tiny()
	o.Workloads = []Workload{Hit}
	o.Monitor = &Monitor{Name: "lost", Open: func() (monitor.Monitor, error) {
		m, err := manual.New(nil)
		if err == nil {
			m.Table().SetLost()
		}
		return m, err
	}}
	if _, err := Run(t.Context(), o); !errors.Is(err, ErrNotCached) {
		t.Errorf("%v", err)
	}
}

func TestOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 17, 1000, 100_000} {
		for _, pattern := range []string{patternHot, patternUniform, patternZipf} {
			for _, shape := range []Area{pageShape, subShape} {
				t.Run(fmt.Sprint(n, pattern, shape.Pages), func(t *testing.T) {
					a := shape
					a.Regions = n
					seen := make(map[uint32]int)
					order := a.order(pattern, a.Pages > 1, rng)
					if len(order)%chunk != 0 || chunk%shortChunk != 0 {
						t.Errorf("%d entries", len(order))
					}
					for _, p := range order {
						i, page := p/a.Stride, p%a.Stride
						if int(i) >= n || page >= a.Pages {
							t.Fatalf("page %d of region %d", page, i)
						}
						seen[i]++
					}
					most := 0
					for _, k := range seen {
						most = max(most, k)
					}
					switch pattern {
					case patternHot:
						if len(seen) != min(n, hotRegions) {
							t.Errorf("%d regions", len(seen))
						}
					case patternUniform:
						if len(seen) < n*9/10 {
							t.Errorf("%d regions of %d", len(seen), n)
						}
					case patternZipf:
						if n >= 1000 && most < len(order)/20 {
							t.Errorf("the most popular one: %d of %d", most, len(order))
						}
					}
				})
			}
		}
	}
}

// TestAccompanied: of two threads, steps count that ran while the other did.
func TestAccompanied(t *testing.T) {
	const us = time.Microsecond
	log := func(times ...int) stepLog {
		l := stepLog{end: time.Duration(times[len(times)-1]) * us}
		for _, at := range times[:len(times)-1] {
			l.at = append(l.at, time.Duration(at)*us)
			l.ops = append(l.ops, 100)
		}
		return l
	}
	//  a |--|--|--|--|------- 3 ms -------|--|--|
	//  b      |--|--|--|--|--|--|--|--|--|--|
	a := log(0, 10, 20, 30, 40, 3040, 3050, 3060)
	b := log(20, 30, 40, 50, 60, 3030, 3040, 3050)
	logs := []stepLog{a, b}
	for i, want := range [][]bool{
		{false, false, true, true, false, true, false},
		{true, true, false, false, false, false, true},
	} {
		for j := range want {
			if got := logs[i].accompanied(j, logs, i); got != want[j] {
				t.Errorf("thread %d, step %d: %v", i, j, got)
			}
		}
	}
}

func TestJudge(t *testing.T) {
	r := &Report{
		Results: []Result{
			{Workload: Memory, Pattern: "total", Regions: 1_000_000, Impl: implPindown, BytesPerRegion: 80},
			{Workload: Miss, Pattern: "room", Regions: 100_000, Impl: implPindown, NsPerOp: 1200},
			{Workload: Miss, Pattern: "room", Regions: 100_000, Impl: "ucx", NsPerOp: 1200},
		},
		Ratios: []Ratio{
			{Workload: Hit, Pattern: "uniform", Regions: 10_000, Of: implPindown, To: "ucx", Median: 0.36},
			{Workload: Hit, Pattern: "uniform", Regions: 100_000, Of: implPindown, To: "ucx", Median: 0.36},
			{Workload: Hit, Pattern: "same", Quantity: "ops_per_second", Of: implPindown + " 2 threads", Median: 1.6},
			{Workload: Hit, Pattern: "different", Quantity: "ops_per_second", Of: implPindown + " 2 threads", Median: 1.6},
			{Workload: Hit, Pattern: "uniform", Of: implPindown, To: "mutex-btree", Median: 9},
		},
	}
	judge(r)
	var got []string
	for _, x := range r.Ratios {
		s := fmt.Sprintf("%.2f %s", x.Median, x.Bound)
		if x.Met != nil {
			s += fmt.Sprint(" ", *x.Met)
		}
		got = append(got, s)
	}
	want := []string{"0.36 ≤ 0.35 false", "0.36 ≤ 0.4 true", "1.60 ≥ 1.5 true", "1.60 ≥ 1.8 false", "9.00 ", "0.50 ≤ 1 true", "2.00 ≤ 1 false"}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
