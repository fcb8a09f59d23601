package pindown_test

import (
	"math/bits"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFault36RealWindow: a window grows up to where nothing more can be
// registered, by whatever that is, and is right throughout; so is what becomes of
// memory that was registered without having been asked for.
func TestFault36RealWindow(t *testing.T) {
	const n, beyond = 100, 60
	for name, end := range map[string]func(t *testing.T, b []byte){
		"hole": func(_ *testing.T, b []byte) { unmap(b) },
		"no access": func(t *testing.T, b []byte) {
			if err := unix.Mprotect(b, unix.PROT_NONE); err != nil {
				t.Fatal(err)
			}
		},
		"read-only": func(t *testing.T, b []byte) {
			if err := unix.Mprotect(b, unix.PROT_READ); err != nil {
				t.Fatal(err)
			}
		},
		"more memory": func(*testing.T, []byte) {},
	} {
		t.Run(name, func(t *testing.T) {
			underMonitors(t, nil, func(t *testing.T, r *real) {
				b := mapAt(t, 0, n+beyond, 0)
				defer func() {
					unmap(b[:n*page])
					if name != "hole" { // which others may have filled
						unmap(b[n*page:])
					}
				}()
				end(t, b[n*page:])
				write(b[:n*page])
				before := r.dev.Stats().Registers
				for i := range n {
					r.use(t, b[:(i+1)*page])
				}
				if got := int(r.dev.Stats().Registers - before); got > 5*bits.Len(n) {
					t.Errorf("%d registrations of a window of %d pages", got, n)
				}
				if name != "more memory" {
					return
				}
				// What is ahead goes, and other memory comes.
				r.want(t, "before", b[:n*page], true)
				reg, err := r.Acquire(t.Context(), b[:n*page], 0)
				if err != nil {
					t.Fatal(err)
				}
				ahead := b[n*page : reg.Range().End-addr(b)]
				check(t, "something is registered ahead", len(ahead) > 0, true)
				release(t, &reg)
				unmap(ahead)
				r.want(t, "after what is ahead went", b[:n*page], false)
				again := mapAt(t, addr(ahead), len(ahead)/page, unix.MAP_FIXED)
				write(again)
				r.want(t, "what came there", again, false)
				r.want(t, "all together", b[:n*page+len(ahead)], false)
				r.want(t, "all together again", b[:n*page+len(ahead)], true)
			})
		})
	}
}
