package vm

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// baseModules are what every guest loads: the control channel, and the disk. crc32c_generic is a soft dependency of ext4 by an algorithm's name.
var baseModules = []string{"virtio_pci", "virtio_console", "virtio_blk", "crc32c_generic", "ext4"}

// rdmaModules make a soft-RoCE adapter. rdma_rxe asks the crypto layer for crc32 by name: without crc32_generic, adding a link fails with ENOENT.
var rdmaModules = []string{"crc32_generic", "dummy", "rdma_rxe", "configfs", "ib_cm", "iw_cm", "rdma_cm", "rdma_ucm"}

// Errors returned by moduleSet.resolve, wrapped.
var (
	errNoModule    = errors.New("no such module")
	errModuleCycle = errors.New("modules depend on each other")
)

// module is a kernel module's file.
type module struct {
	name string
	path string
}

// moduleSet knows the modules of a kernel.
//
// The kernel package has no modules.dep; depmod writes that when the package is installed. So dependencies are read from the modules themselves.
type moduleSet struct {
	paths   map[string]string // by name
	builtin map[string]bool
	depends func(path string) ([]string, error)
}

// openModules lists lib/modules/<release>.
func openModules(dir string) (*moduleSet, error) {
	s := &moduleSet{paths: make(map[string]string), builtin: make(map[string]bool), depends: readDepends}
	b, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	for p := range strings.FieldsSeq(string(b)) {
		s.builtin[moduleName(p)] = true
	}
	err = filepath.WalkDir(filepath.Join(dir, "kernel"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			s.paths[moduleName(path)] = path
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	return s, nil
}

// moduleName is the name of the module in a file: the kernel takes - and _ for the same.
func moduleName(path string) string {
	name, _, _ := strings.Cut(filepath.Base(path), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// resolve returns the modules of those names and all that they depend on, each once, in an order in which they load. What is built into the
// kernel is left out.
func (s *moduleSet) resolve(names ...string) ([]module, error) {
	var out []module
	const visiting, finished = 1, 2
	state := make(map[string]int)
	var visit func(name string) error
	visit = func(name string) error {
		name = moduleName(name)
		switch state[name] {
		case finished:
			return nil
		case visiting:
			return fmt.Errorf("resolve module %s: %w", name, errModuleCycle)
		}
		state[name] = visiting
		path, ok := s.paths[name]
		if !ok && s.builtin[name] {
			state[name] = finished
			return nil
		}
		if !ok {
			return fmt.Errorf("resolve module %s: %w", name, errNoModule)
		}
		deps, err := s.depends(path)
		if err != nil {
			return fmt.Errorf("resolve module %s: %w", name, err)
		}
		for _, d := range deps {
			if err := visit(d); err != nil {
				return fmt.Errorf("resolve module %s: %w", name, err)
			}
		}
		state[name] = finished
		out = append(out, module{name, path})
		return nil
	}
	for _, n := range names {
		if err := visit(n); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// readDepends returns the names of the modules that the one at path depends on.
func readDepends(path string) ([]string, error) {
	b, err := readModule(path)
	if err != nil {
		return nil, err
	}
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer f.Close()
	sec := f.Section(".modinfo")
	if sec == nil {
		return nil, fmt.Errorf("read %s: no .modinfo", path)
	}
	info, err := sec.Data()
	if err != nil {
		return nil, fmt.Errorf("read .modinfo of %s: %w", path, err)
	}
	return parseDepends(info), nil
}

// parseDepends finds depends= in a .modinfo section, which holds key=value strings that end with NULs.
func parseDepends(info []byte) []string {
	for kv := range bytes.SplitSeq(info, []byte{0}) {
		if v, ok := bytes.CutPrefix(kv, []byte("depends=")); ok && len(v) > 0 {
			return strings.Split(string(v), ",")
		}
	}
	return nil
}

// readModule returns a module's content, decompressed.
func readModule(path string) ([]byte, error) {
	switch filepath.Ext(path) {
	case ".ko":
		return os.ReadFile(path)
	case ".gz":
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		z, err := gzip.NewReader(f)
		if err != nil {
			return nil, fmt.Errorf("decompress %s: %w", path, err)
		}
		return io.ReadAll(z)
	case ".xz":
		return output(tool("xz", "-dc", path))
	case ".zst":
		return output(tool("zstd", "-dcq", path))
	default:
		return nil, fmt.Errorf("decompress %s: unknown format", path)
	}
}
