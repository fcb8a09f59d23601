package replay

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestOrdered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var o ordered[int]
		model := map[uint64]int{}
		top := uint64(rapid.SampledFrom([]int{20, 400, 100000}).Draw(t, "top"))
		ascending := rapid.Bool().Draw(t, "ascending")
		for i := range rapid.IntRange(0, 600).Draw(t, "steps") {
			k := rapid.Uint64Range(0, top).Draw(t, "key")
			if ascending {
				k = uint64(i)
			}
			if rapid.IntRange(0, 3).Draw(t, "op") == 0 {
				if len(model) > 0 && rapid.Bool().Draw(t, "existing") {
					k = rapid.SampledFrom(slices.Sorted(maps.Keys(model))).Draw(t, "victim")
				}
				o.remove(k)
				delete(model, k)
			} else {
				o.put(k, i)
				model[k] = i
			}
		}
		keys := slices.Sorted(maps.Keys(model))
		if o.len() != len(keys) {
			t.Fatalf("len %d, want %d", o.len(), len(keys))
		}
		for range 50 {
			k := rapid.Uint64Range(0, top+1).Draw(t, "probe")
			i, found := slices.BinarySearch(keys, k)
			v, ok := o.get(k)
			if ok != found || found && v != model[k] {
				t.Fatalf("get %d: %d %v", k, v, ok)
			}
			if !found {
				i--
			}
			c, ok := o.floor(k)
			if ok != (i >= 0) {
				t.Fatalf("floor %d: %v", k, ok)
			}
			if !ok {
				continue
			}
			for ; i < len(keys); i++ {
				if !o.valid(c) || o.value(c) != model[keys[i]] {
					t.Fatalf("from %d: no %d", k, keys[i])
				}
				c = o.next(c)
			}
			if o.valid(c) {
				t.Fatal("one too many")
			}
		}
	})
}
