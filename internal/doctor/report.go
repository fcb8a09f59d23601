package doctor

import (
	"encoding/json"
	"io"
)

// Report is the result of an examination.
type Report struct {
	// Kernel is the kernel's release, KernelBuild its build.
	Kernel      string `json:"kernel"`
	KernelBuild string `json:"kernel_build"`
	Arch        string `json:"arch"`
	Go          string `json:"go"`

	Privileges Privileges `json:"privileges"`
	Settings   []Setting  `json:"settings"`
	Monitors   []Monitor  `json:"monitors"`
	Devices    []Device   `json:"devices"`
	Selected   Selected   `json:"selected"`
}

// Privileges are what the process may do.
type Privileges struct {
	UID int `json:"uid"`
	// Capabilities says of those that matter which are effective.
	Capabilities map[string]bool `json:"capabilities"`
	NoNewPrivs   bool            `json:"no_new_privs"`
	// Seccomp is "off", "strict", "filter" or "unknown".
	Seccomp string `json:"seccomp"`
	// UserNamespace says that the capabilities are those of a user namespace
	// other than the first: few of them count.
	UserNamespace bool `json:"user_namespace"`
}

// Setting is a limit of the process or a setting of the kernel.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	// Meaning says what follows from the value; empty if nothing does.
	Meaning string `json:"meaning,omitempty"`
}

// Monitor is what became of one monitor.
type Monitor struct {
	Name string `json:"name"`
	// Mode is the best one that is usable, for a monitor that has several.
	Mode   string `json:"mode,omitempty"`
	Usable bool   `json:"usable"`
	// Reason says why the monitor, or a better mode of it, isn't usable, or
	// what a usable one is limited to; Hint what would help.
	Reason string `json:"reason"`
	Hint   string `json:"hint,omitempty"`
	// Coverage is the outcome of the self-test by "<operation>/<mapping>":
	// "caught", "refused", "blind" or "untested". Empty if it didn't take
	// place.
	Coverage map[string]string `json:"coverage"`
	// Modes are what became of each mode, best first.
	Modes []Mode `json:"modes,omitempty"`
}

// Mode is what became of one mode of a monitor.
type Mode struct {
	Name     string            `json:"name"`
	Usable   bool              `json:"usable"`
	Reason   string            `json:"reason"`
	Hint     string            `json:"hint,omitempty"`
	Coverage map[string]string `json:"coverage,omitempty"`
}

// Device is what became of one device.
type Device struct {
	Name   string `json:"name"`
	Usable bool   `json:"usable"`
	Reason string `json:"reason"`
	Hint   string `json:"hint,omitempty"`
	Limits Limits `json:"limits"`
}

// Limits are a device's limits; zero where it knows none.
type Limits struct {
	MaxRegistrations int    `json:"max_registrations"`
	MaxPinnedBytes   uint64 `json:"max_pinned_bytes"`
	MaxRange         uint64 `json:"max_range"`
	PageSize         uint64 `json:"page_size"`
}

// Selected is what a cache with default options would use; "none" where
// nothing is usable.
type Selected struct {
	Monitor string `json:"monitor"`
	Mode    string `json:"mode,omitempty"`
	Device  string `json:"device"`
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
