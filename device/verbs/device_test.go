package verbs_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pindown/pindown/device"
	"github.com/pindown/pindown/device/verbs"
	"github.com/pindown/pindown/vm"
)

// TestInfo shows what the adapter is.
func TestInfo(t *testing.T) {
	d := open(t, nil)
	t.Logf("%+v", d.Info())
	t.Logf("%+v", d.Limits())
}

// Where the adapter can't re-register, nothing happens when it is asked to, and
// what is left is to deregister and register. Then the keys change: the old one
// is dead, a peer must be told the new one.
func TestUpdateFallback(t *testing.T) {
	d := openReal(t)
	if d.Info().Update {
		t.Skipf("%s re-registers", d.Info().Name)
	}
	ctx := t.Context()
	src, dst := mapMemory(t, 1), mapMemory(t, 1)
	from := register(t, d, src, device.LocalWrite)
	old := register(t, d, dst, device.LocalWrite|device.RemoteWrite)
	write := func(c byte, key uint32) error {
		p := connected(t, d)
		fill(src, c)
		must(t, p.a.Write(1, vm.RangeOf(src), from.LocalKey, addr(dst), key))
		return p.a.Do(ctx)
	}
	must(t, churn[0].do(dst))
	for _, r := range rereg {
		if err := r.call(d, old); !errors.Is(err, device.ErrNotSupported) {
			t.Errorf("%s: %v", r.name, err)
		}
	}
	// The old registration is intact, and stale.
	if err := write('o', old.RemoteKey); err != nil || bytes.ContainsRune(dst, 'o') {
		t.Errorf("write under the old key: %v, or it arrived", err)
	}
	must(t, d.Deregister(old))
	fresh := register(t, d, dst, device.LocalWrite|device.RemoteWrite)
	if fresh.RemoteKey == old.RemoteKey {
		t.Errorf("key %#x again", old.RemoteKey)
	}
	if err := write('x', old.RemoteKey); !errors.Is(err, verbs.ErrCompletion) {
		t.Errorf("write under the dead key: %v", err)
	}
	if err := write('n', fresh.RemoteKey); err != nil || !bytes.Equal(dst, src) {
		t.Errorf("write under the new key: %v, or it didn't arrive", err)
	}
	t.Logf("device %s can't re-register: deregistered and registered, remote key %#x became %#x", d.Info().Name, old.RemoteKey, fresh.RemoteKey)
}

func TestHugePages(t *testing.T) {
	d := openReal(t)
	const size = 2 << 20
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB)
	if err != nil && os.Getenv("PINDOWN_VM") == "" {
		t.Skipf("needs a huge page of 2 MiB (sysctl vm.nr_hugepages): %v", err)
	}
	must(t, err)
	defer func() { must(t, unix.Munmap(b)) }()
	src := mapMemory(t, 4)
	fill(src, 'h')
	from := register(t, d, src, device.LocalWrite)
	p := connected(t, d)
	// All of it, and a part that no page begins with.
	for _, r := range []vm.Range{vm.RangeOf(b), part(b, 1<<20+100, 1<<20+100+len(src))} {
		reg, err := d.Register(t.Context(), r, device.LocalWrite|device.RemoteWrite)
		must(t, err)
		clear(b)
		must(t, p.a.Write(1, vm.RangeOf(src), from.LocalKey, uint64(r.Start), reg.RemoteKey), p.a.Do(t.Context()))
		off := int(r.Start - vm.RangeOf(b).Start)
		if !bytes.Equal(b[off:off+len(src)], src) || bytes.Count(b, []byte("h")) != len(src) {
			t.Errorf("write into %v didn't arrive, or elsewhere too", r)
		}
		must(t, d.Deregister(reg))
	}
}

// Handles of one device mean nothing to another.
func TestForeignHandle(t *testing.T) {
	one, other := open(t, nil), open(t, nil)
	b := mapMemory(t, 1)
	reg := register(t, one, b, device.LocalWrite)
	register(t, other, b, device.LocalWrite)
	if err := other.Deregister(reg); !errors.Is(err, device.ErrNotRegistered) {
		t.Errorf("%v", err)
	}
	if _, err := other.Expose(context.Background(), reg, vm.RangeOf(b), device.RemoteRead); !errors.Is(err, device.ErrNotRegistered) {
		t.Errorf("%v", err)
	}
	must(t, one.Deregister(reg))
}

// Close waits for nothing that is only registered, and takes queues, windows and
// keys with it.
func TestCloseTakesAll(t *testing.T) {
	d := open(t, nil)
	b := mapMemory(t, 1)
	reg := register(t, d, b, bindable)
	q, err := d.NewQueue(nil)
	must(t, err)
	_, err = d.Expose(t.Context(), reg, vm.RangeOf(b), device.RemoteRead)
	must(t, err)
	_, err = d.AllocFastKey(t.Context(), 4096)
	must(t, err, d.Close())
	if d.Live() != 0 {
		t.Errorf("%d registrations", d.Live())
	}
	must(t, q.Close(), d.Close())
	if _, err := d.NewQueue(nil); !errors.Is(err, device.ErrClosed) {
		t.Errorf("queue of a closed device: %v", err)
	}
}
