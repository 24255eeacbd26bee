package stack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

// Model is a stack model whose layers fit together.
type Model struct {
	Name, Version string
	In, Out       int // widths of x, or of its embedding, and y
	Widest        int // of x between two layers
	Residuals     int // how many are open at a time
	Parameters    int64
	Steps         []Step
	// Items says that a row is an item of [positions width], computed as a whole; else each position is a row.
	Items      bool
	Positions  int             // the most that an item has
	Mask       bool            // a second input is the mask of Spec
	Vocabulary int             // ids of the embedding that is the first step; 0: there is none
	embedded   tensor.DataType // the data type of its weight
	layers     int             // of the Spec: attention is three steps
}

// Step is one checked layer, with what its kind needs. An attention layer becomes three steps: a
// linear to 3·width, for the queries, keys and values of all heads; the attention itself, from 3·width
// to width; and a linear.
type Step struct {
	Kind         string // as in Layer, or activation: a relu, gelu or silu
	In, Out      int    // widths
	Weight, Bias []float32
	DType        tensor.DataType // linear, embedding, positions: of the tensor that Weight was read from
	Eps          float64
	Factor       float32
	Add          bool // residual: add, not start
	Heads        int  // attention
	Causal       bool
	Activation   string // activation, gated
}

// Info describes m to engines: x of [… In] becomes y of [… Out]. The rows are all axes but the last, or
// the first axis alone if m.Items.
func (m *Model) Info() engine.Info {
	port := func(name string, dtypes []tensor.DataType, shape ...int64) engine.Port {
		return engine.Port{Name: name, DTypes: dtypes, Shape: shape}
	}
	i := engine.Info{
		Name: m.Name, Version: m.Version, Rows: engine.AllButLast, Idempotent: true,
		Inputs:  []engine.Port{port("x", DTypes, engine.AnyAxes, int64(m.In))},
		Outputs: []engine.Port{port("y", DTypes, engine.AnyAxes, int64(m.Out))},
		About:   map[string]string{"layers": strconv.Itoa(m.layers), "parameters": strconv.FormatInt(m.Parameters, 10)},
	}
	if m.Items {
		i.Rows = 1
		i.Inputs[0].Shape = []int64{engine.Free, engine.Free, int64(m.In)}
		i.Outputs[0].Shape = []int64{engine.Free, engine.Free, int64(m.Out)}
		i.About["positions"] = strconv.Itoa(m.Positions)
	}
	if m.Vocabulary > 0 {
		i.Inputs[0] = port("x", []tensor.DataType{tensor.Int32, tensor.Int64}, engine.Free, engine.Free)
		i.Outputs[0].DTypes = []tensor.DataType{m.embedded}
		i.About["vocabulary"] = strconv.Itoa(m.Vocabulary)
	}
	if m.Mask {
		i.Inputs = append(i.Inputs, port("mask", []tensor.DataType{tensor.Bool, tensor.Uint8}, engine.Free, engine.Free))
	}
	return i
}

// Bind returns the desc of y for a call that fits Info, and how many positions an item has: 1 unless
// m.Items. It refuses, with an *engine.InputError, what Info's ports cannot express.
func (m *Model) Bind(c engine.Call) (y tensor.Desc, positions int, err error) {
	x := c.Inputs[0].Desc
	y = x.Clone()
	if m.Vocabulary > 0 {
		y.DType, y.Shape = m.embedded, append(y.Shape, 0)
	}
	y.Shape[len(y.Shape)-1] = int64(m.Out)
	if !m.Items {
		return y, 1, nil
	}
	if n := x.Shape[1]; n > int64(m.Positions) {
		return y, 0, &engine.InputError{Model: m.Name, Port: "x", Want: fmt.Sprintf("at most %d positions", m.Positions), Got: strconv.FormatInt(n, 10)}
	}
	if m.Mask && c.Inputs[1].Desc.Shape[1] != x.Shape[1] {
		return y, 0, &engine.InputError{Model: m.Name, Port: "mask", Want: fmt.Sprintf("%d positions, as x has", x.Shape[1]), Got: c.Inputs[1].Desc.String()}
	}
	return y, int(x.Shape[1]), nil
}

