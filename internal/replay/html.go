package replay

import (
	"fmt"
	"io"

	"github.com/pindown/pindown/internal/report"
)

// WriteHTML writes the result as a page with plots; see package report.
func (r *Result) WriteHTML(w io.Writer) error {
	page := &report.Page{Title: "Where would the time go?", Facts: r.facts(), Foot: "pindown replay"}
	if !r.asked() {
		page.Sections = []report.Section{{Title: "No requests", Elements: []report.Element{report.Text(nothingAsked)}}}
		return page.WriteHTML(w)
	}
	page.Sections = append(page.Sections, r.answersSection())
	for i := range r.Models {
		page.Sections = append(page.Sections, r.modelSection(i))
	}
	page.Sections = append(page.Sections, r.curveSection(), r.pinnedSection(), r.countsSection(), r.modelsSection())
	return page.WriteHTML(w)
}

func (r *Result) answersSection() report.Section {
	s := report.Section{Title: "Does deregistering dominate?"}
	t := &report.Table{Head: []string{"costs", "without a cache", "cache, deregistering beside the program", "cache, deregistering in the kernel", "best policy", "answer"}}
	for _, a := range r.Answers {
		t.Rows = append(t.Rows, []string{
			a.Model, report.Percent.Format(a.PerUse), report.Percent.Format(a.Cached), report.Percent.Format(a.KernelSide),
			r.Recommended.Best[a.Model], a.Text,
		})
	}
	t.Caption = "The share of deregistering in what the program pays."
	s.Elements = append(s.Elements, t)
	if r.Recommended.MaxBytes > 0 {
		s.Elements = append(s.Elements, report.Text(fmt.Sprintf("Recommended limits: MaxBytes %s, MaxRegions %d; hit rate %s.",
			bytesText(r.Recommended.MaxBytes), r.Recommended.MaxRegions, report.Percent.Format(r.Recommended.HitRate))))
	}
	return s
}

func (r *Result) modelSection(i int) report.Section {
	m := &r.Models[i]
	bars := &report.Bars{
		Title:   "Time that the program pays, by policy: " + m.Name,
		Note:    "Not in the bars: what a goroutine deregisters beside the program, and what is still registered when processes end.",
		Value:   report.Axis{Unit: report.Seconds},
		Stacked: true, Horizontal: true,
	}
	t := &report.Table{Head: []string{"policy", "register", "update", "deregister", "invalidate", "hit", "wait", "total", "beside", "at exit"}}
	for _, part := range r.Policies[0].Times[i].parts() {
		bars.Series = append(bars.Series, report.BarSeries{Name: part.name})
	}
	for _, p := range r.Policies {
		bars.Categories = append(bars.Categories, p.Policy.String())
		row := []string{p.Policy.String()}
		for k, part := range p.Times[i].parts() {
			bars.Series[k].Values = append(bars.Series[k].Values, part.v)
			row = append(row, secondsText(part.v))
		}
		t.Rows = append(t.Rows, append(row, secondsText(p.Times[i].Total), secondsText(p.Times[i].Beside), secondsText(p.Times[i].AtExit)))
	}
	return report.Section{Title: "Under the costs of " + m.Name, Elements: []report.Element{bars, t}}
}

