package bpf

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

func TestLoad(t *testing.T) {
	spec, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	if err := spec.Variables["target_mm"].Set(uint64(0xffff888000001000)); err != nil {
		t.Fatal(err)
	}
	for name, p := range spec.Programs {
		if p.Type == ebpf.Tracing && p.AttachType != ebpf.AttachTraceRawTp {
			delete(spec.Programs, name)
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}})
	if err != nil {
		var ve *ebpf.VerifierError
		if errors.As(err, &ve) {
			t.Fatalf("%+v", ve)
		}
		t.Fatal(err)
	}
	defer coll.Close()
	for name, p := range coll.Programs {
		t.Log(name, p.VerifierLog)
	}
	ps := &ebpf.ProgramSpec{Type: ebpf.Tracing, AttachType: ebpf.AttachTraceFEntry, AttachTo: "unmap_vmas", License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}}
	p, err := ebpf.NewProgram(ps)
	t.Logf("fentry load %+v", err)
	ps.AttachType = ebpf.AttachTraceFExit
	_, err = ebpf.NewProgram(ps)
	t.Logf("fexit load %+v", err)
	if err == nil {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		t.Log("fentry attach", l, err)
	}
}
