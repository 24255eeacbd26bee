package kpu

import (
	"bytes"
	"compress/zlib"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// golden is a file that a torch wrote, and what is in it: those of internal/torchsave.
type golden struct {
	File    string
	Refused *string
	Tensors []struct {
		DType, Hex string
		Shape      tensor.Shape
	}
}

func goldens(t *testing.T) map[string]golden {
	t.Helper()
	list := make(map[string]golden)
	paths, err := filepath.Glob("../../internal/torchsave/testdata/torch-*.json")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		var all struct{ Cases map[string]golden }
		require.NoError(t, json.Unmarshal(text, &all))
		for name, g := range all.Cases {
			packed, err := base64.StdEncoding.DecodeString(g.File)
			require.NoError(t, err)
			r, err := zlib.NewReader(bytes.NewReader(packed))
			require.NoError(t, err)
			file, err := io.ReadAll(r)
			require.NoError(t, err)
			g.File = string(file)
			list[filepath.Base(path)+" "+name] = g
		}
	}
	return list
}

// fails is what both RPCs say of chunks.
func (f *fixture) fails(t *testing.T, want codes.Code, says string, list ...*pb.TensorChunk) {
	t.Helper()
	_, err := f.exchanged(t, list...)
	require.Equal(t, want, status.Code(err), "%v", err)
	require.Contains(t, status.Convert(err).Message(), says)
	_, err = f.uploaded(t, list...)
	require.Equal(t, want, status.Code(err), "%v", err)
	require.Contains(t, status.Convert(err).Message(), says)
	f.isIdle(t)
}

func TestFilesOfTorchComeBackDense(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	for name, g := range goldens(t) {
		t.Run(name, func(t *testing.T) {
			for _, size := range []int{100, mib} {
				list := chunksOf("a", []byte(g.File), size)
				if g.Refused != nil || len(g.Tensors) != 1 {
					f.fails(t, codes.InvalidArgument, "not supported: torch: ", list...)
					continue
				}
				if n, err := g.Tensors[0].Shape.Elements(); err == nil && n > mib {
					continue // few bytes, repeated
				}
				got, err := f.exchanged(t, list...)
				if err != nil { // a dict of one
					require.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)
					continue
				}
				want := g.Tensors[0]
				require.Equal(t, want.DType, got[0].DType.String())
				require.Equal(t, append(tensor.Shape{}, want.Shape...), append(tensor.Shape{}, got[0].Shape...))
				require.Equal(t, want.Hex, hex.EncodeToString(got[0].Data))
				_, err = f.uploaded(t, list...)
				require.NoError(t, err)
				same(t, got[0].Tensor, f.storedAs(t, "kpu/a"))
			}
		})
	}
}

func TestADamagedFileIsRefused(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	file := fileOf(t, floats(t, 100))
	for name, bad := range map[string][]byte{
		"cut short": file[:len(file)-1], "cut in the data": file[:len(file)/2], "more behind it": append(slices.Clone(file), 0), "empty": {}, "text": []byte("hello"),
	} {
		t.Run(name, func(t *testing.T) {
			list := chunksOf("a", bad, 1000)
			if len(list) == 0 {
				list = []*pb.TensorChunk{{TensorId: "a", TotalChunks: 1}}
			}
			f.fails(t, codes.InvalidArgument, "malformed: torch: ", list...)
		})
	}
}

func TestChunksThatMakeNoSenseAreRefused(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	list := chunksOf("a", fileOf(t, floats(t, 700_000)), mib)
	other := func(c *pb.TensorChunk, change func(c *pb.TensorChunk)) *pb.TensorChunk {
		o := &pb.TensorChunk{TensorId: c.GetTensorId(), ChunkNumber: c.GetChunkNumber(), Data: c.GetData(), TotalChunks: c.GetTotalChunks()}
		change(o)
		return o
	}
	for name, tc := range map[string]struct {
		list []*pb.TensorChunk
		says string
	}{
		"no total":            {[]*pb.TensorChunk{other(list[0], func(c *pb.TensorChunk) { c.TotalChunks = 0 })}, "total_chunks 0"},
		"a number beyond":     {[]*pb.TensorChunk{other(list[0], func(c *pb.TensorChunk) { c.ChunkNumber = 3 })}, "chunk_number 3"},
		"another total":       {[]*pb.TensorChunk{list[0], other(list[1], func(c *pb.TensorChunk) { c.TotalChunks = 4 })}, "was 3"},
		"other bytes":         {[]*pb.TensorChunk{list[0], other(list[0], func(c *pb.TensorChunk) { c.Data = []byte{1} })}, "other bytes"},
		"other bytes, later":  {[]*pb.TensorChunk{list[2], other(list[2], func(c *pb.TensorChunk) { c.Data = nil })}, "other bytes"},
		"a fault after a gap": {[]*pb.TensorChunk{list[1], other(list[0], func(c *pb.TensorChunk) { c.Data = []byte("x") }), list[2]}, "malformed: torch: "},
	} {
		t.Run(name, func(t *testing.T) { f.fails(t, codes.InvalidArgument, tc.says, tc.list...) })
	}
	// Of a tensor that failed, those before it stay.
	_, err := f.uploaded(t, append(chunksOf("good", fileOf(t, floats(t, 3)), mib), other(list[0], func(c *pb.TensorChunk) { c.TotalChunks = 0 }))...)
	require.Error(t, err)
	same(t, floats(t, 3), f.storedAs(t, "kpu/good"))
}

