package main

import (
	"cmp"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"slices"

	"github.com/spf13/cobra"

	"github.com/pindown/pindown/epoch"
	"github.com/pindown/pindown/monitor/auto"
)

// version is set by the linker (-X main.version=…); otherwise the build
// information is asked.
var version string

// versionInfo is what "version --json" writes.
type versionInfo struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
	// EpochLayout is the layout version of the epoch table, and EpochFeatures
	// the features of its protocol that this build knows.
	EpochLayout   int      `json:"epoch_layout"`
	EpochFeatures []string `json:"epoch_features"`
	Monitors      []string `json:"monitors"`
	Devices       []string `json:"devices"`
}

func newVersionInfo() versionInfo {
	v := versionInfo{
		Version: version, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH,
		EpochLayout: epoch.Version, EpochFeatures: []string{"base", "hit-check"},
		Devices: []string{"iouring", "verbs"},
	}
	for _, o := range auto.Openers() {
		if !slices.Contains(v.Monitors, o.Name) {
			v.Monitors = append(v.Monitors, o.Name)
		}
	}
	v.Monitors = append(v.Monitors, "manual")
	if bi, ok := debug.ReadBuildInfo(); ok {
		if bi.Main.Version != "(devel)" {
			v.Version = cmp.Or(v.Version, bi.Main.Version)
		}
		for _, s := range bi.Settings {
			switch s.Key {
			case "vcs.revision":
				v.Revision = s.Value
			case "vcs.modified":
				v.Modified = s.Value == "true"
			}
		}
	}
	v.Version = cmp.Or(v.Version, "devel")
	return v
}

// versionLine is what "version" and --version write.
func versionLine() string {
	v := newVersionInfo()
	return fmt.Sprintf("pindown %s %s %s/%s, epoch table layout %d\n", v.Version, v.Go, v.OS, v.Arch, v.EpochLayout)
}

func newVersionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print versions of the module, Go and the epoch table's layout",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			w := cmd.OutOrStdout()
			if asJSON {
				return writeJSON(w, newVersionInfo())
			}
			_, err := io.WriteString(w, versionLine())
			return err
		},
	}
	jsonFlag(cmd.Flags(), &asJSON)
	return cmd
}
