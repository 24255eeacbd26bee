package tensor

import (
	"errors"
	"math"
	"math/big"
	"slices"
	"strings"
	"testing"
)

func repeat(d int64, n int) Shape { return slices.Repeat(Shape{d}, n) }

func TestElementsStopsWhereSixtyThreeBitsEnd(t *testing.T) {
	for name, tc := range map[string]struct {
		shape Shape
		want  int64
		err   error
	}{
		"nil is a scalar":           {nil, 1, nil},
		"empty is a scalar":         {Shape{}, 1, nil},
		"zero":                      {Shape{0}, 0, nil},
		"one":                       {Shape{1}, 1, nil},
		"two axes":                  {Shape{2, 3}, 6, nil},
		"largest dimension":         {Shape{MaxDim}, MaxDim, nil},
		"one over":                  {Shape{MaxDim + 1}, 0, ErrShape},
		"max int64":                 {Shape{math.MaxInt64}, 0, ErrShape},
		"minus one":                 {Shape{-1}, 0, ErrShape},
		"min int64":                 {Shape{math.MinInt64}, 0, ErrShape},
		"minus one beside zero":     {Shape{0, -1}, 0, ErrShape},
		"too large beside zero":     {Shape{0, MaxDim + 1}, 0, ErrShape},
		"rank 32":                   {repeat(1, 32), 1, nil},
		"rank 33":                   {repeat(1, 33), 0, ErrShape},
		"rank 33 of zeros":          {repeat(0, 33), 0, ErrShape},
		"2^62":                      {Shape{1 << 31, 1 << 31}, 1 << 62, nil},
		"2^63":                      {Shape{1 << 31, 1 << 32}, 0, ErrTooLarge},
		"2^63-1, its factors":       {Shape{7, 7, 73, 127, 337, 92737, 649657}, math.MaxInt64, nil},
		"one factor more":           {Shape{2, 7, 7, 73, 127, 337, 92737, 649657}, 0, ErrTooLarge},
		"2^64, which wraps to zero": {Shape{1 << 32, 1 << 32}, 0, ErrTooLarge},
		"2^40 three times":          {repeat(MaxDim, 3), 0, ErrTooLarge},
		"2^40 times 32":             {repeat(MaxDim, 32), 0, ErrTooLarge},
		"zero last":                 {Shape{MaxDim, 1 << 22, 0}, 0, nil},
		"zero first":                {Shape{0, MaxDim, 1 << 22}, 0, nil},
		"zero beside an overflow":   {Shape{MaxDim, MaxDim, 0}, 0, ErrTooLarge},
		"zero before an overflow":   {Shape{0, MaxDim, MaxDim}, 0, ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := tc.shape.Elements()
			if got != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("got %d, %v; want %d, %v", got, err, tc.want, tc.err)
			}
		})
	}
}

func TestBytesIsElementsTimesWidth(t *testing.T) {
	for _, d := range DataTypes() {
		width := int64(d.Bits() / 8)
		top := Shape{(math.MaxInt64/width>>31 + 1) >> 1, 1 << 31} // the largest power of two that fits
		for _, tc := range []struct {
			shape Shape
			want  int64
			err   error
		}{
			{nil, width, nil},
			{Shape{0}, 0, nil},
			{Shape{5, 0, MaxDim}, 0, nil},
			{Shape{1}, width, nil},
			{Shape{3, 5}, 15 * width, nil},
			{Shape{MaxDim}, MaxDim * width, nil},
			{append(Shape{0}, top...), 0, nil},
			{append(Shape{0, 2}, top...), 0, ErrTooLarge},
			{top, 1 << 62, nil},
			{append(Shape{2}, top...), 0, ErrTooLarge},
			{Shape{-1}, 0, ErrShape},
			{repeat(1, 33), 0, ErrShape},
		} {
			t.Run(Desc{d, tc.shape}.String(), func(t *testing.T) {
				got, err := Desc{d, tc.shape}.Bytes()
				if got != tc.want || !errors.Is(err, tc.err) {
					t.Errorf("got %d, %v; want %d, %v", got, err, tc.want, tc.err)
				}
			})
		}
	}
	for _, d := range []DataType{0, Complex128 + 1, 255} {
		if n, err := (Desc{d, Shape{1}}).Bytes(); n != 0 || !errors.Is(err, ErrDataType) {
			t.Errorf("%v: got %d, %v", d, n, err)
		}
	}
}

