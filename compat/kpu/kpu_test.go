package kpu

import (
	"context"
	"errors"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestTensorsComeBackAndAreStoredWhateverTheirSize(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	for _, n := range []int{0, 1, 3, 7500, mib/4 - 200, mib / 4, mib/4 + 1, 2 * mib / 4, 3*mib + 7} {
		x := floats(t, n)
		list := chunksOf("a", fileOf(t, x), mib)
		got, err := f.exchanged(t, list...)
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.Equal(t, "processed_a", got[0].id)
		same(t, x, got[0].Tensor)
		require.Equal(t, fileOf(t, x), got[0].file)
		resp, err := f.uploaded(t, list...)
		require.NoError(t, err)
		require.True(t, proto.Equal(&pb.TensorResponse{Success: true, Message: "Received 1 tensor(s)", ReceivedTensorIds: []string{"a"}}, resp), "%v", resp)
		same(t, x, f.storedAs(t, "kpu/a"))
	}
}

func TestLargeChunksTakeTurnsAndSmallOnesDoNot(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	turns := make([]background.Turn, max(1, runtime.GOMAXPROCS(0)-1))
	for i := range turns {
		require.NoError(t, turns[i].Work(t.Context()))
	}
	small, large := floats(t, 7500), chunksOf("a", fileOf(t, floats(t, mib)), mib)
	got, err := f.exchanged(t, chunksOf("b", fileOf(t, small), mib)...)
	require.NoError(t, err)
	same(t, small, got[0].Tensor)
	_, err = f.uploaded(t, chunksOf("b", fileOf(t, small), mib)...)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	s, err := f.client.ReceiveTensors(ctx)
	require.NoError(t, err)
	require.NoError(t, s.Send(large[0]))
	_, err = s.CloseAndRecv()
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), "it waits while others have all turns")
	for i := range turns {
		turns[i].End()
	}
	_, err = f.uploaded(t, large...)
	require.NoError(t, err)
}

func TestAShapeOfMillionsOfDimensionsIsRefusedAtOnce(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	s, err := f.client.SendTensors(t.Context(), &pb.TensorRequest{Parameters: map[string]string{"shape": strings.Repeat("1,", 1<<20) + "1"}})
	require.NoError(t, err)
	_, err = s.Recv()
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.Contains(t, status.Convert(err).Message(), "32 dimensions")
}

func TestAResultHasTheMetadataOfTheContract(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	for shape, want := range map[string]string{"": "[]", "3": "[3]", "2,0,3": "[2, 0, 3]", "2,3,5": "[2, 3, 5]"} {
		for _, d := range tensor.DataTypes() {
			s, err := tensor.ParseShape(shape)
			require.NoError(t, err)
			n, err := tensor.Desc{DType: d, Shape: s}.Bytes()
			require.NoError(t, err)
			x := tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: s}, Data: make([]byte, n)}
			got, err := f.exchanged(t, chunksOf("a", fileOf(t, x), mib)...)
			require.NoError(t, err)
			same(t, x, got[0].Tensor)
			require.Equal(t, map[string]string{"shape": want, "dtype": "torch." + d.String(), "device": "cpu", "size_bytes": got[0].metadata["size_bytes"]}, got[0].metadata)
			require.Regexp(t, "^[0-9]+$", got[0].metadata["size_bytes"])
		}
	}
}

func TestMessagesHaveUpTo4MiB(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	file := fileOf(t, floats(t, 3*mib))
	list := chunksOf("a", file, 4*mib-20)
	c := list[0]
	c.Metadata = map[string]string{"pad": ""}
	c.Metadata["pad"] = strings.Repeat("x", 0)
	size := func() int { return proto.Size(c) }
	c.Data, list[1].Data = file[:3*mib], nil
	for rest, i := file[3*mib:], 1; i < len(list); i++ {
		n := min(len(rest), 4*mib-100)
		list[i].Data, rest = rest[:n], rest[n:]
	}
	for size() < MessageBytes {
		c.Metadata["pad"] += strings.Repeat("x", max(1, min(MessageBytes-size()-8, mib)))
	}
	require.Equal(t, MessageBytes, size())
	got, err := f.exchanged(t, list...)
	require.NoError(t, err)
	require.Len(t, got, 1)
	resp, err := f.uploaded(t, list...)
	require.NoError(t, err)
	require.Equal(t, []string{"a"}, resp.GetReceivedTensorIds())

	c.Metadata["pad"] += "x"
	require.Equal(t, MessageBytes+1, size())
	_, err = f.exchanged(t, list...)
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	_, err = f.uploaded(t, list...)
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
}

