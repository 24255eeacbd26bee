package settings

import (
	"math"
	"math/big"
	"regexp"
	"strings"
	"testing"
)

func TestSizesAreBytesOrWholeUnits(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "1": 1, "65536": 65536, "1B": 1, "512MiB": 512 << 20, "512mib": 512 << 20, "2GB": 2e9, "2 GB": 2e9, "1kB": 1000, "1KiB": 1024,
		"3TiB": 3 << 40, "9223372036854775807": math.MaxInt64, "9223372036854775807B": math.MaxInt64, "8388607TiB": 8388607 << 40,
	} {
		if n, err := ParseSize(text); n != want || err != nil {
			t.Errorf("%q: %d, %v; want %d", text, n, err, want)
		}
	}
	for text, want := range map[string]string{
		"": "not a size", "MiB": "not a size", "-1": "not a size", "+1": "not a size", "1.5GiB": "not a size", "2G": "not a size", "1 ": "not a size", "1  GB": "not a size",
		" 1": "not a size", "1e9": "not a size", "0x10": "not a size", "1_000": "not a size", "12 parsecs": "not a size", "1EiB": "not a size",
		"9223372036854775808": "too large", "8388608TiB": "too large", "99999999999999999999 GB": "too large",
	} {
		if n, err := ParseSize(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %d, %v; want %s", text, n, err, want)
		}
	}
}

func TestSizesAreWrittenInTheirLargestUnit(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0", 1: "1", 1000: "1kB", 1023: "1023", 1024: "1KiB", 2e9: "2GB", 16 << 30: "16GiB", 1 << 62: "4194304TiB", math.MaxInt64: "9223372036854775807",
	} {
		if got := FormatSize(n); got != want {
			t.Errorf("%d is written %s, want %s", n, got, want)
		}
	}
}

// FuzzParseSize compares with arithmetic that cannot overflow.
func FuzzParseSize(f *testing.F) {
	for _, text := range []string{"0", "512MiB", "2 GB", "8388608TiB", "1.5GiB", "9223372036854775807"} {
		f.Add(text)
	}
	form := regexp.MustCompile(`^([0-9]+)(?: ?(?:([kmgt])(i?))?b)?$`)
	f.Fuzz(func(t *testing.T, text string) {
		var want *big.Int
		if m := form.FindStringSubmatch(strings.ToLower(text)); m != nil {
			want, _ = new(big.Int).SetString(m[1], 10)
			base := int64(1000)
			if m[3] == "i" {
				base = 1024
			}
			for range strings.Index("kmgt", m[2]) + 1 {
				if m[2] != "" {
					want.Mul(want, big.NewInt(base))
				}
			}
			if !want.IsInt64() {
				want = nil
			}
		}
		n, err := ParseSize(text)
		if (err == nil) != (want != nil) || err == nil && n != want.Int64() {
			t.Fatalf("%q: %d, %v; want %v", text, n, err, want)
		}
		if err != nil {
			return
		}
		if again, err := ParseSize(FormatSize(n)); again != n || err != nil {
			t.Fatalf("%d is written %s, which reads %d, %v", n, FormatSize(n), again, err)
		}
	})
}
