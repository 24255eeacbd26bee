//go:build linux && cgo

package cuda

// #include "driver.h"
import "C"

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/cuda/kernels"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/tensor"
)

// weights are numbers of a model on the device. The submitter's.
type weights struct {
	data []float32       // until it is there
	as   tensor.DataType // there
	at   C.CUdeviceptr   // 0: not there
}

// bytes is what data takes on the device.
func (w *weights) bytes() int64 { return int64(len(w.data)) * int64(w.as.Bits()/8) }

func (w *weights) upload(v *device) error {
	if len(w.data) == 0 {
		return nil
	}
	if err := v.roomy(func() error { return v.failed(C.tf_alloc(v.c, &w.at, C.size_t(w.bytes()))) }); err != nil {
		return fmt.Errorf("%d bytes of device memory for weights: %w", w.bytes(), err)
	}
	stage, err := v.pinned.Alloc(pieceBytes / 4)
	if err != nil {
		return err
	}
	defer v.pinned.Free(stage)
	f, _ := stack.FloatOf(w.as)
	at := 0
	for piece := range slices.Chunk(w.data, len(stage)/f.Bytes) {
		n := f.Bytes * len(piece)
		f.Store(stage, piece)
		if err := v.failed(C.tf_upload(v.c, w.at+C.CUdeviceptr(at), pointer(stage), C.size_t(n))); err != nil {
			return err
		}
		at += n
	}
	w.data = nil
	return nil
}

func (w *weights) free(v *device) {
	if w.at != 0 {
		_ = C.tf_free(v.c, w.at) // what fails in a dead context goes with that
	}
	w.at = 0
}

// layer appends the launches of one layer for rows at p.
type layer func(l *lane, p *place)

// place is where the rows of a block lie on their way through the layers.
type place struct {
	rows, width      uint64
	items, positions uint64          // of them, and rows of each
	dtype            tensor.DataType // of x: float32 between two layers
	x, y             kernels.Address // y is as large, to compute into
	kept             kernels.Address // the first of the residuals
	each             uint64          // bytes of a residual
	depth            uint64          // residuals in use
	mask             kernels.Address // 0: there is none
}

func (p *place) n() kernels.N { return kernels.N(p.rows * p.width) }

// computed says that rows of width are in y, which are x from now on.
func (p *place) computed(width int) { p.x, p.y, p.width = p.y, p.x, uint64(width) }

func (p *place) convert(l *lane, to tensor.DataType) {
	if p.dtype != to {
		add(l, kernels.Convert{Dst: p.y, Src: p.x, N: p.n(), To: floats[to], From: floats[p.dtype]})
		p.dtype = to
		p.computed(int(p.width))
	}
}

// compiled are the layers of a stack model, and their weights.
type compiled struct {
	layers  []layer
	weights []*weights
}

// Stack makes a stack model ready on h: its weights are copied to the device, those of
// float16 and bfloat16 as they are. What is computed between is float32. A layer
// that is not to be had there wraps engine.ErrUnavailable.
func Stack(h *Host, m *stack.Model) (engine.Model, error) {
	c, err := compile(m)
	if err != nil {
		return nil, fmt.Errorf("cuda: model %q: %w", m.Name, err)
	}
	info := m.Info()
	info.About["device_bytes"] = strconv.FormatInt(c.bytes(), 10)
	known := *m
	known.Steps = nil // without the weights
	made := blocks.Model{
		Info:     info,
		Bind:     func(call engine.Call) (blocks.Bound, error) { return c.bind(&known, call) },
		Setup:    func() error { return c.upload(h.device) },
		Teardown: func() { c.free(h.device) },
		Gauges:   h.gauges,
	}
	if m.Items {
		made.Begin = func(context.Context, engine.Sequence) (engine.State, error) {
			return nil, fmt.Errorf("%w: model %q: a GPU keeps no keys and values for a sequence yet; serve it with --engine cpu", engine.ErrPrecondition, m.Name)
		}
	}
	return h.engine.Model(made)
}

