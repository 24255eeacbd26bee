package splitlearn_test

import (
	"context"
	"encoding/binary"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"

	pb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// theirs is the contract as its own clients have it: FIELD=NUMBER and the type, o for fields
// with presence, r for lists.
var theirs = map[string]string{
	"KVCacheEntry":               "key_data=1 bytes, key_shape=2 r int32, value_data=3 bytes, value_shape=4 r int32",
	"ComputeRequest":             "data=1 bytes, shape=2 r int32, request_id=3 o int32, metadata=4 r message, model_id=5 string, forward_id=6 o string, training_mode=7 o bool, past_key_values=8 r message, use_cache=9 o bool",
	"ComputeResponse":            "data=1 bytes, shape=2 r int32, request_id=3 o int32, compute_time_ms=4 o float, monitoring_data=5 o message, forward_id=6 o string, present_key_values=7 r message",
	"MonitoringSnapshot":         "timestamp=1 double, cpu_percent=2 float, memory_mb=3 float, memory_percent=4 float, gpu_available=5 bool, gpu_utilization=6 o float, gpu_memory_used_mb=7 o float, gpu_memory_total_mb=8 o float",
	"HealthRequest":              "",
	"ServiceInfoRequest":         "",
	"HealthResponse":             "status=1 string, message=2 string, version=3 string, uptime_seconds=4 o float",
	"ServiceInfoResponse":        "service_name=1 string, version=2 string, device=3 string, uptime_seconds=4 o float, total_requests=5 int64, custom_info=6 r message",
	"BackwardRequest":            "grad_output_data=1 bytes, grad_output_shape=2 r int32, forward_id=3 string, model_id=4 o string, learning_rate=5 o float, accumulation_step=6 o int32",
	"BackwardResponse":           "grad_input_data=1 bytes, grad_input_shape=2 r int32, forward_id=3 string, backward_time_ms=4 o float, monitoring_data=5 o message",
	"MonitoringStreamRequest":    "sampling_interval=1 o double",
	"MonitoringSnapshotResponse": "snapshot=1 o message",
}

func TestTheContractIsTheirs(t *testing.T) {
	testkit.Start(t)
	file := pb.File_splitlearn_comm_compute_service_proto
	require.EqualValues(t, "splitlearn.comm", file.Package())
	require.Equal(t, len(theirs), file.Messages().Len())
	for i := range file.Messages().Len() {
		m := file.Messages().Get(i)
		var got []string
		for j := range m.Fields().Len() {
			f := m.Fields().Get(j)
			text := string(f.Name()) + "=" + strconv.Itoa(int(f.Number())) + " "
			if f.IsList() || f.IsMap() {
				text += "r "
			} else if f.HasPresence() {
				text += "o "
			}
			got = append(got, text+f.Kind().String())
		}
		require.Equal(t, theirs[string(m.Name())], strings.Join(got, ", "), m.Name())
	}
	var rpcs []string
	for _, m := range protodesc.ToFileDescriptorProto(file).GetService()[0].GetMethod() {
		text := m.GetName() + " " + strings.TrimPrefix(m.GetInputType(), ".splitlearn.comm.") + " " + strings.TrimPrefix(m.GetOutputType(), ".splitlearn.comm.")
		require.False(t, m.GetClientStreaming())
		require.Equal(t, m.GetName() == "StreamMonitoring", m.GetServerStreaming())
		rpcs = append(rpcs, text)
	}
	require.Equal(t, []string{
		"Compute ComputeRequest ComputeResponse", "ComputeBackward BackwardRequest BackwardResponse", "HealthCheck HealthRequest HealthResponse",
		"GetServiceInfo ServiceInfoRequest ServiceInfoResponse", "StreamMonitoring MonitoringStreamRequest MonitoringSnapshotResponse",
	}, rpcs)
}

func TestEachCodecIsAnsweredInItself(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	many := make([]float32, 300_000)
	for i := range many {
		many[i] = float32(i % 251)
	}
	for name, tc := range map[string]struct {
		values []float32
		shape  []int32
	}{
		"scalar":      {[]float32{1.5}, nil},
		"empty":       {nil, []int32{0}},
		"empty rows":  {nil, []int32{3, 0}},
		"vector":      {[]float32{1, 0, -2}, []int32{3}},
		"1.2 million": {many, []int32{300, 1000}},
	} {
		t.Run(name, func(t *testing.T) {
			for codec, c := range map[string]struct{ encode, decode func([]byte) []byte }{
				"float32": {func(b []byte) []byte { return b }, func(b []byte) []byte { return b }},
				"float16": {func(b []byte) []byte { return half(floats(t, b)...) }, func(b []byte) []byte { return b }},
				"zlib 1":  {func(b []byte) []byte { return deflate(b, 1) }, func(b []byte) []byte { return inflate(t, b) }},
				"zlib 9":  {func(b []byte) []byte { return deflate(b, 9) }, func(b []byte) []byte { return inflate(t, b) }},
			} {
				y, err := f.Compute(t.Context(), compute(c.encode(raw(tc.values...)), tc.shape...))
				require.NoError(t, err, codec)
				require.Equal(t, tc.shape, y.GetShape(), codec)
				want := raw(tc.values...)
				if codec == "float16" {
					want = half(tc.values...)
				}
				require.True(t, string(want) == string(c.decode(y.GetData())), codec)
			}
		})
	}
}

// Of small tensors that compress well, some compress to as many bytes as they have themselves,
// or as their float16 has.
func TestSmallStreamsAreNotMistakenForElements(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	rng := testkit.Rand(t)
	asLong, asHalf := 0, 0
	for range 3000 {
		values := make([]float32, 1+rng.IntN(63))
		for i := range values {
			values[i] = float32(rng.IntN(3))
		}
		data := deflate(raw(values...), 6)
		if len(data) == 4*len(values) {
			asLong++
		} else if len(data) == 2*len(values) {
			asHalf++
		} else if rng.IntN(20) > 0 {
			continue
		}
		y, err := f.Compute(t.Context(), compute(data, int32(len(values))))
		require.NoError(t, err)
		require.Equal(t, values, floats(t, inflate(t, y.GetData())))
	}
	require.Positive(t, asLong)
	require.Positive(t, asHalf)
}

func TestElementsThatLookLikeAStreamAreElements(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	for name, data := range map[string][]byte{
		"a header":                append([]byte{0x78, 0x9c}, make([]byte, 62)...),
		"a stream, and more":      append(deflate(make([]byte, 64), 9), make([]byte, 64)...)[:64],
		"a stream of fewer bytes": append(deflate(make([]byte, 60), 0), 0)[:64],
		"a dictionary":            append([]byte{0x78, 0xbb}, make([]byte, 62)...),
	} {
		y, err := f.Compute(t.Context(), compute(data, 16))
		require.NoError(t, err, name)
		require.Equal(t, data, y.GetData(), name)
	}
}

func TestBytesThatAreNoTensorAreRefusedOnce(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	bomb := deflate(make([]byte, 16*mib), 9)
	stream := deflate(raw(1, 2, 3, 4, 5), 6)
	wrongSum := append([]byte(nil), stream...)
	wrongSum[len(wrongSum)-1]++
	for name, req := range map[string]*pb.ComputeRequest{
		"too few":                      compute(make([]byte, 12), 3, 5),
		"too many":                     compute(make([]byte, 61), 3, 5),
		"negative":                     compute(make([]byte, 12), -2, 3),
		"two free axes":                compute(make([]byte, 12), -1, -1),
		"a free axis that has no size": compute(make([]byte, 12), -1, 0),
		"a free axis that does not":    compute(make([]byte, 12), -1, 2),
		"no such product":              compute(make([]byte, 12), math.MaxInt32, math.MaxInt32, math.MaxInt32),
		"a product that wraps to 4":    compute(make([]byte, 12), 1<<30, 1<<30, 8),
		"33 axes":                      compute(make([]byte, 4), make([]int32, 33)...),
		"a million axes":               compute(make([]byte, 4), make([]int32, 100_000)...),
		"a bomb":                       compute(bomb, 16),
		"a bomb that says all":         compute(bomb[:len(bomb)-1], 4*mib),
		"more than a run may have":     compute(append(slices.Clone(bomb), make([]byte, 256<<10)...), 201<<18),
		"a stream that is longer":      compute(stream, 4),
		"a stream that is shorter":     compute(stream, 6),
		"bytes after a stream":         compute(append(append([]byte(nil), stream...), 0), 5),
		"a stream cut short":           compute(stream[:len(stream)-4], 5),
		"a wrong sum":                  compute(wrongSum, 5),
		"a shape that no stream fills": compute(stream, math.MaxInt32, 2),
		"no bytes":                     compute(nil, 1),
	} {
		_, err := f.Compute(t.Context(), req)
		hasCode(t, codes.InvalidArgument, err)
		require.NotEmpty(t, status.Convert(err).Message(), name)
	}
}

func TestAnAxisMayBeAsLongAsTheBytesSay(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	for name, tc := range map[string]struct{ shape, want []int32 }{
		"first": {[]int32{-1, 4}, []int32{2, 4}},
		"last":  {[]int32{2, -1}, []int32{2, 4}},
		"only":  {[]int32{-1}, []int32{8}},
	} {
		y, err := f.Compute(t.Context(), compute(raw(1, 2, 3, 4, 5, 6, 7, 8), tc.shape...))
		require.NoError(t, err, name)
		require.Equal(t, tc.want, y.GetShape(), name)
	}
	y, err := f.Compute(t.Context(), compute(nil, -1, 4))
	require.NoError(t, err)
	require.Equal(t, []int32{0, 4}, y.GetShape())
}

func TestResultsOfOtherTypesComeAsTheClientReadsThem(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	of := func(d tensor.DataType, data ...byte) tensor.Tensor {
		return tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: tensor.Shape{int64(len(data) * 8 / d.Bits())}}, Data: data}
	}
	wide := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, math.Float64bits(-2.5)), math.Float64bits(1e300))
	for name, tc := range map[string]struct {
		y    tensor.Tensor
		want []float32
	}{
		"int64":    {of(tensor.Int64, 7, 0, 0, 0, 0, 0, 0, 0), []float32{7}},
		"bool":     {of(tensor.Bool, 0, 1), []float32{0, 1}},
		"uint8":    {of(tensor.Uint8, 0, 200), []float32{0, 200}},
		"float64":  {of(tensor.Float64, wide...), []float32{-2.5, float32(math.Inf(1))}},
		"bfloat16": {of(tensor.BFloat16, 0xc0, 0x3f), []float32{1.5}},
		"float16":  {of(tensor.Float16, 0x00, 0x3e), []float32{1.5}},
	} {
		f.constant(t, name, tc.y)
		for codec, data := range map[string][]byte{"float32": raw(0), "float16": half(0), "zlib": deflate(raw(0), 6)} {
			y, err := f.Compute(t.Context(), &pb.ComputeRequest{Data: data, Shape: []int32{1}, ModelId: name})
			require.NoError(t, err, "%s, %s", name, codec)
			switch codec {
			case "float16":
				require.Equal(t, half(tc.want...), y.GetData(), name)
			case "zlib":
				require.Equal(t, tc.want, floats(t, inflate(t, y.GetData())), name)
			default:
				require.Equal(t, tc.want, floats(t, y.GetData()), name)
			}
		}
	}
	f.constant(t, "complex", of(tensor.Complex64, make([]byte, 8)...))
	_, err := f.Compute(t.Context(), &pb.ComputeRequest{Data: raw(0), Shape: []int32{1}, ModelId: "complex"})
	hasCode(t, codes.InvalidArgument, err)
}

