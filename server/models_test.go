package server_test

import (
	"context"
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
