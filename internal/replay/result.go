package replay

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"sort"
	"strings"
	"text/tabwriter"

	"github.com/pindown/pindown/internal/report"
)

// Result is what a replay found.
type Result struct {
	Trace    TraceInfo      `json:"trace"`
	Counts   Counts         `json:"counts"`
	Settings Settings       `json:"settings"`
	Models   []Model        `json:"models"`
	Policies []PolicyResult `json:"policies"`
	Curve    Curve          `json:"curve"`
	// Recommended are limits for a cache of this program.
	Recommended Recommendation `json:"recommended"`
	// Answers say what dominates, one for each model.
	Answers []Answer `json:"answers"`
}

// TraceInfo is what the trace says about itself.
type TraceInfo struct {
	Command []string `json:"command"`
	Kernel  string   `json:"kernel"`
	Mode    string   `json:"mode"`
	UseRule string   `json:"use_rule"`
	Tool    string   `json:"tool"`
	Page    int      `json:"page_bytes"`
}

// Settings are the options that the result is for.
type Settings struct {
	MaxRegions int    `json:"max_regions"`
	MaxBytes   uint64 `json:"max_bytes"`
	MergeBytes uint64 `json:"merge_bytes"`
	Requests   string `json:"requests"`
	MinUse     uint64 `json:"min_use_bytes"`
	Eviction   string `json:"eviction"`
}

// Calls are calls and the bytes that they were for.
type Calls struct {
	Count uint64 `json:"count"`
	Bytes uint64 `json:"bytes"`
}

// PolicyResult is what one policy did.
type PolicyResult struct {
	Policy Policy `json:"policy"`
	// Requests are Hits, and misses by cause: nothing was there, a region that
	// covers a part or lacks write access, a stale one.
	Requests      uint64  `json:"requests"`
	Hits          uint64  `json:"hits"`
	HitRate       float64 `json:"hit_rate"`
	MissesCold    uint64  `json:"misses_cold"`
	MissesPartial uint64  `json:"misses_partial"`
	MissesAccess  uint64  `json:"misses_access"`
	MissesStale   uint64  `json:"misses_stale"`
	// Register, Update and Deregister are on the program's path, Reclaimed when
	// regions became stale (in the kernel: on the path of the VM operation; else
	// beside the program), Closed when processes ended.
	Register   Calls `json:"register"`
	Update     Calls `json:"update"`
	Deregister Calls `json:"deregister"`
	Reclaimed  Calls `json:"reclaimed"`
	Closed     Calls `json:"closed"`
	// Left is what was registered at the end of the trace.
	Left Calls `json:"left"`

	Evictions         uint64    `json:"evictions"`
	PerUse            uint64    `json:"per_use"`
	InvalidatedIdle   uint64    `json:"invalidated_idle"`
	InvalidatedInUse  uint64    `json:"invalidated_in_use"`
	Waits             uint64    `json:"waits"`
	PeakRegions       int       `json:"peak_regions"`
	PeakBytes         uint64    `json:"peak_pinned_bytes"`
	MeanBytes         uint64    `json:"mean_pinned_bytes"`
	PeakStaleBytes    uint64    `json:"peak_stale_bytes"`
	MeanStaleBytes    uint64    `json:"mean_stale_bytes"`
	Times             []Time    `json:"times"`
	Adapter           *Adapter  `json:"simhca,omitempty"`
	PinnedSeconds     []float64 `json:"pinned_seconds"`
	PinnedBytesSeries []float64 `json:"pinned_bytes"`
}

// Time is what a policy costs under a model, in seconds.
type Time struct {
	Model      string  `json:"model"`
	Register   float64 `json:"register"`
	Update     float64 `json:"update"`
	Deregister float64 `json:"deregister"`
	Invalidate float64 `json:"invalidate"`
	Hit        float64 `json:"hit"`
	Wait       float64 `json:"wait"`
	// Total is the sum of these: what the program pays while it runs. Not in it
	// are Beside, what a goroutine deregisters meanwhile, and AtExit, what is
	// still registered when processes end, or the trace.
	Total  float64 `json:"total"`
	Beside float64 `json:"beside"`
	AtExit float64 `json:"at_exit"`
}

