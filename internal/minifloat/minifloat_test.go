package minifloat

import (
	"math"
	"testing"

	"github.com/x448/float16"

	"github.com/tensorferry/tensorferry/tensor"
)

func TestEveryFloat16DecodesAsInTheLibrary(t *testing.T) {
	f, _ := Of(tensor.Float16)
	for bits := range 1 << 16 {
		want := float64(float16.Frombits(uint16(bits)).Float32())
		got := decode(f, uint16(bits))
		if math.Float64bits(got) != math.Float64bits(want) && (got == got || want == want) {
			t.Fatalf("%#x is %v, want %v", bits, got, want)
		}
	}
}

func TestFloat16IsRoundedAsInTheLibrary(t *testing.T) {
	f, _ := Of(tensor.Float16)
	// Every float32 of these upper bits, with what makes rounding interesting below.
	for upper := range uint32(1 << 16) {
		for _, lower := range []uint32{0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x3001, 0xefff, 0xf000, 0xf001, 0xffff} {
			v := math.Float32frombits(upper<<16 | lower)
			want := float16.Fromfloat32(v).Bits()
			if got := f.Encode(float64(v)); got != want && v == v {
				t.Fatalf("%v (%#x) is %#x, want %#x", v, math.Float32bits(v), got, want)
			}
		}
	}
}

func TestBFloat16IsTheUpperHalfOfAFloat32(t *testing.T) {
	f, _ := Of(tensor.BFloat16)
	for bits := range uint32(1 << 16) {
		want := float64(math.Float32frombits(bits << 16))
		if got := decode(f, uint16(bits)); math.Float64bits(got) != math.Float64bits(want) && (got == got || want == want) {
			t.Fatalf("%#x is %v, want %v", bits, got, want)
		}
	}
}

// Encode is held to a slow search for the nearest value, on every value, every
// middle between two and what lies next to it.
func TestRoundingIsToTheNearestAndTiesToEven(t *testing.T) {
	for d, f := range formats {
		t.Run(d.String(), func(t *testing.T) {
			var last uint16 // the largest finite magnitude
			for decode(f, last+1) < math.Inf(1) {
				last++
			}
			check := func(v float64, want uint16) {
				t.Helper()
				if got := f.Encode(v); got != want {
					t.Fatalf("%v is %#x, want %#x", v, got, want)
				}
				if got, negative := f.Encode(-v), want|1<<(f.sign); got != negative {
					t.Fatalf("%v is %#x, want %#x", -v, got, negative)
				}
			}
			for bits := range last {
				low, high := decode(f, bits), decode(f, bits+1)
				if !(low < high) {
					t.Fatalf("%#x is %v, the next %v", bits, low, high)
				}
				middle := (low + high) / 2 // exact: two more bits than either
				check(low, bits)
				check(math.Nextafter(middle, low), bits)
				check(middle, bits+bits&1)
				check(math.Nextafter(middle, high), bits+1)
			}
			check(decode(f, last), last)
			beyond := last + 1 // an infinity or, in a format without, NaN
			// Past the last value rounding goes on as if there were a next one.
			step := decode(f, last) - decode(f, last-1)
			past := decode(f, last) + step/2
			check(math.Nextafter(past, 0), last)
			if last&1 == 1 {
				check(past, beyond)
			} else {
				check(past, last)
			}
			check(math.Nextafter(past, math.Inf(1)), beyond)
			check(math.MaxFloat64, beyond)
			check(math.Inf(1), beyond)
			check(0, 0)
			check(math.SmallestNonzeroFloat64, 0)
			if got := decode(f, f.Encode(math.NaN())); got == got {
				t.Errorf("NaN becomes %v", got)
			}
		})
	}
}

func TestTheEndsOfEachFormatAreThoseOfItsSpecification(t *testing.T) {
	for d, want := range map[tensor.DataType]struct{ largest, smallest float64 }{
		tensor.Float16:      {65504, 0x1p-24},
		tensor.BFloat16:     {0x1.fep127, 0x1p-133},
		tensor.Float8E4M3FN: {448, 0x1p-9},
		tensor.Float8E5M2:   {57344, 0x1p-16},
	} {
		f, ok := Of(d)
		if !ok {
			t.Fatalf("%v is no small float", d)
		}
		if got := decode(f, f.Encode(want.largest)); got != want.largest {
			t.Errorf("%v: largest is %v, want %v", d, got, want.largest)
		}
		if got := decode(f, 1); got != want.smallest {
			t.Errorf("%v: smallest is %v, want %v", d, got, want.smallest)
		}
	}
	if _, ok := Of(tensor.Float32); ok {
		t.Error("float32 is a small float")
	}
}

func decode(f *Format, bits uint16) float64 { return float64(f.Values()[bits]) }