func TestMessagesOf100MiBAndNoMore(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 1<<30, nil)
	const most = 104_857_600
	req := compute(make([]byte, most-64), -1)
	req.Metadata = map[string]string{"k": ""}
	for proto.Size(req) < most {
		req.Metadata["k"] += "x"
	}
	require.Equal(t, most, proto.Size(req))
	y, err := f.Compute(t.Context(), req)
	require.NoError(t, err)
	require.Len(t, y.GetData(), len(req.GetData()))
	req.Metadata["k"] += "x"
	_, err = f.Compute(t.Context(), req)
	hasCode(t, codes.ResourceExhausted, err)
	// As a float16 or a stream, a tensor may have twice as much.
	y, err = f.Compute(t.Context(), compute(make([]byte, 52*mib), 26*mib))
	require.NoError(t, err)
	require.Len(t, y.GetData(), 52*mib)
}

func TestTenClientsOf99MiBAreRefusedWhereThereIsNoMemory(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	x := make([]byte, 99*mib)
	ended := make(chan error)
	for range 10 {
		c := pb.NewComputeServiceClient(dial(t, f.addr))
		_, err := c.Compute(t.Context(), compute(raw(1), 1)) // what follows may leave no time for a handshake
		require.NoError(t, err)
		go func() {
			_, err := c.Compute(t.Context(), compute(x, 99*mib/4))
			ended <- err
		}()
	}
	for range 10 {
		hasCode(t, codes.ResourceExhausted, <-ended)
	}
	// What is inflated counts as what is received.
	bomb := deflate(make([]byte, 70*mib), 1)
	_, err := f.Compute(t.Context(), compute(bomb, 70*mib/4))
	hasCode(t, codes.ResourceExhausted, err)
	y, err := f.Compute(t.Context(), compute(raw(1), 1))
	require.NoError(t, err)
	require.Equal(t, []float32{1}, floats(t, y.GetData()))
}

