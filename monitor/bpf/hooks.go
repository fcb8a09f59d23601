package bpf

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf/btf"

	"github.com/pindown/pindown/monitor"
)

// Flags of a hook; src/monitor.c has the same.
const (
	hookSize    = 1
	hookMove    = 2
	hookControl = 4
)

// maxHooks is the number of pairs of programs in the object.
const maxHooks = 6

// hook is struct hook of src/monitor.c.
type hook struct {
	VMA, Start, End, Start2, Flags uint32
}

// target is a kernel function with the arguments that say what it changes.
type target struct {
	name string
	hook hook
}

// parameter names under which the kernel's versions pass the same thing.
var (
	startNames = []string{"start", "addr", "address", "start_addr", "old_addr"}
	endNames   = []string{"end", "end_addr"}
	sizeNames  = []string{"size", "len"}
)

// alternatives are, for each thing that must be seen, the sets of functions
// that show it, best first. A function may be missing from a kernel, or be
// inlined into its callers and so missing from its BTF.
var alternatives = []struct {
	what string
	sets [][]string
}{
	{"unmapping and zapping", [][]string{
		{"unmap_page_range"},
		{"unmap_vmas", "zap_page_range_single_batched", "zap_page_range_single"},
		{"unmap_vmas", "zap_page_range_single"},
	}},
	{"unmapping of hugetlb pages", [][]string{
		{"__unmap_hugepage_range"},
		{"unmap_hugepage_range", "unmap_vmas", "zap_page_range_single_batched", "zap_page_range_single"},
		{"unmap_hugepage_range", "unmap_vmas", "zap_page_range_single"},
	}},
	{"moving", [][]string{{"move_page_tables"}}},
}

// targets finds the functions to attach to in a kernel's BTF.
func targets(spec *btf.Spec) ([]target, error) {
	var all []target
	for _, alt := range alternatives {
		var reasons []error
		for _, names := range alt.sets {
			set, err := resolveSet(spec, names)
			if err != nil {
				reasons = append(reasons, err)
				continue
			}
			for _, t := range set {
				if !slices.Contains(all, t) {
					all = append(all, t)
				}
			}
			reasons = nil
			break
		}
		if reasons != nil {
			return nil, fmt.Errorf("no kernel function for the %s of pages: %w: %w",
				alt.what, errors.Join(reasons...), monitor.ErrNotSupported)
		}
	}
	if len(all) > maxHooks {
		return nil, fmt.Errorf("%d kernel functions needed, at most %d possible: %w",
			len(all), maxHooks, monitor.ErrNotSupported)
	}
	return all, nil
}

func resolveSet(spec *btf.Spec, names []string) ([]target, error) {
	var set []target
	for _, name := range names {
		t, err := resolve(spec, name)
		if err != nil {
			return nil, err
		}
		set = append(set, t)
	}
	return set, nil
}

// hookArguments is how many arguments the programs can read: those in registers on
// amd64. See argument in src/monitor.c.
const hookArguments = 6

// resolve finds a function's arguments by name and type.
func resolve(spec *btf.Spec, name string) (target, error) {
	var fn *btf.Func
	if err := spec.TypeByName(name, &fn); err != nil {
		return target{}, fmt.Errorf("kernel function %s: %w", name, err)
	}
	proto, ok := fn.Type.(*btf.FuncProto)
	if !ok {
		return target{}, fmt.Errorf("kernel function %s: unexpected type %v", name, fn.Type)
	}
	t := target{name: name}
	if i := indexOfPointer(proto, "pagetable_move_control"); i >= 0 {
		t.hook = hook{VMA: uint32(i), Flags: hookControl}
		return t, nil
	}
	vma, start, end := indexOfPointer(proto, "vm_area_struct"), indexOf(proto, startNames), indexOf(proto, endNames)
	if end < 0 {
		end = indexOf(proto, sizeNames)
		t.hook.Flags |= hookSize
	}
	if vma < 0 || start < 0 || end < 0 {
		return target{}, fmt.Errorf("kernel function %s: unexpected parameters %v", name, proto.Params)
	}
	t.hook.VMA, t.hook.Start, t.hook.End = uint32(vma), uint32(start), uint32(end)
	if to := indexOf(proto, []string{"new_addr"}); to >= 0 {
		t.hook.Start2 = uint32(to)
		t.hook.Flags |= hookMove
	}
	if max(t.hook.VMA, t.hook.Start, t.hook.End, t.hook.Start2) >= hookArguments {
		return target{}, fmt.Errorf("kernel function %s: more parameters than the programs read: %v", name, proto.Params)
	}
	return t, nil
}

func indexOf(proto *btf.FuncProto, names []string) int {
	return slices.IndexFunc(proto.Params, func(p btf.FuncParam) bool { return slices.Contains(names, p.Name) })
}

// indexOfPointer returns the first parameter that points to a structure of
// that name.
func indexOfPointer(proto *btf.FuncProto, name string) int {
	return slices.IndexFunc(proto.Params, func(p btf.FuncParam) bool {
		ptr, ok := btf.UnderlyingType(p.Type).(*btf.Pointer)
		if !ok {
			return false
		}
		s, ok := btf.UnderlyingType(ptr.Target).(*btf.Struct)
		return ok && s.Name == name
	})
}

// lockHasPath reports whether the mmap_lock tracepoints pass the memory
// cgroup's path as their second argument, as they did before Linux 6.14.
func lockHasPath(spec *btf.Spec) (bool, error) {
	const name = "btf_trace_mmap_lock_acquire_returned"
	var def *btf.Typedef
	if err := spec.TypeByName(name, &def); err != nil {
		return false, fmt.Errorf("tracepoint mmap_lock_acquire_returned: %w", err)
	}
	ptr, ok := def.Type.(*btf.Pointer)
	if !ok {
		return false, fmt.Errorf("type %s: not a pointer: %v", name, def.Type)
	}
	proto, ok := ptr.Target.(*btf.FuncProto)
	// The first parameter is the tracepoint's private data.
	if !ok || len(proto.Params) < 4 {
		return false, fmt.Errorf("type %s: unexpected: %v", name, ptr.Target)
	}
	_, path := btf.UnderlyingType(proto.Params[2].Type).(*btf.Pointer)
	return path, nil
}
