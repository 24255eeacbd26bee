package kernels

// Address is an address in a device's memory.
type Address uint64

// Launch is one run of a kernel: a struct whose fields are the parameters, in order and
// aligned as in C. It holds no Go pointer, so C may read it in place.
type Launch interface {
	// Grid returns the number of blocks, and of threads in each. Neither is ever 0,
	// which CUDA refuses: a kernel without elements does nothing.
	Grid() (grid, block [3]uint32)
}

// N is the number of elements that a kernel works on.
type N uint64

// Activation is a function of one element, as engine/cpu computes it: results are NaN,
// infinite or negative here where they are there.
type Activation uint32

const (
	// None is x itself.
	None Activation = iota
	// ReLU is max(x, 0).
	ReLU
	// GELU is x·Φ(x), within 6 units in the last place.
	GELU
	// GELUTanh is the approximation of GELU by tanh, within 4 units.
	GELUTanh
	// SiLU is x/(1 + e^-x), within 4 units.
	SiLU
)

// ReLUWords computes max(x, 0) in place for all elements of 64-bit words, whatever their
// data type. Sign has the sign bits of the elements in a word. NaN has in the place of
// each the largest magnitude less that of infinity, or 0 where no element is NaN. Shift
// is the bits of an element less one. An element that remains keeps its bits.
type ReLUWords struct {
	X                Address // aligned to 8 bytes
	Words, Sign, NaN uint64
	Shift            uint32
}

// AffineF32 computes a·x + b in place, and rounds twice. Its bits are those of
// engine/cpu, but a NaN is any NaN.
type AffineF32 struct {
	X Address
	N
	A, B float32
}

// AffineF64 is AffineF32 for float64.
type AffineF64 struct {
	X Address
	N
	A, B float64
}

// StoreU64 stores a number.
type StoreU64 struct {
	Y Address // aligned to 8 bytes
	V uint64
}

// LinearF32 computes y = activation(x·Wᵀ + bias) for x of [rows in], W of [out in] and y
// of [rows out], which may not overlap. An element of y is ((x₀w₀ + x₁w₁) + …) + bias
// with fused multiply-adds, so its bits do not depend on the other rows.
type LinearF32 struct {
	X, W, Bias, Y Address
	Rows          uint64
	In, Out       uint32
	Activation    Activation
}

// ActivateF32 computes an activation in place.
type ActivateF32 struct {
	X Address
	N
	Activation Activation
}

// ScaleF32 multiplies x by a factor, in place.
type ScaleF32 struct {
	X Address
	N
	Factor float32
}

// AddF32 adds y to x.
type AddF32 struct {
	X, Y Address
	N
}

// CopyF32 copies src to dst; they may not overlap.
type CopyF32 struct {
	Dst, Src Address
	N
}

// All returns an empty launch of every kernel, by its name in an image.
func All() map[string]Launch {
	return map[string]Launch{
		"relu_words": ReLUWords{}, "affine_f32": AffineF32{}, "affine_f64": AffineF64{},
		"store_u64": StoreU64{}, "linear_f32": LinearF32{}, "activate_f32": ActivateF32{},
		"scale_f32": ScaleF32{}, "add_f32": AddF32{}, "copy_f32": CopyF32{},
	}
}

// Grid has a thread per element, up to a limit.
func (n N) Grid() (grid, block [3]uint32) {
	return [3]uint32{blocks(uint64(n), threads, maxBlocks), 1, 1}, [3]uint32{threads, 1, 1}
}

// Grid has a thread per word, up to a limit.
func (l ReLUWords) Grid() (grid, block [3]uint32) { return N(l.Words).Grid() }

// Grid is one thread.
func (StoreU64) Grid() (grid, block [3]uint32) {
	return [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}
}

// Grid has a block per tile, up to a limit: outputs along x, rows along y.
func (l LinearF32) Grid() (grid, block [3]uint32) {
	return [3]uint32{
		blocks(uint64(l.Out), tile, 1<<32/tile), blocks(l.Rows, tile, maxRowTiles), 1,
	}, [3]uint32{threads, 1, 1}
}

// blocks is how many blocks of some elements hold n, at least 1 and at most limit.
func blocks(n, each, limit uint64) uint32 {
	return uint32(min(max(1, n/each+min(1, n%each)), limit))
}
