package vm

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// DefaultTestTimeout is how long a test binary may run. It is generous, because software emulation on a busy host is slow.
const DefaultTestTimeout = 10 * time.Minute

// TestBinary describes a run of a package's tests. The zero value of each field but Pkg means its default.
type TestBinary struct {
	Pkg   string   // import path, or path relative to the module's root that begins with "./"
	Tags  []string // build tags
	Flags []string // further flags for go test -c
	Args  []string // further arguments for the test binary
	Run   string   // pattern of -test.run; in RunTests, PINDOWN_VM_RUN in the environment overrides it

	// Env, User, Caps and Limits are those of Cmd.
	Env    []string
	User   string
	Caps   []uintptr
	Limits map[int]uint64

	// Timeout is -test.timeout: when it has passed, the binary panics and shows its goroutines. 0 means DefaultTestTimeout. It is
	// cut to end two minutes before the timeout of the test that asks.
	Timeout time.Duration

	// FailOnSkip makes a skipped test a failure: this machine has what the tests need.
	FailOnSkip bool
}

// binary is a test binary in the guest.
type binary struct {
	pkg  string // import path
	path string // in the guest
}

// Status is how a test ended.
type Status string

// The values of Status.
const (
	Passed     Status = "pass"
	Failed     Status = "fail"
	Skipped    Status = "skip"
	Unfinished Status = "unfinished" // it was still running when the binary ended
)

// TestResult is what is known of one test.
type TestResult struct {
	Name    string // full name, with those of the tests above
	Status  Status
	Elapsed time.Duration // as the guest measured it
	Output  string        // without the lines that only frame it
	Tests   []*TestResult // subtests
}

// Report is what a test binary has said.
type Report struct {
	Pkg    string        // import path
	Tests  []*TestResult // top-level tests
	Output string        // what belongs to no test
	Code   int           // exit status, -1 if it was killed
	Signal int           // the signal that killed it, or 0
	Err    error         // why the run could not be completed, or nil

	failOnSkip bool
	filtered   bool
}

// Find returns the result of the test of that full name, or nil.
func (r *Report) Find(name string) *TestResult { return find(r.Tests, name) }

func find(tests []*TestResult, name string) *TestResult {
	for _, t := range tests {
		if t.Name == name {
			return t
		}
		if found := find(t.Tests, name); found != nil {
			return found
		}
	}
	return nil
}

// RunTests runs a package's tests in the guest and reports each as a subtest.
func (m *Machine) RunTests(t *testing.T, tests TestBinary) {
	t.Helper()
	filter := os.Getenv("PINDOWN_VM_RUN")
	tests.Run = cmp.Or(filter, tests.Run)
	rep := m.Report(t, tests)
	rep.filtered = filter != ""
	rep.replay(testingT{t})
}

// Report runs a package's tests in the guest and returns what came out, without failing for a test that failed. It ends the test only if the package
// can't be built, or the binary can't be brought into the guest.
func (m *Machine) Report(tb testing.TB, tests TestBinary) *Report {
	tb.Helper()
	bin, err := m.install(tb, tests)
	if err != nil {
		tb.Fatal(err)
	}
	timeout := cmp.Or(tests.Timeout, DefaultTestTimeout)
	if d, ok := tb.(interface{ Deadline() (time.Time, bool) }); ok {
		// The test process's own timeout would show nothing of the guest. So what runs there has to end first.
		if end, ok := d.Deadline(); ok {
			timeout = min(timeout, max(time.Until(end)-2*time.Minute, time.Minute))
		}
	}
	args := []string{bin.path, "-test.v=test2json", "-test.paniconexit0", "-test.timeout=" + timeout.String()}
	if tests.Run != "" {
		args = append(args, "-test.run="+tests.Run)
	}
	res, err := m.Exec(tb.Context(), Cmd{
		Args:     append(args, tests.Args...),
		Env:      tests.Env,
		Dir:      path.Dir(bin.path),
		User:     tests.User,
		Caps:     tests.Caps,
		Limits:   tests.Limits,
		Combined: true,
		Progress: progress(tb),
		// Its own timeout shows more, so that one goes first.
		Timeout: timeout + time.Minute,
	})
	if (err != nil || res.Code != 0) && !strings.HasSuffix(res.Stdout, lastLine) {
		// After a panic it is missing, and test2json reports a test that failed only when it sees what comes next.
		res.Stdout += "\n" + lastLine
	}
	rep, perr := convert(tb.Context(), bin.pkg, res.Stdout)
	if perr != nil {
		tb.Fatal(perr)
	}
	rep.Code, rep.Signal, rep.Err = res.Code, res.Signal, err
	rep.failOnSkip = tests.FailOnSkip
	return rep
}

