package monitor

import "github.com/pindown/pindown/vm"

// Teller is a monitor that sees only what the program tells it. SelfTest
// carries out its operations through Do, so that its coverage shows that the
// telling works; a report should say that such a monitor sees what the program
// says, and never select it unasked.
type Teller interface {
	Monitor

	// Do runs change, which changes pages behind r and nothing else, and
	// records it before and after. It returns change's error.
	Do(r vm.Range, change func() error) error
}
