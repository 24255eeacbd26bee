package stack

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

// Model is a stack model whose layers fit together.
type Model struct {
	Name, Version string
	In, Out       int // widths of x and y
	Widest        int // of x between two layers
	Residuals     int // how many are open at a time
	Parameters    int64
	Steps         []Step
}

// Step is one layer, checked, with what its kind needs.
type Step struct {
	Kind         string // as in Layer
	In, Out      int    // widths
	Weight, Bias []float32
	Eps          float64
	Factor       float32
	Tanh         bool // gelu: approximated
	Add          bool // residual: add, not start
}

// Info is what engines say of m: x of [… In] to y of [… Out], rows are all axes but the last.
func (m *Model) Info() engine.Info {
	port := func(name string, width int) []engine.Port {
		return []engine.Port{{Name: name, DTypes: DTypes, Shape: []int64{engine.AnyAxes, int64(width)}}}
	}
	return engine.Info{
		Name: m.Name, Version: m.Version, Rows: engine.AllButLast, Idempotent: true, Inputs: port("x", m.In), Outputs: port("y", m.Out),
		About: map[string]string{"layers": strconv.Itoa(len(m.Steps)), "parameters": strconv.FormatInt(m.Parameters, 10)},
	}
}

// kind is what layers of one kind have besides it, and what checks one: it fills in
// the step and, if that is another, its width.
type kind struct {
	fields []string
	check  func(*builder, Layer, *Step) error
}

var kinds = map[string]kind{
	"linear":    {[]string{"weight", "bias"}, (*builder).linear},
	"relu":      {},
	"gelu":      {[]string{"approximate"}, (*builder).gelu},
	"silu":      {},
	"layernorm": {[]string{"weight", "bias", "eps"}, (*builder).norm},
	"rmsnorm":   {[]string{"weight", "eps"}, (*builder).norm},
	"residual":  {[]string{"op"}, (*builder).residual},
	"scale":     {[]string{"factor"}, (*builder).scale},
	"softmax":   {},
}

// Kinds returns the kinds of layers that there are, sorted.
func Kinds() []string { return slices.Sorted(maps.Keys(kinds)) }

// checkFields refuses a kind that there is not, and a field that the kind has not.
func (l Layer) checkFields() error {
	k, ok := kinds[l.Kind]
	if !ok {
		return fmt.Errorf("no kind %q; known are %s", l.Kind, strings.Join(Kinds(), ", "))
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

// builder makes a Model of a Spec.
type builder struct {
	*Model
	weight func(string) (tensor.Tensor, error)
	kept   []int // widths of the residuals that are open
}

func build(s Spec, weight func(string) (tensor.Tensor, error)) (*Model, error) {
	b := builder{Model: &Model{Name: s.Name, Version: s.Version}, weight: weight}
	if err := b.build(s); err != nil {
		return nil, fmt.Errorf("stack: model %q: %w: %w", s.Name, engine.ErrInfo, err)
	}
	return b.Model, nil
}

func (b *builder) build(s Spec) (err error) {
	if len(s.Layers) == 0 || len(s.Layers) > maxLayers {
		return fmt.Errorf("%d layers; wanted 1 to %d", len(s.Layers), maxLayers)
	}
	for i, l := range s.Layers {
		if err := l.checkFields(); err != nil {
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
		return fmt.Errorf("%d residuals are started and never added", len(b.kept))
	}
	return nil
}

// findWidth takes the width of the first layer that has one: no other changes it.
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

// load copies a named weight of a shape; one without a name is filled with absent.
func (b *builder) load(name string, absent float32, shape ...int) ([]float32, error) {
	dims := make(tensor.Shape, len(shape))
	n := 1
	for i, d := range shape {
		dims[i] = int64(d)
		n *= d
	}
	data := make([]float32, n)
	if name == "" {
		for i := range data {
			data[i] = absent
		}
		return data, nil
	}
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

func (b *builder) linear(l Layer, s *Step) error {
	if l.Weight == "" {
		return errors.New("needs a weight")
	}
	t, err := b.weight(l.Weight)
	if err != nil {
		return err
	}
	if len(t.Shape) != 2 || t.Shape[1] != int64(s.In) {
		return fmt.Errorf("tensor %q: wanted shape [out %d], got %v", l.Weight, s.In, t.Desc)
	}
	if s.Out, err = b.fit(t.Shape[0]); err != nil {
		return err
	}
	if s.Weight, err = b.load(l.Weight, 0, s.Out, s.In); err != nil {
		return err
	}
	s.Bias, err = b.load(l.Bias, 0, s.Out)
	return err
}

func (b *builder) gelu(l Layer, s *Step) error {
	if l.Approximate != "" && l.Approximate != "none" && l.Approximate != "tanh" {
		return fmt.Errorf("approximate is %q; wanted none or tanh", l.Approximate)
	}
	s.Tanh = l.Approximate == "tanh"
	return nil
}

// epsilons are what norms have where a layer says nothing.
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
	if l.Factor == nil || math.IsNaN(*l.Factor) || math.IsInf(*l.Factor, 0) {
		return errors.New("needs a finite factor")
	}
	s.Factor = float32(*l.Factor)
	return nil
}