func (r *Result) curveSection() report.Section {
	s := report.Section{Title: "How large should the cache be?"}
	rate := &report.Lines{
		Title: "Hit rate by size of the cache", Note: "Of " + r.Curve.Definition + ".",
		X: report.Axis{Label: "size", Unit: report.Bytes, Log: true}, Y: report.Axis{Label: "hit rate", Unit: report.Percent}, Step: true,
	}
	cost := &report.Lines{
		Title: "Time to register and deregister, by size of the cache",
		Note:  "Each miss registers the range asked for, and it is deregistered some time.",
		X:     rate.X, Y: report.Axis{Label: "time", Unit: report.Seconds}, Step: true,
	}
	if r.Recommended.MaxBytes > 0 {
		rate.Marks = []report.Mark{{X: float64(r.Recommended.MaxBytes), Name: "recommended"}}
	}
	points := append([]CurvePoint{{SizeBytes: uint64(r.Trace.Page), MissedBytes: r.Curve.Bytes}}, r.Curve.Sizes...)
	if n := len(r.Curve.Sizes); n > 0 && r.Curve.Sizes[0].SizeBytes == uint64(r.Trace.Page) {
		points = points[1:]
	}
	line := report.Series{Name: "hit rate"}
	for _, p := range points {
		line.X, line.Y = append(line.X, float64(p.SizeBytes)), append(line.Y, p.HitRate)
	}
	rate.Series = []report.Series{line}
	for _, m := range r.Models {
		l := report.Series{Name: m.Name, X: line.X}
		for _, p := range points {
			misses, pages := r.Curve.Requests-p.Hits, float64(p.MissedBytes)/modelPage
			l.Y = append(l.Y, m.Register.of(misses, pages)+m.Deregister.of(misses, pages))
		}
		cost.Series = append(cost.Series, l)
	}
	s.Elements = append(s.Elements, rate, cost)
	if r.Curve.Truncated {
		s.Elements = append(s.Elements, report.Text("The program used more separate ranges than were kept track of: large sizes show too few hits."))
	}
	return s
}

func (r *Result) pinnedSection() report.Section {
	l := &report.Lines{
		Title: "Pinned memory over time", Note: "The peak of each span of time.",
		X: report.Axis{Label: "time", Unit: report.Seconds}, Y: report.Axis{Label: "pinned", Unit: report.Bytes}, Step: true,
	}
	for _, p := range r.Policies {
		if p.Policy != DropKernel { // as drop
			l.Series = append(l.Series, report.Series{Name: p.Policy.String(), X: p.PinnedSeconds, Y: p.PinnedBytesSeries})
		}
	}
	t := &report.Table{Head: []string{"policy", "peak", "mean", "stale, peak", "stale, mean", "regions, peak"}}
	for _, p := range r.Policies {
		t.Rows = append(t.Rows, []string{
			p.Policy.String(), bytesText(p.PeakBytes), bytesText(p.MeanBytes), bytesText(p.PeakStaleBytes), bytesText(p.MeanStaleBytes), fmt.Sprint(p.PeakRegions),
		})
	}
	return report.Section{Title: "What is pinned?", Elements: []report.Element{l, t}}
}

func (r *Result) countsSection() report.Section {
	t := &report.Table{Head: []string{
		"policy", "requests", "hits", "cold", "partly", "access", "stale", "registered", "updated", "deregistered", "reclaimed", "closed", "evicted", "per use",
	}}
	for _, p := range r.Policies {
		row := []string{p.Policy.String()}
		for _, n := range []uint64{
			p.Requests, p.Hits, p.MissesCold, p.MissesPartial, p.MissesAccess, p.MissesStale, p.Register.Count, p.Update.Count,
			p.Deregister.Count, p.Reclaimed.Count, p.Closed.Count, p.Evictions, p.PerUse,
		} {
			row = append(row, fmt.Sprint(n))
		}
		t.Rows = append(t.Rows, row)
	}
	return report.Section{Title: "Counts", Elements: []report.Element{t}}
}

func (r *Result) modelsSection() report.Section {
	s := report.Section{Title: "Costs"}
	t := &report.Table{Head: []string{"costs", "register", "deregister", "update", "hit", "VM operation", "source", "assumed"}}
	cost := func(c Cost) string {
		return fmt.Sprintf("%s + %s a page", report.Seconds.Format(c.Call*1e-9), report.Seconds.Format(c.Page*1e-9))
	}
	for _, m := range r.Models {
		t.Rows = append(t.Rows, []string{
			m.Name, cost(m.Register), cost(m.Deregister), cost(m.Update), report.Seconds.Format(m.Hit * 1e-9), report.Seconds.Format(m.Touch * 1e-9), m.Source, m.Assumed,
		})
	}
	s.Elements = append(s.Elements, t)
	return s
}