// progress returns a writer that logs the begin of each top-level test and the end of each test that is at most two levels below one, where logs are
// shown at all. All results are in the report.
func progress(tb testing.TB) io.Writer {
	tb.Helper()
	if !testing.Verbose() {
		return nil
	}
	return &lineWriter{func(line string) {
		line = strings.TrimPrefix(line, "\x16")
		depth := strings.Count(line, "/")
		if strings.HasPrefix(line, "=== RUN ") && depth == 0 || strings.HasPrefix(line, "--- ") && depth <= 2 {
			tb.Logf("guest: %s", line)
		}
	}, nil}
}

// lineWriter calls f for each line.
type lineWriter struct {
	f    func(string)
	line []byte
}

func (w *lineWriter) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		part, after, ended := bytes.Cut(rest, []byte("\n"))
		w.line = append(w.line, part...)
		if rest = after; ended {
			w.f(string(w.line))
			w.line = w.line[:0]
		}
	}
	return len(b), nil
}

// install builds a test binary and copies it, with the package's testdata, into the guest. A binary that is there already is used again.
func (m *Machine) install(tb testing.TB, tests TestBinary) (*binary, error) {
	tb.Helper()
	key := fmt.Sprintf("%q %q %q", tests.Pkg, tests.Tags, tests.Flags)
	m.mu.Lock()
	bin, n := m.guest[key], len(m.guest)
	m.mu.Unlock()
	if bin != nil {
		return bin, nil
	}
	host, pkg, dir, err := build(tb, m.root, tests)
	if err != nil {
		return nil, err
	}
	guestDir := fmt.Sprintf("/tests/%d-%s", n, path.Base(pkg))
	bin = &binary{pkg: pkg, path: guestDir + "/" + path.Base(pkg) + ".test"}
	if err := m.PutProgram(tb.Context(), bin.path, host); err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "testdata")
	err = filepath.WalkDir(data, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		return m.putFile(tb.Context(), guestDir+"/"+filepath.ToSlash(rel), p)
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("copy testdata of %s: %w", pkg, err)
	}
	m.mu.Lock()
	m.guest[key] = bin
	m.mu.Unlock()
	return bin, nil
}