func TestChunksComeInAnyOrderAndSize(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	rnd := testkit.Rand(t)
	for name, size := range map[string]struct{ elements, chunk int }{
		"bytes": {20, 1}, "hundreds": {700, 100}, "half": {mib / 2, 512 * kib}, "whole": {mib / 2, mib}, "double": {mib, 2 * mib},
	} {
		x := floats(t, size.elements)
		for order, change := range map[string]func([]*pb.TensorChunk){
			"in order": func([]*pb.TensorChunk) {},
			"reversed": func(l []*pb.TensorChunk) { slices.Reverse(l) },
			"shuffled": func(l []*pb.TensorChunk) { rnd.Shuffle(len(l), func(i, j int) { l[i], l[j] = l[j], l[i] }) },
		} {
			t.Run(name+", "+order, func(t *testing.T) {
				list := chunksOf("a", fileOf(t, x), size.chunk)
				change(list)
				again := slices.Insert(slices.Clone(list), 1+rnd.IntN(len(list)), list[0]) // not after the last
				for _, l := range [][]*pb.TensorChunk{list, append(slices.Clip(again), list...)} {
					if last := len(l) - 1; l[last] == list[0] && len(list) == 1 && last > 0 {
						l = l[:1]
					}
					got, err := f.exchanged(t, l...)
					require.NoError(t, err)
					for _, r := range got {
						same(t, x, r.Tensor)
					}
					resp, err := f.uploaded(t, l...)
					require.NoError(t, err)
					require.Len(t, resp.GetReceivedTensorIds(), len(got))
					same(t, x, f.storedAs(t, "kpu/a"))
				}
			})
		}
	}
}

func TestTensorsInterleaveAndIDsServeAgain(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	x, y, z := floats(t, 700_000), floats(t, 300_000), floats(t, 9)
	a, b, c := chunksOf("a", fileOf(t, x), mib), chunksOf("", fileOf(t, y), mib), chunksOf("a", fileOf(t, z), mib)
	list := []*pb.TensorChunk{a[0], b[1], a[1], b[0], a[2], c[0]}
	want := []string{"", "a", "a"}
	resp, err := f.uploaded(t, list...)
	require.NoError(t, err)
	require.Equal(t, "Received 3 tensor(s)", resp.GetMessage())
	require.Equal(t, want, resp.GetReceivedTensorIds())
	same(t, z, f.storedAs(t, "kpu/a"))
	same(t, y, f.storedAs(t, "kpu/."))
	got, err := f.exchanged(t, list...)
	require.NoError(t, err)
	require.Len(t, got, 3)
	for _, r := range got {
		switch {
		case r.id == "processed_":
			same(t, y, r.Tensor)
		case r.Shape[0] == 9:
			same(t, z, r.Tensor)
		default:
			same(t, x, r.Tensor)
		}
	}
}

func TestAClientMayEndAnywhere(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	x := floats(t, 700_000)
	list := append(chunksOf("a", fileOf(t, x), mib), chunksOf("b", fileOf(t, x), mib)...)
	for n := range len(list) + 1 {
		got, err := f.exchanged(t, list[:n]...)
		require.NoError(t, err)
		require.Len(t, got, n/3)
		resp, err := f.uploaded(t, list[:n]...)
		require.NoError(t, err)
		require.True(t, resp.GetSuccess())
		require.Len(t, resp.GetReceivedTensorIds(), n/3)
		f.isIdle(t)
	}
	slices.Reverse(list)
	got, err := f.exchanged(t, list[:2]...)
	require.NoError(t, err)
	require.Empty(t, got)
	require.Zero(t, f.counters(t)["calls_failed_total"])
}

func TestTheFirstResultComesBeforeTheSecondTensor(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	s, err := f.client.StreamTensors(t.Context())
	require.NoError(t, err)
	for _, n := range []int{7, 0, 500_000} {
		x := floats(t, n)
		for _, c := range chunksOf("a", fileOf(t, x), mib) {
			require.NoError(t, s.Send(c))
		}
		same(t, x, one(t, s).Tensor)
	}
	require.NoError(t, s.CloseSend())
	_, err = s.Recv()
	require.ErrorIs(t, err, io.EOF)
}

func TestResultsOfRowsLeaveWhileTheInputComes(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(f *fixture) { f.config.Model = "relu" })
	x := floats(t, 4*mib)
	s, err := f.client.StreamTensors(t.Context())
	require.NoError(t, err)
	list := chunksOf("a", fileOf(t, x), mib)
	for _, c := range list[:8] {
		require.NoError(t, s.Send(c))
	}
	first, err := s.Recv() // half of the input is still here
	require.NoError(t, err)
	require.Zero(t, first.GetChunkNumber())
	require.EqualValues(t, len(list), first.GetTotalChunks())
	for _, c := range list[8:] {
		require.NoError(t, s.Send(c))
	}
	require.NoError(t, s.CloseSend())
	seen := 1
	for ; ; seen++ {
		_, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
	}
	require.Equal(t, len(list), seen)
	require.EqualValues(t, 1, f.counters(t)["calls_ok_total"])
}

