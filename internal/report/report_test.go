package report_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/pindown/pindown/internal/report"
	"github.com/pindown/pindown/internal/report/reporttest"
)

func ramp(n int, f func(float64) float64) (x, y []float64) {
	for i := range n {
		x, y = append(x, float64(i)), append(y, f(float64(i)))
	}
	return x, y
}

const nasty = "<script>alert(1)</script> & \"quotes\" \x00\x01\xff \u202e ]]> 日本"

// page has one of everything, with names that nobody chose.
func page() *report.Page {
	x, y := ramp(5000, func(v float64) float64 { return 1000 + 500*math.Sin(v/200) })
	_, z := ramp(5000, func(v float64) float64 { return v / 3 })
	bx, by := []float64{4096, 8192, 1 << 20, 1 << 30}, []float64{0.1, 0.5, 0.9, 0.95}
	root := report.Node{Name: "all"}
	for i := range 40 {
		root.Add(float64(i+1), "main", fmt.Sprintf("worker%d", i%5), fmt.Sprintf("leaf%d", i))
	}
	root.Add(50, "main", nasty)
	var rows []report.Row
	for i := range 150 {
		at := time.Duration(i) * time.Millisecond
		rows = append(rows, report.Row{Name: fmt.Sprint("registration ", i), Spans: []report.Span{
			{From: at, To: at + 30*time.Millisecond, Title: nasty}, {From: at + 40*time.Millisecond, To: at + 40*time.Millisecond, Color: 1},
		}})
	}
	return &report.Page{
		Title: "A page about " + nasty,
		Facts: []report.Fact{{Name: "command", Value: nasty}, {Name: "kernel", Value: "6.18"}},
		Sections: []report.Section{
			{Title: "Lines", Elements: []report.Element{
				report.Text("A paragraph with " + nasty),
				&report.Lines{
					Title: "Two lines", X: report.Axis{Label: "time", Unit: report.Seconds}, Y: report.Axis{Label: "rate", Unit: report.PerSecond},
					Series: []report.Series{{Name: nasty, X: x, Y: y}, {Name: "b", X: x, Y: z}}, Area: true,
				},
				&report.Lines{
					Title: "Logarithmic", Note: nasty, X: report.Axis{Unit: report.Bytes, Log: true}, Y: report.Axis{Unit: report.Percent},
					Series: []report.Series{{Name: "hit rate", X: bx, Y: by}}, Step: true, Marks: []report.Mark{{X: 1 << 20, Name: nasty}, {X: 1 << 40, Name: "far"}},
				},
				&report.Lines{Title: "One point", Series: []report.Series{{Name: "p", X: []float64{3}, Y: []float64{4}}}},
			}},
			{Title: "Bars " + nasty, Elements: []report.Element{
				&report.Bars{Title: "Vertical", Value: report.Axis{Unit: report.Number}, Categories: []string{"a", nasty, "c"}, Series: []report.BarSeries{{Values: []float64{1, 20000, 3}}}},
				&report.Bars{
					Title: "Stacked", Value: report.Axis{Unit: report.Seconds, Label: "time"}, Horizontal: true, Stacked: true, Categories: []string{"no cache", "drop", nasty},
					Series: []report.BarSeries{{Name: "register", Values: []float64{1e-3, 2e-3, 3e-3}}, {Name: "deregister", Values: []float64{1e-3, math.NaN()}}},
				},
				&report.Bars{Title: "Grouped", Horizontal: true, Categories: []string{"x", "y"}, Series: []report.BarSeries{{Name: "1", Values: []float64{1, 2}}, {Name: "2", Values: []float64{3, 4}}}},
			}},
			{Title: "Rest", Elements: []report.Element{
				&report.Flame{Title: "Flame", Unit: report.Seconds, Root: root},
				&report.Spans{Title: "Spans", Rows: rows, Legend: []string{"valid", "stale"}},
				&report.Table{Caption: nasty, Head: []string{"what", "n"}, Rows: [][]string{{nasty, "12 µs"}, {"b", "3"}}},
			}},
		},
		Foot: "made by a test",
	}
}

