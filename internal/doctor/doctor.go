package doctor

import (
	"context"
	"os/exec"
	"strings"
	"time"
)

// Options configure an examination. The zero value, or nil, means defaults.
type Options struct {
	// Command returns the command that carries out [Trial] with the given name
	// in another process and writes the Finding to its standard output as JSON.
	// Default, and fallback if it can't be started: trials are made in this
	// process.
	Command func(ctx context.Context, id string) *exec.Cmd
	// Timeout is how long one trial may take. Default 30 s, since a loaded
	// machine can be slow, and a self-test gives up by itself before that.
	Timeout time.Duration
	// Progress, if not nil, is told what is being tried.
	Progress func(what string)
}

// Run examines. It returns a report whatever it finds; when ctx ends, trials
// that haven't been made are reported as interrupted.
func Run(ctx context.Context, o *Options) *Report {
	var opts Options
	if o != nil {
		opts = *o
	}
	if opts.Timeout == 0 {
		opts.Timeout = 30 * time.Second
	}
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	r := environment("")
	r.Selected = Selected{Monitor: "none", Device: "none"}
	for _, t := range deviceTrials() {
		opts.Progress("device " + t.name)
		f := opts.examine(ctx, t)
		r.Devices = append(r.Devices, Device{
			Name: t.name, Usable: f.Usable, Reason: oneLine(f.Reason), Limits: f.Limits,
			Hint: when(!f.Usable, r.deviceHint(t.name, f.Reason)),
		})
		if f.Usable && r.Selected.Device == "none" {
			r.Selected.Device = t.name
		}
	}
	for _, t := range monitorTrials() {
		opts.Progress(strings.TrimSpace("monitor " + t.name + " " + t.mode))
		r.addMonitor(t, opts.examine(ctx, t))
	}
	return r
}

// addMonitor adds what became of a monitor, or of one more mode of the last.
func (r *Report) addMonitor(t trial, f Finding) {
	hint := when(!f.Usable, r.monitorHint(t, f.Reason))
	reason := oneLine(f.Reason)
	if f.Usable && r.Selected.Monitor == "none" && t.name != manualName {
		r.Selected.Monitor, r.Selected.Mode = t.name, t.mode
	}
	if f.Coverage == nil {
		f.Coverage = map[string]string{}
	}
	n := len(r.Monitors)
	if t.mode == "" || n == 0 || r.Monitors[n-1].Name != t.name {
		r.Monitors = append(r.Monitors, Monitor{Name: t.name, Usable: f.Usable, Reason: reason, Hint: hint, Coverage: f.Coverage})
		n++
		if t.mode == "" {
			return
		}
		r.Monitors[n-1].Reason, r.Monitors[n-1].Hint = "", ""
	}
	m := &r.Monitors[n-1]
	m.Modes = append(m.Modes, Mode{Name: t.mode, Usable: f.Usable, Reason: reason, Hint: hint, Coverage: f.Coverage})
	if m.Mode == "" { // nothing better is usable
		if reason != "" {
			m.Reason = strings.TrimPrefix(m.Reason+"; "+t.mode+": "+reason, "; ")
		}
		if hint != "" && !strings.Contains(m.Hint, hint) {
			m.Hint = strings.TrimPrefix(m.Hint+"; "+hint, "; ")
		}
		if f.Usable {
			m.Usable, m.Mode, m.Coverage = true, t.mode, f.Coverage
		}
	}
}

func oneLine(s string) string { return strings.Join(strings.Split(s, "\n"), "; ") }
