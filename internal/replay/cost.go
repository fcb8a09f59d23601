package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// Errors, to be tested for with errors.Is.
var (
	// ErrModel: a cost model isn't known or makes no sense.
	ErrModel = errors.New("bad cost model")
	// ErrOptions: the options make no sense.
	ErrOptions = errors.New("bad replay options")
	// ErrLimit: the trace has more processes or requests at once than replay
	// keeps.
	ErrLimit = errors.New("trace is too large to replay")
)

// modelPage is the page that costs are given for, in bytes.
const modelPage = 4096

// Cost is what a call costs, in nanoseconds: something for the call and
// something for each page of 4096 bytes.
type Cost struct {
	Call float64 `json:"call_ns"`
	Page float64 `json:"page_ns"`
}

// of returns the cost of n calls for a number of such pages in all, in seconds.
func (c Cost) of(n uint64, pages float64) float64 {
	// The conversions keep compilers from fusing, so that machines agree.
	return (float64(float64(n)*c.Call) + float64(pages*c.Page)) * 1e-9
}

// Model is what registrations cost on some device.
type Model struct {
	Name string `json:"name"`
	// Source says where the figures are from, Assumed what of it is not
	// measured or published.
	Source  string `json:"source"`
	Assumed string `json:"assumed,omitempty"`

	Register   Cost `json:"register"`
	Deregister Cost `json:"deregister"`
	// Update points a registration at other pages. Zero means as much as
	// deregistering and registering.
	Update Cost `json:"update"`
	// Hit is what a request that hits costs, in nanoseconds, to take and to give
	// back.
	Hit float64 `json:"hit_ns"`
	// Touch is what the monitor adds to each VM operation, in nanoseconds.
	Touch float64 `json:"touch_ns"`
}

// Of this project's cache, measured on a shared virtual machine with 2 CPUs,
// Linux 6.18; see ARCHITECTURE.md.
const (
	ownHit = 21 // acquire and release, up to 1000 regions

	// UsualTouch is what the bpf monitor at system calls adds to a madvise, in
	// nanoseconds.
	UsualTouch = 400
)

const ownSource = "hit and touch: this cache with the bpf monitor at system calls, measured on a 2-CPU virtual machine with Linux 6.18 (ARCHITECTURE.md)"

// Presets returns the models that come with the program.
func Presets() []Model {
	return []Model{
		{
			Name: "iouring",
			Source: "io_uring fixed buffers, as pindown bench --calibrate measures them, on the same virtual machine (7 runs within 4 % a call and 8 % a page): " +
				"4 KiB 1.9 µs to register and 1.7 to deregister, 1 MiB 9.8 and 4.8 µs; " + ownSource,
			Register: Cost{Call: 1840, Page: 31}, Deregister: Cost{Call: 1690, Page: 12}, Update: Cost{Call: 1840, Page: 40},
			Hit: ownHit, Touch: UsualTouch,
		},
		{
			Name: "ucx",
			Source: "UCX's model for InfiniBand adapters: MEM_REG_OVERHEAD=16us, MEM_REG_GROWTH=0.06ns per byte, RCACHE_OVERHEAD=180ns (90ns in older versions, \"auto\" in the latest) " +
				"(uct_ib_md_config_table in src/uct/ib/base/ib_md.c, src/uct/base/uct_md.c); touch: this cache's",
			Assumed:  "deregistering costs as much as registering: UCX has no figure for it",
			Register: Cost{Call: 16000, Page: 0.06 * modelPage}, Deregister: Cost{Call: 16000, Page: 0.06 * modelPage},
			Hit: 180, Touch: UsualTouch,
		},
		{
			Name: "connectx",
			Source: "registering and deregistering 4 MiB on one mlx5 adapter (ConnectX-4 and later) takes 114.5 µs together " +
				"(github.com/minio/minio-rs pull request 236); the calls as in UCX's model, 16 µs; " + ownSource,
			Assumed:  "deregistering is a call of 16 µs too (one command to the adapter each), and a quarter of what pages cost: the published figure is the sum",
			Register: Cost{Call: 16000, Page: 60.4}, Deregister: Cost{Call: 16000, Page: 20.1},
			Hit: ownHit, Touch: UsualTouch,
		},
		{
			Name: "ugni",
			Source: "Cray Gemini and Aries, GNI_MemRegister and GNI_MemDeregister: 0.34 s and 0.50 s for 1 GiB, linear up to 128 GiB " +
				"(github.com/chapel-lang/chapel issue 5680; the sum of several communication domains); " + ownSource,
			Assumed:  "the calls cost 16 µs, as in UCX's model",
			Register: Cost{Call: 16000, Page: 0.34e9 / 262144}, Deregister: Cost{Call: 16000, Page: 0.50e9 / 262144},
			Hit: ownHit, Touch: UsualTouch,
		},
	}
}

// PresetNames returns the names of the presets.
func PresetNames() []string {
	var names []string
	for _, m := range Presets() {
		names = append(names, m.Name)
	}
	return names
}

// Preset returns the model of that name, or a wrapped [ErrModel].
func Preset(name string) (Model, error) {
	for _, m := range Presets() {
		if m.Name == name {
			return m, nil
		}
	}
	return Model{}, fmt.Errorf("%w: %q: one of %s", ErrModel, name, strings.Join(PresetNames(), ", "))
}

// ReadModel reads a model from JSON, as [Model] writes it. Fields that it
// doesn't know are ignored. It returns a wrapped [ErrModel].
func ReadModel(r io.Reader) (Model, error) {
	var m Model
	if err := json.NewDecoder(io.LimitReader(r, 1<<20)).Decode(&m); err != nil {
		return m, fmt.Errorf("%w: %w", ErrModel, err)
	}
	return m, m.check()
}

func (m *Model) check() error {
	if m.Name == "" {
		return fmt.Errorf("%w: no name", ErrModel)
	}
	if m.Register == (Cost{}) {
		return fmt.Errorf("%w: %q: registering costs nothing", ErrModel, m.Name)
	}
	for _, v := range []float64{
		m.Register.Call, m.Register.Page, m.Deregister.Call, m.Deregister.Page, m.Update.Call, m.Update.Page, m.Hit, m.Touch,
	} {
		if v < 0 || v > 1e12 || math.IsNaN(v) {
			return fmt.Errorf("%w: %q: a cost of %g ns", ErrModel, m.Name, v)
		}
	}
	return nil
}

// withDefaults fills in the cost of an update.
func (m Model) withDefaults() Model {
	if m.Update == (Cost{}) {
		m.Update = Cost{Call: m.Register.Call + m.Deregister.Call, Page: m.Register.Page + m.Deregister.Page}
	}
	return m
}

func checkModels(models []Model) error {
	var names []string
	for i := range models {
		if err := models[i].check(); err != nil {
			return err
		}
		if slices.Contains(names, models[i].Name) {
			return fmt.Errorf("%w: two are called %q", ErrModel, models[i].Name)
		}
		names = append(names, models[i].Name)
	}
	return nil
}