// Curve is the hit rate by size of the cache.
type Curve struct {
	// Definition says of which cache.
	Definition string `json:"definition"`
	// Requests and Bytes are all that there were; Compulsory those that no cache
	// hits: first uses, and first ones after a change.
	Requests   uint64 `json:"requests"`
	Bytes      uint64 `json:"bytes"`
	Compulsory uint64 `json:"compulsory"`
	// Sizes are sizes at which the hit rate changes, each at least 2 % larger than
	// the one before.
	Sizes []CurvePoint `json:"sizes"`
	all   []CurvePoint // every size at which the hit rate changes

	// Truncated says that sizes beyond what was kept track of show too few hits.
	Truncated bool `json:"truncated,omitempty"`
}

// CurvePoint is a size of the cache: a multiple of the page size at which the
// hit rate changes, and what it is from there on.
type CurvePoint struct {
	SizeBytes uint64  `json:"size_bytes"`
	Hits      uint64  `json:"hits"`
	HitRate   float64 `json:"hit_rate"`
	// MissedBytes are the lengths of requests that miss.
	MissedBytes uint64 `json:"missed_bytes"`
}

// Recommendation are limits for a cache.
type Recommendation struct {
	// MaxBytes is the size from which on a cache has 99 % of the hits that any
	// has; MaxRegions the most that policy drop held at once. Both rounded up to
	// a power of two. 0: a cache has nothing to hit.
	MaxBytes   uint64  `json:"max_bytes"`
	MaxRegions int     `json:"max_regions"`
	HitRate    float64 `json:"hit_rate"`
	// Best is the policy with the least total time, by model.
	Best map[string]string `json:"best_policy"`
}

// Answer says what dominates under a model.
type Answer struct {
	Model string `json:"model"`
	// PerUse and Cached are the shares of deregistering in what the program pays
	// without a cache and with one (drop), KernelSide with one whose kernel
	// deregisters.
	PerUse     float64 `json:"deregister_share_per_use"`
	Cached     float64 `json:"deregister_share_drop"`
	KernelSide float64 `json:"deregister_share_drop_kernel"`
	Text       string  `json:"text"`
}

const curveDefinition = "a cache of pages for each process, the most recently used up to its size; a request hits if all of its pages are there"

func newResult(o *Options, line *timeline, sims []*sim, c *curve) *Result {
	page := uint64(1) << line.shift
	res := &Result{
		Trace: TraceInfo{
			Command: line.meta.Command, Kernel: line.meta.Kernel, Mode: line.meta.Mode,
			UseRule: line.meta.UseRule, Tool: line.meta.Tool, Page: int(page),
		},
		Counts: line.counts,
		Settings: Settings{
			MaxRegions: o.MaxRegions, MaxBytes: o.MaxBytes, MergeBytes: o.MergeBytes,
			Requests: o.Requests.String(), MinUse: o.MinUse, Eviction: "least recently used idle region",
		},
		Models: o.Models,
		Curve:  newResultCurve(c, page),
	}
	if res.Trace.Command == nil {
		res.Trace.Command = []string{}
	}
	for _, s := range sims {
		res.Policies = append(res.Policies, s.result(s.policy, line, page))
		if s.policy == Drop {
			res.Policies = append(res.Policies, s.result(DropKernel, line, page))
		}
	}
	res.recommend()
	res.answer()
	return res
}

