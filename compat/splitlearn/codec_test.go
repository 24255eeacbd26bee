package splitlearn

import (
	"bytes"
	"compress/zlib"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/x448/float16"

	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// FuzzDecode holds decode to the rule as the contract has it, and to the memory that it asks for.
func FuzzDecode(f *testing.F) {
	stream := func(b []byte) []byte {
		var out bytes.Buffer
		w := zlib.NewWriter(&out)
		_, _ = w.Write(b)
		_ = w.Close()
		return out.Bytes()
	}
	f.Add([]byte{}, int32(0), int32(1))
	f.Add(make([]byte, 24), int32(2), int32(3))
	f.Add(make([]byte, 12), int32(2), int32(3))
	f.Add(make([]byte, 24), int32(-1), int32(3))
	f.Add(stream(make([]byte, 24)), int32(2), int32(3))
	f.Add(stream(make([]byte, 1<<20)), int32(2), int32(3))
	f.Add(stream(make([]byte, 100<<10)), int32(100), int32(256))
	f.Add(append(stream(make([]byte, 24)), 0), int32(2), int32(3))
	f.Add(make([]byte, 8), int32(math.MaxInt32), int32(math.MaxInt32))
	f.Add([]byte{0x78, 0x9c, 3, 0, 0, 0, 0, 1}, int32(0), int32(1))
	f.Fuzz(func(t *testing.T, data []byte, a, b int32) {
		before := bytes.Clone(data)
		var held int64
		got, c, err := decode("data", data, []int32{a, b}, maker{t.Context(), func(n int64) error {
			if held += n; n >= inflateMost*int64(len(data)+1) {
				t.Fatalf("%d bytes for %d", n, len(data))
			}
			return nil
		}})
		if !bytes.Equal(before, data) {
			t.Fatal("it changed what it borrows")
		}
		want, wantCodec, ok := slowDecode(data, int64(a), int64(b))
		if ok != (err == nil) {
			t.Fatalf("%d bytes as [%d %d]: %v, but %v", len(data), a, b, err, ok)
		}
		if !ok {
			return
		}
		if c != wantCodec || !bytes.Equal(got.Data, want) {
			t.Fatalf("%d bytes as [%d %d]: codec %d and %d bytes, want %d and %d", len(data), a, b, c, len(got.Data), wantCodec, len(want))
		}
		if _, err := tensor.New(got.Desc, got.Data); err != nil {
			t.Fatal(err)
		}
		if c != float32s && held < int64(len(want)) {
			t.Fatalf("%d bytes held for %d", held, len(want))
		}
		back, dims, err := encode(got, c, maker{t.Context(), func(int64) error { return nil }})
		if err != nil || len(dims) != 2 {
			t.Fatal(err)
		}
		again, _, err := decode("data", back, dims, maker{t.Context(), func(int64) error { return nil }})
		if err != nil || c != float16s && !bytes.Equal(again.Data, want) {
			t.Fatalf("not the same again: %v", err)
		}
	})
}

// slowDecode is the rule, word by word.
func slowDecode(data []byte, a, b int64) ([]byte, codec, bool) {
	n := int64(len(data))
	switch {
	case a < -1 || b < -1 || a == -1 && b == -1:
		return nil, 0, false
	case (a == -1 || b == -1) && (a*b == 0 || n%(-4*a*b) != 0):
		return nil, 0, false
	case a > 0 && b > 0 && a*b > 1<<40:
		return nil, 0, false
	}
	size := 4 * a * b
	if a == -1 || b == -1 {
		size = n
	}
	if n >= 2 && data[0]&15 == 8 && data[0]>>4 <= 7 && (int(data[0])*256+int(data[1]))%31 == 0 {
		rest := bytes.NewReader(data)
		if z, err := zlib.NewReader(rest); err == nil {
			all, err := io.ReadAll(io.LimitReader(z, size+1))
			if err == nil {
				_, err = z.Read(make([]byte, 1))
			}
			if errors.Is(err, io.EOF) && int64(len(all)) == size && rest.Len() == 0 {
				return all, deflated, true
			}
		}
	}
	switch n {
	case size:
		return data, float32s, true
	case size / 2:
		var out []byte
		for ; len(data) > 0; data = data[2:] {
			v := float16.Frombits(binary.LittleEndian.Uint16(data)).Float32()
			if v != v {
				v = float32(math.NaN())
			}
			out = binary.LittleEndian.AppendUint32(out, math.Float32bits(v))
		}
		return out, float16s, true
	}
	return nil, 0, false
}

func TestLargeMessagesTakeTurnsAndSmallOnesDoNot(t *testing.T) {
	testkit.Start(t)
	compress := func(data []byte) []byte {
		var b bytes.Buffer
		z := zlib.NewWriter(&b)
		_, _ = z.Write(data)
		_ = z.Close()
		return b.Bytes()
	}
	free := maker{t.Context(), func(int64) error { return nil }}
	gone := errors.New("gone")
	for n, want := range map[int32]error{background.PieceBytes / 4: nil, background.PieceBytes/4 + probeBytes: gone} {
		float := make([]byte, 4*n)
		x := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(n)}}, Data: float}
		for name, work := range map[string]func(m maker) error{
			"inflate": func(m maker) error { _, _, err := decode("data", compress(float), []int32{n}, m); return err },
			"widen":   func(m maker) error { _, _, err := decode("data", float[:2*n], []int32{n}, m); return err },
			"deflate": func(m maker) error { _, _, err := encode(x, deflated, m); return err },
			"narrow":  func(m maker) error { _, _, err := encode(x, float16s, m); return err },
		} {
			if err := work(free); err != nil {
				t.Fatal(name, err)
			}
			ctx, leave := context.WithCancelCause(t.Context())
			turns := make([]background.Turn, max(1, runtime.GOMAXPROCS(0)-1))
			for i := range turns {
				if err := turns[i].Work(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			time.AfterFunc(time.Millisecond, func() { leave(gone) })
			if err := work(maker{ctx, free.hold}); !errors.Is(err, want) {
				t.Errorf("%s of %d elements while others have all turns: %v, want %v", name, n, err, want)
			}
			for i := range turns {
				turns[i].End()
			}
			leave(nil)
		}
	}
}

func TestPassesThatAreTooOldAreGone(t *testing.T) {
	testkit.Start(t)
	now, from := time.Now(), t.Context()
	tr := training{gone: make(map[string][]string), passes: []*pass{
		{name: "old", model: "a", from: from, call: tensor.ID{1}, born: now.Add(-passAge)},
		{name: "other", model: "b", from: from, call: tensor.ID{2}, born: now.Add(-passAge)},
		{name: "young", model: "a", from: from, call: tensor.ID{3}, born: now.Add(-passAge / 2)},
	}}
	if _, found := tr.take(from, "old", ""); found {
		t.Error("an old pass was found")
	}
	if run, found := tr.take(from, "young", ""); !found || run.call != (tensor.ID{3}) {
		t.Error("a pass of 30 s was not found")
	}
	if graphs, free := tr.enter(&pass{name: "new", model: "a", from: from}); graphs != (tensor.ID{1}).String() || !free || len(tr.passes) != 2 {
		t.Errorf("graphs %q go, %d passes stay", graphs, len(tr.passes))
	}
}