func TestIDsAreAnyText(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	x := floats(t, 3)
	for name, tc := range map[string]struct {
		id             string
		stream, upload codes.Code
	}{
		"empty": {"", codes.OK, codes.OK}, "a path": {"../..//x", codes.OK, codes.OK}, "a folder": {"a/", codes.OK, codes.OK}, "long": {strings.Repeat("x", 508), codes.OK, codes.OK},
		"longer than a name": {strings.Repeat("x", 509), codes.OK, codes.InvalidArgument}, "control": {"a\nb", codes.OK, codes.InvalidArgument},
		"longest": {strings.Repeat("x", idBytes), codes.OK, codes.InvalidArgument}, "too long": {strings.Repeat("x", idBytes+1), codes.ResourceExhausted, codes.ResourceExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			list := chunksOf(tc.id, fileOf(t, x), mib)
			got, err := f.exchanged(t, list...)
			require.Equal(t, tc.stream, status.Code(err), "%v", err)
			if err == nil {
				require.Equal(t, "processed_"+tc.id, got[0].id)
			}
			resp, err := f.uploaded(t, list...)
			require.Equal(t, tc.upload, status.Code(err), "%v", err)
			if err == nil {
				require.Equal(t, []string{tc.id}, resp.GetReceivedTensorIds())
				name := "kpu/" + tc.id
				if tc.id == "" || strings.HasSuffix(tc.id, "/") {
					name += "."
				}
				same(t, x, f.storedAs(t, name))
			}
		})
	}
}

func TestAnRPCIsUnderLimits(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(f *fixture) {
		f.memory, f.most = 24*mib, limits{open: 3, chunks: 40, unread: time.Hour, silent: time.Hour}
	})
	first := func(id string) *pb.TensorChunk { return chunksOf(id, fileOf(t, floats(t, 700_000)), mib)[0] }
	f.fails(t, codes.ResourceExhausted, "3 incomplete tensors", first("a"), first("b"), first("c"), first("d"))
	f.fails(t, codes.ResourceExhausted, "40 chunks", chunksOf("a", fileOf(t, floats(t, 100_000)), 9000)[0])
	wide := chunksOf("a", fileOf(t, floats(t, 100_000)), 20_000) // 21 of them
	f.fails(t, codes.ResourceExhausted, "40 chunks together", wide[0], &pb.TensorChunk{TensorId: "b", TotalChunks: 20})
	late := chunksOf("a", fileOf(t, floats(t, 14*mib/4)), mib)
	slices.Reverse(late)
	f.fails(t, codes.ResourceExhausted, "half of memory_bytes", late...)
	got, err := f.exchanged(t, chunksOf("a", fileOf(t, floats(t, 14*mib/4)), mib)...)
	require.NoError(t, err, "in order nothing is held but the result")
	require.Len(t, got, 1)

	// Results that are not read wait for a limited time.
	f = serve(t, func(f *fixture) { f.most.unread = 20e6 })
	s, err := f.client.StreamTensors(t.Context())
	require.NoError(t, err)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		sendAll(s, chunksOf("a", fileOf(t, floats(t, 36*mib/4)), mib)...)
	}()
	testkit.Eventually(t, func() bool { return f.counters(t)["calls_failed_total"] == 1 }, "the end of the run")
	f.isIdle(t)
	for err == nil {
		_, err = s.Recv()
	}
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	require.Contains(t, err.Error(), "while it sends")
	testkit.Receive(t, sent)

	long := strings.Repeat("x", 500)
	up, err := f.client.ReceiveTensors(t.Context())
	require.NoError(t, err)
	file := fileOf(t, floats(t, 1))
	for range answerBytes/len(long) + 1 {
		if up.Send(chunksOf(long, file, mib)[0]) != nil {
			break
		}
	}
	_, err = up.CloseAndRecv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	require.Contains(t, err.Error(), "several RPCs")
}

