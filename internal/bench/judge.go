package bench

import "fmt"

// judge sets what the project means to achieve beside the ratios, and adds
// those of single rows.
func judge(r *Report) {
	for i := range r.Ratios {
		t := &r.Ratios[i]
		switch {
		case t.Workload == Hit && t.Of == implPindown && t.To == "ucx" && t.Pattern == patternUniform:
			limit := 0.5
			if t.Regions <= 10_000 {
				limit = 0.35
			} else if t.Regions <= 100_000 {
				limit = 0.4
			}
			t.most(limit)
		case t.Workload == Hit && t.Of == implLane && t.To == "ucx" && t.Pattern == patternUniform && t.Regions <= 10_000:
			t.most(0.2)
		case t.Workload == Hit && t.Quantity == "ops_per_second" && t.Of == implPindown+" 2 threads":
			t.least(map[string]float64{"same": 1.5, "different": 1.8}[t.Pattern])
		case t.Workload == Churn && t.Pattern == "unrelated":
			t.most(1.5)
		}
	}
	for _, x := range r.Results {
		t := Ratio{Workload: x.Workload, Regions: x.Regions, Pattern: x.Pattern, Threads: x.Threads, Of: x.Impl, Quantity: "ns_per_op"}
		value := x.NsPerOp
		var limit float64
		switch {
		case x.Impl != implPindown:
			continue
		case x.Workload == Invalidate && x.Pattern == "acquire-after":
			t.To, limit = "10 µs", 10_000
		case x.Workload == Miss && x.Pattern == "room" && x.Regions == 100_000:
			t.To, limit = "600 ns", 600
		case x.Workload == Memory && x.Pattern == "total" && x.Regions == 1_000_000:
			t.To, limit, value, t.Quantity = "160 B", 160, x.BytesPerRegion, "bytes_per_region"
		default:
			continue
		}
		t.Median, t.Pairs = value/limit, []float64{value / limit}
		t.most(1)
		r.Ratios = append(r.Ratios, t)
	}
}

func (t *Ratio) most(limit float64) {
	met := t.Median <= limit
	t.Bound, t.Met = fmt.Sprintf("≤ %g", limit), &met
}

func (t *Ratio) least(limit float64) {
	if limit == 0 {
		return
	}
	met := t.Median >= limit
	t.Bound, t.Met = fmt.Sprintf("≥ %g", limit), &met
}
