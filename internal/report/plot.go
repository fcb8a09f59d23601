package report

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
)

// The size of a plot in its own units; the page scales it.
const (
	width  = 900
	left   = 76
	right  = 16
	top    = 10
	bottom = 42
	inner  = width - left - right
	colors = 8
)

// Axis is one of a plot.
type Axis struct {
	Label string
	Unit  Unit
	// Log makes it logarithmic; values of zero and less are then at its start.
	Log bool
}

// Series is a line. X ascends.
type Series struct {
	Name string
	X, Y []float64
}

// Lines is a plot of lines over a common axis.
type Lines struct {
	Title, Note string
	X, Y        Axis
	Series      []Series
	// Step draws each value until the next, instead of a slope.
	Step bool
	// Area fills what is below the lines.
	Area bool
	// Marks are vertical lines with a name, e.g. a recommended limit.
	Marks []Mark
}

// Mark is a place on the x axis.
type Mark struct {
	X    float64
	Name string
}

// Bars is a plot of bars: a group for each category, in it a bar for each
// series, or one bar with a part for each if Stacked.
type Bars struct {
	Title, Note string
	// Value is the axis of the values.
	Value      Axis
	Categories []string
	Series     []BarSeries
	Stacked    bool
	// Horizontal is for many or long categories.
	Horizontal bool
}

// BarSeries has a value for each category.
type BarSeries struct {
	Name   string
	Values []float64
}

