package main

import (
	"strings"
	"testing"
)

func TestBenchUsage(t *testing.T) {
	for args, want := range map[string]string{
		"extra":                                 "unknown command",
		"--workload sleep":                      `workload "sleep" is none of hit, miss`,
		"--pattern plaid":                       `pattern "plaid" is none of hot`,
		"--impl magic":                          "is none of pindown, lane",
		"--regions 0":                           "at least 1",
		"--regions 99999999":                    "at most",
		"--regions x":                           "invalid argument",
		"--threads 3":                           "1 or 2",
		"--rounds 0":                            "--rounds 0: at least 1",
		"--rounds 99999":                        "at most",
		"--duration 0s":                         "--duration 0s",
		"--duration 2h":                         "at most a minute",
		"--monitor none":                        "one of manual, auto",
		"--json --benchfmt":                     "exclude each other",
		"--workload memory --pattern hot":       "workload memory has no pattern hot: one of total, heap",
		"--workload churn,memory --pattern hot": "no pattern hot: one of quiet, unrelated, watched, total, heap",
		"--workload hit --pattern zipf --regions 1": "nothing of the kind to measure: hit takes 1 thread",
		"--workload hit --pattern hot --threads 2":  "nothing of the kind to measure: hit takes 1 thread",
		"--workload miss --regions 5":               "miss takes 1 thread, and at least 100 regions",
		"--workload churn --regions 1":              "churn takes 1 thread, and 2 to ",
		"--workload restamp,invalidate --threads 2": "restamp takes 1 thread, and at least 2 regions; invalidate takes 1 thread",
		"--workload hit --seed -1":                  "invalid argument",
	} {
		out, code, err := execute(t, append([]string{"bench"}, strings.Fields(args)...)...)
		if code != exitUsage || err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "bench: bad options") {
			t.Errorf("%s: exit code %d, error %v, want %d and %q", args, code, err, exitUsage, want)
		}
		if out != "" {
			t.Errorf("%s: writes %q", args, out)
		}
	}
}

func TestBench(t *testing.T) {
	args := strings.Fields("bench --workload hit,memory --pattern uniform,total --regions 20 --threads 1 --rounds 2 --duration 1ms")
	out, code, err := execute(t, append(args, "--json")...)
	if code != exitOK {
		t.Fatalf("exit code %d, %v", code, err)
	}
	rows := object(t, out)["results"].([]any)
	if len(rows) != 3 {
		t.Errorf("%d rows in\n%s", len(rows), out)
	}
	first := rows[0].(map[string]any)
	if first["workload"] != "hit" || first["regions"] != 20.0 || first["threads"] != 1.0 || first["pattern"] != "uniform" ||
		first["impl"] != "pindown" || first["ns_per_op"].(float64) <= 0 || first["ops_per_second"].(float64) <= 0 {
		t.Errorf("row %v", first)
	}

	out, code, err = execute(t, append(args, "--benchfmt")...)
	if code != exitOK || strings.Count(out, "BenchmarkHit/pattern=uniform/regions=20/threads=1/impl=pindown\t") != 2 {
		t.Errorf("exit code %d, %v:\n%s", code, err, out)
	}

	out, code, err = execute(t, args...)
	if code != exitOK || !strings.Contains(out, "BYTES/REGION") {
		t.Errorf("exit code %d, %v:\n%s", code, err, out)
	}
}
