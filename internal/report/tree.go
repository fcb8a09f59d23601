package report

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Flame is a plot of where something was spent, by call stack: the callers
// above, what they call below, each as wide as its share.
type Flame struct {
	Title, Note string
	Unit        Unit
	Root        Node
}

// Node is a function in a [Flame], with what is spent in it and below.
type Node struct {
	Name string
	// Self is spent in the function itself.
	Self     float64
	Children []*Node
}

// Add adds v to the node at the path below n, outermost name first.
func (n *Node) Add(v float64, path ...string) {
	for _, name := range path {
		i := slices.IndexFunc(n.Children, func(c *Node) bool { return c.Name == name })
		if i < 0 {
			i = len(n.Children)
			n.Children = append(n.Children, &Node{Name: name})
		}
		n = n.Children[i]
	}
	n.Self += v
}

// total returns what is spent in n and below.
func (n *Node) total() float64 {
	sum := n.Self
	for _, c := range n.Children {
		sum += c.total()
	}
	return sum
}

const (
	maxDepth  = 48
	frameHigh = 19
)

func (f *Flame) html(b *bytes.Buffer) {
	total := f.Root.total()
	depth := 0
	type box struct {
		n        *Node
		x, width float64
		level    int
		sum      float64
	}
	var boxes []box
	var place func(n *Node, x float64, level int)
	place = func(n *Node, x float64, level int) {
		sum := n.total()
		w := width * sum / max(total, 1e-300)
		if w < 0.6 || level >= maxDepth {
			return
		}
		depth = max(depth, level+1)
		boxes = append(boxes, box{n, x, w, level, sum})
		kids := slices.Clone(n.Children)
		slices.SortStableFunc(kids, func(a, b *Node) int { return cmp.Compare(b.total(), a.total()) })
		for _, c := range kids {
			place(c, x, level+1)
			x += width * c.total() / max(total, 1e-300)
		}
	}
	if total > 0 {
		place(&f.Root, 0, 0)
	}
	figure(b, "flame", f.Title, f.Note, float64(max(1, depth)*frameHigh), func() {
		for _, x := range boxes {
			fmt.Fprintf(b, `<g><title>%s: %s, %s</title><rect class="b F%d" x="%s" y="%d" width="%s" height="%d"/>`,
				text(x.n.Name), text(f.Unit.Format(x.sum)), text(Percent.Format(x.sum/total)),
				shade(x.n.Name), num(x.x), x.level*frameHigh, num(x.width), frameHigh-1)
			if n := int(x.width/6.6) - 1; n >= 3 {
				fmt.Fprintf(b, `<text class="i" x="%s" y="%d">%s</text>`, num(x.x+4), x.level*frameHigh+13, text(cut(x.n.Name, n)))
			}
			b.WriteString("</g>\n")
		}
	})
}

// shade chooses a colour by name, so that a function has the same everywhere.
// The light ones are left out: the names are white.
func shade(name string) int {
	h := uint32(2166136261)
	for i := range len(name) {
		h = (h ^ uint32(name[i])) * 16777619
	}
	return []int{0, 2, 3, 5, 7}[h%5]
}

// Spans is a plot of what lived when: a row for each thing.
type Spans struct {
	Title, Note string
	// Row names are on the left.
	Rows []Row
	// Legend names the colours, by Span.Color.
	Legend []string
}

// Row is a thing with its spans.
type Row struct {
	Name  string
	Spans []Span
}

// Span is a time from From to To. Color is an index into the legend.
type Span struct {
	From, To time.Duration
	Color    int
	Title    string
}

// MaxRows is how many rows a [Spans] draws; a note tells of the others.
const MaxRows = 120

func (p *Spans) html(b *bytes.Buffer) {
	const names, high = 210, 16
	rows, note := p.Rows, p.Note
	if len(rows) > MaxRows {
		rows = rows[:MaxRows]
		if note != "" {
			note += " "
		}
		note += fmt.Sprintf("The first %d of %d rows.", MaxRows, len(p.Rows))
	}
	h := float64(high * len(rows))
	figure(b, "spans", p.Title, note, h+top+bottom, func() {
		axis := Axis{Unit: Seconds}
		s := newScale(axis, true, func(yield func(float64)) {
			for _, r := range rows {
				for _, x := range r.Spans {
					yield(x.From.Seconds())
					yield(x.To.Seconds())
				}
			}
		})
		long := float64(width - names - right)
		for _, t := range s.ticks {
			x := names + long*s.at(t)
			fmt.Fprintf(b, `<path class="g" d="M%s %dV%s"/><text class="d m" x="%s" y="%s">%s</text>`+"\n",
				num(x), top, num(top+h), num(x), num(top+h+16), text(axis.Unit.Format(t)))
		}
		for i, r := range rows {
			y := top + high*i
			fmt.Fprintf(b, `<text class="e" x="%d" y="%d">%s</text>`+"\n", names-8, y+12, text(cut(r.Name, 32)))
			for _, x := range r.Spans {
				from, to := s.at(x.From.Seconds()), s.at(x.To.Seconds())
				fmt.Fprintf(b, `<rect class="F%d" x="%s" y="%d" width="%s" height="%d"><title>%s</title></rect>`+"\n",
					max(0, x.Color)%colors, num(names+long*from), y+3, num(max(1, long*(to-from))), high-6, text(x.Title))
			}
		}
	})
	legend(b, p.Legend)
}