// IDs calls each with every id in data, in order. It borrows data, which holds items of x from item row on.
// It stops at the first id outside the vocabulary, with an error that wraps engine.ErrPrecondition and
// names the id and its place.
func (m *Model) IDs(x tensor.Desc, row int64, data []byte, each func(i, id int)) error {
	size, positions := x.DType.Bits()/8, int(x.Shape[1])
	for i := range len(data) / size {
		var id int64
		if size == 4 {
			id = int64(int32(binary.LittleEndian.Uint32(data[4*i:])))
		} else {
			id = int64(binary.LittleEndian.Uint64(data[8*i:]))
		}
		if id < 0 || id >= int64(m.Vocabulary) {
			return fmt.Errorf("%w: model %q, input \"x\": wanted ids below %d, got %d as item %d, position %d",
				engine.ErrPrecondition, m.Name, m.Vocabulary, id, row+int64(i/positions), i%positions)
		}
		each(i, int(id))
	}
	return nil
}

// kind is what there is to know of one kind of layer.
type kind struct {
	fields []string                           // that a layer may have besides its kind
	check  func(*builder, Layer, *Step) error // fills in the step, and its Out if the width changes
	format int                                // the first that has it
}

var kinds = map[string]kind{
	"linear":    {[]string{"weight", "bias"}, (*builder).linear, 1},
	"relu":      {nil, (*builder).activation, 1},
	"gelu":      {[]string{"approximate"}, (*builder).activation, 1},
	"silu":      {nil, (*builder).activation, 1},
	"layernorm": {[]string{"weight", "bias", "eps"}, (*builder).norm, 1},
	"rmsnorm":   {[]string{"weight", "eps"}, (*builder).norm, 1},
	"residual":  {[]string{"op"}, (*builder).residual, 1},
	"scale":     {[]string{"factor"}, (*builder).scale, 1},
	"softmax":   {nil, nil, 1},
	"embedding": {[]string{"weight"}, (*builder).embedding, 2},
	"positions": {[]string{"weight"}, (*builder).table, 2},
	"attention": {[]string{"weight", "bias", "out_weight", "out_bias", "heads", "causal"}, (*builder).attention, 2},
	"gated":     {[]string{"activation"}, (*builder).gated, 2},
}

// Kinds returns the kinds of layers that there are, sorted.
func Kinds() []string { return slices.Sorted(maps.Keys(kinds)) }

// checkFields refuses a kind that the format does not have, and a field that the kind does not have.
func (l Layer) checkFields(format int) error {
	k, ok := kinds[l.Kind]
	if !ok {
		return fmt.Errorf("no kind %q; known are %s", l.Kind, strings.Join(Kinds(), ", "))
	}
	if k.format > format {
		return fmt.Errorf("%s needs format %d; set \"format\": %d", l.Kind, k.format, k.format)
	}
	fields := reflect.ValueOf(l)
	for i := range fields.NumField() {
		f, _, _ := strings.Cut(fields.Type().Field(i).Tag.Get("json"), ",")
		if f != "kind" && !fields.Field(i).IsZero() && !slices.Contains(k.fields, f) {
			return fmt.Errorf("a %s has no %s; its fields are kind%s", l.Kind, f, strings.Join(append([]string{""}, k.fields...), ", "))
		}
	}
	return nil
}

// builder makes a Model of a Spec.
type builder struct {
	*Model
	weight func(string) (tensor.Tensor, error)
	kept   []int                 // widths of the residuals that are open
	absent map[float32][]float32 // what absent weights are filled with: shared, else a short file took gigabytes
}

func build(s Spec, weight func(string) (tensor.Tensor, error)) (*Model, error) {
	b := builder{Model: &Model{Name: s.Name, Version: s.Version, Mask: s.Mask, layers: len(s.Layers), Positions: maxPositions}, weight: weight, absent: make(map[float32][]float32)}
	if err := b.build(s); err != nil {
		return nil, fmt.Errorf("stack: model %q: %w: %w", s.Name, engine.ErrInfo, err)
	}
	return b.Model, nil
}

