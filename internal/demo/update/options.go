package update

import (
	"errors"
	"fmt"
)

// Policy is what the owner does after it has replaced the pages.
type Policy uint8

// Policies, in the order of reports.
const (
	Invalid Policy = iota
	// None: nothing; the cache doesn't know.
	None
	// Drop: it releases the stale region, and advertises another key.
	Drop
	// Strict updates the region by pindown.UpdateStrict.
	Strict
	// Atomic updates the region by pindown.UpdateAtomic.
	Atomic
	policyEnd
)

var policyNames = [...]string{"invalid", "none", "drop", "update-strict", "update-atomic"}

// String returns the name that reports and JSON use.
func (p Policy) String() string { return policyNames[p] }

// MarshalText encodes the policy by name.
func (p Policy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (p *Policy) UnmarshalText(b []byte) error {
	for q := None; q < policyEnd; q++ {
		if q.String() == string(b) {
			*p = q
			return nil
		}
	}
	return fmt.Errorf("policy %q: %w", b, ErrOptions)
}

// ErrOptions is returned, wrapped, for options that make no sense.
var ErrOptions = errors.New("demo update: bad options")

// Defaults and limits of the options.
const (
	DefaultReplacements = 200
	MaxReplacements     = 1_000_000
	DefaultPages        = 4
	MaxPages            = 1024
)

// Options configure a run. The zero value, or nil, means defaults.
type Options struct {
	// Replacements is how often the owner replaces the pages, under each policy.
	// Default DefaultReplacements.
	Replacements int
	// Pages is the size of the memory. Default DefaultPages.
	Pages int
	// Seed makes the order in which the owner replaces pages. Default 1.
	Seed uint64
}

func (o *Options) withDefaults() Options {
	var c Options
	if o != nil {
		c = *o
	}
	if c.Replacements == 0 {
		c.Replacements = DefaultReplacements
	}
	if c.Pages == 0 {
		c.Pages = DefaultPages
	}
	if c.Seed == 0 {
		c.Seed = 1
	}
	return c
}

// Validate reports everything that is wrong with the options, as a wrapped
// ErrOptions.
func (o *Options) Validate() error {
	c := o.withDefaults()
	var errs []error
	if c.Replacements < 1 || c.Replacements > MaxReplacements {
		errs = append(errs, fmt.Errorf("%d replacements: at least 1, at most %d", c.Replacements, MaxReplacements))
	}
	if c.Pages < 1 || c.Pages > MaxPages {
		errs = append(errs, fmt.Errorf("%d pages: at least 1, at most %d", c.Pages, MaxPages))
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w: %w", ErrOptions, errors.Join(errs...))
	}
	return nil
}