func TestAListOfNumbersThatGrowsInMemoryIsRefused(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 1<<30, nil)
	_, err := f.Compute(t.Context(), compute(nil, make([]int32, 30*mib)...))
	hasCode(t, codes.ResourceExhausted, err)
}

func TestAnAnswerHasWhatTheRequestAskedFor(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	y, err := f.Compute(t.Context(), compute(raw(1), 1))
	require.NoError(t, err)
	require.Nil(t, y.RequestId)
	require.Nil(t, y.ForwardId)
	require.Empty(t, y.GetPresentKeyValues())
	require.Positive(t, y.GetComputeTimeMs())
	require.NotNil(t, y.GetMonitoringData())
	for _, id := range []int32{0, 7, -1} {
		req := compute(raw(1), 1)
		req.RequestId = &id
		req.Metadata = map[string]string{"session": "17"} // no param of the model
		y, err = f.Compute(t.Context(), req)
		require.NoError(t, err)
		require.Equal(t, id, y.GetRequestId())
		require.NotNil(t, y.RequestId)
	}
	// A model that does not train runs, and keeps nothing.
	req := compute(raw(1), 1)
	req.TrainingMode, req.ForwardId = new(true), new("a")
	y, err = f.Compute(t.Context(), req)
	require.NoError(t, err)
	require.Nil(t, y.ForwardId)
	_, err = f.ComputeBackward(t.Context(), &pb.BackwardRequest{GradOutputData: raw(1), GradOutputShape: []int32{1}, ForwardId: "a"})
	hasCode(t, codes.FailedPrecondition, err)
	require.Equal(t, "Training mode not enabled on server", status.Convert(err).Message())
}

