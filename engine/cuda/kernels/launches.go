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
	// Sigmoid is 1/(1 + e^-x), within 4 units.
	Sigmoid
)

// Float is the data type of elements in memory. Computed is in float32.
type Float uint32

const (
	// F32 is float32.
	F32 Float = iota
	// F16 is float16.
	F16
	// BF16 is bfloat16.
	BF16
	// F64 is float64.
	F64
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

// AffineF32 computes a·x + b in place, and rounds twice, then to the data type of x. Its
// bits are those of engine/cpu, but a NaN is any NaN.
type AffineF32 struct {
	X Address
	N
	A, B float32
	Type Float
}

// AffineF64 is AffineF32 for float64, and computed in that.
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
// with fused multiply-adds, so its bits do not depend on the other rows. Type is that of
// W, and not F64; all else is float32.
type LinearF32 struct {
	X, W, Bias, Y Address
	Rows          uint64
	In, Out       uint32
	Activation    Activation
	Type          Float
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

// AddF32 adds y, of so many elements, to each as many of x.
type AddF32 struct {
	X, Y Address
	N
	Of N
}

// CopyF32 copies src to dst; they may not overlap.
type CopyF32 struct {
	Dst, Src Address
	N
}

// Convert copies elements of one data type to those of another, rounded to nearest even;
// what is too large becomes infinite. Src and dst may not overlap.
type Convert struct {
	Dst, Src Address
	N
	To, From Float
}

// NormF32 computes (x - mean)/√(variance + eps)·weight + bias in place for each row of
// width, in float64. Centered is 1, or 0 for a mean that counts as 0, as rmsnorm has it.
type NormF32 struct {
	X, Weight, Bias Address
	Rows            uint64
	Width, Centered uint32
	Eps             float64
}

// SoftmaxF32 computes e^x/Σe^x in place for each row of width, within 4 units.
type SoftmaxF32 struct {
	X     Address
	Rows  uint64
	Width uint32
}

// GateF32 computes y = activation(a)·b of rows that have a and b, each of width, side by
// side. N is that of y; x and y may not overlap.
type GateF32 struct {
	Y, X Address
	N
	Width      uint32
	Activation Activation
}

// EmbedF32 makes rows of y of rows of weight, one for each of ids, which are int32, or int64
// if wide is 1, and must be rows of it: nothing checks them. N is that of y; Type is that
// of weight.
type EmbedF32 struct {
	Y, IDs, Weight Address
	N
	Width, Wide uint32
	Type        Float
}

// AttentionF32 computes softmax(scale·q·kᵀ)·v for each head of each item, of qkv of [items
// positions 3·width], where a head has as many columns of each width as others, to y of
// [items positions width]. Mask is 0, or has a byte for each position, 0 for those that nobody
// sees; if causal is 1, nobody sees later ones. A position that sees none has 0.
type AttentionF32 struct {
	QKV, Mask, Y                    Address
	Items                           uint64
	Positions, Width, Heads, Causal uint32
	Scale                           float32
}

// All returns an empty launch of every kernel, by its name in an image.
func All() map[string]Launch {
	return map[string]Launch{
		"relu_words": ReLUWords{}, "affine_f32": AffineF32{}, "affine_f64": AffineF64{},
		"store_u64": StoreU64{}, "linear_f32": LinearF32{}, "activate_f32": ActivateF32{},
		"scale_f32": ScaleF32{}, "add_f32": AddF32{}, "copy_f32": CopyF32{}, "convert": Convert{},
		"norm_f32": NormF32{}, "softmax_f32": SoftmaxF32{}, "gate_f32": GateF32{}, "embed_f32": EmbedF32{},
		"attention_f32": AttentionF32{},
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
		blocks(uint64(l.Out), tile, 1<<32/tile), blocks(l.Rows, tile, maxTiles), 1,
	}, [3]uint32{threads, 1, 1}
}

// Grid has a team of threads per row, up to a limit.
func (l NormF32) Grid() (grid, block [3]uint32) { return teams(l.Rows, l.Width) }

// Grid has a team of threads per row, up to a limit.
func (l SoftmaxF32) Grid() (grid, block [3]uint32) { return teams(l.Rows, l.Width) }

func teams(rows uint64, width uint32) (grid, block [3]uint32) {
	each := uint64(threads / narrowTeam)
	if width > narrowRow {
		each = 1
	}
	return [3]uint32{blocks(rows, each, maxBlocks), 1, 1}, [3]uint32{threads, 1, 1}
}

// Grid has a block per tile of queries of each head, up to a limit.
func (l AttentionF32) Grid() (grid, block [3]uint32) {
	most, tiles := uint64(maxTiles), uint64(blocks(uint64(l.Positions), tile, 1<<32/tile))
	heads := tiles * uint64(l.Heads) // below 2^58
	if l.Items <= most/max(heads, 1) {
		most = l.Items * heads
	}
	return [3]uint32{blocks(most, 1, maxTiles), 1, 1}, [3]uint32{threads, 1, 1}
}

// blocks is how many blocks of some elements hold n, at least 1 and at most limit.
func blocks(n, each, limit uint64) uint32 {
	return uint32(min(max(1, n/each+min(1, n%each)), limit))
}