func TestRowsSplitsAtAnyAxis(t *testing.T) {
	for name, tc := range map[string]struct {
		desc           Desc
		axes           int
		rows, rowBytes int64
		err            error
	}{
		"scalar, no axis":        {Desc{Float32, nil}, 0, 1, 4, nil},
		"scalar, one axis":       {Desc{Float32, nil}, 1, 0, 0, ErrShape},
		"negative":               {Desc{Float32, Shape{2}}, -1, 0, 0, ErrShape},
		"whole":                  {Desc{Float32, Shape{2, 3}}, 0, 1, 24, nil},
		"rows":                   {Desc{Float32, Shape{2, 3}}, 1, 2, 12, nil},
		"elements":               {Desc{Float32, Shape{2, 3}}, 2, 6, 4, nil},
		"past the rank":          {Desc{Float32, Shape{2, 3}}, 3, 0, 0, ErrShape},
		"no rows":                {Desc{Int8, Shape{0, 3}}, 1, 0, 3, nil},
		"empty rows":             {Desc{Int8, Shape{3, 0}}, 1, 3, 0, nil},
		"zero hides a huge rest": {Desc{Int8, Shape{0, MaxDim, MaxDim}}, 1, 0, 0, ErrTooLarge},
		"zero hides huge rows":   {Desc{Int8, Shape{MaxDim, MaxDim, 0}}, 2, 0, 0, ErrTooLarge},
		"no data type":           {Desc{0, Shape{2}}, 1, 0, 0, ErrDataType},
		"too large":              {Desc{Int8, Shape{MaxDim, MaxDim}}, 1, 0, 0, ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			rows, rowBytes, err := tc.desc.Rows(tc.axes)
			if !errors.Is(err, tc.err) || (err == nil && (rows != tc.rows || rowBytes != tc.rowBytes)) {
				t.Errorf("got %d, %d, %v; want %d, %d, %v", rows, rowBytes, err, tc.rows, tc.rowBytes, tc.err)
			}
			if err != nil && (rows != 0 || rowBytes != 0) {
				t.Errorf("an error came with %d rows of %d bytes", rows, rowBytes)
			}
		})
	}
}

func TestParseShapeReadsWhatPeopleType(t *testing.T) {
	for text, tc := range map[string]struct {
		want Shape
		err  error
	}{
		"":                             {Shape{}, nil},
		" ":                            {Shape{}, nil},
		"0":                            {Shape{0}, nil},
		"2,3,4":                        {Shape{2, 3, 4}, nil},
		" 2 , 3 ":                      {Shape{2, 3}, nil},
		"1099511627776":                {Shape{MaxDim}, nil},
		strings.Repeat("1,", 31) + "1": {repeat(1, 32), nil},
		strings.Repeat("1,", 32) + "1": {nil, ErrShape},
		strings.Repeat("1,", 1e5):      {nil, ErrShape},
		"1099511627777":                {nil, ErrShape},
		"9223372036854775808":          {nil, ErrShape},
		"-1":                           {nil, ErrShape},
		",":                            {nil, ErrShape},
		"2,":                           {nil, ErrShape},
		",2":                           {nil, ErrShape},
		"2x3":                          {nil, ErrShape},
		"2.0":                          {nil, ErrShape},
		"0x10":                         {nil, ErrShape},
		"[2]":                          {nil, ErrShape},
	} {
		t.Run(text[:min(len(text), 20)], func(t *testing.T) {
			got, err := ParseShape(text)
			if !errors.Is(err, tc.err) || (err == nil && !got.Equal(tc.want)) {
				t.Errorf("got %v, %v; want %v, %v", got, err, tc.want, tc.err)
			}
		})
	}
}

func TestCloneSharesNothing(t *testing.T) {
	a := Desc{Int8, Shape{2, 3}}
	b := a.Clone()
	if !a.Equal(b) {
		t.Fatalf("%v is not %v", b, a)
	}
	b.Shape[0] = 9
	if a.Shape[0] != 2 {
		t.Error("the clone shares its shape")
	}
	for name, other := range map[string]Desc{
		"data type": {Uint8, Shape{2, 3}}, "dimension": {Int8, Shape{2, 4}}, "rank": {Int8, Shape{2}}, "scalar": {Int8, nil},
	} {
		if a.Equal(other) || other.Equal(a) {
			t.Errorf("%v equals %v in spite of its %s", a, other, name)
		}
	}
	if !(Desc{Int8, nil}).Equal(Desc{Int8, Shape{}}) {
		t.Error("nil and empty are both the scalar")
	}
	if got := a.String(); got != "int8[2 3]" {
		t.Error(got)
	}
}

