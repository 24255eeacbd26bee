package tensor

import (
	"fmt"
	"reflect"
	"unsafe"
)

// DataType is the kind of a tensor's elements. The numbers are those of the
// wire (tensorferry.v1.DataType) and never change.
type DataType uint8

// The data types. Zero is no data type.
const (
	Bool         DataType = 1
	Int8         DataType = 2
	Int16        DataType = 3
	Int32        DataType = 4
	Int64        DataType = 5
	Uint8        DataType = 6
	Uint16       DataType = 7
	Uint32       DataType = 8
	Uint64       DataType = 9
	Float16      DataType = 10 // IEEE 754 binary16
	BFloat16     DataType = 11 // upper half of a binary32
	Float32      DataType = 12
	Float64      DataType = 13
	Float8E4M3FN DataType = 14 // OCP 8-bit: no infinities, one NaN per sign
	Float8E5M2   DataType = 15 // OCP 8-bit, IEEE-like
	Complex64    DataType = 16 // two float32: real, imaginary
	Complex128   DataType = 17 // two float64: real, imaginary
)

var dtypes = [...]struct {
	name string
	bits int
}{
	Bool: {"bool", 8}, Int8: {"int8", 8}, Int16: {"int16", 16}, Int32: {"int32", 32}, Int64: {"int64", 64},
	Uint8: {"uint8", 8}, Uint16: {"uint16", 16}, Uint32: {"uint32", 32}, Uint64: {"uint64", 64},
	Float16: {"float16", 16}, BFloat16: {"bfloat16", 16}, Float32: {"float32", 32}, Float64: {"float64", 64},
	Float8E4M3FN: {"float8_e4m3fn", 8}, Float8E5M2: {"float8_e5m2", 8},
	Complex64: {"complex64", 64}, Complex128: {"complex128", 128},
}

// DataTypes returns every data type in the order of its number.
func DataTypes() []DataType {
	var all []DataType
	for d := Bool; d.Valid(); d++ {
		all = append(all, d)
	}
	return all
}

// Valid reports whether d is a data type.
func (d DataType) Valid() bool { return d > 0 && int(d) < len(dtypes) }

// Bits returns the width of one element in bits, 0 when d is no data type.
func (d DataType) Bits() int {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].bits
}

// Whole reports whether all elements are whole numbers: integers, and bool, which is
// 0 or 1.
func (d DataType) Whole() bool { return d >= Bool && d <= Uint64 }

// String returns the name NumPy and PyTorch use, such as float32.
func (d DataType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("DataType(%d)", uint8(d))
	}
	return dtypes[d].name
}

// ParseDataType finds a data type by its name.
func ParseDataType(name string) (DataType, error) {
	for d := range dtypes {
		if d > 0 && dtypes[d].name == name {
			return DataType(d), nil
		}
	}
	return 0, fmt.Errorf("%w: %.64q is not a data type; known: %v", ErrDataType, name, DataTypes())
}

// UnmarshalText is ParseDataType; it borrows the name.
func (d *DataType) UnmarshalText(name []byte) (err error) {
	*d, err = ParseDataType(string(name))
	return err
}

// Element is a Go type whose values are a tensor's elements as they stand in
// memory. A 16- or 8-bit float has no Go type: pass its bits with New.
type Element interface {
	bool | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 |
		float32 | float64 | complex64 | complex128
}

var elements = [...]DataType{
	reflect.Bool: Bool, reflect.Int8: Int8, reflect.Int16: Int16, reflect.Int32: Int32, reflect.Int64: Int64,
	reflect.Uint8: Uint8, reflect.Uint16: Uint16, reflect.Uint32: Uint32, reflect.Uint64: Uint64,
	reflect.Float32: Float32, reflect.Float64: Float64, reflect.Complex64: Complex64, reflect.Complex128: Complex128,
}

// DataTypeOf returns the data type of a Go element type.
func DataTypeOf[T Element]() DataType { return elements[reflect.TypeFor[T]().Kind()] }

// Of makes a tensor over a Go slice without copying: the tensor shares the
// slice's memory. Without a shape it is a vector.
func Of[T Element](data []T, shape ...int64) (Tensor, error) {
	if shape == nil {
		shape = []int64{int64(len(data))}
	}
	var z T
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(z)))
	return New(Desc{DataTypeOf[T](), shape}, bytes)
}

// Slice returns the elements of t without copying: the slice shares t's memory.
// It fails when t holds another data type or its bytes are not aligned for T. A
// bool other than 0 and 1 is undefined in Go: Slice[bool] looks at every byte and
// fails on the first such one.
func Slice[T Element](t Tensor) ([]T, error) {
	if want := DataTypeOf[T](); t.DType != want {
		return nil, fmt.Errorf("%w: tensor holds %v, not %v", ErrDataType, t.DType, want)
	}
	var z T
	size := int(unsafe.Sizeof(z))
	if len(t.Data) == 0 {
		return []T{}, nil
	}
	if t.DType == Bool {
		for i, b := range t.Data {
			if b > 1 {
				return nil, fmt.Errorf("%w: element %d is %d, a bool is 0 or 1; pass it as uint8", ErrDataType, i, b)
			}
		}
	}
	if len(t.Data)%size != 0 {
		return nil, fmt.Errorf("%w: %d bytes are not a whole number of %v", ErrShape, len(t.Data), t.DType)
	}
	p := unsafe.Pointer(unsafe.SliceData(t.Data))
	if uintptr(p)%unsafe.Alignof(z) != 0 {
		return nil, fmt.Errorf("%w: the bytes are not aligned for %v; copy them first", ErrShape, t.DType)
	}
	return unsafe.Slice((*T)(p), len(t.Data)/size), nil
}

func init() {
	// The bytes of a Go slice are the bytes of the wire only on a little-endian
	// machine; every platform Go's CUDA users have is one.
	one := uint16(1)
	if *(*byte)(unsafe.Pointer(&one)) != 1 {
		panic("tensor: big-endian machines are not supported")
	}
}