func (s *sim) result(p Policy, line *timeline, page uint64) PolicyResult {
	calls := func(t tally) Calls { return Calls{t.n, t.pages * page} }
	end := line.now
	s.tick(end)
	r := PolicyResult{
		Policy: p, Requests: s.requests, Hits: s.hits, HitRate: share(float64(s.hits), float64(s.requests)),
		MissesCold: s.cold, MissesPartial: s.partial, MissesAccess: s.access, MissesStale: s.stale,
		Register: calls(s.register), Update: calls(s.update), Deregister: calls(s.dereg), Reclaimed: calls(s.reclaim), Closed: calls(s.closed),
		Left:      Calls{uint64(s.regions), s.pinned * page},
		Evictions: s.evictions, PerUse: s.perUse, InvalidatedIdle: s.invalidIdle, InvalidatedInUse: s.invalidInUse, Waits: s.waits,
		PeakRegions: s.most, PeakBytes: s.peak * page, PeakStaleBytes: s.stalePeak * page,
		MeanBytes:      uint64(math.Round(share(s.area, line.counts.Seconds) * float64(page))),
		MeanStaleBytes: uint64(math.Round(share(s.staleArea, line.counts.Seconds) * float64(page))),
	}
	if p == PerUse {
		r.MissesCold = s.requests
	}
	r.PinnedSeconds, r.PinnedBytesSeries = s.series.points(end, float64(page))
	units := func(t tally) float64 { return float64(float64(t.pages) * s.pageUnits) }
	for i := range s.models {
		m := &s.models[i]
		t := Time{
			Model:      m.Name,
			Register:   m.Register.of(s.register.n, units(s.register)),
			Update:     m.Update.of(s.update.n, units(s.update)),
			Deregister: m.Deregister.of(s.dereg.n, units(s.dereg)),
			Wait:       s.wait[i],
			AtExit:     m.Deregister.of(s.closed.n+uint64(s.regions), float64(float64(s.closed.pages+s.pinned)*s.pageUnits)),
		}
		reclaim := m.Deregister.of(s.reclaim.n, units(s.reclaim))
		switch p {
		case PerUse:
		case DropKernel:
			t.Deregister += reclaim
		default:
			t.Beside = reclaim
		}
		if p != PerUse {
			t.Hit = float64(s.hits) * m.Hit * 1e-9
			t.Invalidate = float64(line.counts.Monitored) * m.Touch * 1e-9
		}
		t.Total = t.Register + t.Update + t.Deregister + t.Invalidate + t.Hit + t.Wait
		r.Times = append(r.Times, t)
	}
	return r
}

func newResultCurve(c *curve, page uint64) Curve {
	out := Curve{Definition: curveDefinition, Requests: c.requests, Bytes: c.pages * page, Compulsory: c.infinite.n, Sizes: []CurvePoint{}}
	sizes, hits := c.steps()
	for i, d := range sizes {
		out.all = append(out.all, CurvePoint{
			SizeBytes: uint64(d) * page, Hits: hits[i].n, HitRate: share(float64(hits[i].n), float64(c.requests)),
			MissedBytes: (c.pages - hits[i].pages) * page,
		})
	}
	last := 0.0
	for i, p := range out.all {
		if size := float64(p.SizeBytes); size >= 1.02*last || i == len(out.all)-1 {
			out.Sizes = append(out.Sizes, p)
			last = size
		}
	}
	out.Truncated = c.forgot
	return out
}

// At returns the hits of a cache of that many bytes.
func (c *Curve) At(size uint64) CurvePoint {
	i := sort.Search(len(c.all), func(i int) bool { return c.all[i].SizeBytes > size })
	p := CurvePoint{MissedBytes: c.Bytes}
	if i > 0 {
		p = c.all[i-1]
	}
	p.SizeBytes = size
	return p
}

func (r *Result) policy(p Policy) *PolicyResult {
	for i := range r.Policies {
		if r.Policies[i].Policy == p {
			return &r.Policies[i]
		}
	}
	return nil
}

// asked reports whether there was a request.
func (r *Result) asked() bool { return r.policy(PerUse).Requests > 0 }

const nothingAsked = "The trace has no requests: there is nothing to compare."

func (r *Result) recommend() {
	r.Recommended.Best = make(map[string]string)
	for i, m := range r.Models {
		// Of those that cost the same, the first here.
		best := r.policy(Drop)
		for _, p := range []Policy{Update, Lazy, DropKernel, PerUse} {
			if x := r.policy(p); x.Times[i].Total < best.Times[i].Total {
				best = x
			}
		}
		r.Recommended.Best[m.Name] = best.Policy.String()
	}
	n := len(r.Curve.all)
	if n == 0 {
		return
	}
	most := r.Curve.all[n-1].Hits
	for _, p := range r.Curve.all {
		if float64(p.Hits) >= 0.99*float64(most) {
			r.Recommended.MaxBytes = ceilPower(p.SizeBytes)
			break
		}
	}
	r.Recommended.HitRate = r.Curve.At(r.Recommended.MaxBytes).HitRate
	r.Recommended.MaxRegions = int(ceilPower(uint64(r.policy(Drop).PeakRegions)))
}

func ceilPower(v uint64) uint64 {
	p := uint64(1)
	for p < v && p < 1<<62 {
		p <<= 1
	}
	return p
}