func TestNewWantsExactlyTheBytesOfTheDesc(t *testing.T) {
	for n := range 14 {
		data := make([]byte, n)
		got, err := New(Desc{Float32, Shape{3}}, data)
		switch {
		case n == 12 && (err != nil || &got.Data[0] != &data[0]):
			t.Errorf("12 bytes: %v", err)
		case n != 12 && (!errors.Is(err, ErrShape) || got.Data != nil):
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if _, err := New(Desc{Float32, Shape{0}}, nil); err != nil {
		t.Error(err)
	}
	if _, err := New(Desc{}, nil); !errors.Is(err, ErrDataType) {
		t.Error(err)
	}
	if _, err := New(Desc{Int8, repeat(MaxDim, 2)}, nil); !errors.Is(err, ErrTooLarge) {
		t.Error(err)
	}
}

func TestIDIsSixteenBytesAndNotZero(t *testing.T) {
	raw := []byte("0123456789abcdef")
	id, ok := ParseID(raw)
	if !ok || id.IsZero() || id.String() != "30313233343536373839616263646566" {
		t.Errorf("%v, %v", id, ok)
	}
	raw[0] = 0
	if id[0] != '0' {
		t.Error("the ID shares the wire's bytes")
	}
	for _, bad := range [][]byte{nil, raw[:15], append(raw, 0), make([]byte, 16)} {
		if id, ok := ParseID(bad); ok || !id.IsZero() {
			t.Errorf("% x became %v", bad, id)
		}
	}
}

// FuzzShape holds the shape arithmetic against math/big. The script is a data
// type, a number of leading axes, and the dimensions, 8 bytes each or 1 when small.
func FuzzShape(f *testing.F) {
	f.Add(byte(Float32), byte(1), []byte{2, 3, 4})
	f.Add(byte(Complex128), byte(0), []byte{255, 40, 255, 23})
	f.Add(byte(Int8), byte(2), []byte{255, 31, 255, 31, 0})
	f.Add(byte(18), byte(40), slices.Repeat([]byte{1}, 33))
	f.Fuzz(func(t *testing.T, dtype, axes byte, script []byte) {
		var shape Shape
		for i := 0; i < len(script) && len(shape) < 40; i++ {
			d := int64(script[i])
			if d == 255 && i+1 < len(script) { // a power of two, one less, or one or two more
				i++
				d = int64(1)<<(script[i]%64) + int64(script[i]/64) - 1
			}
			shape = append(shape, d)
		}
		desc := Desc{DataType(dtype % 20), shape}
		product := func(s Shape) *big.Int {
			p := big.NewInt(1)
			for _, d := range s {
				p.Mul(p, big.NewInt(d))
			}
			return p
		}
		others := product(slices.DeleteFunc(shape.Clone(), func(d int64) bool { return d == 0 }))
		fits := func(n *big.Int) bool { return n.IsInt64() && n.Sign() >= 0 }
		valid := len(shape) <= 32
		for _, d := range shape {
			valid = valid && d >= 0 && d <= 1<<40
		}
		check := func(what string, got int64, err error, want *big.Int, ok bool) {
			t.Helper()
			if (err == nil) != ok || (ok && got != want.Int64()) || (!ok && got != 0) {
				t.Fatalf("%s of %v: got %d, %v; the model says %v, %v", what, desc, got, err, want, ok)
			}
			if err != nil && !errors.Is(err, ErrDataType) && !errors.Is(err, ErrShape) && !errors.Is(err, ErrTooLarge) {
				t.Fatalf("untyped error %v", err)
			}
		}
		n, err := shape.Elements()
		elements := product(shape)
		check("elements", n, err, elements, valid && fits(others))

		width := big.NewInt(int64(desc.DType.Bits() / 8))
		size := new(big.Int).Mul(elements, width)
		sizeOK := valid && fits(others.Mul(others, width)) && width.Sign() > 0
		n, err = desc.Bytes()
		check("bytes", n, err, size, sizeOK)

		rows, rowBytes, err := desc.Rows(int(axes))
		if int(axes) > len(shape) {
			check("rows", rows, err, nil, false)
		} else {
			r, rb := product(shape[:axes]), product(shape[axes:])
			rb.Mul(rb, width)
			ok := sizeOK && fits(r) && fits(rb)
			check("rows", rows, err, r, ok)
			check("row bytes", rowBytes, err, rb, ok)
		}

		text := strings.ReplaceAll(strings.Trim(shape.String(), "[]"), " ", ",")
		parsed, err := ParseShape(text)
		if (err == nil) != valid || (valid && !parsed.Equal(shape)) {
			t.Fatalf("%q became %v, %v", text, parsed, err)
		}
	})
}
