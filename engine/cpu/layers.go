package cpu

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/tensorferry/tensorferry/tensor"
)

// builder turns the layers of a Spec into functions.
type builder struct {
	*stack
	weight func(string) (tensor.Tensor, error)
	width  int64   // of x at this layer, 0 while unknown
	kept   []int64 // widths of the residuals that are open
}

// kind is what layers of one kind have besides it, and what makes one.
type kind struct {
	fields []string
	make   func(*builder, Layer) (func(*tile), error)
}

var kinds = map[string]kind{
	"linear":    {[]string{"weight", "bias"}, (*builder).linear},
	"relu":      {nil, elementwise(func(x float32) float32 { return max(x, 0) })},
	"gelu":      {[]string{"approximate"}, (*builder).gelu},
	"silu":      {nil, elementwise(func(x float32) float32 { return float32(float64(x) / (1 + math.Exp(-float64(x)))) })},
	"layernorm": {[]string{"weight", "bias", "eps"}, (*builder).layernorm},
	"rmsnorm":   {[]string{"weight", "eps"}, (*builder).rmsnorm},
	"residual":  {[]string{"op"}, (*builder).residual},
	"scale":     {[]string{"factor"}, (*builder).scale},
	"softmax":   {nil, func(*builder, Layer) (func(*tile), error) { return perRow(softmax), nil }},
}

// checkFields refuses a kind that there is not, and a field that the kind has not.
func (l Layer) checkFields() error {
	k, ok := kinds[l.Kind]
	if !ok {
		return fmt.Errorf("no kind %q; known are %s", l.Kind, strings.Join(slices.Sorted(maps.Keys(kinds)), ", "))
	}
	given := map[string]bool{
		"weight": l.Weight != "", "bias": l.Bias != "", "approximate": l.Approximate != "",
		"eps": l.Eps != nil, "op": l.Op != "", "factor": l.Factor != nil,
	}
	for _, f := range slices.Sorted(maps.Keys(given)) {
		if given[f] && !slices.Contains(k.fields, f) {
			return fmt.Errorf("a %s has no %s; its fields are kind%s", l.Kind, f, strings.Join(append([]string{""}, k.fields...), ", "))
		}
	}
	return nil
}

func (b *builder) build(layers []Layer) error {
	b.stack = new(stack)
	if len(layers) == 0 || len(layers) > maxLayers {
		return fmt.Errorf("%d layers; wanted 1 to %d", len(layers), maxLayers)
	}
	for i, l := range layers {
		if err := l.checkFields(); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
	}
	if b.width == 0 {
		if err := b.findWidth(layers); err != nil {
			return err
		}
	}
	if err := b.grow(b.width); err != nil {
		return err
	}
	b.in = int(b.width)
	for i, l := range layers {
		f, err := kinds[l.Kind].make(b, l)
		if err != nil {
			return fmt.Errorf("layer %d (%s): %w", i, l.Kind, err)
		}
		b.layers = append(b.layers, f)
	}
	if len(b.kept) > 0 {
		return fmt.Errorf("%d residuals are started and never added", len(b.kept))
	}
	b.out = int(b.width)
	return nil
}

// findWidth takes the width of the first layer that has one: no other changes it.
func (b *builder) findWidth(layers []Layer) error {
	for i, l := range layers {
		if l.Weight == "" {
			continue
		}
		t, err := b.weight(l.Weight)
		if err != nil {
			return fmt.Errorf("layer %d (%s): %w", i, l.Kind, err)
		}
		if len(t.Shape) > 0 {
			b.width = t.Shape[len(t.Shape)-1]
		}
		return nil
	}
	return errors.New("no width is given, and no layer has a weight that tells it")
}

// grow makes room for tiles of this width.
func (b *builder) grow(width int64) error {
	if width < 1 || width > maxWidth {
		return fmt.Errorf("width is %d; wanted 1 to %d", width, maxWidth)
	}
	b.widest = max(b.widest, int(width))
	return nil
}