func (b *builder) build(s Spec) (err error) {
	format := max(s.Format, 1) // absent in files from before there was a second
	if s.Format < 0 || format > 2 {
		return fmt.Errorf("format is %d; wanted 1 or 2", s.Format)
	}
	if s.Mask && format < 2 {
		return errors.New("mask needs format 2; set \"format\": 2")
	}
	if len(s.Layers) == 0 {
		return errors.New("0 layers; wanted 1 or more")
	}
	for i, l := range s.Layers {
		if err := l.checkFields(format); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
	}
	if s.Width == 0 {
		if s.Width, err = b.findWidth(s.Layers); err != nil {
			return err
		}
	}
	if b.In, err = b.fit(s.Width); err != nil {
		return err
	}
	b.Out = b.In
	for i, l := range s.Layers {
		step := Step{Kind: l.Kind, In: b.Out, Out: b.Out}
		if check := kinds[l.Kind].check; check != nil {
			if err := check(b, l, &step); err != nil {
				return fmt.Errorf("layer %d (%s): %w", i, l.Kind, err)
			}
		}
		b.Out = step.Out
		b.Steps = append(b.Steps, step)
	}
	if len(b.kept) > 0 {
		return fmt.Errorf("residuals started and never added: %d", len(b.kept))
	}
	if s.Mask && !slices.ContainsFunc(b.Steps, func(s Step) bool { return s.Kind == "attention" }) {
		return errors.New("mask is set, but no layer is an attention; remove mask")
	}
	return nil
}

// findWidth returns the width of the first weight: the layers before it keep the width.
func (b *builder) findWidth(layers []Layer) (width int64, err error) {
	for i, l := range layers {
		if l.Weight == "" {
			continue
		}
		t, err := b.weight(l.Weight)
		if err != nil {
			return 0, fmt.Errorf("layer %d (%s): %w", i, l.Kind, err)
		}
		if len(t.Shape) > 0 {
			width = t.Shape[len(t.Shape)-1]
		}
		return width, nil
	}
	return 0, errors.New("no width is given, and no layer has a weight that tells it")
}

// fit makes room for rows of this width.
func (b *builder) fit(width int64) (int, error) {
	if width < 1 || width > maxWidth {
		return 0, fmt.Errorf("width is %d; wanted 1 to %d", width, maxWidth)
	}
	b.Widest = max(b.Widest, int(width))
	return int(width), nil
}

// load copies the weight of that name, which must have that shape. Without a name, every element is absent, and
// the memory is shared and read-only.
func (b *builder) load(name string, absent float32, shape ...int) ([]float32, error) {
	dims := make(tensor.Shape, len(shape))
	n := 1
	for i, d := range shape {
		dims[i] = int64(d)
		n *= d
	}
	if name == "" {
		if n > len(b.absent[absent]) {
			b.absent[absent] = slices.Repeat([]float32{absent}, n)
		}
		return b.absent[absent][:n:n], nil
	}
	data := make([]float32, n)
	t, err := b.weight(name)
	if err != nil {
		return nil, err
	}
	f, ok := FloatOf(t.DType)
	if !ok || !t.Shape.Equal(dims) {
		return nil, fmt.Errorf("tensor %q: wanted floats of shape %v, got %v", name, dims, t.Desc)
	}
	f.Load(data, t.Data)
	for i, v := range data {
		// BLAS leaves out products with 0, which is right only for finite weights.
		if v-v != 0 {
			return nil, fmt.Errorf("tensor %q: element %d is %v as float32; weights are finite", name, i, v)
		}
	}
	b.Parameters += int64(n)
	return data, nil
}

// matrix loads a step's weight, which must have s.In columns, and returns the number of its rows.
func (b *builder) matrix(name, rows string, s *Step) (n int, err error) {
	if name == "" {
		return 0, errors.New("needs a weight")
	}
	t, err := b.weight(name)
	if err != nil {
		return 0, err
	}
	if len(t.Shape) != 2 || t.Shape[1] != int64(s.In) || t.Shape[0] < 1 {
		return 0, fmt.Errorf("tensor %q: wanted shape [%s %d], got %v", name, rows, s.In, t.Desc)
	}
	n, s.DType = int(t.Shape[0]), t.DType
	s.Weight, err = b.load(name, 0, n, s.In)
	return n, err
}

func (b *builder) linear(l Layer, s *Step) error { return b.project(l.Weight, l.Bias, 0, s) }

