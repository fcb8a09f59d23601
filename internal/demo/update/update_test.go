package update_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/pindown/pindown/internal/demo/update"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	const n = 25
	for _, pages := range []int{1, 3} {
		res, err := update.Run(t.Context(), &update.Options{Replacements: n, Pages: pages})
		if err != nil {
			t.Fatal(err)
		}
		if err := res.Failure(); err != nil {
			t.Error(err)
		}
		if len(res.Policies) != 4 {
			t.Fatalf("%d policies", len(res.Policies))
		}
		for i, p := range res.Policies {
			if p.Name != update.None+update.Policy(i) || p.PeerWrites < 20*n {
				t.Errorf("%+v", p)
			}
			told := p.Name == update.Drop
			if (p.Lost > 0) != (p.Name == update.None) || (p.Errors == n) != told || (p.KeyChanges == n) != told {
				t.Errorf("%+v", p)
			}
			if want := uint64(1); !told && p.Registrations != want || told && p.Registrations != n+1 {
				t.Errorf("%+v", p)
			}
		}
		if res.Local.Device == "none" {
			if os.Getenv("CI") == "true" {
				t.Error("no io_uring: " + res.Local.Reason)
			}
			continue
		}
		for i, p := range res.Local.Policies {
			told := p.Name == update.Drop
			if p.Name != update.None+update.Policy(i) || p.Reads != 5*(n+1) || (p.Lost > 0) != (p.Name == update.None) || (p.Errors == n) != told || (p.KeyChanges == n) != told {
				t.Errorf("local: %+v", p)
			}
		}
	}
}

func TestResult(t *testing.T) {
	res := &update.Result{Device: "d", Local: update.Local{Device: "none", Reason: "why", Policies: []update.LocalTotals{}}}
	for p := update.None; p <= update.Atomic; p++ {
		res.Policies = append(res.Policies, update.Totals{Name: p, PeerWrites: 7})
	}
	res.Policies[0].Lost = 3
	if err := res.Failure(); err != nil {
		t.Error(err)
	}
	var text, js bytes.Buffer
	if err := errors.Join(res.WriteText(&text), res.WriteJSON(&js)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"none", "drop", "update-strict", "update-atomic", "No local half: why"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in %s", want, text.String())
		}
	}
	var back update.Result
	if err := json.Unmarshal(js.Bytes(), &back); err != nil || back.Policies[3].Name != update.Atomic || back.Policies[0].Lost != 3 {
		t.Errorf("%v: %+v", err, back)
	}
	if err := json.Unmarshal([]byte(`{"policies":[{"name":"invalid"}]}`), &back); !errors.Is(err, update.ErrOptions) {
		t.Error(err)
	}
	for _, spoil := range []func(*update.Result){
		func(r *update.Result) { r.Policies[1].Lost = 1 },
		func(r *update.Result) { r.Policies[2].Errors = 1 },
		func(r *update.Result) { r.Policies[3].KeyChanges = 1 },
		func(r *update.Result) { r.Local.Policies = []update.LocalTotals{{Name: update.Strict, Lost: 1}} },
	} {
		bad := *res
		bad.Policies = append([]update.Totals(nil), res.Policies...)
		spoil(&bad)
		if err := bad.Failure(); !errors.Is(err, update.ErrFailed) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []update.Options{{Replacements: -1}, {Pages: -1}, {Replacements: update.MaxReplacements + 1}, {Pages: update.MaxPages + 1}} {
		if _, err := update.Run(t.Context(), &o); !errors.Is(err, update.ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := update.Run(ctx, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// signal is the cause of an interruption.
type signal struct{}

func (signal) Error() string        { return "signal" }
func (signal) Is(target error) bool { return target == context.Canceled }

// What was found before an interruption is returned with its error.
func TestInterrupted(t *testing.T) {
	for turns := 1; ; turns *= 2 {
		ctx, cancel := context.WithCancelCause(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			for range turns {
				runtime.Gosched()
			}
			cancel(signal{})
		})
		res, err := update.Run(ctx, &update.Options{Replacements: update.MaxReplacements})
		wg.Wait()
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("%+v, %v", res, err)
		}
		if res == nil {
			continue // it came before the first write
		}
		if !res.Interrupted || res.Failure() != nil || res.Policies[0].PeerWrites == 0 {
			t.Errorf("%+v", res)
		}
		var text, js bytes.Buffer
		if err := errors.Join(res.WriteText(&text), res.WriteJSON(&js)); err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(text.String(), "Interrupted.") || !strings.Contains(js.String(), `"interrupted": true`) {
			t.Errorf("%s%s", text.String(), js.String())
		}
		return
	}
}
