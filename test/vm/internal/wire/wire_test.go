package wire

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
)

func TestRoundTrip(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	want := ExecMsg{Args: []string{"a", "b\x00c"}, User: "nobody", Limits: map[int]uint64{8: 1 << 63}, Caps: []uintptr{39}}
	if err := w.Send(Exec, 7, want); err != nil {
		t.Fatal(err)
	}
	if err := w.Write(End, 8, nil); err != nil {
		t.Fatal(err)
	}
	big := bytes.Repeat([]byte("0123456789"), MaxPayload/4)
	if err := w.Write(Data, 9, big); err != nil {
		t.Fatal(err)
	}

	r := NewReader(iotest.OneByteReader(&buf))
	f, err := r.Read()
	if err != nil || f.Kind != Exec || f.ID != 7 {
		t.Fatalf("first frame: %v %v", f, err)
	}
	var got ExecMsg
	if err := f.Decode(&got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	if f, err = r.Read(); err != nil || f.Kind != End || f.ID != 8 || len(f.Payload) != 0 {
		t.Fatalf("second frame: %v %v", f, err)
	}
	var all []byte
	for f, err = r.Read(); err == nil; f, err = r.Read() {
		if f.Kind != Data || f.ID != 9 {
			t.Fatalf("frame of kind %d, id %d", f.Kind, f.ID)
		}
		all = append(all, f.Payload...)
	}
	if !errors.Is(err, io.EOF) || !bytes.Equal(all, big) {
		t.Errorf("%d bytes of %d, then %v", len(all), len(big), err)
	}
}

func TestSendTooLarge(t *testing.T) {
	w := NewWriter(io.Discard)
	if err := w.Send(Put, 1, PutMsg{Path: strings.Repeat("x", MaxPayload)}); !errors.Is(err, ErrProtocol) {
		t.Errorf("got %v", err)
	}
}

func TestTruncated(t *testing.T) {
	var buf bytes.Buffer
	if err := NewWriter(&buf).Write(Stdout, 3, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	for n := range buf.Len() {
		_, err := NewReader(bytes.NewReader(buf.Bytes()[:n])).Read()
		if n == 0 && !errors.Is(err, io.EOF) || n > 0 && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestHostile(t *testing.T) {
	for name, in := range map[string]string{
		"text":        "Kernel panic - not syncing: what",
		"zero kind":   "pd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"last kind":   "pd\xff\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"reserved":    "pd\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00",
		"huge length": "pd\x01\x00\x00\x00\x00\x00\xff\xff\xff\xff",
		"one more":    "pd\x01\x00\x00\x00\x00\x00\x01\x00\x10\x00",
	} {
		if _, err := NewReader(strings.NewReader(in)).Read(); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := (Frame{Kind: Exit, Payload: []byte(`{"Code":`)}).Decode(&ExitMsg{}); !errors.Is(err, ErrProtocol) {
		t.Errorf("bad JSON: %v", err)
	}
}

func TestConcurrentWriters(t *testing.T) {
	pr, pw := io.Pipe()
	w := NewWriter(pw)
	var wg sync.WaitGroup
	for id := range uint32(8) {
		wg.Go(func() {
			for range 100 {
				if err := w.Write(Stdout, id, bytes.Repeat([]byte{byte(id)}, int(id)*50)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	go func() {
		wg.Wait()
		pw.Close()
	}()
	r := NewReader(pr)
	n := 0
	f, err := r.Read()
	for ; err == nil; f, err = r.Read() {
		n++
		if len(f.Payload) != int(f.ID)*50 || bytes.Count(f.Payload, []byte{byte(f.ID)}) != len(f.Payload) {
			t.Fatalf("frame %d of writer %d is torn", n, f.ID)
		}
	}
	if !errors.Is(err, io.EOF) || n != 800 {
		t.Errorf("%d frames, then %v", n, err)
	}
}

func FuzzReader(f *testing.F) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	_ = w.Send(Exit, 1, ExitMsg{Code: 3})
	_ = w.Write(Stdout, 2, []byte("out"))
	f.Add(buf.Bytes())
	f.Add(buf.Bytes()[:buf.Len()-1])
	f.Add([]byte("pd\x01\x00\x00\x00\x00\x00\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, in []byte) {
		// What reads as frames must write back to the same bytes.
		r := NewReader(bytes.NewReader(in))
		var out bytes.Buffer
		w := NewWriter(&out)
		for {
			fr, err := r.Read()
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, ErrProtocol) {
					t.Fatalf("unexpected error: %v", err)
				}
				break
			}
			_ = fr.Decode(&ExecMsg{})
			if err := w.Write(fr.Kind, fr.ID, fr.Payload); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.HasPrefix(in, out.Bytes()) {
			t.Fatalf("in  %x\nout %x", in, out.Bytes())
		}
	})
}
