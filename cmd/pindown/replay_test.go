package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pindown/pindown/internal/calibrate"
	"github.com/pindown/pindown/internal/replay"
	"github.com/pindown/pindown/internal/report/reporttest"
	"github.com/pindown/pindown/trace/tracetest"
)

func traceFile(t *testing.T, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.pdtrace")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReplayUsage(t *testing.T) {
	path := traceFile(t, tracetest.Bytes(t, tracetest.Pool, 1, 100))
	for _, c := range []struct{ args, want string }{
		{"replay", "which trace"},
		{"replay a b", "accepts"},
		{"replay --calibrate", "which trace"},
		{"replay --write-model x " + path, "for --calibrate"},
		{"replay --html " + path + " " + path, "named for input and for output"},
		{"replay --html " + path + " --model-file " + path + " " + path, "named for input and for output"},
		{"replay --calibrate --write-model " + path + " " + path, "named for input and for output"},
		{"replay --calibrate --write-model x --html ./x " + path, "named for two outputs"},
		{"replay --model abacus " + path, "one of iouring, ucx, connectx, ugni"},
		{"replay --model ucx,ucx " + path, "two are called"},
		{"replay --max-regions 0 " + path, "at least 1"},
		{"replay --max-regions -4 " + path, "at least 1"},
		{"replay --max-bytes 0 " + path, "at least a page"},
		{"replay --max-bytes x " + path, "want a number of bytes"},
		{"replay --requests none " + path, "one of all, uses, registrations"},
	} {
		out, code, err := execute(t, strings.Fields(c.args)...)
		if code != exitUsage || err == nil || !strings.Contains(err.Error(), c.want) || out != "" {
			t.Errorf("%s: code %d, %v, wrote %q", c.args, code, err, out)
		}
	}
	if b, err := os.ReadFile(path); !bytes.Equal(b, tracetest.Bytes(t, tracetest.Pool, 1, 100)) {
		t.Errorf("the trace has changed, %v", err)
	}
}

func TestReplayBadInput(t *testing.T) {
	whole := tracetest.Bytes(t, tracetest.Pool, 1, 100)
	newer := bytes.Clone(whole)
	newer[8] = 9 // the checksum is wrong now too: that comes first
	dir := t.TempDir()
	for _, c := range []struct{ name, path, want string }{
		{"missing", filepath.Join(dir, "missing"), "no such file"},
		{"a directory", dir, "is a directory"},
		{"empty", traceFile(t, nil), "not a trace: it is empty"},
		{"not a trace", traceFile(t, []byte("#!/bin/sh\necho this is a script, as it seems\n")), "not a trace"},
		{"newer", "testdata/newer.pdtrace", "unknown trace version 2; this program reads version 1"},
		{"damaged header", traceFile(t, newer), "damaged"},
		{"no model", traceFile(t, whole), "--model-file"},
	} {
		args := []string{"replay", c.path}
		if c.name == "no model" {
			args = append(args, "--model-file", traceFile(t, []byte("{}")))
		}
		out, code, err := execute(t, args...)
		if code != exitFailed || err == nil || !strings.Contains(err.Error(), c.want) || out != "" {
			t.Errorf("%s: code %d, %v, wrote %q", c.name, code, err, out)
		}
	}
	// What is intact of a cut trace is replayed, and the rest is told.
	out, code, err := execute(t, "replay", traceFile(t, tracetest.Bytes(t, tracetest.Pool, 1, 100000)[:200000]))
	if code != exitOK || !strings.Contains(out, "damage: trace is truncated") {
		t.Errorf("code %d, %v, wrote %q", code, err, out)
	}
}

func TestReplay(t *testing.T) {
	path := traceFile(t, tracetest.Bytes(t, tracetest.Mixed, 1, 20000))
	html := filepath.Join(t.TempDir(), "report.html")
	first, code, err := execute(t, "replay", path, "--json", "--html", html, "--max-bytes", "4M", "--merge-bytes", "0", "--min-use", "8K")
	if code != exitOK {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal([]byte(first), &m); err != nil {
		t.Fatal(err)
	}
	s := m["settings"].(map[string]any)
	if s["max_bytes"] != 4194304.0 || s["merge_bytes"] != 0.0 || s["min_use_bytes"] != 8192.0 || s["max_regions"] != 65536.0 {
		t.Errorf("%v", s)
	}
	if n := len(m["policies"].([]any)); n != 5 || len(m["models"].([]any)) != len(replay.Presets()) {
		t.Errorf("%d policies", n)
	}
	page, err := os.ReadFile(html)
	if err != nil {
		t.Fatal(err)
	}
	reporttest.WellFormed(t, page)
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(html), ".*")); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	second, _, _ := execute(t, "replay", path, "--json", "--html", html, "--max-bytes", "4M", "--merge-bytes", "0", "--min-use", "8K")
	again, err := os.ReadFile(html)
	if err != nil {
		t.Fatal(err)
	}
	if first != second || !bytes.Equal(page, again) {
		t.Error("not the same twice")
	}

	text, code, err := execute(t, "replay", path, "--model", "ucx", "--requests", "registrations")
	if code != exitOK || !strings.Contains(text, "UCX ") || strings.Contains(text, "IOURING") || !strings.Contains(text, " 0 uses of 0 B") {
		t.Errorf("%v: %s", err, text)
	}
	// A report that can't be written is an error, and nothing is left.
	if _, code, _ := execute(t, "replay", path, "--html", filepath.Join(t.TempDir(), "no", "x.html")); code != exitFailed {
		t.Errorf("code %d", code)
	}
}

func TestReplayModelFile(t *testing.T) {
	path := traceFile(t, tracetest.Bytes(t, tracetest.Pool, 1, 1000))
	model := filepath.Join(t.TempDir(), "m.json")
	if place().Selected.Device == "iouring" {
		if out, code, err := execute(t, "replay", "--calibrate", "--write-model", model); code != exitOK || out != "" {
			t.Fatalf("code %d, %v, wrote %q", code, err, out)
		}
		out, code, err := execute(t, "bench", "--calibrate")
		if code != exitOK {
			t.Fatal(err)
		}
		if m, err := replay.ReadModel(strings.NewReader(out)); err != nil || m.Name != calibrate.Name {
			t.Fatalf("%v: %s", err, out)
		}
	} else {
		// What the test needs of it is the format.
		m, _ := replay.Preset("ucx")
		m.Name = calibrate.Name
		b, _ := json.Marshal(m)
		if err := os.WriteFile(model, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, code, err := execute(t, "replay", path, "--model-file", model, "--model", "ucx", "--json")
	if code != exitOK {
		t.Fatal(err)
	}
	var m struct{ Models []replay.Model }
	if err := json.Unmarshal([]byte(out), &m); err != nil {
		t.Fatal(err)
	}
	names := []string{m.Models[0].Name, m.Models[1].Name}
	if !slices.Equal(names, []string{"ucx", calibrate.Name}) {
		t.Errorf("%v", names)
	}
}