// load copies a named weight of a shape, nil for one without a name.
func (b *builder) load(name string, shape ...int64) ([]float32, error) {
	if name == "" {
		return nil, nil
	}
	t, err := b.weight(name)
	if err != nil {
		return nil, err
	}
	f, ok := floats[t.DType]
	if !ok || !t.Shape.Equal(shape) {
		return nil, fmt.Errorf("tensor %q: wanted floats of shape %v, got %v", name, tensor.Shape(shape), t.Desc)
	}
	data := make([]float32, len(t.Data)/f.bytes)
	f.load(data, t.Data)
	for i, v := range data {
		// gonum leaves out products with 0, which is right only for finite weights.
		if v-v != 0 {
			return nil, fmt.Errorf("tensor %q: element %d is %v as float32; weights are finite", name, i, v)
		}
	}
	return data, nil
}

// linear is x·Wᵀ + bias. gonum takes different paths through x·Wᵀ for small and
// large problems, which round differently; so W is transposed here, once, and
// cut into panels that gonum multiplies serially, whatever the number of rows:
// an output is always bias + x₀w₀ + x₁w₁ + … in this order.
func (b *builder) linear(l Layer) (func(*tile), error) {
	if l.Weight == "" {
		return nil, errors.New("needs a weight")
	}
	t, err := b.weight(l.Weight)
	if err != nil {
		return nil, err
	}
	if len(t.Shape) != 2 {
		return nil, fmt.Errorf("tensor %q: wanted shape [out in], got %v", l.Weight, t.Desc)
	}
	if err := b.grow(t.Shape[0]); err != nil {
		return nil, err
	}
	w, err := b.load(l.Weight, t.Shape[0], b.width)
	if err != nil {
		return nil, err
	}
	bias, err := b.load(l.Bias, t.Shape[0])
	if err != nil {
		return nil, err
	}
	in, out := int(b.width), int(t.Shape[0])
	b.width = t.Shape[0]
	if bias == nil {
		bias = make([]float32, out)
	}
	// A panel holds the weights of panelWidth outputs: in rows, one output a column.
	panels := make([]float32, in*out)
	for left := 0; left < out; left += panelWidth {
		n := min(panelWidth, out-left)
		panel := panels[left*in:][:n*in]
		for j := range n {
			for i, v := range w[(left+j)*in:][:in] {
				panel[i*n+j] = v
			}
		}
	}
	return func(t *tile) {
		for r := range t.rows {
			copy(t.y[r*out:], bias)
		}
		for left := 0; left < out; left += panelWidth {
			n := min(panelWidth, out-left)
			panel := panels[left*in:][:n*in]
			for top := 0; top < in; top += panelDepth {
				k := min(panelDepth, in-top)
				gonum.Implementation{}.Sgemm(blas.NoTrans, blas.NoTrans, t.rows, n, k,
					1, t.x[top:], in, panel[top*n:], n, 1, t.y[left:], out)
			}
		}
		t.x, t.y, t.width = t.y, t.x, out
	}, nil
}

func elementwise(f func(float32) float32) func(*builder, Layer) (func(*tile), error) {
	return func(*builder, Layer) (func(*tile), error) {
		return perRow(func(x []float32) {
			for i, v := range x {
				x[i] = f(v)
			}
		}), nil
	}
}

func perRow(f func(x []float32)) func(*tile) {
	return func(t *tile) {
		for r := range t.rows {
			f(t.x[r*t.width:][:t.width])
		}
	}
}

// gelus are the ways to approximate x·Φ(x); absent means none.
var gelus = map[string]func(x float64) float64{
	"":     gelu,
	"none": gelu,
	"tanh": func(x float64) float64 { return x / (1 + math.Exp(-2*math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x))) },
}

func gelu(x float64) float64 { return x * math.Erfc(-x/math.Sqrt2) / 2 }