func (r *Result) answer() {
	for i, m := range r.Models {
		per, drop, kernel := &r.policy(PerUse).Times[i], &r.policy(Drop).Times[i], &r.policy(DropKernel).Times[i]
		a := Answer{
			Model:  m.Name,
			PerUse: share(per.Deregister, per.Total), Cached: share(drop.Deregister, drop.Total), KernelSide: share(kernel.Deregister, kernel.Total),
		}
		percent := report.Percent.Format
		switch {
		case !r.asked():
			a.Text = "the trace has no requests"
		default:
			does := "doesn't dominate, even if the kernel does it"
			if kernel.Deregister > max(kernel.Register, kernel.Invalidate, kernel.Hit, kernel.Wait) {
				does = "dominates if the kernel does it"
				if drop.Deregister > max(drop.Register, drop.Invalidate, drop.Hit, drop.Wait) {
					does = "dominates"
				}
			}
			a.Text = fmt.Sprintf("deregistering %s: it is %s of what the program pays with a cache if the kernel does it, %s if it is done beside the program, %s without a cache; with a cache, %s costs most, and %s",
				does, percent(a.KernelSide), percent(a.Cached), percent(a.PerUse), drop.largest(), saving(per.Total, drop.Total))
		}
		r.Answers = append(r.Answers, a)
	}
}

func (t *Time) largest() string {
	best, most := "nothing", 0.0
	for _, c := range t.parts() {
		if c.v > most {
			best, most = c.name, c.v
		}
	}
	return best
}

type part struct {
	name string
	v    float64
}

func (t *Time) parts() []part {
	return []part{
		{"register", t.Register}, {"update", t.Update}, {"deregister", t.Deregister},
		{"invalidate", t.Invalidate}, {"hit", t.Hit}, {"wait", t.Wait},
	}
}

func saving(without, with float64) string {
	switch {
	case with <= 0 || without <= 0:
		return "it changes nothing"
	case with > without:
		return fmt.Sprintf("it is %.2g times slower than without", with/without)
	default:
		return fmt.Sprintf("it is %.3g times faster than without", without/with)
	}
}

// WriteJSON writes the result as JSON.
func (r *Result) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}

func bytesText(n uint64) string { return report.Bytes.Format(float64(n)) }

func secondsText(v float64) string {
	if v == 0 {
		return "-"
	}
	return report.Seconds.Format(v)
}

// printable keeps what a recorded program is called from changing the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return ' '
		}
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0xfffd {
			return '?'
		}
		return r
	}, s)
}

// facts are what is shown first.
func (r *Result) facts() []report.Fact {
	c := &r.Counts
	facts := []report.Fact{
		{Name: "program", Value: strings.Join(r.Trace.Command, " ")},
		{Name: "recorded", Value: fmt.Sprintf("%s of %s, kernel %s", report.Seconds.Format(c.Seconds), r.Trace.Mode, r.Trace.Kernel)},
		{Name: "events", Value: fmt.Sprintf("%d, %d of them VM operations that changed pages (%d in processes that have requests), in %d processes", c.Events, c.Changing, c.Monitored, c.Processes)},
		{Name: "requests", Value: fmt.Sprintf("%d uses of %s, %d registrations of %s", c.Uses, bytesText(c.UseBytes), c.Registrations, bytesText(c.RegisterBytes))},
		{Name: "limits", Value: fmt.Sprintf("%d regions, %s, merged up to %s", r.Settings.MaxRegions, bytesText(r.Settings.MaxBytes), bytesText(r.Settings.MergeBytes))},
	}
	if r.Trace.UseRule != "" {
		facts = append(facts, report.Fact{Name: "what a use is", Value: r.Trace.UseRule})
	}
	var skipped []string
	if c.Registered > 0 {
		skipped = append(skipped, fmt.Sprintf("%d uses through buffers that the program had registered itself: the registrations are the requests, so that a cache has nothing to save there", c.Registered))
	}
	if n := c.Skipped - c.Registered; n > 0 {
		skipped = append(skipped, fmt.Sprintf("%d uses or registrations that failed, or were empty, too small or not asked for", n))
	}
	if len(skipped) > 0 {
		facts = append(facts, report.Fact{Name: "left out", Value: strings.Join(skipped, "; ")})
	}
	if c.Lost > 0 || c.LostPlaces > 0 {
		facts = append(facts, report.Fact{Name: "missing", Value: fmt.Sprintf("%d records or more, in %d places", c.Lost, c.LostPlaces)})
	}
	if c.Damage != "" {
		facts = append(facts, report.Fact{Name: "damage", Value: c.Damage})
	}
	if c.Late > 0 {
		facts = append(facts, report.Fact{Name: "out of order", Value: fmt.Sprintf("%d, taken for later than they were", c.Late)})
	}
	return facts
}