func TestAnIncompleteTensorDoesNotWaitForEver(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(f *fixture) { f.most.silent = 50e6 })
	list := chunksOf("a", fileOf(t, floats(t, 3*mib/4)), mib)
	for name, c := range map[string]*pb.TensorChunk{"known": list[0], "out of order": list[1]} {
		s, err := f.client.StreamTensors(t.Context())
		require.NoError(t, err)
		require.NoError(t, s.Send(c))
		_, err = s.Recv()
		require.Equal(t, codes.ResourceExhausted, status.Code(err), "%s: %v", name, err)
		require.Contains(t, err.Error(), "incomplete")
		up, err := f.client.ReceiveTensors(t.Context())
		require.NoError(t, err)
		require.NoError(t, up.Send(c))
		err = up.RecvMsg(new(pb.TensorResponse))
		require.Equal(t, codes.ResourceExhausted, status.Code(err), "%s: %v", name, err)
		f.isIdle(t)
	}
}

func TestAFaultIsToldWhileResultsWaitToBeRead(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	file := fileOf(t, floats(t, 24*mib/4))
	s, err := f.client.StreamTensors(t.Context())
	require.NoError(t, err)
	for id := range 8 {
		for _, c := range chunksOf(strconv.Itoa(id), file, mib)[:14] { // more than waits, less than blocks the model
			require.NoError(t, s.Send(c))
		}
	}
	require.NoError(t, s.Send(&pb.TensorChunk{TensorId: "0", TotalChunks: 1}))
	f.isIdle(t) // and not 5 s later for each
	for err == nil {
		_, err = s.Recv()
	}
	require.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)
}

func TestASlowClientMayReadOtherResultsFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &exchange{receiver: &receiver{service: &service{most: defaults}}}
		last := running{exchange: e, wanted: t.Context(), free: make(chan []byte, 1)}
		go func() {
			for range 16 { // the chunks before its own
				time.Sleep(defaults.unread * 2 / 3)
				e.passed.Add(1)
			}
			last.free <- nil
		}()
		_, err := last.room()
		require.NoError(t, err)
		began := time.Now()
		_, err = last.room()
		why, ok := errors.AsType[*frame.Error](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, frame.ResourceExhausted, why.Code)
		require.Equal(t, defaults.unread, time.Since(began))
	})
}

func TestAFaultOfTheModelIsToldAsToNativeCallers(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		model string
		want  codes.Code
		says  string
	}{
		"unknown":     {"nothing", codes.NotFound, "nothing"},
		"broken":      {"broken", codes.Internal, "the weights are wrong"},
		"two outputs": {"two", codes.FailedPrecondition, "2 outputs"},
		"other type":  {"bytes", codes.FailedPrecondition, "wanted"},
	} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, func(f *fixture) { f.config.Model = tc.model })
			add := func(info engine.Info, err error) {
				m, bad := cpu.RowFunc{
					Info: info, Rows: func(context.Context, cpu.RowBlock) error { return err },
					Outs: func(in []tensor.Desc, _ map[string]string) (out []tensor.Desc, _ error) {
						for range info.Outputs {
							out = append(out, in[0])
						}
						return out, nil
					},
				}.Model(f.host)
				require.NoError(t, bad)
				require.NoError(t, f.models.Add(m))
			}
			ports := func(port ...string) (list []engine.Port) {
				for _, p := range port {
					list = append(list, engine.Port{Name: p, Shape: []int64{engine.AnyAxes}})
				}
				return list
			}
			add(engine.Info{Name: "broken", Rows: 1, Inputs: ports("x"), Outputs: ports("y")}, engine.Publicf("the weights are wrong"))
			add(engine.Info{Name: "two", Rows: 1, Inputs: ports("x"), Outputs: ports("y", "z")}, nil)
			add(engine.Info{Name: "bytes", Rows: 1, Inputs: []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}, DTypes: []tensor.DataType{tensor.Uint8}}}, Outputs: ports("y")}, nil)
			for _, n := range []int{3, 4 * mib} {
				_, err := f.exchanged(t, chunksOf("a", fileOf(t, floats(t, n)), mib)...)
				require.Equal(t, tc.want, status.Code(err), "%v", err)
				require.Contains(t, status.Convert(err).Message(), tc.says)
			}
			f.isIdle(t)
		})
	}
}

// TestBlocksThatOvertakeOthersComeBackInTheirPlace has a model whose first block waits for others.
func TestBlocksThatOvertakeOthersComeBackInTheirPlace(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(f *fixture) { f.config.Model = "late" })
	var mu sync.Mutex
	blocks := 0
	enough := make(chan struct{})
	m, err := cpu.RowFunc{
		Info: engine.Info{
			Name: "late", Rows: 1, Inputs: []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}, Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.AnyAxes}}},
		},
		Rows: func(ctx context.Context, b cpu.RowBlock) error {
			copy(b.Out[0], b.In[0])
			mu.Lock()
			if blocks++; blocks == 6 {
				close(enough)
			}
			mu.Unlock()
			if b.Row == 0 {
				select {
				case <-enough:
				case <-ctx.Done():
				}
			}
			return nil
		},
	}.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, f.models.Add(m))
	x := floats(t, 9*mib)
	got, err := f.exchanged(t, chunksOf("a", fileOf(t, x), mib)...)
	require.NoError(t, err)
	require.Len(t, got, 1)
	same(t, x, got[0].Tensor)
	require.Greater(t, blocks, 6)
}