func TestErrorsHaveCodesThatClientsDoNotRetryInVain(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	f.add(t, cpu.Func{
		Info: engine.Info{Name: "broken", Inputs: anyShape("x"), Outputs: anyShape("y")},
		Call: func(context.Context, []tensor.Tensor, map[string]string) ([]tensor.Tensor, error) {
			return nil, engine.Publicf("the weights are wrong")
		},
	})
	f.add(t, cpu.Func{
		Info: engine.Info{Name: "whole", Inputs: anyShape("x", tensor.Int64), Outputs: anyShape("y")},
		Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
			return in, nil
		},
	})
	f.add(t, cpu.Func{
		Info: engine.Info{Name: "two", Inputs: append(anyShape("x"), anyShape("w")...), Outputs: anyShape("y")},
		Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
			return in[:1], nil
		},
	})
	f.add(t, cpu.Func{ // of these no request has the second
		Info: engine.Info{Name: "one", Inputs: append(anyShape("x"), engine.Port{Name: "w", Optional: true}), Outputs: anyShape("y")},
		Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
			return nil, engine.Publicf("it is called with %d", len(in))
		},
	})
	for model, want := range map[string]struct {
		code codes.Code
		says string
	}{
		"one":                     {codes.Internal, "it is called with 1"},
		"broken":                  {codes.Internal, "the weights are wrong"},
		"whole":                   {codes.InvalidArgument, "int64"},
		"two":                     {codes.Unimplemented, "one tensor"},
		"nothing":                 {codes.NotFound, "nothing"},
		strings.Repeat("x", 1000): {codes.NotFound, "x"},
	} {
		_, err := f.Compute(t.Context(), &pb.ComputeRequest{Data: raw(1), Shape: []int32{1}, ModelId: model})
		hasCode(t, want.code, err)
		require.Contains(t, status.Convert(err).Message(), want.says)
	}
}