func write(t *testing.T, p *report.Page) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := p.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestPage(t *testing.T) {
	b := write(t, page())
	reporttest.WellFormed(t, b)
	if strings.Contains(string(b), "alert(1)</script>") {
		t.Error("names aren't escaped")
	}
	if !bytes.Equal(b, write(t, page())) {
		t.Error("not the same twice")
	}
	if n := len(b); n > 150<<10 {
		t.Errorf("%d bytes: points aren't thinned", n)
	}
	broken := errors.New("broken")
	if err := page().WriteHTML(iotest.TruncateWriter(errWriter{broken}, 0)); err != nil {
		t.Error(err)
	}
	if err := page().WriteHTML(errWriter{broken}); !errors.Is(err, broken) {
		t.Error(err)
	}
}

type errWriter struct{ err error }

func (w errWriter) Write([]byte) (int, error) { return 0, w.err }

// TestNothing: plots of nothing, and of what can't be drawn.
func TestNothing(t *testing.T) {
	bad := []float64{math.NaN(), math.Inf(1), math.Inf(-1), 0, -1}
	p := &report.Page{Sections: []report.Section{{Elements: []report.Element{
		&report.Lines{}, &report.Bars{}, &report.Bars{Horizontal: true}, &report.Flame{}, &report.Spans{}, &report.Table{}, report.Text(""),
		&report.Lines{X: report.Axis{Log: true}, Y: report.Axis{Log: true}, Series: []report.Series{{X: bad, Y: bad}}},
		&report.Lines{Series: []report.Series{{X: bad, Y: bad}}, Area: true, Marks: []report.Mark{{X: math.NaN()}}},
		&report.Bars{Categories: []string{"a", "b"}, Series: []report.BarSeries{{Values: bad}}},
		&report.Bars{Categories: []string{"a"}, Value: report.Axis{Log: true}, Series: []report.BarSeries{{}}},
	}}}}
	reporttest.WellFormed(t, write(t, p))
}

func TestBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: a browser takes seconds")
	}
	path := filepath.Join(t.TempDir(), "report.html")
	if err := os.WriteFile(path, write(t, page()), 0o600); err != nil {
		t.Fatal(err)
	}
	plots := reporttest.Render(t, path)
	if len(plots) != 8 {
		t.Errorf("%d plots: %+v", len(plots), plots)
	}
	reporttest.Drawn(t, plots)
}

func TestUnits(t *testing.T) {
	for _, c := range []struct {
		u    report.Unit
		v    float64
		want string
	}{
		{report.Number, 0, "0"}, {report.Number, 12, "12"}, {report.Number, 1234, "1234"}, {report.Number, 12345, "12.3k"},
		{report.Number, 1.5e6, "1.5M"}, {report.Number, 2e9, "2G"}, {report.Number, 0.25, "0.25"},
		{report.Seconds, 0, "0 s"}, {report.Seconds, 1.5, "1.5 s"}, {report.Seconds, 0.0012, "1.2 ms"}, {report.Seconds, 16e-6, "16 µs"},
		{report.Seconds, 13e-9, "13 ns"}, {report.Seconds, 999.9e-6, "1 ms"},
		{report.Bytes, 512, "512 B"}, {report.Bytes, 4096, "4 KiB"}, {report.Bytes, 1.5 * (1 << 20), "1.5 MiB"}, {report.Bytes, 1 << 40, "1 TiB"},
		{report.Percent, 0.5, "50 %"}, {report.Percent, 1, "100 %"}, {report.PerSecond, 1e6, "1M/s"}, {report.BytesPerSecond, 2048, "2 KiB/s"},
	} {
		if got := c.u.Format(c.v); got != c.want {
			t.Errorf("%v of unit %d is %q, want %q", c.v, c.u, got, c.want)
		}
	}
}
