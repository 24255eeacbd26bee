package server_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// floats returns n float32 of both signs as bytes.
func floats(n int) []byte {
	data := make([]byte, 0, 4*n)
	for i := range n {
		v := float32(i%251) / 8
		if i%3 == 0 {
			v = -v
		}
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
	}
	return data
}

// mapFloats is what a model should make of data.
func mapFloats(data []byte, f func(float32) float32) []byte {
	out := make([]byte, 0, len(data))
	for at := 0; at < len(data); at += 4 {
		v := math.Float32frombits(binary.LittleEndian.Uint32(data[at:]))
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(f(v)))
	}
	return out
}

func relu(v float32) float32 { return max(v, 0) }

func TestAStockClientGetsBitExactResultsFromPermutedUnalignedChunks(t *testing.T) {
	testkit.Start(t)
	f := serve(t, unpaced)
	float32s := pb.DataType_DATA_TYPE_FLOAT32
	wants := map[string]func([]byte) (string, []byte){
		"echo":   func(d []byte) (string, []byte) { return "y", d },
		"relu":   func(d []byte) (string, []byte) { return "y", mapFloats(d, relu) },
		"affine": func(d []byte) (string, []byte) { return "y", mapFloats(d, func(v float32) float32 { return 2*v - 1 }) },
		"sink":   func(d []byte) (string, []byte) { return "bytes", binary.LittleEndian.AppendUint64(nil, uint64(len(d))) },
	}
	for name, size := range map[string]struct{ chunk, floats int }{
		"1 byte":  {1, 501},
		"7":       {7, 7_001},
		"1000":    {1000, 100_001},
		"65537":   {65537, 1 << 19},
		"1 MiB":   {mib, 3<<18 + 5},
		"1 chunk": {mib, 10},
	} {
		for model, want := range wants {
			for _, allowance := range []bool{true, false} {
				for _, kind := range []pb.Checksum{pb.Checksum_CHECKSUM_CRC32C, pb.Checksum_CHECKSUM_CRC32} {
					if allowance && 4*size.floats > mib {
						continue
					}
					t.Run(fmt.Sprintf("chunk=%s/model=%s/allowance=%v/%v", name, model, allowance, kind), func(t *testing.T) {
						r := dialRaw(t, f.addr)
						r.kind = kind
						r.greet()
						o := offering(model, floats(size.floats), size.chunk).as(float32s, int64(size.floats))
						o.desc.OnAllowance = allowance
						if model == "affine" {
							o.call.Params = map[string]string{"a": "2", "b": "-1"}
						}
						port, data := want(o.data)
						out := r.run(o)
						require.Len(t, out, 1)
						require.True(t, string(data) == string(out[port].data), "the result differs")
					})
				}
			}
		}
	}
}

func TestEveryDataTypeAndRankArrivesBitExact(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openRaw(t, f.addr)
	for _, d := range tensor.DataTypes() {
		for _, shape := range [][]int64{{}, {0}, {3, 0, 5}, {1}, {7, 3}, {2, 1, 3, 1, 5}} {
			for _, allowance := range []bool{true, false} {
				n := int64(d.Bits() / 8)
				for _, dim := range shape {
					n *= dim
				}
				o := offering("echo", testkit.Bytes(int(n), uint64(d)), 5).as(pb.DataType(d), shape...)
				o.desc.OnAllowance = allowance
				out := r.run(o)["y"]
				require.Equal(t, pb.DataType(d), out.desc.Dtype)
				require.Equal(t, shape, append([]int64{}, out.desc.Shape...))
				require.Equal(t, string(o.data), string(out.data), "%v of shape %v", d, shape)
			}
		}
	}
}

func TestAWholeCallMayBeOneFrameEachWay(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openRaw(t, f.addr)
	o := offering("echo", testkit.Bytes(30_000, 1), 30_000)
	o.desc.OnAllowance = true
	r.send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}, Chunk: r.chunk(o, 0)})
	answer, err := r.stream.Recv()
	require.NoError(t, err)
	require.Len(t, answer.Descs, 1)
	require.Len(t, answer.Dones, 1)
	require.Equal(t, o.data, answer.Chunk.GetData())
	timings := answer.Dones[0].Timings
	require.Positive(t, timings.TotalNanos)
	require.LessOrEqual(t, timings.FirstResultNanos, timings.TotalNanos)
	require.LessOrEqual(t, timings.ReceiveNanos, timings.FirstResultNanos)
}

func TestATensorWithoutBytesMayHaveManyBlocks(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	free := []int64{engine.AnyAxes}
	f.add(t, cpu.RowFunc{
		Info: engine.Info{
			Name: "rows", Rows: 1, BlockRows: 2,
			Inputs: []engine.Port{{Name: "x", Shape: free}}, Outputs: []engine.Port{{Name: "y", Shape: free}},
		},
		Rows: func(_ context.Context, b cpu.RowBlock) error { copy(b.Out[0], b.In[0]); return nil },
	})
	for _, allowance := range []bool{true, false} {
		for _, shape := range [][]int64{{0, 4}, {1000, 0}, {0, 0}, {7, 3}} {
			r := openRaw(t, f.addr)
			o := offering("rows", make([]byte, shape[0]*shape[1]), 4).as(pb.DataType_DATA_TYPE_UINT8, shape...)
			o.desc.OnAllowance = allowance
			require.Equal(t, string(o.data), string(r.run(o)["y"].data))
		}
	}
}
