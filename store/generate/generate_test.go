package generate

import (
	"encoding/binary"
	"flag"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/minifloat"
	"github.com/tensorferry/tensorferry/tensor"
)

// bytesAt returns bytes [off,+n) of the tensor.
func bytesAt(off int64, n int, d tensor.DataType, seed uint64, fill Fill) []byte {
	p := make([]byte, n)
	Bytes(p, off, d, seed, fill)
	return p
}

// The outputs of Vigna's splitmix64.c for two seeds, as published with
// implementations in many languages.
func TestTheWordsAreThoseOfSplitMix64(t *testing.T) {
	for seed, want := range map[uint64][]uint64{
		0:       {0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f, 0xf88bb8a8724c81ec},
		1234567: {6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821},
	} {
		g := generator{seed: seed}
		for i, w := range want {
			require.Equal(t, w, g.word(uint64(i)), "seed %d, output %d", seed, i)
		}
	}
}

var rewrite = flag.Bool("rewrite", false, "write testdata/generate.txt, which never changes once it is released")

// Whoever pulls a generated tensor may check it against these bytes: the first 16,
// and the CRC32C of 64 KiB far behind.
func TestTheStreamNeverChanges(t *testing.T) {
	const seed, far = 42, 1 << 40
	var lines strings.Builder
	for _, d := range tensor.DataTypes() {
		for _, name := range Fills() {
			f, err := ParseFill(name, d)
			if err != nil {
				continue // normal, of integers
			}
			sum := crc32.Checksum(bytesAt(far, 64<<10, d, seed, f), crc32.MakeTable(crc32.Castagnoli))
			fmt.Fprintf(&lines, "%-14v %-8v %x %08x\n", d, f, bytesAt(0, 16, d, seed, f), sum)
		}
	}
	const file = "testdata/generate.txt"
	if *rewrite {
		require.NoError(t, os.WriteFile(file, []byte(lines.String()), 0o666))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), lines.String())
}

func TestAnyRangeOfBytesIsThatOfTheWhole(t *testing.T) {
	const n = 1 << 10
	for _, d := range tensor.DataTypes() {
		for _, name := range Fills() {
			f, err := ParseFill(name, d)
			if err != nil {
				continue
			}
			whole := bytesAt(0, n, d, 7, f)
			for off := range int64(40) {
				for _, length := range []int{0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 33, n - 40} {
					require.Equal(t, whole[off:off+int64(length)], bytesAt(off, length, d, 7, f), "%v %v [%d,+%d)", d, f, off, length)
				}
			}
		}
	}
}

func TestNormalIsThePercentagePointOfItsShare(t *testing.T) {
	// The same quantile by way of the standard library, where that has not lost
	// digits: 2u-1 is exact, but close to 1 it says little about 1-u.
	for _, bits := range []uint64{0, 1 << 11, 1 << 20, 1 << 30, 1 << 40, 1 << 50, 1 << 57, 1<<60 - 1, 1 << 61, 1<<63 - 1, 1 << 63, 1<<63 + 1<<62, 3 << 62, math.MaxUint64} {
		u := (float64(bits>>11) + 0.5) / (1 << 53)
		got := normal(bits)
		want := -math.Sqrt2 * math.Erfcinv(2*u)
		if u < 1e-6 || u > 1-1e-6 {
			// Erfc is good there, its inverse is not.
			share := math.Erfc(math.Abs(got)/math.Sqrt2) / 2
			require.InEpsilon(t, min(u, (float64(^bits>>11)+0.5)/(1<<53)), share, 1e-13, "bits %#x", bits)
			require.Equal(t, bits>>63 == 1, got > 0)
			continue
		}
		require.InDelta(t, want, got, 4e-15*max(1, math.Abs(want)), "bits %#x", bits)
		require.Equal(t, -got, normal(^bits), "the distribution is symmetric")
	}
}

func TestTheLogarithmIsThatOfTheStandardLibrary(t *testing.T) {
	for x := 0x1p-54; x < 1e3; x *= 1.0009 {
		if want := math.Log(x); math.Abs(ln(x)-want) > 4e-16*max(1, math.Abs(want)) {
			t.Fatalf("ln %v is %v, want %v", x, ln(x), want)
		}
	}
}

