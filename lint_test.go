package pindown_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// goFiles calls visit with every Go file of the module, generated or not,
// parsed up to its imports.
func goFiles(t *testing.T, visit func(path string, f *ast.File)) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || path != "." && strings.HasPrefix(d.Name(), ".")):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go"):
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		visit(filepath.ToSlash(path), f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func imports(f *ast.File) []string {
	var list []string
	for _, s := range f.Imports {
		p, _ := strconv.Unquote(s.Path.Value)
		list = append(list, p)
	}
	return list
}

// TestNoCgo: depguard doesn't see import "C".
func TestNoCgo(t *testing.T) {
	n := 0
	goFiles(t, func(path string, f *ast.File) {
		n++
		if slices.Contains(imports(f), "C") && !strings.HasPrefix(path, "bench/") {
			t.Errorf("%s uses cgo", path)
		}
	})
	if n < 20 {
		t.Fatalf("%d files found", n)
	}
}

// TestUnsafeFilesAreNamed: whoever audits memory safety finds the files by
// their names.
func TestUnsafeFilesAreNamed(t *testing.T) {
	goFiles(t, func(path string, f *ast.File) {
		base := strings.TrimSuffix(strings.TrimSuffix(path, ".go"), "_test")
		for _, arch := range []string{"_amd64", "_arm64", "_linux"} {
			base = strings.TrimSuffix(base, arch)
		}
		generated := ast.IsGenerated(f)
		if slices.Contains(imports(f), "unsafe") && !generated && !strings.HasSuffix(base, "_unsafe") {
			t.Errorf("%s imports unsafe but isn't named so", path)
		}
	})
}

// TestLayers: an import in the wrong direction is a design change, to be made
// on purpose.
func TestLayers(t *testing.T) {
	const module = "github.com/pindown/pindown"
	forbidden := map[string][]string{
		"vm":      {module},
		"epoch":   {module + "/monitor", module + "/device"},
		"device":  {module + "/monitor", module + "/epoch"},
		"monitor": {module + "/device"},
		"model":   {module},
	}
	goFiles(t, func(path string, f *ast.File) {
		if strings.HasSuffix(path, "_test.go") || strings.Contains(path, "test/") {
			return
		}
		top, _, _ := strings.Cut(path, "/")
		for _, p := range imports(f) {
			for _, bad := range forbidden[top] {
				if p == bad || strings.HasPrefix(p, bad+"/") {
					t.Errorf("%s imports %s", path, p)
				}
			}
			if p == module && !strings.HasPrefix(path, "cmd/") && !strings.HasPrefix(path, "internal/") && !strings.HasPrefix(path, "metrics/") &&
				!strings.HasPrefix(path, "trace/") && !strings.HasPrefix(path, "examples/") && !strings.HasPrefix(path, "bench/") {
				t.Errorf("%s imports the root package", path)
			}
		}
	})
}

// TestPackageComments: one package comment for each package.
func TestPackageComments(t *testing.T) {
	comments := map[string]int{}
	goFiles(t, func(path string, f *ast.File) {
		dir := filepath.Dir(path)
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		comments[dir] += 0
		if f.Doc != nil && !ast.IsGenerated(f) {
			comments[dir]++
		}
	})
	for dir, n := range comments {
		if n != 1 {
			t.Errorf("package in %s has %d package comments, want 1", dir, n)
		}
	}
}
