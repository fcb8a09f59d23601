package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"time"
)

// What the two ends say to each other over TCP, as JSON objects, after the
// handshake of the queues. One connection carries one file.
//
//	client                            server
//	request  (name, size, …)    →
//	                            ←     offer     (where a block may be written)
//	RDMA write of the block     ⇒     memory
//	block    (which, how long)  →               … as often as needed
//	block    (end)              →
//	                            ←     reply     (checksum, figures)

// request begins a copy.
type request struct {
	Name  string `json:"name"`
	Size  int64  `json:"size"`
	Block int    `json:"block"`
	Way   string `json:"way"`
	Renew int    `json:"renew"`
}

// answer is what the server sends: an offer, or the last word.
type answer struct {
	Offer *offer `json:"offer,omitempty"`
	Reply *reply `json:"reply,omitempty"`
	Error string `json:"error,omitempty"`
}

// offer is memory of the server that one block may be written to.
type offer struct {
	Slot int    `json:"slot"`
	Addr uint64 `json:"addr"`
	Key  uint32 `json:"key"`
}

// reply says that the whole file has arrived.
type reply struct {
	CRC   uint32   `json:"crc"`
	Stats wayStats `json:"stats"`
}

// block says that a block has been written, or that there are no more.
type block struct {
	Slot int   `json:"slot"`
	Off  int64 `json:"off"`
	Len  int   `json:"len"`
	End  bool  `json:"end,omitempty"`
}

const (
	maxBlock = 64 << 20
	slots    = 8 // blocks under way
)

// errPeer is what the other end has said.
var errPeer = errors.New("the other end")

var table = crc32.MakeTable(crc32.Castagnoli)

// sum is the checksum of all of r.
func sum(r io.Reader) (uint32, error) {
	h := crc32.New(table)
	_, err := io.Copy(h, r)
	return h.Sum32(), err
}

// control is the TCP connection.
type control struct {
	net.Conn
	enc *json.Encoder
	dec *json.Decoder
}

func newControl(c net.Conn) *control {
	return &control{c, json.NewEncoder(c), json.NewDecoder(c)}
}

// formatBytes is a size for people.
func formatBytes(n float64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	i := 0
	for ; n >= 1024 && i < len(units)-1; i++ {
		n /= 1024
	}
	return fmt.Sprintf("%.1f %s", n, units[i])
}

// rate is a throughput for people.
func rate(n int64, d time.Duration) string {
	return formatBytes(float64(n)/d.Seconds()) + "/s"
}
