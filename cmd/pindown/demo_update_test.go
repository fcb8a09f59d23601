package main

import (
	"bytes"
	"context"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
)

func TestDemoUpdateJSON(t *testing.T) {
	out, code, err := execute(t, "demo", "update", "--json", "--replacements", "10", "--pages", "2")
	if code != exitOK {
		t.Fatalf("exit code %d, %v", code, err)
	}
	m := object(t, out)
	policies, _ := m["policies"].([]any)
	if len(policies) != 4 {
		t.Fatalf("%d policies", len(policies))
	}
	for i, name := range []string{"none", "drop", "update-strict", "update-atomic"} {
		p := policies[i].(map[string]any)
		number := func(key string) float64 {
			n, ok := p[key].(float64)
			if !ok {
				t.Errorf("%s: %s is %v", name, key, p[key])
			}
			return n
		}
		if p["name"] != name {
			t.Errorf("policy %d is %v, want %s", i, p["name"], name)
		}
		if number("peer_writes") < 200 || number("lost") > 0 != (name == "none") ||
			number("errors") > 0 != (name == "drop") || number("key_changes") > 0 != (name == "drop") {
			t.Errorf("%v", p)
		}
	}
}

func TestDemoUpdateText(t *testing.T) {
	out, code, err := execute(t, "demo", "update", "--replacements", "3")
	if code != exitOK {
		t.Fatalf("exit code %d, %v", code, err)
	}
	for _, want := range []string{"none", "drop", "update-strict", "update-atomic", "key changes"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
}

func TestDemoUpdateUsage(t *testing.T) {
	for args, want := range map[string]string{
		"demo update extra":                   "unknown command",
		"demo update --nosuch":                "unknown flag",
		"demo update --replacements 0":        "at least 1",
		"demo update --replacements 99999999": "at most",
		"demo update --pages 0":               "at least 1",
		"demo update --pages 5000":            "at most",
	} {
		_, code, err := execute(t, strings.Fields(args)...)
		if code != exitUsage || err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "bad options") {
			t.Errorf("%s: exit code %d, error %v, want %d and %q", args, code, err, exitUsage, want)
		}
	}
}

// What was found before an interruption is shown, and nothing else said.
func TestDemoUpdateInterrupt(t *testing.T) {
	for turns := 1; ; turns *= 2 {
		ctx, cancel := context.WithCancelCause(t.Context())
		root := NewRootCommand()
		var out bytes.Buffer
		root.SetArgs([]string{"demo", "update", "--replacements", "1000000"})
		root.SetOut(&out)
		var wg sync.WaitGroup
		wg.Go(func() {
			for range turns {
				runtime.Gosched()
			}
			cancel(signalError(syscall.SIGINT))
		})
		err := signalled(ctx, root.ExecuteContext(ctx))
		wg.Wait()
		if exitCode(err) != 130 || message(err) != "interrupted" {
			t.Fatalf("exit code %d, %v", exitCode(err), err)
		}
		if out.Len() == 0 {
			continue // it came before the first write
		}
		if !strings.HasPrefix(out.String(), "Interrupted. ") || !strings.Contains(out.String(), "peer writes") {
			t.Errorf("%s", &out)
		}
		return
	}
}
