package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/pindown/pindown/internal/replay"
)

func TestSpread(t *testing.T) {
	for _, tt := range []struct {
		v    []float64
		want string
	}{
		{nil, "–"},
		{[]float64{2}, "2.0"},
		{[]float64{3, 1, 2}, "2.0 (1.0–3.0)"},
		{[]float64{1.01, 1.02}, "1.0"},
		{[]float64{4, 1, 2, 3}, "2.5 (1.0–4.0)"},
	} {
		if got := spread(tt.v, "%.1f"); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.v, got, tt.want)
		}
	}
}

func TestReplaceFigures(t *testing.T) {
	path := filepath.Join(t.TempDir(), "doc.md")
	write := func(s string) {
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("above\n" + begin + "old\n" + end + "below\n")
	if err := replaceFigures(path, []byte("new\n")); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if want := "above\n" + begin + "new\n" + end + "below\n"; string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
	write("no place")
	if err := replaceFigures(path, nil); err == nil {
		t.Error("no error without a place for figures")
	}
}

// TestMiddle: what a measurement had to assume isn't mixed with what others
// measured, whichever is the first.
func TestMiddle(t *testing.T) {
	of := func(touch float64, source, assumed string) replay.Model {
		return replay.Model{Name: "machine", Register: replay.Cost{Call: touch}, Touch: touch, Source: source, Assumed: assumed}
	}
	for _, c := range []struct {
		here            []replay.Model
		call, touch     float64
		source, assumed string
	}{
		{[]replay.Model{of(1, "a", ""), of(3, "a", ""), of(2, "a", "")}, 2, 2, "the programs; a", ""},
		{[]replay.Model{of(400, "a", "touch"), of(3, "a", ""), of(5, "b", "")}, 5, 4, "a; or b (in 2 of the measurements)", ""},
		{[]replay.Model{of(3, "a", ""), of(400, "a", "touch"), of(400, "a", "touch")}, 400, 3, "the programs; a (in 1 of the measurements)", ""},
		{[]replay.Model{of(400, "a", "touch"), of(400, "a", "touch"), of(400, "a", "touch")}, 400, 400, "the programs; a", "touch"},
	} {
		m := middle(c.here)
		if m.Register.Call != c.call || m.Touch != c.touch || m.Assumed != c.assumed || !strings.HasSuffix(m.Source, c.source) {
			t.Errorf("%+v:\n%+v", c.here, m)
		}
	}
}

// TestTables: every program has a row in every table, whatever is missing.
func TestTables(t *testing.T) {
	models := replay.Presets()
	f := &figures{Name: "program", Models: map[string]*split{}}
	for _, m := range models {
		f.Models[m.Name] = &split{}
	}
	var b bytes.Buffer
	write(&b, &measured{Models: models, Workloads: []*figures{f}})
	if n, want := strings.Count(b.String(), "| program |"), 4+len(models); n != want {
		t.Errorf("%d rows, want %d:\n%s", n, want, b.String())
	}
}

// TestDocument: the tables in the document are those of its file of figures.
func TestDocument(t *testing.T) {
	const docs = "../../../docs/vm-activity"
	o := options{data: docs + ".json", doc: filepath.Join(t.TempDir(), "doc.md"), render: true}
	want, err := os.ReadFile(docs + ".md")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.doc, want, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := o.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(o.doc)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("make it anew with -render: %s", diff)
	}
}