// build compiles a package's tests and returns the binary, the import path, and the package's directory.
func build(tb testing.TB, root string, tests TestBinary) (bin, pkg, dir string, err error) {
	tb.Helper()
	args := []string{"list", "-f", "{{.ImportPath}}\n{{.Dir}}"}
	if len(tests.Tags) > 0 {
		args = append(args, "-tags="+strings.Join(tests.Tags, ","))
	}
	list := exec.Command("go", append(args, tests.Pkg)...)
	list.Dir = root
	out, err := output(list)
	if err != nil {
		return "", "", "", fmt.Errorf("find package %s: %w", tests.Pkg, err)
	}
	pkg, dir, ok := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if !ok || strings.Contains(dir, "\n") {
		return "", "", "", fmt.Errorf("find package %s: not one package", tests.Pkg)
	}
	bin = filepath.Join(tb.TempDir(), path.Base(pkg)+".test")
	args = []string{"test", "-c", "-o", bin}
	if len(tests.Tags) > 0 {
		args = append(args, "-tags="+strings.Join(tests.Tags, ","))
	}
	cmd := exec.Command("go", append(append(args, tests.Flags...), tests.Pkg)...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if _, err := output(cmd); err != nil {
		return "", "", "", fmt.Errorf("build tests of %s: %w", pkg, err)
	}
	if _, err := os.Stat(bin); err != nil {
		return "", "", "", fmt.Errorf("build tests of %s: it has none", pkg)
	}
	return bin, pkg, dir, nil
}

// lastLine is how the output of a test run that fails ends under -test.v=test2json.
const lastLine = "\x16FAIL\n"

// convert makes a report of what a test binary wrote under -test.v=test2json.
func convert(ctx context.Context, pkg, out string) (*Report, error) {
	// The run's context may be over, for a timeout; this has to be done all the same.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "go", "tool", "test2json", "-t", "-p", pkg) // without -t it leaves out how long a test took
	cmd.Stdin = strings.NewReader(out)
	events, err := output(cmd)
	if err != nil {
		return nil, fmt.Errorf("read test output: %w", err)
	}
	r, err := parseEvents(bytes.NewReader(events))
	if err != nil {
		return nil, fmt.Errorf("read test output: %w", err)
	}
	r.Pkg = pkg
	return r, nil
}

// event is a line that go tool test2json prints. See its documentation.
type event struct {
	Action  string
	Test    string
	Elapsed float64 // seconds
	Output  string
}

// parseEvents makes a report of test2json's lines.
func parseEvents(in io.Reader) (*Report, error) {
	r := &Report{}
	tests := make(map[string]*TestResult)
	get := func(name string) *TestResult {
		if t := tests[name]; t != nil {
			return t
		}
		t := &TestResult{Name: name, Status: Unfinished}
		tests[name] = t
		// The name of a subtest can hold slashes, so the test above it is the longest known one.
		for i := strings.LastIndexByte(name, '/'); i > 0; i = strings.LastIndexByte(name[:i], '/') {
			if above := tests[name[:i]]; above != nil {
				above.Tests = append(above.Tests, t)
				return t
			}
		}
		r.Tests = append(r.Tests, t)
		return t
	}
	dec := json.NewDecoder(in)
	for {
		var e event
		err := dec.Decode(&e)
		if errors.Is(err, io.EOF) {
			return r, nil
		}
		if err != nil {
			return nil, fmt.Errorf("decode test event: %w", err)
		}
		if e.Test == "" {
			if e.Action == "output" {
				r.Output += e.Output
			}
			continue
		}
		t := get(e.Test)
		switch e.Action {
		case "output":
			if !isFrame(e.Output) {
				t.Output += e.Output
			}
		case "pass", "fail", "skip":
			t.Status = Status(e.Action)
			t.Elapsed = time.Duration(e.Elapsed * float64(time.Second))
		}
	}
}

// isFrame says that a line of output only marks where a test begins, pauses, goes on, or ends.
func isFrame(line string) bool {
	line = strings.TrimLeft(line, " ")
	for _, p := range []string{"=== RUN ", "=== PAUSE ", "=== CONT ", "=== NAME ", "--- PASS: ", "--- FAIL: ", "--- SKIP: "} {
		if strings.HasPrefix(line, p) {
			return true
		}
	}
	return false
}

// reporter is what of testing.T a report is replayed to.
type reporter interface {
	run(name string, f func(reporter))
	log(text string)
	fail(text string)
	skip(text string) // does not return
}

// replay makes a test of each result.
func (r *Report) replay(t reporter) {
	for _, res := range r.Tests {
		r.replayTest(t, "", res)
	}
	output := strings.TrimRight(r.Output, "\n")
	failed := func(t *TestResult) bool { return t.Status == Failed }
	switch {
	case r.Err != nil:
		t.fail(fmt.Sprintf("%v\n%s", r.Err, output))
	case r.Signal != 0:
		t.fail(fmt.Sprintf("the test binary was killed by signal %d\n%s", r.Signal, output))
	case r.Code != 0 && !slices.ContainsFunc(r.Tests, failed):
		t.fail(fmt.Sprintf("the test binary ended with exit status %d, but no test failed\n%s", r.Code, output))
	case r.Code == 0 && slices.ContainsFunc(r.Tests, failed):
		t.fail(fmt.Sprintf("a test failed, but the test binary ended with exit status 0\n%s", output))
	case len(r.Tests) == 0 && r.filtered:
		t.skip("PINDOWN_VM_RUN selects no test of " + r.Pkg)
	case len(r.Tests) == 0:
		t.fail(fmt.Sprintf("no test of %s ran\n%s", r.Pkg, output))
	default:
		t.log(output)
	}
}

func (r *Report) replayTest(t reporter, above string, res *TestResult) {
	name := strings.TrimPrefix(res.Name, above)
	t.run(name, func(t reporter) {
		for _, sub := range res.Tests {
			r.replayTest(t, res.Name+"/", sub)
		}
		text := strings.TrimRight(fmt.Sprintf("in the virtual machine, %.2fs:\n%s", res.Elapsed.Seconds(), res.Output), "\n")
		switch {
		case res.Status == Passed:
			t.log(text)
		case res.Status == Skipped && r.failOnSkip:
			t.fail("skipped, where nothing may be: " + text)
		case res.Status == Skipped:
			t.skip(text)
		case res.Status == Unfinished:
			t.fail("not finished: " + text)
		default:
			t.fail(text)
		}
	})
}

// testingT is the reporter of real tests.
type testingT struct{ t *testing.T }

func (r testingT) run(name string, f func(reporter)) {
	r.t.Run(name, func(t *testing.T) { f(testingT{t}) })
}

func (r testingT) log(text string) {
	if testing.Verbose() {
		r.t.Log(text)
	}
}

func (r testingT) fail(text string) { r.t.Error(text) }
func (r testingT) skip(text string) { r.t.Skip(text) }
