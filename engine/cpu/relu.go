package cpu

import (
	"encoding/binary"

	"github.com/tensorferry/tensorferry/tensor"
)

// relu computes max(x, 0) for all elements of a 64-bit word at once, without
// branches: with two float32 in a word it runs at several GB/s per core where a
// loop over elements mispredicts every other sign. An element is kept when its
// sign bit is clear, or when it is a NaN: its other bits, with nan added, then
// carry into the place of the sign. -0 becomes 0, as any negative number does.
type relu struct {
	bits uint // of an element
	nan  uint64
}

// relus holds, for each data type, the width and the largest magnitude (as bits)
// minus that of infinity. Integers have no NaN: nothing carries.
var relus = map[tensor.DataType]relu{
	tensor.Int8: {8, 0}, tensor.Int16: {16, 0}, tensor.Int32: {32, 0}, tensor.Int64: {64, 0},
	tensor.Float16:  {16, 1<<10 - 1},
	tensor.BFloat16: {16, 1<<7 - 1},
	tensor.Float32:  {32, 1<<23 - 1},
	tensor.Float64:  {64, 1<<52 - 1},
}

// apply overwrites data, which holds whole elements.
func (r relu) apply(data []byte) {
	var sign, nan uint64 // one of each per element of a word
	for at := uint(0); at < 64; at += r.bits {
		sign |= 1 << (at + r.bits - 1)
		nan |= r.nan << at
	}
	shift := (r.bits - 1) & 63
	for len(data) >= 32 {
		d := data[:32]
		a, b := binary.LittleEndian.Uint64(d), binary.LittleEndian.Uint64(d[8:])
		e, f := binary.LittleEndian.Uint64(d[16:]), binary.LittleEndian.Uint64(d[24:])
		binary.LittleEndian.PutUint64(d, reluWord(a, sign, nan, shift))
		binary.LittleEndian.PutUint64(d[8:], reluWord(b, sign, nan, shift))
		binary.LittleEndian.PutUint64(d[16:], reluWord(e, sign, nan, shift))
		binary.LittleEndian.PutUint64(d[24:], reluWord(f, sign, nan, shift))
		data = data[32:]
	}
	for len(data) > 0 {
		var word [8]byte
		n := copy(word[:], data)
		binary.LittleEndian.PutUint64(word[:], reluWord(binary.LittleEndian.Uint64(word[:]), sign, nan, shift))
		copy(data, word[:n])
		data = data[n:]
	}
}

func reluWord(x, sign, nan uint64, shift uint) uint64 {
	keep := ((x&^sign + nan) | ^x) & sign
	return x & (keep | (keep - keep>>(shift&63)))
}
