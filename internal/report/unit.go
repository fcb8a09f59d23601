package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Unit is what an axis counts in.
type Unit uint8

// Units. The zero Unit is that of plain numbers.
const (
	Number  Unit = iota
	Seconds      // 0.0012 is "1.2 ms"
	Bytes        // 4096 is "4 KiB"
	Percent      // 0.5 is "50 %"
	PerSecond
	BytesPerSecond
)

// Format returns v in the unit with about three digits.
func (u Unit) Format(v float64) string {
	switch u {
	case Seconds:
		a := math.Abs(v)
		for _, s := range []struct {
			above float64
			unit  string
		}{{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}} {
			if a >= s.above*0.9995 {
				return digits(v/s.above) + " " + s.unit
			}
		}
		if v == 0 {
			return "0 s"
		}
		return digits(v*1e9) + " ns"
	case Bytes, BytesPerSecond:
		suffix := ""
		if u == BytesPerSecond {
			suffix = "/s"
		}
		for i, name := range []string{"PiB", "TiB", "GiB", "MiB", "KiB"} {
			if s := math.Ldexp(1, 10*(5-i)); math.Abs(v) >= s {
				return digits(v/s) + " " + name + suffix
			}
		}
		return digits(v) + " B" + suffix
	case Percent:
		return digits(100*v) + " %"
	case PerSecond:
		return Number.Format(v) + "/s"
	default:
		for _, s := range []struct {
			above, by float64
			unit      string
		}{{1e9, 1e9, "G"}, {1e6, 1e6, "M"}, {1e4, 1e3, "k"}} {
			if math.Abs(v) >= s.above {
				return digits(v/s.by) + s.unit
			}
		}
		return digits(v)
	}
}

// digits formats v with at most three significant digits, more before the
// point.
func digits(v float64) string {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return fmt.Sprintf("%.0f", v)
	}
	decimals := max(0, 2-int(math.Floor(math.Log10(math.Abs(v)))))
	s := strconv.FormatFloat(v, 'f', min(decimals, 9), 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return s
}
