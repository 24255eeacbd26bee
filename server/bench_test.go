package server_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

func BenchmarkCall(b *testing.B) {
	for _, model := range []string{"sink", "echo", "relu"} {
		for _, size := range []int{30_000, 256 * mib} {
			b.Run(fmt.Sprintf("model=%s/bytes=%d", model, size), func(b *testing.B) {
				f := serve(b, nil)
				s := f.session(b, client.Config{})
				data := testkit.Bytes(size, 1)
				x, err := tensor.New(tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(size / 4)}}, data)
				require.NoError(b, err)
				dst := make([]byte, size)
				r := client.Request{Model: model, Inputs: []client.Input{client.From("", x)}}
				if model != "sink" {
					r.Results = map[string]client.Sink{"y": client.Into(dst)}
				}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					c, err := s.Call(b.Context(), r)
					require.NoError(b, err)
					_, err = c.Wait()
					require.NoError(b, err)
				}
			})
		}
	}
}
