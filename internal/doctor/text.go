package doctor

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/pindown/pindown/internal/plural"
	"github.com/pindown/pindown/monitor"
	"github.com/pindown/pindown/vm"
)

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "kernel\t%s, %s, %s\n", r.Kernel, r.Arch, r.Go)
	fmt.Fprintf(tw, "user\t%s\n", r.Privileges.text())
	for _, s := range r.Settings {
		fmt.Fprintf(tw, "%s\t%s%s\n", s.Name, s.Value, when(s.Meaning != "", "   ("+s.Meaning+")"))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, d := range r.Devices {
		title(&b, "device "+d.Name, d.Usable, r.Selected.Device == d.Name)
		why(&b, d.Usable, d.Reason, d.Hint)
		if d.Usable && d.Limits != (Limits{}) {
			fmt.Fprintf(&b, "  limits: %s, %s pinned, %s each\n",
				when(d.Limits.MaxRegistrations == 0, "unlimited registrations")+when(d.Limits.MaxRegistrations > 0, plural.Of(d.Limits.MaxRegistrations, "registration")),
				orNone(d.Limits.MaxPinnedBytes > 0, formatBytes(d.Limits.MaxPinnedBytes)),
				orNone(d.Limits.MaxRange > 0, formatBytes(d.Limits.MaxRange)))
		}
	}
	for _, m := range r.Monitors {
		modes := m.Modes
		if len(modes) == 0 {
			modes = []Mode{{Usable: m.Usable, Reason: m.Reason, Hint: m.Hint, Coverage: m.Coverage}}
		}
		for _, mode := range modes {
			name := "monitor " + m.Name + when(mode.Name != "", ", mode "+mode.Name)
			title(&b, name, mode.Usable, r.Selected.Monitor == m.Name && r.Selected.Mode == mode.Name)
			why(&b, mode.Usable, mode.Reason, mode.Hint)
			if err := r.matrix(&b, mode.Coverage); err != nil {
				return err
			}
		}
	}
	fmt.Fprintf(&b, "\nA cache with default options would use monitor %s%s and device %s.\n",
		r.Selected.Monitor, when(r.Selected.Mode != "", " in mode "+r.Selected.Mode), r.Selected.Device)
	if r.Selected.Monitor == "none" {
		b.WriteString("Without a monitor it doesn't cache: it registers for each use.\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Privileges) text() string {
	var has, lacks []string
	for _, c := range capabilities {
		if p.Capabilities[c.name] {
			has = append(has, c.name)
		} else {
			lacks = append(lacks, c.name)
		}
	}
	s := fmt.Sprintf("uid %d", p.UID)
	if len(has) > 0 {
		s += ", has " + strings.Join(has, " ")
	}
	if len(lacks) > 0 {
		s += ", lacks " + strings.Join(lacks, " ")
	}
	s += ", seccomp " + p.Seccomp
	s += when(p.NoNewPrivs, ", no_new_privs") + when(p.UserNamespace, ", in a user namespace")
	return s
}

func title(b *strings.Builder, what string, usable, selected bool) {
	state := "not usable"
	if usable {
		state = "usable" + when(selected, ", selected")
	}
	fmt.Fprintf(b, "\n%s: %s\n", what, state)
}

func why(b *strings.Builder, usable bool, reason, hint string) {
	if reason != "" {
		fmt.Fprintf(b, "  %s: %s\n", map[bool]string{true: "note", false: "why"}[usable], reason)
	}
	if hint != "" {
		fmt.Fprintf(b, "  fix: %s\n", hint)
	}
}

func orNone(ok bool, s string) string {
	if ok {
		return s
	}
	return "unlimited"
}

// matrix writes a table of operations by kinds of mapping. Kinds of which
// nothing is cached make no column.
func (r *Report) matrix(b *strings.Builder, coverage map[string]string) error {
	if len(coverage) == 0 {
		return nil
	}
	at := func(op vm.Op, m vm.Mapping) string { return coverage[monitor.Cell{Op: op, Mapping: m}.String()] }
	var columns []vm.Mapping
	var refused, untested []string
	for m := range vm.MappingTHP + 1 {
		count := map[string]int{}
		for op := range vm.OpUnknown + 1 {
			count[at(op, m)]++
		}
		switch {
		case count[monitor.Caught.String()]+count[monitor.Blind.String()] > 0:
			columns = append(columns, m)
		case count[monitor.Refused.String()] > 0:
			refused = append(refused, m.String())
		case count[monitor.Untested.String()] > 0:
			untested = append(untested, m.String()+when(r.untested(m, coverage) != "", " ("+r.untested(m, coverage)+")"))
		}
	}
	tw := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	if len(columns) > 0 {
		fmt.Fprint(tw, "  self-test")
		for _, m := range columns {
			fmt.Fprintf(tw, "\t%v", m)
		}
		fmt.Fprintln(tw)
		for op := range vm.OpUnknown + 1 {
			line, any := fmt.Sprintf("  %v", op), false
			for _, m := range columns {
				cell := at(op, m)
				any = any || cell != ""
				if cell == monitor.Blind.String() {
					cell = "BLIND"
				}
				line += "\t" + orDash(cell)
			}
			if any {
				fmt.Fprintln(tw, line)
			}
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if len(refused) > 0 {
		fmt.Fprintf(b, "  never cached: %s\n", strings.Join(refused, ", "))
	}
	if len(untested) > 0 {
		fmt.Fprintf(b, "  not tested here: %s\n", strings.Join(untested, ", "))
	}
	return nil
}

// untested says why memory of a kind isn't tested, and what follows.
func (r *Report) untested(m vm.Mapping, coverage map[string]string) string {
	switch m {
	case vm.MappingHugeTLB:
		return when(r.setting("vm.nr_hugepages") == "0", "vm.nr_hugepages is 0")
	case vm.MappingBrk:
		// It is no other memory to a monitor.
		usual := coverage[monitor.Cell{Op: vm.OpMunmap, Mapping: vm.MappingAnonPrivate}.String()]
		return "the C library owns it" + when(usual == monitor.Caught.String(), "; cached as anon-private is")
	default:
		return ""
	}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
