package tensor

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

func TestDataTypesHaveTheNumbersAndNamesOfTheWire(t *testing.T) {
	want := []struct {
		name string
		bits int
	}{
		{"bool", 8}, {"int8", 8}, {"int16", 16}, {"int32", 32}, {"int64", 64},
		{"uint8", 8}, {"uint16", 16}, {"uint32", 32}, {"uint64", 64},
		{"float16", 16}, {"bfloat16", 16}, {"float32", 32}, {"float64", 64},
		{"float8_e4m3fn", 8}, {"float8_e5m2", 8}, {"complex64", 64}, {"complex128", 128},
	}
	all := DataTypes()
	if len(all) != len(want) {
		t.Fatalf("%d data types, want %d", len(all), len(want))
	}
	for i, w := range want {
		d := DataType(i + 1)
		if all[i] != d || !d.Valid() || d.String() != w.name || d.Bits() != w.bits {
			t.Errorf("number %d is %v of %d bits, want %s of %d", i+1, d, d.Bits(), w.name, w.bits)
		}
		if got, err := ParseDataType(w.name); err != nil || got != d {
			t.Errorf("%q became %v, %v", w.name, got, err)
		}
	}
}

func TestIntegersAndBoolAreWhole(t *testing.T) {
	for _, d := range DataTypes() {
		want := d == Bool || strings.Contains(d.String(), "int")
		if d.Whole() != want {
			t.Errorf("%v: Whole is %v", d, d.Whole())
		}
	}
	if DataType(0).Whole() || DataType(255).Whole() {
		t.Error("what is no data type is whole")
	}
}

func TestWhatIsNoDataTypeSaysSo(t *testing.T) {
	for _, d := range []DataType{0, Complex128 + 1, 255} {
		if d.Valid() || d.Bits() != 0 || d.String() != fmt.Sprintf("DataType(%d)", uint8(d)) {
			t.Errorf("%v, %d bits", d, d.Bits())
		}
	}
	for _, name := range []string{"", "Float32", "float", "float32 ", "f4", "DataType(0)"} {
		d, err := ParseDataType(name)
		if d != 0 || !errors.Is(err, ErrDataType) {
			t.Errorf("%q became %v, %v", name, d, err)
		} else if !strings.Contains(err.Error(), "bfloat16") {
			t.Errorf("the error does not say what is known: %v", err)
		}
	}
}

func testElement[T Element](t *testing.T, want DataType, values ...T) {
	t.Helper()
	t.Run(want.String(), func(t *testing.T) {
		var z T
		size, align := int(unsafe.Sizeof(z)), int(unsafe.Alignof(z))
		if got := DataTypeOf[T](); got != want || got.Bits() != 8*size {
			t.Fatalf("data type %v of %d bits, want %v of %d bytes", got, got.Bits(), want, size)
		}

		made, err := Of(values)
		if err != nil {
			t.Fatal(err)
		}
		if !made.Desc.Equal(Desc{want, Shape{int64(len(values))}}) {
			t.Errorf("a slice without shape became %v", made.Desc)
		}
		if unsafe.Pointer(&made.Data[0]) != unsafe.Pointer(&values[0]) || len(made.Data) != len(values)*size {
			t.Error("Of copied")
		}
		back, err := Slice[T](made)
		if err != nil || !slices.Equal(back, values) || &back[0] != &values[0] || len(back) != len(values) {
			t.Errorf("Slice returned %v, %v", back, err)
		}
		if n := testing.AllocsPerRun(10, func() { _, _ = Slice[T](made) }); n != 0 {
			t.Errorf("Slice allocates %v times", n)
		}

		if shaped, err := Of(values, 1, int64(len(values)), 1); err != nil || len(shaped.Shape) != 3 {
			t.Errorf("shaped: %v, %v", shaped.Desc, err)
		}
		if scalar, err := Of(values[:1], []int64{}...); err != nil || len(scalar.Shape) != 0 {
			t.Errorf("scalar: %v, %v", scalar.Desc, err)
		}
		if _, err := Of(values, int64(len(values))+1); !errors.Is(err, ErrShape) {
			t.Errorf("too few elements: %v", err)
		}
		if empty, err := Of([]T{}, 3, 0); err != nil || len(empty.Data) != 0 {
			t.Errorf("empty: %v, %v", empty, err)
		} else if s, err := Slice[T](empty); err != nil || s == nil || len(s) != 0 {
			t.Errorf("empty: %v, %v", s, err)
		}

		for _, d := range DataTypes() {
			if d != want {
				other := Tensor{Desc{d, Shape{1}}, make([]byte, d.Bits()/8)}
				if _, err := Slice[T](other); !errors.Is(err, ErrDataType) {
					t.Errorf("%v read as %v: %v", d, want, err)
				}
			}
		}
		room := make([]uint64, 4) // begins aligned for anything
		bytes := unsafe.Slice((*byte)(unsafe.Pointer(&room[0])), 8*len(room))
		for off := range 8 {
			part := Tensor{Desc{want, Shape{1}}, bytes[off : off+size]}
			if _, err := Slice[T](part); (err == nil) != (off%align == 0) || (err != nil && !errors.Is(err, ErrShape)) {
				t.Errorf("at offset %d: %v", off, err)
			}
		}
		if size > 1 {
			torn := Tensor{Desc{want, Shape{1}}, bytes[:size+1]}
			if _, err := Slice[T](torn); !errors.Is(err, ErrShape) {
				t.Errorf("torn: %v", err)
			}
		}
	})
}

func TestSlicesAndTensorsShareMemoryInBothDirections(t *testing.T) {
	testElement(t, Bool, true, false, true)
	testElement[int8](t, Int8, -128, 127)
	testElement[int16](t, Int16, -1<<15, 1<<15-1)
	testElement[int32](t, Int32, -1<<31, 1<<31-1)
	testElement[int64](t, Int64, -1<<63, 1<<63-1)
	testElement[uint8](t, Uint8, 0, 255)
	testElement[uint16](t, Uint16, 0, 1<<16-1)
	testElement[uint32](t, Uint32, 0, 1<<32-1)
	testElement[uint64](t, Uint64, 0, 1<<64-1)
	testElement[float32](t, Float32, -1.5, 3e38)
	testElement(t, Float64, -1.5, 1e300)
	testElement[complex64](t, Complex64, 1-2i)
	testElement(t, Complex128, 1-2i, 0)
}

func TestElementsStandInMemoryAsOnTheWire(t *testing.T) {
	made, err := Of([]uint32{0x04030201, 0x08070605})
	if err != nil {
		t.Fatal(err)
	}
	if want := []byte{1, 2, 3, 4, 5, 6, 7, 8}; !slices.Equal(made.Data, want) {
		t.Errorf("% x, want % x", made.Data, want)
	}
}

// A Go bool with another bit set breaks the language: b && !b may hold.
func TestSliceRefusesBoolsThatAreNeitherZeroNorOne(t *testing.T) {
	for _, at := range []int{0, 1, 99} {
		for _, b := range []byte{2, 128, 255} {
			data := make([]byte, 100)
			data[at] = b
			if s, err := Slice[bool](Tensor{Desc{Bool, Shape{100}}, data}); !errors.Is(err, ErrDataType) || s != nil {
				t.Errorf("byte %d at %d: %v", b, at, err)
			}
		}
	}
}
