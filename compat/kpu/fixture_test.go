package kpu

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

// fixture is a real server with the service on a socket of its own.
type fixture struct {
	host    *cpu.Host
	models  *engine.Registry
	server  *server.Server
	store   store.Store
	addr    string
	client  pb.ServiceClient
	config  Config
	most    limits
	memory  int64
	change  func(*server.Config)
	service func(*server.Service)
}

// serve starts a server that the test's end closes, and then finds empty.
func serve(t testing.TB, change func(*fixture)) *fixture {
	t.Helper()
	f := &fixture{most: defaults, memory: 512 * mib}
	if change != nil {
		change(f)
	}
	f.host = cpu.NewHost(cpu.HostConfig{MemoryBytes: f.memory, Workers: 2})
	f.models = engine.NewRegistry()
	for _, m := range append(cpu.Builtins(f.host), cpu.Slow(f.host)) {
		require.NoError(t, f.models.Add(m))
	}
	sources := new(store.Sources)
	require.NoError(t, sources.Add(DefaultSource, store.Generator()))
	own, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	svc := f.config.service(own, f.most)
	if f.service != nil {
		f.service(&svc)
	}
	kept := memory.New(f.host.Pool(), 256*mib)
	f.store = kept
	cfg := server.Config{Models: f.models, Pool: f.host.Pool(), Budget: f.host.Budget(), Store: kept, Sources: sources, Services: []server.Service{svc}}
	if f.change != nil {
		f.change(&cfg)
	}
	f.server, err = server.New(cfg)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- f.server.Serve(l) }()
	f.addr = own.Addr().String()
	f.client = pb.NewServiceClient(f.dial(t))
	t.Cleanup(func() {
		f.server.Close()
		require.NoError(t, testkit.Receive(t, served))
		require.NoError(t, kept.Close())
		f.isIdle(t)
		f.host.Close()
	})
	return f
}

func (f *fixture) dial(t testing.TB) *grpc.ClientConn {
	conn, err := grpc.NewClient(f.addr, grpc.WithTransportCredentials(insecure.NewCredentials())) // which receives 4 MiB, as theirs do
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// isIdle waits until no memory is in use but the store's, and nothing open.
func (f *fixture) isIdle(t testing.TB) {
	t.Helper()
	testkit.Eventually(t, func() bool {
		used, _, _ := f.host.Budget().Used()
		c := f.counters(t)
		return used == 0 && c["calls"] == 0 && c["open_transfers"] == 0
	}, "the end of what is open")
	c := f.counters(t)
	require.Equal(t, c["calls_total"], c["calls_ok_total"]+c["calls_failed_total"]+c["calls_cancelled_total"])
}

func (f *fixture) counters(t testing.TB) map[string]int64 {
	info, err := f.server.GetServiceInfo(context.Background(), nil)
	require.NoError(t, err)
	return info.GetCounters()
}

// fileOf returns the file of a tensor.
func fileOf(t testing.TB, x tensor.Tensor) []byte {
	t.Helper()
	p, err := torchsave.Bare(x.Desc)
	require.NoError(t, err)
	file := slices.Concat(p.Gap(0, nil), x.Data, p.Gap(1, []uint32{crc32.ChecksumIEEE(x.Data)}))
	require.EqualValues(t, p.Size(), len(file))
	return file
}

func floats(t testing.TB, n int) tensor.Tensor {
	data := testkit.Bytes(4*n, uint64(n))
	for i := 3; i < len(data); i += 4 {
		data[i] &= 0xbe // no NaN
	}
	x, err := tensor.New(tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(n)}}, data)
	require.NoError(t, err)
	return x
}

// chunksOf cuts a file.
func chunksOf(id string, file []byte, size int) (list []*pb.TensorChunk) {
	total := (len(file) + size - 1) / size
	for i := range total {
		c := &pb.TensorChunk{TensorId: id, ChunkNumber: uint32(i), Data: file[i*size : min((i+1)*size, len(file))], TotalChunks: uint32(total), IsLast: i == total-1}
		if i == 0 {
			c.Metadata = map[string]string{"mine": "1", "shape": "[]", "dtype": "torch.float32", "device": "cuda:0", "size_bytes": strconv.Itoa(len(file))}
		}
		list = append(list, c)
	}
	return list
}

// assembler is what the contract says of a client: distinct numbers, as many as the chunk just
// received says.
type assembler map[string]map[uint32]*pb.TensorChunk

