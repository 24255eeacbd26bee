//go:build linux && cgo

package cuda

// #include "driver.h"
import "C"

import (
	"fmt"
	"strconv"
	"unsafe"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/cuda/kernels"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/tensor"
)

// weights are numbers of a model on the device. The submitter's.
type weights struct {
	data []float32     // until it is there
	at   C.CUdeviceptr // 0: not there
}

func (w *weights) upload(v *device) error {
	if len(w.data) == 0 {
		return nil
	}
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w.data))), 4*len(w.data))
	if err := v.roomy(func() error { return v.failed(C.tf_alloc(v.c, &w.at, C.size_t(len(bytes)))) }); err != nil {
		return fmt.Errorf("%d bytes of device memory for weights: %w", len(bytes), err)
	}
	stage, err := v.pinned.Alloc(uploadBytes)
	if err != nil {
		return err
	}
	defer v.pinned.Free(stage)
	for at := 0; at < len(bytes) && err == nil; {
		n := copy(stage, bytes[at:])
		err = v.failed(C.tf_upload(v.c, w.at+C.CUdeviceptr(at), pointer(stage), C.size_t(n)))
		at += n
	}
	if err == nil {
		w.data = nil
	}
	return err
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
	rows, width uint64
	x, y        kernels.Address // y is as large, to compute into
	kept        kernels.Address // the first of the residuals
	each        uint64          // bytes of a residual
	depth       uint64          // residuals in use
}

func (p *place) n() kernels.N { return kernels.N(p.rows * p.width) }

// compiled are the layers of a stack model, and their weights.
type compiled struct {
	layers  []layer
	weights []*weights
}

// Stack makes a stack model of float32 ready on h: its weights are copied to the
// device. A layer that is not to be had there wraps engine.ErrUnavailable.
func Stack(h *Host, m *stack.Model) (engine.Model, error) {
	c, err := compile(m)
	if err != nil {
		return nil, fmt.Errorf("cuda: model %q: %w", m.Name, err)
	}
	info := m.Info()
	info.Inputs[0].DTypes = []tensor.DataType{tensor.Float32}
	info.Outputs[0].DTypes = info.Inputs[0].DTypes
	info.About["device_bytes"] = strconv.FormatInt(c.bytes(), 10)
	v, widest, residuals, in, out := h.device, int64(m.Widest), int64(m.Residuals), uint64(m.In), int64(m.Out)
	size := func(rows int64) int64 { return align(4 * rows * widest) }
	// A block of few inputs may have many times as much between two layers.
	row := (2 + residuals) * 4 * widest
	if engine.ChunkBytes/(4*int64(max(m.In, m.Out)))*row > laneMost {
		info.BlockRows = max(1, laneMost/row)
	}
	on := program{
		memory: func(rows int64) int64 { return (2 + residuals) * size(rows) },
		launch: func(l *lane, rows, _ int64, x kernels.Address) kernels.Address {
			each := kernels.Address(size(rows))
			at := place{rows: uint64(rows), width: in, x: x, y: x + each, kept: x + 2*each, each: uint64(each)}
			for _, layer := range c.layers {
				layer(l, &at)
			}
			return at.x
		},
	}
	return h.engine.Model(blocks.Model{
		Info: info,
		Bind: func(call engine.Call) (blocks.Bound, error) {
			y := call.Inputs[0].Desc.Clone()
			y.Shape[len(y.Shape)-1] = out
			p := on
			return blocks.Bound{Outs: []tensor.Desc{y}, Program: &p}, nil
		},
		Setup:    func() error { return c.upload(v) },
		Teardown: func() { c.free(v) },
	})
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

// activations are the kinds of layers that a linear one computes with its result.
func activation(s *stack.Step) kernels.Activation {
	switch s.Kind {
	case "relu":
		return kernels.ReLU
	case "silu":
		return kernels.SiLU
	case "gelu":
		if s.Tanh {
			return kernels.GELUTanh
		}
		return kernels.GELU
	}
	return kernels.None
}

// compile makes launches of a model's steps.
func compile(m *stack.Model) (c compiled, err error) {
	for i := 0; i < len(m.Steps); i++ {
		s := &m.Steps[i]
		switch a := activation(s); {
		case s.Kind == "linear":
			a := kernels.None
			if i+1 < len(m.Steps) {
				a = activation(&m.Steps[i+1])
			}
			c.linear(s, a)
			if a != kernels.None {
				i++ // computed with it
			}
		case a != kernels.None:
			c.layers = append(c.layers, func(l *lane, p *place) {
				add(l, kernels.ActivateF32{X: p.x, N: p.n(), Activation: a})
			})
		case s.Kind == "scale":
			factor := s.Factor
			c.layers = append(c.layers, func(l *lane, p *place) {
				add(l, kernels.ScaleF32{X: p.x, N: p.n(), Factor: factor})
			})
		case s.Kind == "residual" && s.Add:
			c.layers = append(c.layers, func(l *lane, p *place) {
				p.depth--
				add(l, kernels.AddF32{X: p.x, Y: p.kept + kernels.Address(p.depth*p.each), N: p.n()})
			})
		case s.Kind == "residual":
			c.layers = append(c.layers, func(l *lane, p *place) {
				add(l, kernels.CopyF32{Dst: p.kept + kernels.Address(p.depth*p.each), Src: p.x, N: p.n()})
				p.depth++
			})
		default:
			return c, fmt.Errorf("%w: layer %d: %s does not run on a GPU", engine.ErrUnavailable, i, s.Kind)
		}
	}
	return c, nil
}

// bytes is what the weights take on the device.
func (c *compiled) bytes() (n int64) {
	for _, w := range c.weights {
		n += 4 * int64(len(w.data))
	}
	return n
}

func (c *compiled) linear(s *stack.Step, a kernels.Activation) {
	w, bias := &weights{data: s.Weight}, &weights{data: s.Bias}
	c.weights = append(c.weights, w, bias)
	in, out := uint32(s.In), uint32(s.Out)
	c.layers = append(c.layers, func(l *lane, p *place) {
		add(l, kernels.LinearF32{
			X: p.x, W: kernels.Address(w.at), Bias: kernels.Address(bias.at), Y: p.y,
			Rows: p.rows, In: in, Out: out, Activation: a,
		})
		p.x, p.y, p.width = p.y, p.x, uint64(out)
	})
}
