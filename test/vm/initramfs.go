package vm

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pindown/pindown/test/vm/internal/cpio"
)

const (
	agentPath  = "/agent"
	configPath = "/etc/pindown-vm.json"
	agentPkg   = "github.com/pindown/pindown/test/vm/agent"
)

// agentConfig is what package agent reads.
type agentConfig struct {
	Modules []string
	Disk    string
	DiskDir string
}

// etc are the files that a guest's programs expect.
var etc = map[string]string{
	"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n",
	"etc/group":  "root:x:0:\nnogroup:x:65534:\n",
	"etc/hosts":  "127.0.0.1 localhost\n::1 localhost\n",
}

// buildInitramfs writes the guest's root file system.
func (m *Machine) buildInitramfs(k kernel, sysroot string) (err error) {
	agent := m.path("agent")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", agent, agentPkg)
	build.Dir = m.root
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if _, err := output(build); err != nil {
		return fmt.Errorf("build agent: %w", err)
	}
	f, err := os.Create(m.path("initramfs"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	buf := bufio.NewWriterSize(f, 1<<20)
	w := cpio.NewWriter(buf)

	for name, perm := range map[string]fs.FileMode{
		"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "root": 0o700, "mnt": 0o755, "tmp": 0o777 | fs.ModeSticky, "usr/bin": 0o755,
	} {
		if err := w.Dir(name, perm); err != nil {
			return err
		}
	}
	// The kernel opens it for the first process, before that can mount anything.
	if err := w.CharDevice("dev/console", 0o600, 5, 1); err != nil {
		return err
	}
	for _, name := range []string{"lib", "lib64"} {
		if err := w.Symlink(name, "usr/"+name); err != nil {
			return err
		}
	}
	for name, content := range etc {
		if err := addBytes(w, name, 0o644, []byte(content)); err != nil {
			return err
		}
	}
	if err := addFile(w, agentPath, agent); err != nil {
		return err
	}
	if err := addBusybox(w); err != nil {
		return err
	}
	if err := m.addModules(w, k); err != nil {
		return err
	}
	if err := m.addPrograms(w, sysroot); err != nil {
		return err
	}
	for _, guest := range slices.Sorted(maps.Keys(m.opts.Files)) {
		if err := addFile(w, guest, m.opts.Files[guest]); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return buf.Flush()
}

func addBytes(w *cpio.Writer, name string, perm fs.FileMode, b []byte) error {
	return w.File(name, perm, int64(len(b)), bytes.NewReader(b))
}

// addFile copies a host's file to an absolute guest path.
func addFile(w *cpio.Writer, guest, host string) error {
	f, err := os.Open(host)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	return w.File(guestName(guest), fi.Mode(), fi.Size(), f)
}

// guestName turns an absolute guest path into an entry's name. The guest's /lib and /lib64 are links into /usr, as Debian has it.
func guestName(guest string) string {
	name := strings.TrimPrefix(path.Clean(guest), "/")
	if strings.HasPrefix(name, "lib/") || strings.HasPrefix(name, "lib64/") {
		return "usr/" + name
	}
	return name
}

// addBusybox adds busybox and a link for each of its commands.
func addBusybox(w *cpio.Writer) error {
	host, err := lookTool("busybox")
	if err != nil {
		return err
	}
	if err := addFile(w, "/bin/busybox", host); err != nil {
		return err
	}
	list, err := output(exec.Command(host, "--list"))
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(list)) {
		if name == "busybox" {
			continue
		}
		if err := w.Symlink("bin/"+name, "busybox"); err != nil {
			return err
		}
	}
	return nil
}

// addModules adds the modules and the agent's configuration, which lists them in load order.
func (m *Machine) addModules(w *cpio.Writer, k kernel) error {
	set, err := openModules(k.modules)
	if err != nil {
		return err
	}
	names := slices.Clone(baseModules)
	if m.opts.RDMA {
		names = append(names, rdmaModules...)
	}
	mods, err := set.resolve(append(names, m.opts.Modules...)...)
	if err != nil {
		return err
	}
	cfg := agentConfig{Disk: "/dev/vda", DiskDir: DiskDir}
	for _, mod := range mods {
		b, err := readModule(mod.path)
		if err != nil {
			return err
		}
		name := "usr/lib/modules/" + mod.name + ".ko"
		if err := addBytes(w, name, 0o644, b); err != nil {
			return err
		}
		cfg.Modules = append(cfg.Modules, "/"+name)
	}
	b, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	return addBytes(w, strings.TrimPrefix(configPath, "/"), 0o644, b)
}

// addPrograms adds dynamically linked programs, and what RDMA programs load at run time.
func (m *Machine) addPrograms(w *cpio.Writer, sysroot string) error {
	roots := []string{"/"}
	files := make(map[string]string) // host path by guest path
	var objects []string
	if m.opts.RDMA {
		roots = []string{sysroot, "/"}
		const libDir = "/usr/lib/x86_64-linux-gnu/"
		patterns := []string{
			"/usr/bin/ibv_*", libDir + "libibverbs/librxe-*.so", libDir + "libibverbs.so.1", libDir + "librdmacm.so.1",
		}
		for _, p := range patterns {
			found, err := filepath.Glob(sysroot + p)
			if err != nil || len(found) == 0 {
				return fmt.Errorf("find %s among the RDMA packages: %w", p, cmp.Or(err, fs.ErrNotExist))
			}
			for _, host := range found {
				files[strings.TrimPrefix(host, sysroot)] = host
				objects = append(objects, host)
			}
		}
		files["/etc/libibverbs.d/rxe.driver"] = sysroot + "/etc/libibverbs.d/rxe.driver"
		rdma, err := findIn(roots, programDirs, "rdma")
		if err != nil {
			return err
		}
		files["/usr/bin/rdma"] = rdma
		objects = append(objects, rdma)
	}
	for _, name := range m.opts.Programs {
		host, err := lookTool(name)
		if err != nil {
			return err
		}
		files["/usr/bin/"+filepath.Base(name)] = host
		objects = append(objects, host)
	}
	libs, err := libraries(roots, objects...)
	if err != nil {
		return err
	}
	maps.Copy(files, libs)
	for guest := range files {
		m.libs[guest] = true
	}
	for _, guest := range slices.Sorted(maps.Keys(files)) {
		if err := addFile(w, guest, files[guest]); err != nil {
			return err
		}
	}
	return nil
}
