package probe

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

type fileID struct{ dev, ino uint64 }

// verbsFunctions are those of libibverbs that are watched, with the cookies
// that tell src/profile.c which is which.
var verbsFunctions = map[string]uint64{
	"ibv_reg_mr":       1,
	"ibv_reg_mr_iova":  2,
	"ibv_reg_mr_iova2": 2,
	"ibv_dereg_mr":     3,
	"ibv_rereg_mr":     4,
}

// IsVerbs reports whether a file of that name is a copy of libibverbs.
func IsVerbs(path string) bool {
	name := filepath.Base(path)
	return name == "libibverbs.so" || strings.HasPrefix(name, "libibverbs.so.")
}

// AttachVerbs watches the registrations made through the copy of libibverbs at
// path, in all followed tasks. It does nothing for a file that is watched
// already. Calls that are in progress aren't seen.
func (p *Probe) AttachVerbs(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	id := fileID{st.Dev, st.Ino}
	if p.verbs[id] {
		return nil
	}
	links, err := p.attachTo(path)
	if err != nil {
		for _, l := range links {
			err = errors.Join(err, l.Close())
		}
		return err
	}
	p.links = append(p.links, links...)
	p.verbs[id] = true
	return nil
}

func (p *Probe) attachTo(path string) (links []link.Link, err error) {
	offsets, err := functionOffsets(path)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	exe, err := link.OpenExecutable(path)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	attach := p.attachEach
	if p.multi {
		attach = p.attachAll
	}
	links, err = attach(exe, offsets)
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("needs CAP_SYS_ADMIN: %w", err)
	}
	if err != nil {
		return links, fmt.Errorf("attach to %s: %w", path, err)
	}
	return links, nil
}

// attachAll attaches to all functions at once, since Linux 6.6. To end that the
// kernel waits once; separate ones it ends one after the other, some 40 ms each.
func (p *Probe) attachAll(exe *link.Executable, functions []function) ([]link.Link, error) {
	var opts link.UprobeMultiOptions
	for _, f := range functions {
		opts.Addresses = append(opts.Addresses, f.offset)
		opts.Cookies = append(opts.Cookies, f.cookie)
	}
	// The return first: a call is known by its entry.
	returns, err := exe.UretprobeMulti(nil, p.coll.Programs["on_verbs_return"], &opts)
	if err != nil {
		return nil, err
	}
	entries, err := exe.UprobeMulti(nil, p.coll.Programs["on_verbs"], &opts)
	if err != nil {
		return []link.Link{returns}, err
	}
	return []link.Link{returns, entries}, nil
}

func (p *Probe) attachEach(exe *link.Executable, functions []function) (links []link.Link, err error) {
	for _, f := range functions {
		opts := &link.UprobeOptions{Address: f.offset, Cookie: f.cookie}
		for _, attach := range []func() (link.Link, error){
			func() (link.Link, error) { return exe.Uretprobe(f.name, p.coll.Programs["on_verbs_return"], opts) },
			func() (link.Link, error) { return exe.Uprobe(f.name, p.coll.Programs["on_verbs"], opts) },
		} {
			l, err := attach()
			if err != nil {
				return links, fmt.Errorf("%s: %w", f.name, err)
			}
			links = append(links, l)
		}
	}
	return links, nil
}

// Attached reports whether the copy of libibverbs at path is watched.
func (p *Probe) Attached(path string) bool {
	var st unix.Stat_t
	return unix.Stat(path, &st) == nil && p.verbs[fileID{st.Dev, st.Ino}]
}

type function struct {
	name           string
	offset, cookie uint64
}

// functionOffsets finds the functions in a library: all versions of a symbol.
func functionOffsets(path string) ([]function, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, err
	}
	var found []function
	seen := map[uint64]bool{}
	for _, s := range symbols {
		cookie := verbsFunctions[s.Name]
		if cookie == 0 || elf.ST_TYPE(s.Info) != elf.STT_FUNC || s.Section == elf.SHN_UNDEF || seen[s.Value] {
			continue
		}
		for _, prog := range f.Progs {
			if prog.Type == elf.PT_LOAD && s.Value >= prog.Vaddr && s.Value < prog.Vaddr+prog.Filesz {
				seen[s.Value] = true
				found = append(found, function{s.Name, s.Value - prog.Vaddr + prog.Off, cookie})
			}
		}
	}
	if len(found) == 0 {
		return nil, errors.New("no function that registers memory")
	}
	return found, nil
}

// InstalledVerbs returns the copies of libibverbs at the usual places: those in
// the directories of the environment variable LD_LIBRARY_PATH, and of the
// system.
func InstalledVerbs() []string {
	dirs := filepath.SplitList(os.Getenv("LD_LIBRARY_PATH"))
	dirs = append(dirs, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64",
		"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu")
	var found []string
	for _, dir := range dirs {
		if dir == "" {
			continue
		}
		// The pattern is a good one.
		files, _ := filepath.Glob(filepath.Join(dir, "libibverbs.so*"))
		found = append(found, files...)
	}
	return found
}