func (b *builder) gelu(l Layer) (func(*tile), error) {
	f, ok := gelus[l.Approximate]
	if !ok {
		return nil, fmt.Errorf("approximate is %q; wanted none or tanh", l.Approximate)
	}
	return elementwise(func(x float32) float32 { return float32(f(float64(x))) })(b, l)
}

func (b *builder) layernorm(l Layer) (func(*tile), error) {
	weight, bias, eps, err := b.norm(l, 1e-5)
	if err != nil {
		return nil, err
	}
	return perRow(func(x []float32) {
		var sum, squares float64
		for _, v := range x {
			sum += float64(v)
		}
		mean := sum / float64(len(x))
		for _, v := range x {
			d := float64(v) - mean
			squares += d * d
		}
		scale := 1 / math.Sqrt(squares/float64(len(x))+eps)
		for i, v := range x {
			x[i] = float32((float64(v)-mean)*scale*float64(weight[i]) + float64(bias[i]))
		}
	}), nil
}

func (b *builder) rmsnorm(l Layer) (func(*tile), error) {
	weight, _, eps, err := b.norm(l, 1e-6)
	if err != nil {
		return nil, err
	}
	return perRow(func(x []float32) {
		var squares float64
		for _, v := range x {
			squares += float64(v) * float64(v)
		}
		scale := 1 / math.Sqrt(squares/float64(len(x))+eps)
		for i, v := range x {
			x[i] = float32(float64(v) * scale * float64(weight[i]))
		}
	}), nil
}

// norm reads what both norms have: ones and zeros stand for what is absent.
func (b *builder) norm(l Layer, eps float64) (weight, bias []float32, _ float64, err error) {
	if weight, err = b.load(l.Weight, b.width); err != nil {
		return nil, nil, 0, err
	}
	if bias, err = b.load(l.Bias, b.width); err != nil {
		return nil, nil, 0, err
	}
	if weight == nil {
		weight = make([]float32, b.width)
		for i := range weight {
			weight[i] = 1
		}
	}
	if bias == nil {
		bias = make([]float32, b.width)
	}
	if l.Eps != nil {
		eps = *l.Eps
	}
	if !(eps >= 0 && eps < 1) {
		return nil, nil, 0, fmt.Errorf("eps is %v; wanted 0 to 1", eps)
	}
	return weight, bias, eps, nil
}

func (b *builder) residual(l Layer) (func(*tile), error) {
	switch l.Op {
	case "start":
		if len(b.kept) == maxResiduals {
			return nil, fmt.Errorf("residuals nest deeper than %d", maxResiduals)
		}
		b.kept = append(b.kept, b.width)
		b.residuals = max(b.residuals, len(b.kept))
		return func(t *tile) {
			copy(t.kept[t.depth], t.x[:t.rows*t.width])
			t.depth++
		}, nil
	case "add":
		last := len(b.kept) - 1
		if last < 0 || b.kept[last] != b.width {
			return nil, fmt.Errorf("no residual of width %d is started; started are %v", b.width, b.kept)
		}
		b.kept = b.kept[:last]
		return func(t *tile) {
			t.depth--
			for i, v := range t.kept[t.depth][:t.rows*t.width] {
				t.x[i] += v
			}
		}, nil
	}
	return nil, fmt.Errorf("op is %q; wanted start or add", l.Op)
}

func (b *builder) scale(l Layer) (func(*tile), error) {
	if l.Factor == nil || math.IsNaN(*l.Factor) || math.IsInf(*l.Factor, 0) {
		return nil, errors.New("needs a finite factor")
	}
	factor := float32(*l.Factor)
	return elementwise(func(x float32) float32 { return factor * x })(b, l)
}

// softmax subtracts the largest element, so that no exponential overflows.
func softmax(x []float32) {
	top := float32(math.Inf(-1))
	for _, v := range x {
		top = max(top, v)
	}
	var sum float64
	for i, v := range x {
		e := math.Exp(float64(v) - float64(top))
		sum += e
		x[i] = float32(e)
	}
	for i, v := range x {
		x[i] = float32(float64(v) / sum)
	}
}