// project fills in a linear step. Its weight must have out rows, or any number if out is 0.
func (b *builder) project(weight, bias string, out int, s *Step) (err error) {
	if s.Out, err = b.matrix(weight, "out", s); err != nil {
		return err
	}
	if out != 0 && s.Out != out {
		return fmt.Errorf("tensor %q: wanted shape [%d %d], got [%d %d]", weight, out, s.In, s.Out, s.In)
	}
	if _, err = b.fit(int64(s.Out)); err != nil {
		return err
	}
	s.Bias, err = b.load(bias, 0, s.Out)
	return err
}

func (b *builder) embedding(l Layer, s *Step) error {
	if len(b.Steps) > 0 {
		return errors.New("must be the first layer")
	}
	n, err := b.matrix(l.Weight, "vocabulary", s)
	b.Vocabulary, b.embedded, b.Items = n, s.DType, true
	return err
}

func (b *builder) table(l Layer, s *Step) error {
	n, err := b.matrix(l.Weight, "positions", s)
	b.Positions, b.Items = min(b.Positions, n), true
	return err
}

func (b *builder) attention(l Layer, s *Step) error {
	if l.Heads < 1 || s.In%l.Heads != 0 {
		return fmt.Errorf("heads is %d; wanted a divisor of the width, which is %d", l.Heads, s.In)
	}
	in, core := *s, Step{Kind: l.Kind, In: 3 * s.In, Out: s.In, Heads: l.Heads, Causal: l.Causal}
	in.Kind, s.Kind, b.Items = "linear", "linear", true
	if err := b.project(l.Weight, l.Bias, core.In, &in); err != nil {
		return fmt.Errorf("in_proj: %w", err)
	}
	if err := b.project(l.OutWeight, l.OutBias, core.Out, s); err != nil {
		return fmt.Errorf("out_proj: %w", err)
	}
	b.Steps = append(b.Steps, in, core)
	return nil
}

// activations lists those that gated layers may have.
var activations = []string{"relu", "gelu", "gelu_tanh", "silu", "sigmoid"}

func (b *builder) gated(l Layer, s *Step) error {
	if s.In%2 != 0 {
		return fmt.Errorf("a width of %d has no halves", s.In)
	}
	if !slices.Contains(activations, l.Activation) {
		return fmt.Errorf("activation is %q; wanted one of %s", l.Activation, strings.Join(activations, ", "))
	}
	s.Out, s.Activation = s.In/2, l.Activation
	return nil
}

func (b *builder) activation(l Layer, s *Step) error {
	s.Kind, s.Activation = "activation", l.Kind
	switch l.Approximate {
	case "", "none":
	case "tanh":
		s.Activation += "_tanh"
	default:
		return fmt.Errorf("approximate is %q; wanted none or tanh", l.Approximate)
	}
	return nil
}

// epsilons are the defaults of the norms' eps.
var epsilons = map[string]float64{"layernorm": 1e-5, "rmsnorm": 1e-6}

func (b *builder) norm(l Layer, s *Step) (err error) {
	if s.Weight, err = b.load(l.Weight, 1, s.In); err != nil {
		return err
	}
	if s.Bias, err = b.load(l.Bias, 0, s.In); err != nil {
		return err
	}
	s.Eps = epsilons[l.Kind]
	if l.Eps != nil {
		s.Eps = *l.Eps
	}
	if !(s.Eps >= 0 && s.Eps < 1) {
		return fmt.Errorf("eps is %v; wanted 0 to 1", s.Eps)
	}
	return nil
}

func (b *builder) residual(l Layer, s *Step) error {
	last := len(b.kept) - 1
	switch {
	case l.Op == "start" && len(b.kept) == maxResiduals:
		return fmt.Errorf("residuals nest deeper than %d", maxResiduals)
	case l.Op == "start":
		b.kept = append(b.kept, s.In)
		b.Residuals = max(b.Residuals, len(b.kept))
	case l.Op != "add":
		return fmt.Errorf("op is %q; wanted start or add", l.Op)
	case last < 0 || b.kept[last] != s.In:
		return fmt.Errorf("no residual of width %d is started; started are %v", s.In, b.kept)
	default:
		b.kept, s.Add = b.kept[:last], true
	}
	return nil
}

func (b *builder) scale(l Layer, s *Step) error {
	if l.Factor == nil {
		return errors.New("needs a factor")
	}
	if s.Factor = float32(*l.Factor); s.Factor-s.Factor != 0 {
		return fmt.Errorf("factor is %v, which is %v as float32; factors are finite", *l.Factor, s.Factor)
	}
	return nil
}