func TestADeadlineCancelsTheModel(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	_, cancelled := f.addBlocker(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := f.Compute(ctx, &pb.ComputeRequest{Data: raw(1), Shape: []int32{1}, ModelId: "blocker"})
	hasCode(t, codes.DeadlineExceeded, err)
	testkit.Eventually(t, func() bool { return cancelled.Load() == 1 }, "the model learns of it")
}

func TestADrainingServerSaysSo(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	running, cancelled := f.addBlocker(t)
	h, err := f.HealthCheck(t.Context(), &pb.HealthRequest{})
	require.NoError(t, err)
	require.Equal(t, "ok", h.GetStatus())
	require.NotEmpty(t, h.GetMessage())
	require.Equal(t, "1.0.0", h.GetVersion())
	require.NotNil(t, h.UptimeSeconds)
	ended := make(chan error, 1)
	go func() {
		_, err := f.Compute(t.Context(), &pb.ComputeRequest{Data: raw(1), Shape: []int32{1}, ModelId: "blocker"})
		ended <- err
	}()
	monitoring, err := f.StreamMonitoring(t.Context(), &pb.MonitoringStreamRequest{})
	require.NoError(t, err)
	testkit.Eventually(t, func() bool { return running.Load() == 1 }, "the run")
	ctx, cancel := context.WithCancel(t.Context())
	drained := make(chan error, 1)
	go func() { drained <- f.server.Shutdown(ctx) }()
	testkit.Eventually(t, func() bool {
		h, err := f.HealthCheck(t.Context(), &pb.HealthRequest{})
		return err == nil && h.GetStatus() != "ok"
	}, "clients see it when they connect")
	_, err = f.Compute(t.Context(), compute(raw(1), 1))
	hasCode(t, codes.Unavailable, err)
	cancel()
	require.ErrorIs(t, <-drained, context.Canceled)
	hasCode(t, codes.Unavailable, <-ended)
	for err = nil; err == nil; {
		_, err = monitoring.Recv()
	}
	hasCode(t, codes.Unavailable, err)
	require.EqualValues(t, 1, cancelled.Load())
}

func TestInfoIsOfTheDefaultModel(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	m, err := cpu.Func{
		Info: engine.Info{Name: "echo", Inputs: anyShape("x"), Outputs: anyShape("y"), About: map[string]string{"parameters": "12", "layers": "['a', 'b']"}},
		Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
			return in, nil
		},
	}.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, f.models.Replace(m))
	_, err = f.Compute(t.Context(), compute(raw(1), 1))
	require.NoError(t, err)
	_, err = f.Compute(t.Context(), compute(raw(1), 3))
	require.Error(t, err)
	_, err = f.Compute(t.Context(), &pb.ComputeRequest{ModelId: "nothing"})
	require.Error(t, err)
	i, err := f.GetServiceInfo(t.Context(), &pb.ServiceInfoRequest{})
	require.NoError(t, err)
	require.Equal(t, "echo", i.GetServiceName())
	require.Equal(t, "1.0.0", i.GetVersion())
	require.Equal(t, "cpu", i.GetDevice())
	require.EqualValues(t, 3, i.GetTotalRequests(), "failed ones included")
	require.NotNil(t, i.UptimeSeconds)
	require.Equal(t, map[string]string{"parameters": "12", "layers": "['a', 'b']"}, i.GetCustomInfo())
	require.NoError(t, f.models.Remove("echo"))
	i, err = f.GetServiceInfo(t.Context(), &pb.ServiceInfoRequest{})
	require.NoError(t, err)
	require.Equal(t, "unknown", i.GetDevice())
	h, err := f.HealthCheck(t.Context(), &pb.HealthRequest{})
	require.NoError(t, err)
	require.NotEqual(t, "ok", h.GetStatus())
}