// num formats a coordinate: short, and the same everywhere.
func num(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		v = 0
	}
	v = math.Round(v*10) / 10
	if v == 0 {
		v = 0 // not -0
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// scale maps values to [0,1].
type scale struct {
	lo, hi float64
	log    bool
	ticks  []float64
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// newScale fits one to values. Linear scales begin at zero if fromZero.
func newScale(a Axis, fromZero bool, values func(yield func(float64))) scale {
	lo, hi := math.Inf(1), math.Inf(-1)
	values(func(v float64) {
		if finite(v) && (!a.Log || v > 0) {
			lo, hi = min(lo, v), max(hi, v)
		}
	})
	if lo > hi {
		lo, hi = 0, 1
		if a.Log {
			lo = 0.1
		}
	}
	s := scale{lo: lo, hi: hi, log: a.Log}
	if a.Log {
		base := 10.0
		if a.Unit == Bytes {
			base = 2
		}
		from, to := math.Floor(logOf(lo, base)), math.Ceil(logOf(hi, base))
		if from == to {
			to++
		}
		s.lo, s.hi = math.Pow(base, from), math.Pow(base, to)
		step := max(1, math.Ceil((to-from)/9))
		for e := from; e <= to; e += step {
			s.ticks = append(s.ticks, math.Pow(base, e))
		}
		return s
	}
	if fromZero {
		s.lo, s.hi = min(0, lo), max(0, hi)
	}
	if s.lo == s.hi {
		s.hi = s.lo + 1
	}
	step := niceStep(s.hi-s.lo, a.Unit)
	from, to := math.Floor(s.lo/step), math.Ceil(s.hi/step)
	if a.Unit == Percent && s.hi <= 1 {
		to = min(to, math.Round(1/step))
	}
	for i := from; i <= to && i-from < 30; i++ {
		s.ticks = append(s.ticks, i*step)
	}
	s.lo, s.hi = from*step, to*step
	return s
}

func logOf(v, base float64) float64 {
	l := math.Log2(v)
	if base == 10 {
		l = math.Log10(v)
	}
	if r := math.Round(l); math.Abs(l-r) < 1e-9 {
		return r
	}
	return l
}

// niceStep returns a distance for some five ticks.
func niceStep(span float64, u Unit) float64 {
	raw := span / 5
	if u == Bytes || u == BytesPerSecond {
		return max(1, math.Exp2(math.Ceil(math.Log2(raw))))
	}
	p := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, m := range []float64{1, 2, 2.5, 5} {
		if m*p >= raw*0.999 {
			return m * p
		}
	}
	return 10 * p
}

func (s *scale) at(v float64) float64 {
	if s.log {
		if v <= s.lo || !finite(v) {
			return 0
		}
		return min(1, math.Log(v/s.lo)/math.Log(s.hi/s.lo))
	}
	if !finite(v) {
		return 0
	}
	return (v - s.lo) / (s.hi - s.lo)
}

func figure(b *bytes.Buffer, kind, title, note string, height float64, draw func()) {
	fmt.Fprintf(b, "<figure>\n<figcaption>%s</figcaption>\n", text(title))
	if note != "" {
		fmt.Fprintf(b, "<p>%s</p>\n", text(note))
	}
	fmt.Fprintf(b, `<svg class="plot" data-kind="%s" role="img" aria-label="%s" viewBox="0 0 %d %s" xmlns="http://www.w3.org/2000/svg">`+"\n",
		kind, text(title), width, num(height))
	draw()
	b.WriteString("</svg>\n</figure>\n")
}

func legend(b *bytes.Buffer, names []string) {
	if len(names) < 2 {
		return
	}
	b.WriteString("<ul class=\"k\">")
	for i, n := range names {
		fmt.Fprintf(b, `<li><span class="B%d"></span>%s</li>`, i%colors, text(n))
	}
	b.WriteString("</ul>\n")
}

// yTicks draws the grid and labels of a vertical axis.
func yTicks(b *bytes.Buffer, s *scale, a Axis, height float64) {
	h := height - top - bottom
	for _, t := range s.ticks {
		y := top + h*(1-s.at(t))
		fmt.Fprintf(b, `<path class="g" d="M%d %sH%d"/><text class="d e" x="%d" y="%s">%s</text>`+"\n",
			left, num(y), width-right, left-6, num(y+4), text(a.Unit.Format(t)))
	}
	if a.Label != "" {
		fmt.Fprintf(b, `<text class="d m" transform="translate(14 %s) rotate(-90)">%s</text>`+"\n", num(top+h/2), text(a.Label))
	}
}

func xTicks(b *bytes.Buffer, s *scale, a Axis, height float64) {
	y := height - bottom
	for _, t := range s.ticks {
		x := left + inner*s.at(t)
		fmt.Fprintf(b, `<path class="g" d="M%s %dV%s"/><text class="d m" x="%s" y="%s">%s</text>`+"\n",
			num(x), top, num(y), num(x), num(y+16), text(a.Unit.Format(t)))
	}
	fmt.Fprintf(b, `<path class="a" d="M%d %sH%d"/>`+"\n", left, num(y), width-right)
	if a.Label != "" {
		fmt.Fprintf(b, `<text class="d m" x="%s" y="%s">%s</text>`+"\n", num(left+inner/2.0), num(y+34), text(a.Label))
	}
}

func (l *Lines) html(b *bytes.Buffer) {
	const height = 300
	figure(b, "lines", l.Title, l.Note, height, func() {
		xs := newScale(l.X, false, func(yield func(float64)) {
			for _, s := range l.Series {
				for _, v := range s.X {
					yield(v)
				}
			}
		})
		ys := newScale(l.Y, true, func(yield func(float64)) {
			for _, s := range l.Series {
				for _, v := range s.Y {
					yield(v)
				}
			}
		})
		yTicks(b, &ys, l.Y, height)
		xTicks(b, &xs, l.X, height)
		h := float64(height - top - bottom)
		for i, s := range l.Series {
			n := min(len(s.X), len(s.Y))
			if n == 0 {
				continue
			}
			var d bytes.Buffer
			px := func(j int) float64 { return left + inner*xs.at(s.X[j]) }
			py := func(j int) float64 { return top + h*(1-ys.at(s.Y[j])) }
			for k, j := range thin(n, px, py) {
				switch {
				case k == 0:
					fmt.Fprintf(&d, "M%s %s", num(px(j)), num(py(j)))
				case l.Step:
					fmt.Fprintf(&d, "H%sV%s", num(px(j)), num(py(j)))
				default:
					fmt.Fprintf(&d, "L%s %s", num(px(j)), num(py(j)))
				}
			}
			if l.Area {
				fmt.Fprintf(b, `<path class="f F%d" fill-opacity=".18" d="%sV%sH%sZ"/>`+"\n", i%colors, d.String(), num(top+h), num(px(0)))
			}
			fmt.Fprintf(b, `<path class="l S%d" d="%s"><title>%s</title></path>`+"\n", i%colors, d.String(), text(s.Name))
			if n == 1 {
				fmt.Fprintf(b, `<circle class="F%d" r="3" cx="%s" cy="%s"/>`+"\n", i%colors, num(px(0)), num(py(0)))
			}
		}
		for _, m := range l.Marks {
			x := left + inner*min(1, max(0, xs.at(m.X)))
			anchor, at := "", x+4
			if x > width/2 {
				anchor, at = ` class="e"`, x-4
			}
			fmt.Fprintf(b, `<path class="a" stroke-dasharray="4 3" d="M%s %dV%s"/><text%s x="%s" y="%d">%s</text>`+"\n",
				num(x), top, num(top+h), anchor, num(at), top+12, text(m.Name))
		}
	})
	names := make([]string, len(l.Series))
	for i, s := range l.Series {
		names[i] = s.Name
	}
	legend(b, names)
}

// thin returns the indices of points to draw: for each column of pixels the
// first, the lowest, the highest and the last.
func thin(n int, px, py func(int) float64) []int {
	var keep []int
	for i := 0; i < n; {
		first, low, high, last := i, i, i, i
		for col := math.Floor(px(i)); i < n && math.Floor(px(i)) == col; i++ {
			last = i
			if py(i) < py(low) {
				low = i
			}
			if py(i) > py(high) {
				high = i
			}
		}
		for _, j := range []int{first, min(low, high), max(low, high), last} {
			if len(keep) == 0 || keep[len(keep)-1] < j {
				keep = append(keep, j)
			}
		}
	}
	return keep
}

// value returns a series' value for a category, 0 if there is none.
func (s *BarSeries) value(i int) float64 {
	if i < len(s.Values) && finite(s.Values[i]) {
		return s.Values[i]
	}
	return 0
}

func (p *Bars) scale() scale {
	return newScale(p.Value, true, func(yield func(float64)) {
		for i := range p.Categories {
			sum := 0.0
			for k := range p.Series {
				v := p.Series[k].value(i)
				if sum += v; !p.Stacked {
					yield(v)
				}
			}
			if p.Stacked {
				yield(sum)
			}
		}
	})
}

func (p *Bars) names() []string {
	names := make([]string, len(p.Series))
	for i, s := range p.Series {
		names[i] = s.Name
	}
	return names
}

func (p *Bars) html(b *bytes.Buffer) {
	if p.Horizontal {
		p.horizontal(b)
	} else {
		p.vertical(b)
	}
	legend(b, p.names())
}

// bars calls draw with each bar: its category, series, and where it lies:
// across from a to b (0 to 1 of the category's band), along from v to w.
func (p *Bars) bars(s *scale, draw func(i, k int, a, b, v, w float64)) {
	for i := range p.Categories {
		sum := 0.0
		for k := range p.Series {
			v := p.Series[k].value(i)
			if v == 0 {
				continue
			}
			if p.Stacked {
				draw(i, k, 0.12, 0.88, s.at(sum), s.at(sum+v))
				sum += v
				continue
			}
			n := float64(len(p.Series))
			draw(i, k, 0.1+0.8*float64(k)/n, 0.1+0.8*float64(k+1)/n, s.at(0), s.at(v))
		}
	}
}

func (p *Bars) tip(i, k int) string {
	tip := p.Categories[i] + ": "
	if name := p.Series[k].Name; name != "" {
		tip += name + " "
	}
	return text(tip + p.Value.Unit.Format(p.Series[k].value(i)))
}

func (p *Bars) vertical(b *bytes.Buffer) {
	const height = 280
	figure(b, "bars", p.Title, p.Note, height, func() {
		s := p.scale()
		yTicks(b, &s, p.Value, height)
		h := float64(height - top - bottom)
		band := inner / float64(max(1, len(p.Categories)))
		p.bars(&s, func(i, k int, from, to, v, w float64) {
			fmt.Fprintf(b, `<rect class="b F%d" x="%s" y="%s" width="%s" height="%s"><title>%s</title></rect>`+"\n",
				k%colors, num(left+band*(float64(i)+from)), num(top+h*(1-w)), num(band*(to-from)), num(h*(w-v)), p.tip(i, k))
		})
		every := max(1, int(math.Ceil(62/band)))
		for i, c := range p.Categories {
			if i%every == 0 {
				fmt.Fprintf(b, `<text class="d m" x="%s" y="%s">%s</text>`+"\n", num(left+band*(float64(i)+0.5)), num(top+h+16), text(cut(c, int(band*float64(every)/6))))
			}
		}
		fmt.Fprintf(b, `<path class="a" d="M%d %sH%d"/>`+"\n", left, num(top+h), width-right)
	})
}

func (p *Bars) horizontal(b *bytes.Buffer) {
	const names = 210
	thick := 24.0
	if !p.Stacked {
		thick = max(20, 9*float64(len(p.Series)))
	}
	h := thick * float64(len(p.Categories))
	height := h + top + bottom
	if p.Value.Label == "" {
		height -= 16
	}
	figure(b, "bars", p.Title, p.Note, height, func() {
		s := p.scale()
		long := float64(width - names - right)
		for _, t := range s.ticks {
			x := names + long*s.at(t)
			fmt.Fprintf(b, `<path class="g" d="M%s %dV%s"/><text class="d m" x="%s" y="%s">%s</text>`+"\n",
				num(x), top, num(top+h), num(x), num(top+h+16), text(p.Value.Unit.Format(t)))
		}
		p.bars(&s, func(i, k int, from, to, v, w float64) {
			fmt.Fprintf(b, `<rect class="b F%d" x="%s" y="%s" width="%s" height="%s"><title>%s</title></rect>`+"\n",
				k%colors, num(names+long*v), num(top+thick*(float64(i)+from)), num(long*(w-v)), num(thick*(to-from)), p.tip(i, k))
		})
		for i, c := range p.Categories {
			fmt.Fprintf(b, `<text class="e" x="%d" y="%s">%s</text>`+"\n", names-8, num(top+thick*(float64(i)+0.5)+4), text(cut(c, 32)))
		}
		if p.Value.Label != "" {
			fmt.Fprintf(b, `<text class="d m" x="%s" y="%s">%s</text>`+"\n", num(names+long/2), num(top+h+34), text(p.Value.Label))
		}
	})
}

// cut shortens s to n characters.
func cut(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:max(1, n-1)]) + "…"
}
