package workloads

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
)

// ErrMissing says that the machine lacks a program that a workload needs.
var ErrMissing = errors.New("not installed")

//go:embed programs
var programs embed.FS

// Workload is a program to run.
type Workload struct {
	Name string
	// What it does, for people.
	What string
	// UseBytes is the size of a transfer from which on it is a use of a buffer.
	UseBytes uint64
	prepare  func(ctx context.Context, p *place) error
}

// Prepared is a workload that can be run, as often as wanted.
type Prepared struct {
	Command []string
	// Env is added to the environment.
	Env []string
}

// place is where a workload is made ready.
type place struct {
	dir    string // empty, the workload's own
	module string // the root of this module
	scale  int
	out    Prepared
}

const useBytes = 16 << 10

// All returns the workloads.
func All() []Workload {
	return []Workload{
		{"go build", "The Go compiler builds encoding/json and all that it imports anew: " +
			"many short processes, each with a heap that grows.", useBytes, prepareGoBuild},
		{"go server", "A server in Go with a small heap limit, so that the garbage collector runs and the scavenger gives memory back all the time; " +
			"four clients in the same process send requests of 16 KiB to 1 MiB over TCP.", useBytes, prepareGoServer},
		{"malloc", "A program in C reads a file into buffers of 16 KiB to 4 MiB from malloc, writes them, and frees them in another order; " +
			"glibc's thresholds as they are by default: they adapt, and most buffers come from the heap.", useBytes, prepareMalloc(false)},
		{"malloc, fixed threshold", "The same with glibc's mmap threshold fixed at 128 KiB (MALLOC_MMAP_THRESHOLD_): " +
			"every larger buffer is a mapping of its own, made and unmapped.", useBytes, prepareMalloc(true)},
		{"python", "Arrays in Python as numpy makes them: read from a file into new memory, computed with, written, dropped.", useBytes, preparePython},
		{"redis", "Redis (jemalloc) under redis-benchmark: values of 64 KiB set and got by 20 clients.", useBytes, prepareRedis},
		{"postgresql", "PostgreSQL under pgbench with 4 clients, its buffers in System V or mapped shared memory; " +
			"uses from 8 KiB on, its page size.", 8 << 10, preparePostgreSQL},
	}
}

// Prepare makes the workload ready in dir, an empty directory. Scale is about
// how many seconds it runs on an idle machine; 0 is a moment. The error wraps [ErrMissing] if it needs something
// that isn't there.
func (w *Workload) Prepare(ctx context.Context, dir string, scale int) (*Prepared, error) {
	module, err := moduleRoot(ctx)
	if err != nil {
		return nil, err
	}
	p := &place{dir: dir, module: module, scale: scale}
	if err := w.prepare(ctx, p); err != nil {
		return nil, fmt.Errorf("prepare workload %s: %w", w.Name, err)
	}
	return &p.out, nil
}

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("find module: %w", err)
	}
	return string(out[:max(0, len(out)-1)]), nil
}

// need returns the path of the first of these programs that there is.
func need(names ...string) (string, error) {
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s: %w", names[0], ErrMissing)
}

// run runs a command that prepares something.
func run(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// file writes one of the programs to the place and returns its path.
func (p *place) file(name string) (string, error) {
	b, err := programs.ReadFile("programs/" + name)
	if err != nil {
		return "", err
	}
	path := filepath.Join(p.dir, name)
	return path, os.WriteFile(path, b, 0o755) //nolint:gosec // Another user may have to run it.
}

// rounds returns how often a workload does its work.
func (p *place) rounds(perSecond int) string {
	const fewest = 40
	return strconv.Itoa(max(fewest, perSecond*p.scale))
}

// data makes a file to read from.
func (p *place) data() (string, error) {
	const size = 64 << 20
	path := filepath.Join(p.dir, "data")
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(i * i >> 3)
	}
	return path, os.WriteFile(path, b, 0o644) //nolint:gosec // Likewise.
}

func prepareGoBuild(_ context.Context, p *place) error {
	path, err := need("go")
	if err != nil {
		return err
	}
	p.out.Command = []string{path, "build", "-a", "encoding/json"}
	return nil
}

func prepareGoServer(ctx context.Context, p *place) error {
	program := filepath.Join(p.dir, "goserver")
	if err := run(ctx, p.module, "go", "build", "-o", program, "./internal/workloads/goserver"); err != nil {
		return err
	}
	const perSecond = 500
	p.out.Command = []string{program, "-requests", p.rounds(perSecond)}
	return nil
}

func prepareMalloc(fixed bool) func(context.Context, *place) error {
	return func(ctx context.Context, p *place) error {
		gcc, err := need("gcc", "cc")
		if err != nil {
			return err
		}
		source, err := p.file("malloc.c")
		if err != nil {
			return err
		}
		data, err := p.data()
		if err != nil {
			return err
		}
		program := filepath.Join(p.dir, "malloc")
		if err := run(ctx, p.dir, gcc, "-O2", "-fno-omit-frame-pointer", "-o", program, source); err != nil {
			return err
		}
		const perSecond = 1000
		p.out.Command = []string{program, data, p.rounds(perSecond)}
		if fixed {
			p.out.Env = []string{"MALLOC_MMAP_THRESHOLD_=131072"}
		}
		return nil
	}
}

func preparePython(_ context.Context, p *place) error {
	path, err := need("/usr/bin/python3", "python3")
	if err != nil {
		return err
	}
	source, err := p.file("arrays.py")
	if err != nil {
		return err
	}
	data, err := p.data()
	if err != nil {
		return err
	}
	const perSecond = 60
	p.out.Command = []string{path, source, data, p.rounds(perSecond)}
	return nil
}

func prepareRedis(_ context.Context, p *place) error {
	for _, name := range []string{"redis-server", "redis-benchmark"} {
		if _, err := need(name); err != nil {
			return err
		}
	}
	script, err := p.file("redis.sh")
	if err != nil {
		return err
	}
	const perSecond = 2000
	p.out.Command = []string{"/bin/sh", script, p.dir, p.rounds(perSecond)}
	return nil
}

func preparePostgreSQL(ctx context.Context, p *place) error {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil || len(found) == 0 {
		return fmt.Errorf("postgresql: %w", ErrMissing)
	}
	script, err := p.file("postgresql.sh")
	if err != nil {
		return err
	}
	p.out.Command = []string{"/bin/sh", script, found[len(found)-1], p.dir, strconv.Itoa(max(1, p.scale))}
	if os.Geteuid() != 0 {
		return run(ctx, p.dir, "/bin/sh", script, found[len(found)-1], p.dir, "init")
	}
	// It refuses to run as root.
	u, err := user.Lookup("postgres")
	if err != nil {
		return fmt.Errorf("postgresql: %w: %w", err, ErrMissing)
	}
	setpriv, err := need("setpriv")
	if err != nil {
		return err
	}
	as := []string{"--reuid=" + u.Uid, "--regid=" + u.Gid, "--clear-groups"}
	if err := run(ctx, p.dir, "chown", u.Uid+":"+u.Gid, p.dir); err != nil {
		return err
	}
	if err := run(ctx, p.dir, setpriv, append(as, "/bin/sh", script, found[len(found)-1], p.dir, "init")...); err != nil {
		return err
	}
	p.out.Command = append(append([]string{setpriv}, as...), p.out.Command...)
	return nil
}
