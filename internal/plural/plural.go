// Package plural writes numbers of things for people.
package plural

import (
	"fmt"
	"strings"
)

// Of returns n and the thing, with an s if there isn't one of it: "1 block",
// "2 blocks", "0 BLOCKS".
func Of[N ~int | ~uint64](n N, thing string) string {
	switch {
	case n == 1:
	case strings.ToUpper(thing) == thing:
		thing += "S"
	default:
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}
