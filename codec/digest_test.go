package codec

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"pgregory.net/rapid"
)

func TestADigestIsThePublishedXXH3(t *testing.T) {
	// The 128-bit hash of nothing, as the reference implementation's own tests have it.
	const empty = "xxh3:99aa06d3014798d86001c324468d497f"
	var d Digester
	if got := d.Sum().String(); got != empty {
		t.Errorf("digest of nothing is %s, want %s", got, empty)
	}
}

func TestADigestDoesNotDependOnThePiecesItWasMadeOf(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		data := rapid.SliceOfN(rapid.Byte(), 0, 5000).Draw(t, "data")
		var whole, pieces Digester
		_, _ = whole.Write(data)
		for rest := data; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "n")
			_, _ = pieces.Write(rest[:n])
			rest = rest[n:]
		}
		if whole.Sum() != pieces.Sum() {
			t.Fatalf("%v in one piece, %v in several", whole.Sum(), pieces.Sum())
		}
		if again, ok := ParseDigest(whole.Sum().String()); !ok || again != whole.Sum() {
			t.Fatalf("%v reads back as %v, %v", whole.Sum(), again, ok)
		}
	})
}

func TestOnlyADigestIsReadAsOne(t *testing.T) {
	for _, text := range []string{"", "xxh3:", "xxh3:00", "crc32:99aa06d3014798d86001c324468d497f", "xxh3:99aa06d3014798d86001c324468d497g", "99aa06d3014798d86001c324468d497f"} {
		if d, ok := ParseDigest(text); ok {
			t.Errorf("%q is read as %v", text, d)
		}
	}
	if text := (Digest{}).String(); text != "" {
		t.Errorf("the zero digest prints %q", text)
	}
}

func TestAnOrderedDigestIsThatOfTheBytesHoweverTheyCame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.OneOf(rapid.IntRange(0, 5000), rapid.IntRange(PieceBytes-1, PieceBytes+1), rapid.Just(2*PieceBytes+1)).Draw(t, "size")
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(i*7 + i>>8)
		}
		var want Digester
		_, _ = want.Write(data)
		chunk := rapid.IntRange(max(1, size/20), size+1).Draw(t, "chunk")
		var chunks []int // their offsets
		for off := 0; off < size; off += chunk {
			chunks = append(chunks, off)
		}
		if rapid.Bool().Draw(t, "in any order") {
			chunks = rapid.Permutation(chunks).Draw(t, "chunks")
		}
		var got OrderedDigester
		written := make([]byte, size)
		next := 0 // the model of Next: what has come without a gap, when it came
		for _, off := range chunks {
			p := data[off:min(off+chunk, size)]
			copy(written[off:], p)
			got.Wrote(int64(off), p)
			if off == next {
				next += len(p)
			}
			if got.Next() != int64(next) {
				t.Fatalf("next is %d, want %d", got.Next(), next)
			}
		}
		if err := got.ReadRest(bytes.NewReader(written), int64(size)); err != nil {
			t.Fatal(err)
		}
		if got.Next() != int64(size) || got.Sum() != want.Sum() {
			t.Fatalf("%v of %d bytes, want %v of %d", got.Sum(), got.Next(), want.Sum(), size)
		}
	})
}

func TestWhatCannotBeReadAgainHasNoDigest(t *testing.T) {
	var o OrderedDigester
	o.Wrote(0, []byte("abc"))
	if err := o.ReadRest(bytes.NewReader([]byte("abcdef")), 7); !errors.Is(err, io.ErrUnexpectedEOF) || o.Next() != 3 {
		t.Errorf("read to %d, %v", o.Next(), err)
	}
	if err := o.ReadRest(bytes.NewReader([]byte("abcdef")), 6); err != nil || o.Next() != 6 {
		t.Errorf("read to %d, %v", o.Next(), err)
	}
	if err := o.ReadRest(nil, 6); err != nil {
		t.Errorf("all is read: %v", err)
	}
}