// bind ties the layers of m to a call.
func (c *compiled) bind(m *stack.Model, call engine.Call) (blocks.Bound, error) {
	y, positions, err := m.Bind(call)
	if err != nil {
		return blocks.Bound{}, err
	}
	x, in := call.Inputs[0].Desc, int64(m.In)
	if m.Vocabulary > 0 {
		in = 1
	}
	// A row has room for what comes in, is between two layers, and goes out.
	residuals, row := int64(m.Residuals), int64(positions)*max(in*int64(x.DType.Bits()/8), 4*int64(m.Widest), int64(m.Out*y.DType.Bits()/8))
	size := func(rows int64) int64 { return align(rows * row) }
	mask := func(rows int64) int64 { return (2 + residuals) * size(rows) }
	return blocks.Bound{
		Outs: []tensor.Desc{y},
		// A block of few inputs may have many times as much between two layers.
		MostRows: max(1, laneMost/max(1, (2+residuals)*row)),
		Program: &program{
			memory: func(rows int64) int64 { return mask(rows) + rows*int64(positions) },
			second: mask,
			check: func(w *blocks.Work) error {
				if m.Vocabulary == 0 {
					return nil
				}
				return m.IDs(x, w.Row, w.In[0], func(int, int) {})
			},
			launch: func(l *lane, rows, _ int64, at kernels.Address) kernels.Address {
				each := kernels.Address(size(rows))
				p := place{
					rows: uint64(rows) * uint64(positions), items: uint64(rows), positions: uint64(positions), width: uint64(in),
					x: at, y: at + each, kept: at + 2*each, each: uint64(each), dtype: x.DType,
				}
				if m.Mask {
					p.mask = at + kernels.Address(mask(rows))
				}
				if m.Vocabulary == 0 {
					p.convert(l, tensor.Float32)
				}
				for _, layer := range c.layers {
					layer(l, &p)
				}
				p.convert(l, y.DType)
				return p.x
			},
		},
	}, nil
}

// upload copies the weights to the device, a tensor at a time: blocks pass between.
func (c *compiled) upload(v *device) error {
	for _, w := range c.weights {
		err := v.ask(func(dead error) error {
			if dead != nil {
				return dead
			}
			v.weights[w] = struct{}{}
			return w.upload(v)
		})
		if err != nil {
			c.free(v)
			return err
		}
	}
	return nil
}

// free frees them; when the device is lost or closed they are gone already.
func (c *compiled) free(v *device) {
	_ = v.ask(func(error) error {
		for _, w := range c.weights {
			w.free(v)
			delete(v.weights, w)
		}
		return nil
	})
}

// align rounds bytes up to what every access of a kernel is aligned to.
func align(n int64) int64 { return (n + 255) &^ 255 }

// activations are what kernels call them.
var activations = map[string]kernels.Activation{
	"relu": kernels.ReLU, "gelu": kernels.GELU, "gelu_tanh": kernels.GELUTanh, "silu": kernels.SiLU, "sigmoid": kernels.Sigmoid,
}

// compile makes launches of a model's steps.
func compile(m *stack.Model) (c compiled, err error) {
	for i := 0; i < len(m.Steps); i++ {
		s := &m.Steps[i]
		switch {
		case s.Kind == "linear":
			a := kernels.None
			if i+1 < len(m.Steps) && m.Steps[i+1].Kind == "activation" {
				i++ // computed with it
				a = activations[m.Steps[i].Activation]
			}
			c.linear(s, a)
		case others[s.Kind] == nil:
			return c, fmt.Errorf("%w: layer %d: %s does not run on a GPU", engine.ErrUnavailable, i, s.Kind)
		default:
			c.layers = append(c.layers, others[s.Kind](&c, s))
		}
	}
	return c, nil
}

// others make what computes a step that is not linear.
var others = map[string]func(*compiled, *stack.Step) layer{
	"activation": func(_ *compiled, s *stack.Step) layer {
		a := activations[s.Activation]
		return func(l *lane, p *place) { add(l, kernels.ActivateF32{X: p.x, N: p.n(), Activation: a}) }
	},
	"scale": func(_ *compiled, s *stack.Step) layer {
		factor := s.Factor
		return func(l *lane, p *place) { add(l, kernels.ScaleF32{X: p.x, N: p.n(), Factor: factor}) }
	},
	"softmax": func(_ *compiled, s *stack.Step) layer {
		return func(l *lane, p *place) { add(l, kernels.SoftmaxF32{X: p.x, Rows: p.rows, Width: uint32(p.width)}) }
	},
	"residual": residual, "layernorm": norm, "rmsnorm": norm,
	"embedding": embedding, "positions": positions, "attention": attention, "gated": gated,
}

