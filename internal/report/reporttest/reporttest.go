// Package reporttest looks at pages of package report as a browser does.
package reporttest

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"html"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Plot is a plot as the browser laid it out.
type Plot struct {
	Kind, Title string
	// Width and Height are of the plot in pixels.
	Width, Height float64
	// Marks is how many lines, bars, boxes and areas are in it, and have an
	// extent.
	Marks int
	// Outside is how many of them lie outside of the plot.
	Outside int
}

// WellFormed fails the test if page isn't well-formed XML, or refers to
// anything outside of itself.
func WellFormed(tb testing.TB, page []byte) {
	tb.Helper()
	d := xml.NewDecoder(bytes.NewReader(page))
	d.Strict = true
	var open []string
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			tb.Fatalf("page isn't well-formed: %v", err)
		}
		switch t := tok.(type) {
		case xml.StartElement:
			open = append(open, t.Name.Local)
			if t.Name.Local == "script" || t.Name.Local == "iframe" {
				tb.Errorf("the page has a %s", t.Name.Local)
			}
			for _, a := range t.Attr {
				switch a.Name.Local {
				case "href", "src", "srcset", "data", "action":
					if !strings.HasPrefix(a.Value, "data:") && !strings.HasPrefix(a.Value, "#") {
						tb.Errorf("the page refers to %q", a.Value)
					}
				}
				for _, no := range []string{"NaN", "Inf"} {
					if a.Name.Local != "aria-label" && strings.Contains(a.Value, no) {
						tb.Errorf("<%s %s=%q>", t.Name.Local, a.Name.Local, a.Value)
					}
				}
			}
		case xml.EndElement:
			open = open[:len(open)-1]
		}
	}
	if len(open) > 0 {
		tb.Errorf("not closed: %v", open)
	}
}

// browsers are the names under which Chromium is installed.
var browsers = []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"}

// measure is added to a copy of the page, with leave to run.
const measure = `<script>
const out = [];
for (const s of document.querySelectorAll('svg.plot')) {
  const box = s.getBoundingClientRect();
  let marks = 0, outside = 0;
  for (const m of s.querySelectorAll('rect,path.l,path.f,circle')) {
    const r = m.getBoundingClientRect();
    if (r.width < 0.2 && r.height < 0.2) continue;
    marks++;
    if (r.left < box.left - 2 || r.right > box.right + 2 || r.top < box.top - 2 || r.bottom > box.bottom + 2) outside++;
  }
  out.push({Kind: s.dataset.kind, Title: s.getAttribute('aria-label'), Width: box.width, Height: box.height, Marks: marks, Outside: outside});
}
const pre = document.createElement('pre');
pre.id = 'measured';
pre.textContent = JSON.stringify(out);
document.body.appendChild(pre);
</script></body>`

var (
	policy   = regexp.MustCompile(`<meta http-equiv="Content-Security-Policy"[^>]*>`)
	measured = regexp.MustCompile(`(?s)<pre id="measured">(.*?)</pre>`)
)

// Render opens the page, a file, in a headless Chromium without network, fails
// the test if the browser's console has anything to say, and returns the plots.
// Without a Chromium it skips the test, but fails it if CI is true.
func Render(tb testing.TB, path string) []Plot {
	tb.Helper()
	exe := ""
	for _, name := range browsers {
		if p, err := exec.LookPath(name); err == nil {
			exe = p
			break
		}
	}
	if exe == "" {
		if os.Getenv("CI") == "true" {
			tb.Fatal("Chromium is needed (apt-get install chromium)")
		}
		tb.Skip("Chromium is needed (apt-get install chromium)")
	}
	page, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	if _, console := open(tb, exe, path); console != "" {
		tb.Errorf("the browser's console says:\n%s", console)
	}
	with := filepath.Join(tb.TempDir(), "measured.html")
	changed := strings.Replace(policy.ReplaceAllString(string(page), ""), "</body>", measure, 1)
	if err := os.WriteFile(with, []byte(changed), 0o600); err != nil {
		tb.Fatal(err)
	}
	dom, console := open(tb, exe, with)
	m := measured.FindStringSubmatch(dom)
	if m == nil {
		tb.Fatalf("the browser measured nothing: %s", console)
	}
	var plots []Plot
	if err := json.Unmarshal([]byte(html.UnescapeString(m[1])), &plots); err != nil {
		tb.Fatal(err)
	}
	return plots
}

// Drawn fails the test if a plot of the page has no extent, nothing in it, or
// something outside of it.
func Drawn(tb testing.TB, plots []Plot) {
	tb.Helper()
	for _, p := range plots {
		if p.Width < 200 || p.Height < 15 || p.Marks == 0 || p.Outside > 0 {
			tb.Errorf("not drawn well: %+v", p)
		}
	}
}

// open returns the page's DOM, and what the console said.
func open(tb testing.TB, exe, path string) (dom, console string) {
	tb.Helper()
	abs, err := filepath.Abs(path)
	if err != nil {
		tb.Fatal(err)
	}
	cmd := exec.CommandContext(tb.Context(), exe,
		"--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
		"--host-resolver-rules=MAP * ~NOTFOUND", "--user-data-dir="+tb.TempDir(),
		"--enable-logging=stderr", "--window-size=1100,1000", "--dump-dom", "file://"+abs)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	// Helpers of the browser may hold its output open.
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		tb.Fatalf("%s: %v\n%s", exe, err, errs.String())
	}
	var said []string
	for line := range strings.Lines(errs.String()) {
		if strings.Contains(line, "CONSOLE") {
			said = append(said, line)
		}
	}
	return out.String(), strings.Join(said, "")
}