func TestMonitoringStreamsUntilItIsCancelled(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, nil)
	for name, asked := range map[string]*float64{"shortest": new(0.0001), "none": nil, "zero": new(0.0), "negative": new(-1.0), "no number": new(math.NaN()), "longest": new(math.Inf(1))} {
		ctx, cancel := context.WithCancel(t.Context())
		s, err := f.StreamMonitoring(ctx, &pb.MonitoringStreamRequest{SamplingInterval: asked})
		require.NoError(t, err, name)
		first, err := s.Recv() // at once
		require.NoError(t, err, name)
		m := first.GetSnapshot()
		require.InDelta(t, float64(time.Now().Unix()), m.GetTimestamp(), 60)
		require.Positive(t, m.GetMemoryMb(), name)
		require.Positive(t, m.GetMemoryPercent(), name)
		require.LessOrEqual(t, m.GetMemoryPercent(), float32(100), name)
		require.GreaterOrEqual(t, m.GetCpuPercent(), float32(0), name)
		require.LessOrEqual(t, m.GetCpuPercent(), float32(100), name)
		require.False(t, m.GetGpuAvailable())
		require.Nil(t, m.GpuUtilization)
		require.Nil(t, m.GpuMemoryUsedMb)
		require.Nil(t, m.GpuMemoryTotalMb)
		if name == "shortest" {
			for range 3 {
				first, err = s.Recv()
				require.NoError(t, err)
			}
			// One may be late, and the next one soon after it; none is early.
			require.Greater(t, first.GetSnapshot().GetTimestamp(), m.GetTimestamp()+0.15)
		}
		cancel()
		_, err = s.Recv()
		hasCode(t, codes.Canceled, err)
	}
}

func TestClientsOfOneServerMayNotKnowEachOther(t *testing.T) {
	testkit.Start(t)
	f := serve(t, 256*mib, func(c *server.Config) { c.QueuedCalls = 1024 })
	const clients = 10
	ended := make(chan error)
	for n := range clients {
		c := pb.NewComputeServiceClient(dial(t, f.addr))
		go func() {
			for i := range 50 {
				x := raw(float32(n), float32(i))
				y, err := c.Compute(t.Context(), compute(x, 2))
				if err == nil && string(y.GetData()) != string(x) {
					err = status.Error(codes.DataLoss, "another's answer")
				}
				if err != nil {
					ended <- err
					return
				}
			}
			ended <- nil
		}()
	}
	for range clients {
		require.NoError(t, <-ended)
	}
}
