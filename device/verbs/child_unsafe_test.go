package verbs_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

// childEnv names what a child process of the tests is to do.
const childEnv = "PINDOWN_VERBS_CHILD"

// children are the programs of child processes, by childEnv.
var children = map[string]func() error{"writer": writer}

func timeout(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// offer is what the writer is told of the memory that it may write to.
type offer struct {
	Addr uint64
	Key  uint32
	Len  int
}

// regsOfWriter is how many registrations the writer has.
const regsOfWriter = 32

// writer connects to its parent and writes to its memory without end.
func writer() error {
	ctx := context.Background()
	conn, err := net.Dial("tcp", os.Getenv("PINDOWN_VERBS_ADDR"))
	if err != nil {
		return err
	}
	d, err := verbs.Open(nil)
	if err != nil {
		return err
	}
	q, err := d.NewQueue(nil)
	if err != nil {
		return err
	}
	if err := q.Handshake(ctx, conn); err != nil {
		return err
	}
	var o offer
	if err := json.NewDecoder(conn).Decode(&o); err != nil {
		return err
	}
	b, err := unix.Mmap(-1, 0, o.Len, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	var reg device.Registration
	for range regsOfWriter {
		if reg, err = d.Register(ctx, vm.RangeOf(b), device.LocalWrite); err != nil {
			return err
		}
	}
	for i := 1; ; i++ {
		fill(b, byte(i))
		for range 4 {
			if err := q.Write(1, vm.RangeOf(b), reg.LocalKey, o.Addr, o.Key); err != nil {
				return err
			}
		}
		if err := q.Do(ctx); err != nil {
			return err
		}
	}
}

// threads returns the numbers of a process's threads: that is what the kernel
// notes with an object, of the thread that made it.
func threads(t *testing.T, pid int) map[int]bool {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	must(t, err)
	tids := map[int]bool{}
	for _, e := range entries {
		tid, err := strconv.Atoi(e.Name())
		must(t, err)
		tids[tid] = true
	}
	return tids
}

// resources returns how many objects of a kind the kernel knows of these
// threads, as the rdma command tells.
func resources(t *testing.T, kind string, tids map[int]bool) int {
	t.Helper()
	out, err := exec.Command("rdma", "-j", "resource", "show", kind).Output()
	if err != nil {
		t.Fatalf("rdma resource show %s: %v", kind, err)
	}
	var list []struct {
		IfName string
		PID    int
	}
	if len(out) > 0 {
		if err := json.Unmarshal(out, &list); err != nil {
			t.Fatalf("rdma resource show %s: %v: %s", kind, err, out)
		}
	}
	n := 0
	for _, r := range list {
		if tids[r.PID] {
			n++
		}
	}
	return n
}

// A process that is killed in the middle of a transfer leaves nothing registered.
func TestKilled(t *testing.T) {
	d := openReal(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=writer", "PINDOWN_VERBS_ADDR="+l.Addr().String())
	cmd.Stderr = os.Stderr
	must(t, cmd.Start())
	pid := cmd.Process.Pid
	killed := false
	defer func() {
		if !killed {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}()
	conn, err := l.Accept()
	must(t, err)
	defer conn.Close()
	q, err := d.NewQueue(nil)
	must(t, err)
	defer q.Close()
	ctx, cancel := timeout(time.Minute)
	defer cancel()
	must(t, q.Handshake(ctx, conn))
	b := mapMemory(t, 16)
	reg := register(t, d, b, device.LocalWrite|device.RemoteWrite)
	must(t, json.NewEncoder(conn).Encode(offer{addr(b), reg.RemoteKey, len(b)}))

	last := (*atomic.Uint32)(unsafe.Pointer(&b[len(b)-4]))
	for last.Load() < 0x03030303 { // Until the third round has arrived.
		if ctx.Err() != nil {
			t.Fatal("the writer doesn't write")
		}
		runtime.Gosched()
	}
	tids := threads(t, pid)
	mrs, qps := resources(t, "mr", tids), resources(t, "qp", tids)
	if mrs < regsOfWriter || qps < 1 {
		t.Errorf("before: %d registrations, %d queues of process %d", mrs, qps, pid)
	}
	must(t, cmd.Process.Kill())
	err = cmd.Wait()
	killed = true
	if e, ok := errors.AsType[*exec.ExitError](err); !ok || e.Exited() {
		t.Errorf("the writer ended by itself: %v", err)
	}
	left := map[string]int{}
	for _, kind := range []string{"mr", "qp", "cq", "pd", "ctx"} {
		if n := resources(t, kind, tids); n > 0 {
			left[kind] = n
		}
	}
	if len(left) > 0 {
		t.Errorf("left by the killed process: %v", left)
	}
	t.Logf("%d registrations and %d queues before the kill in the middle of a transfer, none after", mrs, qps)
}

// runChild is a child process.
func runChild(run func() error) int {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
