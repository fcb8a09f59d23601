// Package plural writes numbers of things for people.
package plural

import "fmt"

// Of returns n and the thing, with an s if there isn't one of it: "1 block",
// "2 blocks".
func Of[N ~int | ~uint64](n N, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}