// moments returns mean and standard deviation of the numbers that value reads.
func moments(n int, value func(i int) float64) (mean, std float64) {
	for i := range n {
		mean += value(i) / float64(n)
	}
	for i := range n {
		std += (value(i) - mean) * (value(i) - mean) / float64(n)
	}
	return mean, math.Sqrt(std)
}

func TestTheFillsHaveTheirDistributions(t *testing.T) {
	const n = 1 << 16
	f64 := func(p []byte) func(i int) float64 {
		return func(i int) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(p[8*i:])) }
	}
	mean, std := moments(n, f64(bytesAt(0, 8*n, tensor.Float64, 1, FillNormal)))
	require.InDelta(t, 0, mean, 0.02)
	require.InDelta(t, 1, std, 0.02)
	mean, std = moments(2*n, f64(bytesAt(0, 16*n, tensor.Complex128, 1, FillNormal)))
	require.InDelta(t, 0, mean, 0.02)
	require.InDelta(t, 1, std, 0.02)
	mean, std = moments(n, f64(bytesAt(0, 8*n, tensor.Float64, 1, FillUniform)))
	require.InDelta(t, 0.5, mean, 0.01)
	require.InDelta(t, 1/math.Sqrt(12), std, 0.01)
	for _, d := range []tensor.DataType{tensor.Float16, tensor.BFloat16, tensor.Float8E4M3FN, tensor.Float8E5M2} {
		format, _ := minifloat.Of(d)
		width := d.Bits() / 8
		for fill, want := range map[Fill][2]float64{FillNormal: {0, 1}, FillUniform: {0.5, 1 / math.Sqrt(12)}} {
			p := append(bytesAt(0, width*n, d, 1, fill), 0)
			value := func(i int) float64 {
				bits := binary.LittleEndian.Uint16(p[width*i:])
				if width == 1 {
					bits &= 0xff
				}
				v := float64(format.Values()[bits])
				if fill == FillUniform && !(v >= 0 && v < 1) {
					t.Fatalf("%v: element %d is %v", d, i, v)
				}
				return v
			}
			mean, std := moments(n, value)
			require.InDelta(t, want[0], mean, 0.07, "%v %v: coarse steps round down", d, fill)
			require.InDelta(t, want[1], std, 0.02, "%v %v", d, fill)
		}
	}
	seen := map[byte]int{}
	for _, b := range bytesAt(0, n, tensor.Uint8, 1, FillUniform) {
		seen[b]++
	}
	require.Len(t, seen, 256)
	for _, b := range bytesAt(0, n, tensor.Bool, 1, FillUniform) {
		require.LessOrEqual(t, b, byte(1))
	}
}

func TestCountingIsTheIndexConverted(t *testing.T) {
	require.Equal(t, []byte{0, 1, 1, 1}, bytesAt(0, 4, tensor.Bool, 0, FillCount))
	require.Equal(t, []byte{254, 255, 0, 1}, bytesAt(254, 4, tensor.Uint8, 0, FillCount))
	require.Equal(t, []byte{3, 0, 0, 0, 4, 0, 0, 0}, bytesAt(12, 8, tensor.Int32, 0, FillCount))
	p := bytesAt(5*8, 16, tensor.Complex64, 0, FillCount)
	values := make([]complex64, 2)
	_, err := binary.Decode(p, binary.LittleEndian, values)
	require.NoError(t, err)
	require.Equal(t, []complex64{5, 6}, values)
	require.Equal(t, make([]byte, 9), bytesAt(3, 9, tensor.Float64, 0, FillZeros))
}

func TestSeedsDiffer(t *testing.T) {
	require.NotEqual(t, bytesAt(0, 64, tensor.Float32, 1, FillNormal), bytesAt(0, 64, tensor.Float32, 2, FillNormal))
}

func BenchmarkGenerate(b *testing.B) {
	for _, d := range []tensor.DataType{tensor.Float32, tensor.BFloat16, tensor.Uint8} {
		for _, fill := range Fills() {
			f, err := ParseFill(fill, d)
			if err != nil {
				continue
			}
			b.Run(fmt.Sprintf("dtype=%v/fill=%v", d, f), func(b *testing.B) {
				p := make([]byte, 1<<20)
				b.SetBytes(int64(len(p)))
				b.ReportAllocs()
				for b.Loop() {
					Bytes(p, 0, d, 1, f)
				}
			})
		}
	}
}
