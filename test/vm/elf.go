package vm

import (
	"debug/elf"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// Directories, relative to a root, where Debian keeps programs and shared libraries.
var (
	programDirs = []string{"usr/bin", "usr/sbin", "bin", "sbin"}
	libraryDirs = []string{"usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib64", "lib64", "usr/lib", "lib"}
)

// findIn returns the path of the first file of that name below a root, relative to it, in one of dirs.
func findIn(roots, dirs []string, name string) (string, error) {
	for _, root := range roots {
		for _, dir := range dirs {
			p := filepath.Join(root, dir, name)
			if fi, err := os.Stat(p); err == nil && fi.Mode().IsRegular() {
				return p, nil
			}
		}
	}
	return "", fmt.Errorf("find %s: %w", name, fs.ErrNotExist)
}

// libraries returns the shared libraries and the dynamic linker that ELF files need, as host paths by guest path. They are looked for below each
// root in turn.
func libraries(roots []string, files ...string) (map[string]string, error) {
	out := make(map[string]string)
	for len(files) > 0 {
		file := files[0]
		files = files[1:]
		interp, needed, err := dynamic(file)
		if err != nil {
			return nil, err
		}
		add := func(guest, host string) {
			if _, ok := out[guest]; !ok {
				out[guest] = host
				files = append(files, host)
			}
		}
		if interp != "" {
			host, err := findIn(roots, []string{path.Dir(interp)}, path.Base(interp))
			if err != nil {
				return nil, fmt.Errorf("find linker of %s: %w", file, err)
			}
			add(interp, host)
		}
		for _, name := range needed {
			if strings.HasPrefix(name, "ld-linux") {
				continue // It is there as the linker, under its own path.
			}
			host, err := findIn(roots, libraryDirs, name)
			if err != nil {
				return nil, fmt.Errorf("find library of %s: %w", file, err)
			}
			add("/usr/lib/x86_64-linux-gnu/"+name, host)
		}
	}
	return out, nil
}

// dynamic returns what an ELF file says of its dynamic linker and libraries.
func dynamic(file string) (interp string, needed []string, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return "", nil, fmt.Errorf("read %s: %w", file, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		b, err := io.ReadAll(p.Open())
		if err != nil {
			return "", nil, fmt.Errorf("read linker of %s: %w", file, err)
		}
		interp = strings.TrimRight(string(b), "\x00")
	}
	needed, err = f.ImportedLibraries()
	if err != nil && f.Section(".dynamic") != nil {
		return "", nil, fmt.Errorf("read libraries of %s: %w", file, err)
	}
	return interp, needed, nil
}
