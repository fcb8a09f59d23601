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
