package splitlearn_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// addCached adds a model with a cache in each layer, to which it adds what it gets: x [n 2] and
// keys and values [1 past 2].
func (f *fixture) addCached(t testing.TB, name string, layers int) {
	f32 := []tensor.DataType{tensor.Float32}
	info := engine.Info{
		Name:    name,
		Inputs:  []engine.Port{{Name: "hidden", DTypes: f32, Shape: []int64{engine.Free, 2}}},
		Outputs: []engine.Port{{Name: "out", DTypes: f32, Shape: []int64{engine.Free, 2}}},
	}
	for n := range layers {
		for _, part := range []string{"key", "value"} {
			cache := engine.Port{Name: fmt.Sprintf("past_%s_%d", part, n), DTypes: f32, Shape: []int64{1, engine.Free, 2}}
			info.Inputs = append([]engine.Port{cache}, info.Inputs...) // in any order
			cache.Name = fmt.Sprintf("present_%s_%d", part, n)
			info.Outputs = append(info.Outputs, cache)
		}
	}
	f.add(t, cpu.Func{Info: info, Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
		x := in[len(in)-1]
		out := []tensor.Tensor{x}
		for i := range 2 * layers {
			past := in[2*layers-1-i] // as the inputs, backwards
			all := append(append([]byte(nil), past.Data...), x.Data...)
			out = append(out, tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{1, past.Shape[1] + x.Shape[0], 2}}, Data: all})
		}
		return out, nil
	}})
}

func TestCachesComeAndGoWithEachToken(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	for _, layers := range []int{1, 2, 31} {
		f.addCached(t, fmt.Sprint("cached", layers), layers)
		for codec, encode := range map[string]func(...float32) []byte{
			"float32": raw, "float16": half, "zlib": func(v ...float32) []byte { return deflate(raw(v...), 6) },
		} {
			decode := func(b []byte) []float32 {
				switch codec {
				case "zlib":
					return floats(t, inflate(t, b))
				case "float16":
					require.Zero(t, len(b)%2)
					return []float32{float32(len(b))}
				}
				return floats(t, b)
			}
			var entries []*pb.KVCacheEntry
			var all []float32
			for token := range 3 {
				x := []float32{float32(token), float32(-token)}
				all = append(all, x...)
				y, err := f.Compute(t.Context(), &pb.ComputeRequest{
					Data: encode(x...), Shape: []int32{1, 2}, ModelId: fmt.Sprint("cached", layers), PastKeyValues: entries, UseCache: new(true),
				})
				require.NoError(t, err, codec)
				require.NotEmpty(t, y.GetData(), codec)
				entries = y.GetPresentKeyValues()
				require.Len(t, entries, layers)
				for _, e := range entries {
					require.Equal(t, []int32{1, int32(token + 1), 2}, e.GetKeyShape())
					require.Equal(t, []int32{1, int32(token + 1), 2}, e.GetValueShape())
					want := all
					if codec == "float16" {
						want = []float32{float32(2 * len(all))}
						require.Equal(t, half(all...), e.GetKeyData())
					}
					require.Equal(t, want, decode(e.GetKeyData()), codec)
					require.Equal(t, want, decode(e.GetValueData()), codec)
				}
			}
		}
	}
}

func TestCachesThatAModelDoesNotHaveAreRefusedByName(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	f.addCached(t, "cached", 2)
	entry := &pb.KVCacheEntry{KeyData: raw(1, 2), KeyShape: []int32{1, 1, 2}, ValueData: raw(3, 4), ValueShape: []int32{1, 1, 2}}
	bad := &pb.KVCacheEntry{KeyData: raw(1, 2), KeyShape: []int32{1, 1, 2}, ValueData: raw(3, 4), ValueShape: []int32{1, 1, 3}}
	narrow := &pb.KVCacheEntry{KeyData: raw(1), KeyShape: []int32{1, 1, 1}, ValueData: raw(3), ValueShape: []int32{1, 1, 1}}
	for name, tc := range map[string]struct {
		model   string
		cache   bool
		entries []*pb.KVCacheEntry
		says    string
	}{
		"entries without ports":   {"echo", false, []*pb.KVCacheEntry{entry}, "past_key_0"},
		"use_cache without ports": {"echo", true, nil, "present_key_0"},
		"too many layers":         {"cached", true, []*pb.KVCacheEntry{entry, entry, entry}, "2 layers"},
		"bytes of another shape":  {"cached", true, []*pb.KVCacheEntry{entry, bad}, "past_value_1"},
		"shape of another model":  {"cached", true, []*pb.KVCacheEntry{narrow, narrow}, "past_"},
		"nothing in it":           {"cached", true, []*pb.KVCacheEntry{{}}, "past_key_0"},
	} {
		_, err := f.Compute(t.Context(), &pb.ComputeRequest{Data: raw(1, 2), Shape: []int32{1, 2}, ModelId: tc.model, PastKeyValues: tc.entries, UseCache: &tc.cache})
		hasCode(t, codes.InvalidArgument, err)
		require.Contains(t, status.Convert(err).Message(), tc.says, name)
	}
	// The first layers may have entries, and the answer only has caches if they were asked for.
	y, err := f.Compute(t.Context(), &pb.ComputeRequest{Data: raw(1, 2), Shape: []int32{1, 2}, ModelId: "cached", PastKeyValues: []*pb.KVCacheEntry{entry}})
	require.NoError(t, err)
	require.Empty(t, y.GetPresentKeyValues())
}

func TestAnAbsentCacheNeedsOneFreeAxis(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	for name, shape := range map[string][]int64{"none": {1, 2}, "two": {engine.Free, engine.Free}, "any": {engine.AnyAxes}} {
		f.add(t, cpu.Func{
			Info: engine.Info{Name: name, Outputs: anyShape("y"), Inputs: []engine.Port{
				{Name: "x", Shape: []int64{engine.AnyAxes}}, {Name: "past_key_0", Shape: shape}, {Name: "past_value_0", Shape: shape},
			}},
			Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
				return in[:1], nil
			},
		})
		_, err := f.Compute(t.Context(), &pb.ComputeRequest{Data: raw(1), Shape: []int32{1}, ModelId: name})
		hasCode(t, codes.InvalidArgument, err)
		require.Contains(t, status.Convert(err).Message(), "past_key_0")
		e := &pb.KVCacheEntry{KeyData: raw(1, 2), KeyShape: []int32{1, 2}, ValueData: raw(1, 2), ValueShape: []int32{1, 2}}
		_, err = f.Compute(t.Context(), &pb.ComputeRequest{Data: raw(1), Shape: []int32{1}, ModelId: name, PastKeyValues: []*pb.KVCacheEntry{e}})
		require.NoError(t, err, name)
	}
}
