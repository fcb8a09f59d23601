package bpf

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf/btf"
	"github.com/google/go-cmp/cmp"

	"github.com/pindown/pindown/monitor"
)

// kernelTypes builds BTF with functions of the given parameters.
func kernelTypes(t *testing.T, funcs map[string][]btf.FuncParam) *btf.Spec {
	t.Helper()
	b, err := btf.NewBuilder(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, params := range funcs {
		f := &btf.Func{Name: name, Type: &btf.FuncProto{Return: &btf.Void{}, Params: params}}
		if _, err := b.Add(f); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := b.Marshal(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := btf.LoadSpecFromReader(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func TestTargets(t *testing.T) {
	long := &btf.Int{Name: "long unsigned int", Size: 8}
	pointer := func(name string) btf.Type { return &btf.Pointer{Target: &btf.Struct{Name: name, Size: 8}} }
	vma, tlb, mt := pointer("vm_area_struct"), pointer("mmu_gather"), pointer("maple_tree")
	param := func(name string, typ btf.Type) btf.FuncParam { return btf.FuncParam{Name: name, Type: typ} }

	unmapPageRange := []btf.FuncParam{param("tlb", tlb), param("vma", vma), param("addr", long), param("end", long)}
	unmapHuge := []btf.FuncParam{param("vma", vma), param("start", long), param("end", long)}
	unmapHugeInner := []btf.FuncParam{param("tlb", tlb), param("vma", vma), param("start", long), param("end", long)}
	unmapVMAs := []btf.FuncParam{param("tlb", tlb), param("mt", mt), param("vma", vma), param("start", long), param("end", long)}
	zapSingle := []btf.FuncParam{param("vma", vma), param("address", long), param("size", long)}
	move := []btf.FuncParam{
		param("vma", vma), param("old_addr", long), param("new_vma", vma), param("new_addr", long), param("len", long),
	}
	moveControl := []btf.FuncParam{param("pmc", pointer("pagetable_move_control"))}

	for _, tt := range []struct {
		name  string
		funcs map[string][]btf.FuncParam
		want  []target
	}{
		{
			"6.1",
			map[string][]btf.FuncParam{
				"unmap_page_range": unmapPageRange, "unmap_hugepage_range": unmapHuge, "unmap_vmas": unmapVMAs,
				"zap_page_range_single": zapSingle, "move_page_tables": move,
			},
			[]target{
				{"unmap_page_range", hook{VMA: 1, Start: 2, End: 3}},
				{"unmap_hugepage_range", hook{VMA: 0, Start: 1, End: 2}},
				{"unmap_vmas", hook{VMA: 2, Start: 3, End: 4}},
				{"zap_page_range_single", hook{VMA: 0, Start: 1, End: 2, Flags: hookSize}},
				{"move_page_tables", hook{VMA: 0, Start: 1, End: 4, Start2: 3, Flags: hookSize | hookMove}},
			},
		},
		{
			"6.18",
			map[string][]btf.FuncParam{
				"unmap_page_range": unmapPageRange, "__unmap_hugepage_range": unmapHugeInner, "move_page_tables": moveControl,
			},
			[]target{
				{"unmap_page_range", hook{VMA: 1, Start: 2, End: 3}},
				{"__unmap_hugepage_range", hook{VMA: 1, Start: 2, End: 3}},
				{"move_page_tables", hook{VMA: 0, Flags: hookControl}},
			},
		},
		{"nothing to move", map[string][]btf.FuncParam{"unmap_page_range": unmapPageRange, "__unmap_hugepage_range": unmapHugeInner}, nil},
		{"other parameters", map[string][]btf.FuncParam{
			"unmap_page_range": {param("vma", vma), param("first", long), param("last", long)}, "__unmap_hugepage_range": unmapHugeInner,
			"move_page_tables": move,
		}, nil},
		{"too many parameters", map[string][]btf.FuncParam{
			"unmap_page_range": {
				param("tlb", tlb), param("vma", vma), param("a", long), param("b", long), param("c", long),
				param("addr", long), param("end", long),
			},
			"__unmap_hugepage_range": unmapHugeInner, "move_page_tables": move,
		}, nil},
	} {
		got, err := targets(kernelTypes(t, tt.funcs))
		if (err != nil) != (tt.want == nil) || err != nil && !errors.Is(err, monitor.ErrNotSupported) {
			t.Errorf("%s: %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(target{})); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tt.name, diff)
		}
	}
}

// The running kernel's types are read without privilege.
func TestTargetsHere(t *testing.T) {
	spec, err := btf.LoadKernelSpec()
	if err != nil && os.Getenv("CI") != "true" {
		t.Skipf("a kernel with BTF needed: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	got, err := targets(spec)
	if err != nil {
		t.Fatal(err)
	}
	path, err := lockHasPath(spec)
	t.Logf("functions %+v, path in mmap_lock's tracepoints: %v, %v", got, path, err)
}
