package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestVerbs(t *testing.T) {
	const lib, driver, adapter = "usr/lib/x86_64-linux-gnu/libibverbs.so.1", "etc/libibverbs.d/rxe.driver", "sys/class/infiniband/rxe0/node_type"
	const class, dev = "sys/class/infiniband_verbs/uverbs0/ibdev", "dev/infiniband/uverbs0"
	for _, c := range []struct {
		name   string
		files  []string
		usable bool
		want   []string
	}{
		{"nothing", nil, false, []string{"libibverbs.so.1 isn't installed", "there is no RDMA adapter"}},
		{"library", []string{lib}, false, []string{"no providers", "there is no RDMA adapter"}},
		{"library and providers", []string{lib, driver}, false, []string{"there is no RDMA adapter"}},
		{"no library", []string{adapter, class, dev}, false, []string{"libibverbs.so.1 isn't installed"}},
		{"no module", []string{lib, driver, adapter}, false, []string{"modprobe ib_uverbs"}},
		{"no node", []string{lib, driver, adapter, class}, false, []string{"dev/infiniband/uverbs0 can't be opened: no such file"}},
		{"all", []string{lib, driver, adapter, class, dev}, true, []string{"rxe0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("PATH", "") // No ibv_devinfo.
			t.Setenv("LD_LIBRARY_PATH", "")
			root := t.TempDir()
			for _, path := range c.files {
				path = filepath.Join(root, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte("rxe0\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			f := tryVerbs(t.Context(), root)
			if f.Usable != c.usable {
				t.Errorf("%+v", f)
			}
			for _, want := range c.want {
				if !strings.Contains(f.Reason, want) {
					t.Errorf("reason %q lacks %q", f.Reason, want)
				}
			}
			if got := len(strings.Split(f.Reason, "; ")); got != len(c.want) {
				t.Errorf("%d reasons in %q, want %d", got, f.Reason, len(c.want))
			}
		})
	}
}

func TestParseODP(t *testing.T) {
	out := `hca_id:	mlx5_0
	transport:			InfiniBand (0)
	general_odp_caps:
					ODP_SUPPORT
					ODP_SUPPORT_IMPLICIT
	rc_odp_caps:
					SUPPORT_SEND
hca_id:	rxe0
	general_odp_caps:
	rc_odp_caps:
					NO SUPPORT
`
	if diff := cmp.Diff([]string{"mlx5_0"}, parseODP(out)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
