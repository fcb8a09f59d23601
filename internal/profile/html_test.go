package profile

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/pindown/pindown/internal/report/reporttest"
)

// TestHTML: the page of a real profile is drawn by a browser.
func TestHTML(t *testing.T) {
	skipShort(t)
	res := profileIt(t, &Options{Command: []string{compile(t, "ring"), "stale"}})
	page := writeHTML(t, res)
	reporttest.WellFormed(t, page)
	if !bytes.Contains(page, []byte("plant (ring)")) {
		t.Error("the page doesn't name the place of the stale window")
	}
	path := filepath.Join(t.TempDir(), "report.html")
	if err := os.WriteFile(path, page, 0o600); err != nil {
		t.Fatal(err)
	}
	plots := reporttest.Render(t, path)
	const want = 8
	if len(plots) != want {
		t.Errorf("%d plots, want %d: %+v", len(plots), want, plots)
	}
	reporttest.Drawn(t, plots)
}

// TestHTMLOfNothing: a program without a single operation.
func TestHTMLOfNothing(t *testing.T) {
	reporttest.WellFormed(t, writeHTML(t, &Result{Command: []string{"</script><b>\x00"}, Timeline: Timeline{Interval: 1}}))
}

func writeHTML(tb testing.TB, res *Result) []byte {
	tb.Helper()
	var b bytes.Buffer
	if err := res.WriteHTML(&b); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}
