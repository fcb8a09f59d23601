package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// recorder notes what a report is replayed as.
type recorder struct {
	name  string
	lines *[]string
}

type skipped struct{}

func (r recorder) run(name string, f func(reporter)) {
	if r.name != "" {
		name = r.name + "/" + name
	}
	defer func() {
		if p := recover(); p != nil && p != any(skipped{}) {
			panic(p)
		}
	}()
	f(recorder{name, r.lines})
}

func (r recorder) note(what, text string) {
	*r.lines = append(*r.lines, fmt.Sprintf("%s %s: %s", what, r.name, strings.ReplaceAll(strings.TrimSpace(text), "\n", "|")))
}

func (r recorder) log(string)       { r.note("pass", "") }
func (r recorder) fail(text string) { r.note("fail", text) }
func (r recorder) skip(text string) {
	r.note("skip", text)
	panic(skipped{})
}

func replayed(r *Report) []string {
	var lines []string
	recorder{"", &lines}.run("", r.replay)
	return lines
}

func TestReplay(t *testing.T) {
	events := `{"Action":"start"}
{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"run","Test":"TestA/x"}
{"Action":"output","Test":"TestA/x","Output":"    a_test.go:1: broken\n"}
{"Action":"output","Test":"TestA/x","Output":"    --- FAIL: TestA/x (0.50s)\n"}
{"Action":"fail","Test":"TestA/x","Elapsed":0.5}
{"Action":"run","Test":"TestA/y/z"}
{"Action":"pass","Test":"TestA/y/z"}
{"Action":"fail","Test":"TestA"}
{"Action":"run","Test":"TestS"}
{"Action":"output","Test":"TestS","Output":"why\n"}
{"Action":"skip","Test":"TestS"}
{"Action":"run","Test":"TestU"}
{"Action":"output","Output":"FAIL\n"}
{"Action":"fail"}
`
	r, err := parseEvents(strings.NewReader(events))
	if err != nil {
		t.Fatal(err)
	}
	const vm = "in the virtual machine, 0.00s:"
	r.Code = 1
	want := []string{
		"fail TestA/x: in the virtual machine, 0.50s:|    a_test.go:1: broken",
		"pass TestA/y/z: ",
		"fail TestA: " + vm,
		"skip TestS: " + vm + "|why",
		"fail TestU: not finished: " + vm,
		"pass : ",
	}
	if got := replayed(r); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	r.failOnSkip = true
	want[3] = "fail TestS: skipped, where nothing may be: " + vm + "|why"
	if got := replayed(r); !slices.Equal(got, want) {
		t.Errorf("skips fail: got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestReplayPackage has runs whose outcome is not that of any test.
func TestReplayPackage(t *testing.T) {
	pass := []*TestResult{{Name: "TestP", Status: Passed}}
	fail := []*TestResult{{Name: "TestF", Status: Failed}}
	for name, c := range map[string]struct {
		r    Report
		want string
	}{
		"good":          {Report{Tests: pass}, "pass : "},
		"error":         {Report{Tests: pass, Err: errors.New("gone"), Output: "out"}, "fail : gone|out"},
		"killed":        {Report{Tests: pass, Code: -1, Signal: 9}, "fail : the test binary was killed by signal 9"},
		"status":        {Report{Tests: pass, Code: 7}, "fail : the test binary ended with exit status 7, but no test failed"},
		"status 0":      {Report{Tests: fail}, "fail : a test failed, but the test binary ended with exit status 0"},
		"nothing":       {Report{}, "fail : no test of  ran"},
		"nothing asked": {Report{filtered: true, Pkg: "p"}, "skip : PINDOWN_VM_RUN selects no test of p"},
	} {
		got := replayed(&c.r)
		if last := got[len(got)-1]; last != c.want {
			t.Errorf("%s: %q, want %q", name, last, c.want)
		}
	}
}

func TestParseEventsTruncated(t *testing.T) {
	if r, err := parseEvents(strings.NewReader(`{"Action":"run","Test":"TestA"}` + "\n" + `{"Action":`)); err == nil {
		t.Errorf("got %+v", r)
	}
}

func TestLineWriter(t *testing.T) {
	var got []string
	w := &lineWriter{func(l string) { got = append(got, l) }, nil}
	for _, part := range []string{"a", "b\n\nc", "\n", "d"} {
		fmt.Fprint(w, part)
	}
	if want := []string{"ab", "", "c"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

func FuzzParseEvents(f *testing.F) {
	f.Add("TestA", "TestA/b/c", "--- FAIL: TestA", "fail")
	f.Add("", "/", "///", "output")
	f.Fuzz(func(t *testing.T, a, b, out, action string) {
		var in strings.Builder
		enc := json.NewEncoder(&in)
		for _, e := range []event{
			{Action: "run", Test: a}, {Action: action, Test: b, Output: out}, {Action: "output", Test: a, Output: out}, {Action: "pass", Test: a},
		} {
			if err := enc.Encode(e); err != nil {
				t.Skip()
			}
		}
		r, err := parseEvents(strings.NewReader(in.String()))
		if err != nil {
			t.Fatal(err)
		}
		// Each test named is in the tree once, below one whose name begins its own.
		seen := make(map[string]bool)
		var walk func(above string, tests []*TestResult)
		walk = func(above string, tests []*TestResult) {
			for _, res := range tests {
				if seen[res.Name] || !strings.HasPrefix(res.Name, above) {
					t.Errorf("%q is below %q, or there twice", res.Name, above)
				}
				seen[res.Name] = true
				walk(res.Name+"/", res.Tests)
			}
		}
		walk("", r.Tests)
		if n := len(seen); n > 2 || a != "" && len(r.Tests) == 0 {
			t.Errorf("%d tests of %q, %q", n, a, b)
		}
		replayed(r)
	})
}