func (a assembler) add(t testing.TB, c *pb.TensorChunk) (whole []byte, head *pb.TensorChunk) {
	t.Helper()
	if a[c.GetTensorId()] == nil {
		a[c.GetTensorId()] = make(map[uint32]*pb.TensorChunk)
	}
	parts := a[c.GetTensorId()]
	parts[c.GetChunkNumber()] = c
	require.Equal(t, c.GetChunkNumber() == 0, len(c.GetMetadata()) > 0)
	require.Equal(t, c.GetChunkNumber() == c.GetTotalChunks()-1, c.GetIsLast())
	require.LessOrEqual(t, len(c.GetData()), mib)
	if len(parts) < int(c.GetTotalChunks()) {
		return nil, nil
	}
	delete(a, c.GetTensorId())
	for i := range c.GetTotalChunks() {
		whole = append(whole, parts[i].GetData()...)
	}
	return whole, parts[0]
}

// parse reads a file.
func parse(t testing.TB, file []byte) tensor.Tensor {
	t.Helper()
	r := torchsave.NewReader(1 << 40)
	var data []byte
	for rest := file; len(rest) > 0; {
		var some []byte
		var err error
		some, rest, err = r.Next(rest)
		require.NoError(t, err)
		data = append(data, some...)
	}
	require.NoError(t, r.Close())
	l, known := r.Layout()
	require.True(t, known)
	require.True(t, l.Dense())
	return tensor.Tensor{Desc: l.Desc, Data: data}
}

// result is a tensor of a stream.
type result struct {
	id   string
	file []byte
	tensor.Tensor
	metadata map[string]string
}

// results receives all that is left of a stream of chunks.
func results(t testing.TB, recv func() (*pb.TensorChunk, error)) (list []result, err error) {
	t.Helper()
	a := make(assembler)
	for {
		c, err := recv()
		if errors.Is(err, io.EOF) { // what is incomplete is dropped, as a client does
			return list, nil
		}
		if err != nil {
			return list, err
		}
		if file, head := a.add(t, c); head != nil {
			list = append(list, result{c.GetTensorId(), file, parse(t, file), head.GetMetadata()})
		}
	}
}

// one receives the next whole result.
func one(t testing.TB, s pb.Service_StreamTensorsClient) result {
	t.Helper()
	a := make(assembler)
	for {
		c, err := s.Recv()
		require.NoError(t, err)
		if file, head := a.add(t, c); head != nil {
			return result{c.GetTensorId(), file, parse(t, file), head.GetMetadata()}
		}
	}
}

// sendAll sends chunks, and stops when the RPC has ended.
func sendAll(s interface {
	Send(*pb.TensorChunk) error
	CloseSend() error
}, list ...*pb.TensorChunk,
) {
	for _, c := range list {
		if s.Send(c) != nil {
			return
		}
	}
	_ = s.CloseSend()
}

// exchanged sends chunks while it receives the results.
func (f *fixture) exchanged(t testing.TB, list ...*pb.TensorChunk) ([]result, error) {
	t.Helper()
	s, err := f.client.StreamTensors(t.Context())
	require.NoError(t, err)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		sendAll(s, list...)
	}()
	got, err := results(t, s.Recv)
	testkit.Receive(t, sent)
	return got, err
}

// uploaded sends chunks to the store.
func (f *fixture) uploaded(t testing.TB, list ...*pb.TensorChunk) (*pb.TensorResponse, error) {
	t.Helper()
	s, err := f.client.ReceiveTensors(t.Context())
	require.NoError(t, err)
	for _, c := range list {
		if s.Send(c) != nil {
			break
		}
	}
	return s.CloseAndRecv()
}

// storedAs returns a tensor of the store.
func (f *fixture) storedAs(t testing.TB, name string) tensor.Tensor {
	t.Helper()
	r, err := f.store.Open(t.Context(), name)
	require.NoError(t, err)
	defer r.Release()
	size, err := r.Info().Bytes()
	require.NoError(t, err)
	var all bytes.Buffer
	for off := int64(0); off < size; off += mib {
		view, held, err := r.View(t.Context(), off, min(mib, size-off))
		require.NoError(t, err)
		all.Write(view)
		held.Release()
	}
	return tensor.Tensor{Desc: r.Info().Desc, Data: all.Bytes()}
}

func same(t testing.TB, want, got tensor.Tensor) {
	t.Helper()
	require.Equal(t, want.DType, got.DType)
	require.Equal(t, append(tensor.Shape{}, want.Shape...), append(tensor.Shape{}, got.Shape...))
	require.True(t, bytes.Equal(want.Data, got.Data))
}
