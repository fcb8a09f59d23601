package verbs_test

import "testing"

// TestInfo shows what the adapter is.
func TestInfo(t *testing.T) {
	d := open(t, nil)
	t.Logf("%+v", d.Info())
	t.Logf("%+v", d.Limits())
}
