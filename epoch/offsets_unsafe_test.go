package epoch

import "unsafe"

// offsets are where Go put the overlays' fields.
var offsets = struct {
	magic, version, headerSize, features, readerFeatures, writerFeatures uintptr
	pageShift, fanoutShift, levels, bucketSlots, bucketBits, bucketSize  uintptr
	word, tag, self, below, want, wantBelow                              uintptr
	sizeofHeader, sizeofBucket, sizeofWatch                              uintptr
}{
	magic:          unsafe.Offsetof(header{}.magic),
	version:        unsafe.Offsetof(header{}.version),
	headerSize:     unsafe.Offsetof(header{}.headerSize),
	features:       unsafe.Offsetof(header{}.features),
	readerFeatures: unsafe.Offsetof(header{}.readerFeatures),
	writerFeatures: unsafe.Offsetof(header{}.writerFeatures),
	pageShift:      unsafe.Offsetof(header{}.pageShift),
	fanoutShift:    unsafe.Offsetof(header{}.fanoutShift),
	levels:         unsafe.Offsetof(header{}.levels),
	bucketSlots:    unsafe.Offsetof(header{}.bucketSlots),
	bucketBits:     unsafe.Offsetof(header{}.bucketBits),
	bucketSize:     unsafe.Offsetof(header{}.bucketSize),
	word:           unsafe.Offsetof(header{}.word),
	tag:            unsafe.Offsetof(bucket{}.tag),
	self:           unsafe.Offsetof(bucket{}.self),
	below:          unsafe.Offsetof(bucket{}.below),
	want:           unsafe.Offsetof(bucket{}.want),
	wantBelow:      unsafe.Offsetof(bucket{}.wantBelow),
	sizeofHeader:   unsafe.Sizeof(header{}),
	sizeofBucket:   unsafe.Sizeof(bucket{}),
	sizeofWatch:    unsafe.Sizeof(Watch{}),
}
