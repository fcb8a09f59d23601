package trace

import "github.com/klauspost/compress/zstd"

// CompressForTest compresses as blocks are, whatever the size.
func CompressForTest(b []byte) []byte {
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err)
	}
	return z.EncodeAll(b, nil)
}
