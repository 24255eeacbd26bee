package server_test

import (
	"context"
	"encoding/binary"
	"math"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/tensor"
)

func (f *fixture) add(t testing.TB, fn cpu.RowFunc) {
	t.Helper()
	m, err := fn.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, f.models.Add(m))
}

// addPair adds a model of two inputs and two outputs: x is split into rows, w is
// needed whole; sum is each row's scalar product with w, scaled is x times w.
func addPair(t testing.TB, f *fixture) {
	t.Helper()
	f32 := []tensor.DataType{tensor.Float32}
	f.add(t, cpu.RowFunc{
		Info: engine.Info{
			Name: "pair", Rows: 1,
			Inputs: []engine.Port{
				{Name: "x", DTypes: f32, Shape: []int64{engine.Free, engine.Free}},
				{Name: "w", DTypes: f32, Shape: []int64{engine.Free}, Whole: true},
			},
			Outputs: []engine.Port{
				{Name: "sum", DTypes: f32, Shape: []int64{engine.Free}},
				{Name: "scaled", DTypes: f32, Shape: []int64{engine.Free, engine.Free}},
			},
		},
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
			return []tensor.Desc{{DType: tensor.Float32, Shape: in[0].Shape[:1]}, in[0]}, nil
		},
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			sum, scaled := pairWant(b.In[0], b.Whole[1])
			copy(b.Out[0], sum)
			copy(b.Out[1], scaled)
			return nil
		},
	})
}

func pairWant(x, w []byte) (sums, scaled []byte) {
	at := func(b []byte, i int) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])) }
	columns := len(w) / 4
	sum := float32(0)
	for i := range len(x) / 4 {
		v := at(x, i) * at(w, i%columns)
		scaled = binary.LittleEndian.AppendUint32(scaled, math.Float32bits(v))
		if sum += v; i%columns == columns-1 {
			sums = binary.LittleEndian.AppendUint32(sums, math.Float32bits(sum))
			sum = 0
		}
	}
	return sums, scaled
}

// gate is a model like echo whose blocks wait to be let through, and are counted.
type gate struct {
	started, ended atomic.Int64
	open           chan struct{} // closed, or one token per block
}

// addGate adds a gate of 1 MiB blocks under its name.
func addGate(t testing.TB, f *fixture, name string) *gate {
	t.Helper()
	g := &gate{open: make(chan struct{})}
	f.add(t, cpu.RowFunc{
		Info: engine.Info{
			Name: name, Rows: engine.AllAxes, BlockRows: mib,
			Inputs:  []engine.Port{{Name: "x", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.AnyAxes}}},
			Outputs: []engine.Port{{Name: "y", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.AnyAxes}}},
		},
		InPlace: true,
		Rows: func(ctx context.Context, _ cpu.RowBlock) error {
			g.started.Add(1)
			defer g.ended.Add(1)
			select {
			case <-g.open:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		},
	})
	return g
}
