package codec

import (
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