func TestSendTensorsSendsWhatIsAskedFor(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	pull := func(t *testing.T, count uint32, params map[string]string) ([]result, error) {
		s, err := f.client.SendTensors(t.Context(), &pb.TensorRequest{Count: count, Parameters: params})
		require.NoError(t, err)
		return results(t, s.Recv)
	}
	for text, want := range map[string]tensor.Shape{
		"3": {3}, "2,0,3": {2, 0, 3}, " 2 ,\t3\n": {2, 3}, "+4": {4}, "1_0,2": {10, 2}, "007": {7}, "-0": {0},
		"": {10, 10}, "x": {10, 10}, "3,": {10, 10}, "1.5": {10, 10}, "1__0": {10, 10}, "_1": {10, 10}, "- 3": {10, 10}, "-3,x": {10, 10}, "0x10": {10, 10}, "600000": {600000},
	} {
		t.Run(text, func(t *testing.T) {
			got, err := pull(t, 0, map[string]string{"shape": text, "other": "x"})
			require.NoError(t, err)
			require.Len(t, got, 1)
			require.Equal(t, tensor.Desc{DType: tensor.Float32, Shape: want}, got[0].Desc)
		})
	}
	got, err := pull(t, 3, nil)
	require.NoError(t, err)
	require.Len(t, got, 3)
	ids := make(map[string]bool)
	for i, r := range got {
		id, err := uuid.Parse(r.id)
		require.NoError(t, err)
		require.EqualValues(t, 4, id.Version())
		ids[r.id] = true
		require.Equal(t, tensor.Shape{10, 10}, r.Shape)
		require.NotEqual(t, got[(i+1)%3].Data, r.Data)
	}
	require.Len(t, ids, 3)
	got, err = pull(t, 1, map[string]string{"shape": "100,100"})
	require.NoError(t, err)
	v, err := tensor.Slice[float32](got[0].Tensor)
	require.NoError(t, err)
	var sum, squares float64
	for _, x := range v {
		sum, squares = sum+float64(x), squares+float64(x)*float64(x)
	}
	require.Less(t, math.Abs(sum/1e4), 0.1)
	require.InDelta(t, 1, squares/1e4, 0.1)
	for text, want := range map[string]codes.Code{
		"-3": codes.InvalidArgument, "2,-1": codes.InvalidArgument, "99999999999999999999": codes.ResourceExhausted, "-99999999999999999999": codes.InvalidArgument,
		"1000000,1000000": codes.ResourceExhausted, strings.Repeat("1,", 40) + "1": codes.InvalidArgument, "4000000000,4000000000": codes.ResourceExhausted,
	} {
		_, err := pull(t, 1, map[string]string{"shape": text})
		require.Equal(t, want, status.Code(err), "%s: %v", text, err)
	}
}

func TestSendTensorsSendsATensorOfTheStore(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(f *fixture) { f.config.Source = "kpu/a" })
	s, err := f.client.SendTensors(t.Context(), &pb.TensorRequest{})
	require.NoError(t, err)
	_, err = s.Recv()
	require.Equal(t, codes.NotFound, status.Code(err))
	x := floats(t, 700_000)
	_, err = f.uploaded(t, chunksOf("a", fileOf(t, x), mib)...)
	require.NoError(t, err)
	s, err = f.client.SendTensors(t.Context(), &pb.TensorRequest{Count: 2, Parameters: map[string]string{"shape": "3"}})
	require.NoError(t, err)
	got, err := results(t, s.Recv)
	require.NoError(t, err)
	require.Len(t, got, 2)
	same(t, x, got[0].Tensor)
	same(t, x, got[1].Tensor)
}

func TestASilentClientIsEndedAfterALongTime(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(f *fixture) { f.service = func(s *server.Service) { s.Idle = 20e6 } }) // 20 ms
	list := chunksOf("a", fileOf(t, floats(t, mib)), mib)
	s, err := f.client.StreamTensors(t.Context())
	require.NoError(t, err)
	require.NoError(t, s.Send(list[0]))
	_, err = s.Recv()
	for err == nil {
		_, err = s.Recv()
	}
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), "%v", err)
	f.isIdle(t)
	f = serve(t, func(f *fixture) { // whose own sessions would be
		f.change = func(c *server.Config) { c.Session.ChunkIdle, c.Session.FirstFrame = 20e6, 20e6 }
	})
	upload, err := f.client.ReceiveTensors(t.Context())
	require.NoError(t, err)
	require.NoError(t, upload.Send(list[0]))
	native, err := f.client.StreamTensors(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100e6)
	defer cancel()
	<-ctx.Done() // five times as long
	for _, c := range list[1:] {
		require.NoError(t, upload.Send(c))
	}
	resp, err := upload.CloseAndRecv()
	require.NoError(t, err)
	require.Equal(t, []string{"a"}, resp.GetReceivedTensorIds())
	require.NoError(t, native.CloseSend())
	_, err = native.Recv()
	require.ErrorIs(t, err, io.EOF)
}