func residual(_ *compiled, s *stack.Step) layer {
	if s.Add {
		return func(l *lane, p *place) {
			p.depth--
			add(l, kernels.AddF32{X: p.x, Y: p.kept + kernels.Address(p.depth*p.each), N: p.n(), Of: p.n()})
		}
	}
	return func(l *lane, p *place) {
		add(l, kernels.CopyF32{Dst: p.kept + kernels.Address(p.depth*p.each), Src: p.x, N: p.n()})
		p.depth++
	}
}

func norm(c *compiled, s *stack.Step) layer {
	w, bias := c.weight(s.Weight, tensor.Float32), c.weight(s.Bias, tensor.Float32)
	k := kernels.NormF32{Width: uint32(s.In), Eps: s.Eps}
	if s.Kind == "layernorm" {
		k.Centered = 1
	}
	return func(l *lane, p *place) {
		k := k
		k.X, k.Rows, k.Weight, k.Bias = p.x, p.rows, kernels.Address(w.at), kernels.Address(bias.at)
		add(l, k)
	}
}

func embedding(c *compiled, s *stack.Step) layer {
	w, width := c.weight(s.Weight, s.DType), s.Out
	return func(l *lane, p *place) {
		k := kernels.EmbedF32{Y: p.y, IDs: p.x, Weight: kernels.Address(w.at), N: kernels.N(p.rows) * kernels.N(width), Width: uint32(width), Type: floats[w.as]}
		if p.dtype == tensor.Int64 {
			k.Wide = 1
		}
		add(l, k)
		p.dtype = tensor.Float32
		p.computed(width)
	}
}

// positions adds a table to each item.
func positions(c *compiled, s *stack.Step) layer {
	w := c.weight(s.Weight, tensor.Float32)
	return func(l *lane, p *place) {
		add(l, kernels.AddF32{X: p.x, Y: kernels.Address(w.at), N: p.n(), Of: kernels.N(p.positions * p.width)})
	}
}

func attention(_ *compiled, s *stack.Step) layer {
	k := kernels.AttentionF32{Width: uint32(s.Out), Heads: uint32(s.Heads), Scale: float32(1 / math.Sqrt(float64(s.Out/s.Heads)))}
	if s.Causal {
		k.Causal = 1
	}
	return func(l *lane, p *place) {
		k := k
		k.QKV, k.Mask, k.Y, k.Items, k.Positions = p.x, p.mask, p.y, p.items, uint32(p.positions)
		add(l, k)
		p.computed(int(k.Width))
	}
}

func gated(_ *compiled, s *stack.Step) layer {
	a, width := activations[s.Activation], s.Out
	return func(l *lane, p *place) {
		p.width = uint64(width)
		add(l, kernels.GateF32{Y: p.y, X: p.x, N: p.n(), Width: uint32(width), Activation: a})
		p.computed(width)
	}
}

// weight has data copied to the device, as half types if they are.
func (c *compiled) weight(data []float32, as tensor.DataType) *weights {
	if as == tensor.Float64 {
		as = tensor.Float32
	}
	w := &weights{data: data, as: as}
	c.weights = append(c.weights, w)
	return w
}

// bytes is what the weights take on the device.
func (c *compiled) bytes() (n int64) {
	for _, w := range c.weights {
		n += w.bytes()
	}
	return n
}

func (c *compiled) linear(s *stack.Step, a kernels.Activation) {
	w, bias := c.weight(s.Weight, s.DType), c.weight(s.Bias, tensor.Float32)
	in, out := s.In, s.Out
	c.layers = append(c.layers, func(l *lane, p *place) {
		add(l, kernels.LinearF32{
			X: p.x, W: kernels.Address(w.at), Bias: kernels.Address(bias.at), Y: p.y,
			Rows: p.rows, In: uint32(in), Out: uint32(out), Activation: a, Type: floats[w.as],
		})
		p.computed(out)
	})
}