// WriteText writes the result as tables.
func (r *Result) WriteText(w io.Writer) error {
	var b strings.Builder
	for _, f := range r.facts() {
		fmt.Fprintf(&b, "%s: %s\n", f.Name, printable(f.Value))
	}
	if !r.asked() {
		fmt.Fprintf(&b, "\n%s\n", nothingAsked)
		if _, err := io.WriteString(w, b.String()); err != nil {
			return fmt.Errorf("write result: %w", err)
		}
		return nil
	}
	tw := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "\nPOLICY\tHIT RATE\tREGISTERED\tUPDATED\tDEREGISTERED\tINVALIDATED\tEVICTED\tPINNED PEAK\tMEAN\tSTALE PEAK")
	for _, p := range r.Policies {
		fmt.Fprintf(tw, "%v\t%.2f %%\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n", p.Policy, 100*p.HitRate, p.Register.Count, p.Update.Count,
			p.Deregister.Count+p.Reclaimed.Count+p.Closed.Count, p.InvalidatedIdle+p.InvalidatedInUse, p.Evictions,
			bytesText(p.PeakBytes), bytesText(p.MeanBytes), bytesText(p.PeakStaleBytes))
	}
	for i, m := range r.Models {
		fmt.Fprintf(tw, "\n%s\tREGISTER\tUPDATE\tDEREGISTER\tINVALIDATE\tHIT\tWAIT\tTOTAL\tBESIDE\tAT EXIT\n", strings.ToUpper(printable(m.Name)))
		for _, p := range r.Policies {
			t := &p.Times[i]
			fmt.Fprintf(tw, "%v\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", p.Policy, secondsText(t.Register), secondsText(t.Update), secondsText(t.Deregister),
				secondsText(t.Invalidate), secondsText(t.Hit), secondsText(t.Wait), secondsText(t.Total), secondsText(t.Beside), secondsText(t.AtExit))
		}
	}
	if r.Policies[0].Adapter != nil {
		fmt.Fprintf(tw, "\nSIMULATED ADAPTER\tREGISTER\tDEREGISTER\tUPDATE\tHITS CHECKED\tSTALE\tORPHAN PAGES\tLEFT OUT\n")
		for _, p := range r.Policies {
			x := p.Adapter
			fmt.Fprintf(tw, "%v\t%s\t%s\t%s\t%d\t%d\t%d\t%d\n", p.Policy, secondsText(x.Register), secondsText(x.Deregister), secondsText(x.Update),
				x.Checked, x.StaleHits, x.OrphanPages, x.LeftOut)
		}
	}
	if n := len(r.Curve.Sizes); n > 0 {
		fmt.Fprintf(tw, "\nCACHE SIZE\tHIT RATE\tHITS\tMISSED\n")
		for _, size := range r.Curve.sampled(16) {
			p := r.Curve.At(size)
			fmt.Fprintf(tw, "%s\t%.2f %%\t%d\t%s\n", bytesText(size), 100*p.HitRate, p.Hits, bytesText(p.MissedBytes))
		}
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	b.WriteByte('\n')
	if r.Recommended.MaxBytes > 0 {
		fmt.Fprintf(&b, "recommended: MaxBytes %d (%s, hit rate %.2f %%), MaxRegions %d\n", r.Recommended.MaxBytes,
			bytesText(r.Recommended.MaxBytes), 100*r.Recommended.HitRate, r.Recommended.MaxRegions)
	}
	for i, a := range r.Answers {
		fmt.Fprintf(&b, "%s: %s; best policy %s\n", printable(a.Model), a.Text, r.Recommended.Best[r.Models[i].Name])
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}

// sampled returns up to n sizes, powers of two, that show the curve.
func (c *Curve) sampled(n int) []uint64 {
	if len(c.Sizes) == 0 {
		return nil
	}
	var sizes []uint64
	for s := ceilPower(c.Sizes[0].SizeBytes); ; s *= 2 {
		sizes = append(sizes, s)
		if s >= c.Sizes[len(c.Sizes)-1].SizeBytes {
			break
		}
	}
	for len(sizes) > n {
		k := 0
		for i := len(sizes) - 1; i >= 0; i -= 2 {
			sizes[len(sizes)-1-k] = sizes[i]
			k++
		}
		sizes = sizes[len(sizes)-k:]
	}
	return sizes
}