func TestAClientThatLeavesLeavesNothing(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	x := chunksOf("a", fileOf(t, floats(t, 8*mib)), mib)
	strided := []byte(goldens(t)["torch-1.13.json view"].File)
	for name, leave := range map[string]func(cancel context.CancelFunc, kill func()){
		"cancel": func(cancel context.CancelFunc, _ func()) { cancel() },
		"kill":   func(_ context.CancelFunc, kill func()) { kill() },
	} {
		t.Run(name, func(t *testing.T) {
			for read := range 3 {
				conn := f.dial(t)
				c := pb.NewServiceClient(conn)
				ctx, cancel := context.WithCancel(t.Context())
				s, err := c.StreamTensors(ctx)
				require.NoError(t, err)
				up, err := c.ReceiveTensors(ctx)
				require.NoError(t, err)
				down, err := c.SendTensors(ctx, &pb.TensorRequest{Parameters: map[string]string{"shape": "100000,1000"}})
				require.NoError(t, err)
				for _, c := range append(slices.Clone(x[:12]), x[14], chunksOf("b", append(strided, fileOf(t, floats(t, 1000))...), 500)[0]) {
					require.NoError(t, s.Send(c))
					require.NoError(t, up.Send(c))
				}
				for range read {
					_, err = s.Recv()
					require.NoError(t, err)
					_, err = down.Recv()
					require.NoError(t, err)
				}
				leave(cancel, func() { _ = conn.Close() })
				f.isIdle(t)
				cancel()
			}
		})
	}
	list, err := f.store.List(t.Context(), "", "", 10)
	require.NoError(t, err)
	require.Empty(t, list)
}

func TestADrainingServerEndsWhatHasBegun(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	x := floats(t, 4*mib)
	list := chunksOf("a", fileOf(t, x), mib)
	s, err := f.client.StreamTensors(t.Context())
	require.NoError(t, err)
	up, err := f.client.ReceiveTensors(t.Context())
	require.NoError(t, err)
	for _, c := range list[:8] {
		require.NoError(t, s.Send(c))
		require.NoError(t, up.Send(c))
	}
	_, err = s.Recv() // it has begun
	require.NoError(t, err)
	testkit.Eventually(t, func() bool { return f.counters(t)["open_transfers"] == 1 }, "the upload")
	drained := make(chan error, 1)
	go func() { drained <- f.server.Shutdown(t.Context()) }()
	testkit.Eventually(t, func() bool {
		late, err := f.client.StreamTensors(t.Context())
		if err != nil {
			return true
		}
		sendAll(late, chunksOf("b", fileOf(t, floats(t, 1)), mib)...)
		_, err = late.Recv()
		return status.Code(err) == codes.Unavailable
	}, "that it drains")
	for _, c := range list[8:] {
		require.NoError(t, s.Send(c))
		require.NoError(t, up.Send(c))
	}
	for n := 1; n < len(list); n++ {
		_, err := s.Recv()
		require.NoError(t, err, "chunk %d of %d", n, len(list))
	}
	require.NoError(t, testkit.Receive(t, drained))
	same(t, x, f.storedAs(t, "kpu/a"))
}

// TestManyLargeTensorsAtOnceStayWithinTheMemory has ten clients, each with a strided tensor and
// one whose chunks come backwards.
func TestManyLargeTensorsAtOnceStayWithinTheMemory(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(f *fixture) { f.memory = 64 * mib })
	file := fileOf(t, floats(t, 16*mib/4))
	var all sync.WaitGroup
	var mu sync.Mutex
	ended := make(map[codes.Code]int)
	for i := range 10 {
		all.Go(func() {
			list := chunksOf("a", file, mib)
			if i%2 == 0 {
				slices.Reverse(list)
			}
			c := pb.NewServiceClient(f.dial(t))
			s, err := c.StreamTensors(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			go sendAll(s, list...)
			for err == nil {
				_, err = s.Recv()
			}
			if errors.Is(err, io.EOF) {
				err = nil
			}
			mu.Lock()
			ended[status.Code(err)]++
			mu.Unlock()
		})
	}
	all.Wait()
	_, peak, limit := f.host.Budget().Used()
	require.LessOrEqual(t, peak, limit)
	require.Equal(t, 10, ended[codes.OK]+ended[codes.ResourceExhausted], "%v", ended)
	require.Positive(t, ended[codes.OK])
}
