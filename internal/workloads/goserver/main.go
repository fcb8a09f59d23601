// Goserver is a workload: a server and its clients in one process, under
// pressure of the garbage collector.
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime/debug"
	"sync"
)

const (
	clients  = 4
	smallest = 14 // powers of two
	largest  = 20
	// limit is of the heap: the collector and the scavenger work for it.
	limit = 48 << 20
)

func main() {
	requests := flag.Int("requests", 1000, "`number` of requests")
	flag.Parse()
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(limit)
	if err := run(*requests); err != nil {
		fmt.Fprintln(os.Stderr, "goserver:", err)
		os.Exit(1) //nolint:forbidigo // This is a main.
	}
}

func run(requests int) error {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make([]error, 2*clients)
	for i := range clients {
		wg.Go(func() { errs[2*i] = client(l.Addr(), uint64(i), requests/clients) })
		wg.Go(func() {
			c, err := l.Accept()
			if err == nil {
				err = serve(c)
			}
			errs[2*i+1] = err
		})
	}
	wg.Wait()
	return errors.Join(append(errs, l.Close())...)
}

// serve answers each message with one of the same length.
func serve(c net.Conn) error {
	defer func() { _ = c.Close() }()
	var header [8]byte
	for {
		if _, err := io.ReadFull(c, header[:]); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		request := make([]byte, binary.LittleEndian.Uint64(header[:]))
		if _, err := io.ReadFull(c, request); err != nil {
			return err
		}
		answer := make([]byte, len(request))
		for i, b := range request {
			answer[len(answer)-1-i] = b
		}
		if _, err := c.Write(answer); err != nil {
			return err
		}
	}
}

func client(to net.Addr, seed uint64, requests int) error {
	c, err := new(net.Dialer).DialContext(context.Background(), to.Network(), to.String())
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	rng := rand.New(rand.NewPCG(seed, 0))
	for range requests {
		order := smallest + rng.IntN(largest-smallest)
		n := 1<<order + rng.IntN(1<<order)
		message := make([]byte, 8+n)
		binary.LittleEndian.PutUint64(message, uint64(n))
		if _, err := c.Write(message); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, make([]byte, n)); err != nil {
			return err
		}
	}
	return nil
}
