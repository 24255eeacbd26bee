package cpu

import (
	"testing"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/tensor"
)

func builtin(name string) func(testing.TB, int64) enginetest.Subject {
	return enginetest.OnHost(func(h *engine.Host) (engine.Model, error) {
		for _, m := range Builtins(h) {
			if m.Info().Name == name {
				return m, nil
			}
		}
		return nil, engine.ErrNotFound
	})
}

func TestEchoPassesTheSuite(t *testing.T) {
	data := make([]float32, 3000)
	for i := range data {
		data[i] = float32(i)
	}
	in, err := tensor.Of(data, 30, 100)
	if err != nil {
		t.Fatal(err)
	}
	enginetest.Run(t, enginetest.Case{New: builtin("echo"), Inputs: []tensor.Tensor{in}, Want: func(in []tensor.Tensor) ([]tensor.Tensor, error) { return in, nil }})
}
