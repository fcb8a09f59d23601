package epoch

import "sync/atomic"

// Features is a set of features of the protocol between reader and writer.
//
// A table's header has three words of them. The first, written by Format, says
// what everybody who uses the table must know. The other two are announced by
// the attached readers and writers: in the low half what each of that side
// understands, in the high half what any of it requires the other side to
// understand. Both sides refuse what they don't understand.
type Features uint32

// Feature bits. A bit is never reused for something else.
const (
	// FeatureBase is the protocol of layout version 1: two touches around a
	// change, or busy around it. Whoever is attached understands it, so a word
	// of zero means that nobody is.
	FeatureBase Features = 1 << 0
	// FeatureHitCheck: the table alone doesn't prove that nothing happened,
	// since an operation may return shortly before the writer makes itself
	// busy. A writer that requires it has told the reader by other means what
	// to ask before each look at the word (userfaultfd: whether events are
	// unread). A reader that understands it asks.
	FeatureHitCheck Features = 1 << 1
)

// knownFeatures are the features that a table's first word may demand. The
// package itself does what FeatureBase says; FeatureHitCheck is up to its user.
const knownFeatures = FeatureBase | FeatureHitCheck

// requiresShift moves a required feature to its place in an announcement.
const requiresShift = 32

// AttachOptions says what a party announces. The zero value, and nil, announce
// FeatureBase and require nothing.
type AttachOptions struct {
	// Understands are the features that this party acts on when the other
	// side requires them. FeatureBase is always among them.
	Understands Features
	// Requires are the features without which the other side would get wrong
	// answers from this party, or give it some.
	Requires Features
}

// OpenReader opens a table as [Open] does and attaches as a party that
// watches: see [Table.AttachReader].
func OpenReader(mem []byte, opts *AttachOptions) (*Table, error) {
	t, err := Open(mem)
	if err != nil {
		return nil, err
	}
	if err := t.AttachReader(opts); err != nil {
		return nil, err
	}
	return t, nil
}

// OpenWriter opens a table as [Open] does and attaches as a party that
// touches: see [Table.AttachWriter].
func OpenWriter(mem []byte, opts *AttachOptions) (*Table, error) {
	t, err := Open(mem)
	if err != nil {
		return nil, err
	}
	if err := t.AttachWriter(opts); err != nil {
		return nil, err
	}
	return t, nil
}

// AttachReader announces in the table what this reader understands and
// requires. It returns an [*IncompatibleError] if an attached writer requires
// what the reader doesn't understand or the other way round; the reader then
// must not use the table. There is no detaching: a table keeps what was
// announced, and every later party must fit it.
func (t *Table) AttachReader(opts *AttachOptions) error {
	return attach(opts, t.hdr.features, &t.hdr.readerFeatures, &t.hdr.writerFeatures, "writer_features")
}

// AttachWriter announces in the table what this writer understands and
// requires, with the same refusals as [Table.AttachReader].
func (t *Table) AttachWriter(opts *AttachOptions) error {
	return attach(opts, t.hdr.features, &t.hdr.writerFeatures, &t.hdr.readerFeatures, "reader_features")
}

func attach(opts *AttachOptions, table uint64, own, other *atomic.Uint64, otherField string) error {
	var o AttachOptions
	if opts != nil {
		o = *opts
	}
	o.Understands |= FeatureBase
	if table&^uint64(o.Understands) != 0 {
		return &IncompatibleError{Field: "features", Have: table, Want: uint64(o.Understands)}
	}
	if err := o.fits(other.Load(), otherField); err != nil {
		return err
	}
	for {
		before := own.Load()
		if own.CompareAndSwap(before, o.announce(before)) {
			break
		}
	}
	// Two sides that attach at the same time: at least one sees the other now.
	// What a refused party announced then stays, since a later one may have
	// been merged into it: that refuses too many, never too few.
	return o.fits(other.Load(), otherField)
}

// fits checks what the other side announced, if anybody is there.
func (o AttachOptions) fits(announced uint64, field string) error {
	if announced == 0 {
		return nil
	}
	understands, requires := Features(announced), Features(announced>>requiresShift)
	if requires&^o.Understands != 0 {
		return &IncompatibleError{Field: field, Have: announced, Want: uint64(o.Understands) << requiresShift}
	}
	if o.Requires&^understands != 0 {
		return &IncompatibleError{Field: field, Have: announced, Want: uint64(o.Requires)}
	}
	return nil
}

// announce merges this party into what its side announced: a side understands
// what all its parties do, and requires what any does.
func (o AttachOptions) announce(before uint64) uint64 {
	understands, requires := o.Understands, o.Requires
	if before != 0 {
		understands &= Features(before)
		requires |= Features(before >> requiresShift)
	}
	return uint64(requires)<<requiresShift | uint64(understands)
}
