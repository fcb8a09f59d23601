package report

import (
	"bytes"
	"fmt"
	"html"
	"io"
	"strings"
)

// Page is an HTML page.
type Page struct {
	Title string
	// Facts are shown beneath the title: what was looked at, where, when.
	Facts    []Fact
	Sections []Section
	// Foot is shown at the end.
	Foot string
}

// Fact is a name and its value.
type Fact struct{ Name, Value string }

// Section is a part of a page with a heading.
type Section struct {
	Title    string
	Elements []Element
}

// Element is a [Text], a [*Table], [*Lines], [*Bars], [*Flame] or [*Spans].
type Element interface {
	html(b *bytes.Buffer)
}

// Text is a paragraph.
type Text string

// Table is a table. Cells that parse as numbers, with or without a unit, are
// aligned to the right.
type Table struct {
	Caption string
	Head    []string
	Rows    [][]string
}

// WriteHTML writes the page: HTML that is well-formed XML too.
func (p *Page) WriteHTML(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n")
	b.WriteString(`<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:"/>` + "\n")
	b.WriteString(`<meta name="viewport" content="width=device-width, initial-scale=1"/>` + "\n<link rel=\"icon\" href=\"data:,\"/>\n")
	fmt.Fprintf(&b, "<title>%s</title>\n<style>%s</style>\n</head>\n<body>\n<main>\n", text(p.Title), style)
	fmt.Fprintf(&b, "<h1>%s</h1>\n", text(p.Title))
	if len(p.Facts) > 0 {
		b.WriteString("<dl>\n")
		for _, f := range p.Facts {
			fmt.Fprintf(&b, "<div><dt>%s</dt><dd>%s</dd></div>\n", text(f.Name), text(f.Value))
		}
		b.WriteString("</dl>\n")
	}
	for _, s := range p.Sections {
		fmt.Fprintf(&b, "<section>\n<h2>%s</h2>\n", text(s.Title))
		for _, e := range s.Elements {
			e.html(&b)
		}
		b.WriteString("</section>\n")
	}
	if p.Foot != "" {
		fmt.Fprintf(&b, "<footer>%s</footer>\n", text(p.Foot))
	}
	b.WriteString("</main>\n</body>\n</html>\n")
	if _, err := b.WriteTo(w); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

func (t Text) html(b *bytes.Buffer) { fmt.Fprintf(b, "<p>%s</p>\n", text(string(t))) }

func (t *Table) html(b *bytes.Buffer) {
	b.WriteString("<div class=\"wide\"><table>\n")
	if t.Caption != "" {
		fmt.Fprintf(b, "<caption>%s</caption>\n", text(t.Caption))
	}
	b.WriteString("<thead><tr>")
	for _, h := range t.Head {
		fmt.Fprintf(b, "<th scope=\"col\">%s</th>", text(h))
	}
	b.WriteString("</tr></thead>\n<tbody>\n")
	for _, row := range t.Rows {
		b.WriteString("<tr>")
		for _, c := range row {
			class := ""
			if numeric(c) {
				class = ` class="n"`
			}
			fmt.Fprintf(b, "<td%s>%s</td>", class, text(c))
		}
		b.WriteString("</tr>\n")
	}
	b.WriteString("</tbody></table></div>\n")
}

func numeric(s string) bool {
	s = strings.TrimLeft(s, "+-−<≥~ ")
	return s != "" && s[0] >= '0' && s[0] <= '9'
}

// text escapes s for HTML and XML.
func text(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' || r == 0x7f || r == 0xFFFE || r == 0xFFFF {
			return '\uFFFD'
		}
		return r
	}, s)
	return html.EscapeString(s)
}

// style has two palettes; the colours of series are Okabe and Ito's, which
// people with colour-blindness can tell apart.
const style = `
:root{--fg:#1b1f24;--bg:#fff;--dim:#59636e;--grid:#e3e6ea;--box:#f6f8fa;
--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#cc79a7;--c4:#56b4e9;--c5:#d55e00;--c6:#b8a800;--c7:#7f7f7f}
@media (prefers-color-scheme:dark){:root{--fg:#e6edf3;--bg:#0d1117;--dim:#9198a1;--grid:#2b313a;--box:#161b22;
--c0:#4ba3e3;--c6:#f0e442;--c7:#a5a5a5}}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:1rem 1.25rem 3rem}
h1{font-size:1.5rem;margin:.5rem 0 1rem}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;border-bottom:1px solid var(--grid);padding-bottom:.3rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:.4rem 1.2rem;margin:0 0 1rem;padding:.8rem 1rem;background:var(--box);border-radius:6px}
dl div{min-width:0}dt{color:var(--dim);font-size:.8rem}dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;margin:.5rem 0 1rem}
caption{text-align:left;color:var(--dim);padding-bottom:.3rem}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--grid);text-align:left;vertical-align:top}
th{font-weight:600}td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
figure{margin:1rem 0 1.6rem}figcaption{font-weight:600;margin-bottom:.2rem}
figure p{margin:.1rem 0 .4rem;color:var(--dim);font-size:.88rem}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--fg);font:12px system-ui,sans-serif}svg text.d{fill:var(--dim)}
svg .e{text-anchor:end}svg .m{text-anchor:middle}
svg .g{stroke:var(--grid);stroke-width:1;fill:none}svg .a{stroke:var(--dim);stroke-width:1;fill:none}
svg .l{fill:none;stroke-width:1.8;stroke-linejoin:round}
svg .f{stroke:none}svg .b{stroke:var(--bg);stroke-width:.5}
svg text.i{fill:#fff}
.k{display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.85rem;list-style:none;padding:0;margin:.2rem 0}
.k span{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
footer{margin-top:2.5rem;color:var(--dim);font-size:.85rem}
@media print{main{max-width:none}figure,table{break-inside:avoid}}
.F0{fill:var(--c0)}.F1{fill:var(--c1)}.F2{fill:var(--c2)}.F3{fill:var(--c3)}.F4{fill:var(--c4)}.F5{fill:var(--c5)}.F6{fill:var(--c6)}.F7{fill:var(--c7)}
.S0{stroke:var(--c0)}.S1{stroke:var(--c1)}.S2{stroke:var(--c2)}.S3{stroke:var(--c3)}.S4{stroke:var(--c4)}.S5{stroke:var(--c5)}.S6{stroke:var(--c6)}.S7{stroke:var(--c7)}
.B0{background:var(--c0)}.B1{background:var(--c1)}.B2{background:var(--c2)}.B3{background:var(--c3)}.B4{background:var(--c4)}.B5{background:var(--c5)}.B6{background:var(--c6)}.B7{background:var(--c7)}
`
