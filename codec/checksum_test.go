package codec

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// id is 00 01 02 … 0f.
var id = tensor.ID{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}

// polynomials are the two of the wire, bits reversed.
var polynomials = map[Checksum]uint32{CRC32C: 0x82f63b78, CRC32: 0xedb88320}

// slow computes a CRC-32 bit by bit, as its definition says.
func slow(sum, polynomial uint32, data []byte) uint32 {
	sum = ^sum
	for _, b := range data {
		sum ^= uint32(b)
		for range 8 {
			if sum&1 == 1 {
				sum = sum>>1 ^ polynomial
			} else {
				sum >>= 1
			}
		}
	}
	return ^sum
}

func TestChecksumsAreThePublishedOnes(t *testing.T) {
	// The check values that every list of CRCs gives, and those of RFC 3720 B.4.
	check := []byte("123456789")
	for name, tc := range map[string]struct {
		kind Checksum
		data []byte
		want uint32
	}{
		"CRC-32C of 123456789":   {CRC32C, check, 0xe3069283},
		"CRC-32 of 123456789":    {CRC32, check, 0xcbf43926},
		"CRC-32C of 32 zeros":    {CRC32C, make([]byte, 32), 0x8a9136aa},
		"CRC-32C of nothing":     {CRC32C, nil, 0},
		"CRC-32 of nothing":      {CRC32, nil, 0},
		"CRC-32 of a whole zero": {CRC32, []byte{0}, 0xd202ef8d},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.kind.Update(0, tc.data); got != tc.want {
				t.Errorf("got %#08x, want %#08x", got, tc.want)
			}
		})
	}
}

func TestAChunksChecksumBeginsWithItsName(t *testing.T) {
	// Computed apart from this module, over id, index (little-endian) and data:
	// CRC-32 by zlib, CRC-32C bit by bit. A changed value changes the wire.
	for name, tc := range map[string]struct {
		kind       Checksum
		index      uint32
		data       string
		want, seed uint32
	}{
		"CRC-32C, first chunk":          {CRC32C, 0, "123456789", 0x428e5fa2, 0xeb7040db},
		"CRC-32C, index in four bytes":  {CRC32C, 0x01020304, "123456789", 0x320d20b0, 0xaf5202b6},
		"CRC-32, first chunk":           {CRC32, 0, "123456789", 0xe9e73963, 0x8a6a5071},
		"CRC-32, index in four bytes":   {CRC32, 0x01020304, "123456789", 0xe96e53fa, 0x427f2b6b},
		"CRC-32C, a chunk without data": {CRC32C, 1, "", 0x3635ea63, 0x3635ea63},
	} {
		t.Run(name, func(t *testing.T) {
			seed := tc.kind.Seed(id, tc.index)
			if got := tc.kind.Update(seed, []byte(tc.data)); seed != tc.seed || got != tc.want {
				t.Errorf("seed %#08x, whole %#08x; want %#08x, %#08x", seed, got, tc.seed, tc.want)
			}
		})
	}
}

func TestBytesDeliveredUnderAnotherNameFailTheirCheck(t *testing.T) {
	data := []byte("the same bytes")
	for kind := range polynomials {
		sums := map[uint32]string{kind.Update(kind.Seed(id, 1), data): "the name itself"}
		note := func(what string, id tensor.ID, index uint32) {
			sum := kind.Update(kind.Seed(id, index), data)
			if other, taken := sums[sum]; taken {
				t.Errorf("kind %d: %s has the checksum of %s", kind, what, other)
			}
			sums[sum] = what
		}
		for bit := range 128 {
			other := id
			other[bit/8] ^= 1 << (bit % 8)
			note("an ID with one bit changed", other, 1)
		}
		for bit := range 32 {
			note("an index with one bit changed", id, 1^1<<bit)
		}
	}
}

func TestOnlyTheTwoKindsOfTheWireAreValid(t *testing.T) {
	for c := range Checksum(255) {
		if _, known := polynomials[c]; c.Valid() != known {
			t.Errorf("Checksum(%d).Valid() = %v", c, c.Valid())
		}
	}
}

// TestAnyCutGivesTheSumOfTheWhole compares with the definition, over views cut
// at any place.
func TestAnyCutGivesTheSumOfTheWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		data := rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "data")
		index := rapid.Uint32().Draw(t, "index")
		cuts := rapid.SliceOfN(rapid.IntRange(0, 64), 0, 8).Draw(t, "cuts")
		name := append(id[:len(id):len(id)], byte(index), byte(index>>8), byte(index>>16), byte(index>>24))
		for kind, polynomial := range polynomials {
			sum, rest := kind.Seed(id, index), data
			for _, n := range cuts {
				n = min(n, len(rest))
				sum, rest = kind.Update(sum, rest[:n]), rest[n:]
			}
			sum = kind.UpdateCold(sum, rest)
			if want := slow(slow(0, polynomial, name), polynomial, data); sum != want {
				t.Fatalf("kind %d: %#08x, want %#08x", kind, sum, want)
			}
		}
	})
}

func TestAChecksumAllocatesNothing(t *testing.T) {
	data := make([]byte, 16384)
	for kind := range polynomials {
		if n := testing.AllocsPerRun(100, func() { kind.Update(kind.Seed(id, 7), data) }); n != 0 {
			t.Errorf("kind %d: %v allocations, want 0", kind, n)
		}
	}
}

func TestColdBytesHaveTheSameSum(t *testing.T) {
	data := testkit.Bytes(3*fetchBytes+1, 1)
	for kind := range polynomials {
		for _, n := range []int{0, 1, 64, fetchBytes - 1, fetchBytes, fetchBytes + 1, len(data)} {
			if got, want := kind.UpdateCold(7, data[:n]), kind.Update(7, data[:n]); got != want {
				t.Errorf("kind %d, %d bytes: %#08x, want %#08x", kind, n, got, want)
			}
		}
	}
}

// BenchmarkUpdate sums the chunks of a tensor that no cache holds, and one chunk that
// it does.
func BenchmarkUpdate(b *testing.B) {
	const chunk = 1 << 20
	tensor := testkit.Bytes(256*chunk, 1)
	for name, kind := range map[string]Checksum{"CRC32C": CRC32C, "CRC32": CRC32} {
		for memory, data := range map[string][]byte{"cache": tensor[:chunk], "main": tensor} {
			b.Run("kind="+name+"/memory="+memory+"/chunk=1MiB", func(b *testing.B) {
				b.SetBytes(chunk)
				b.ReportAllocs()
				for i := 0; b.Loop(); i = (i + chunk) % len(data) {
					kind.Update(kind.Seed(id, 0), data[i:i+chunk])
				}
			})
			b.Run("kind="+name+"/memory="+memory+"/cold=true/chunk=1MiB", func(b *testing.B) {
				b.SetBytes(chunk)
				for i := 0; b.Loop(); i = (i + chunk) % len(data) {
					kind.UpdateCold(kind.Seed(id, 0), data[i:i+chunk])
				}
			})
		}
	}
}

func TestTheFastestKindIsOneOfTheWire(t *testing.T) {
	if kind := Fastest(); !kind.Valid() {
		t.Errorf("Fastest() = %d", kind)
	}
}
