package server_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
)

// A client in any language needs no more than this: stubs generated from the proto,
// a CRC-32C, and, to check what it pulled, XXH3. It pushes a tensor, pulls it back
// and has a model compute over it.
func TestAStockClientPushesPullsAndCallsBitExact(t *testing.T) {
	testkit.Start(t)
	shelf, _ := inFolder(t)
	f := serve(t, func(c *server.Config) { c.Store = shelf })
	conn, err := grpc.NewClient(f.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	service := pb.NewTensorServiceClient(conn)
	ctx := t.Context()

	const rows, columns, chunkBytes = 300, 700, 64 << 10
	data := floats(rows * columns) // 840 000 bytes
	chunks := (len(data) + chunkBytes - 1) / chunkBytes
	checksum := func(id []byte, index int, payload []byte) uint32 {
		sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
		_, _ = sum.Write(id)
		_, _ = sum.Write(binary.LittleEndian.AppendUint32(nil, uint32(index)))
		_, _ = sum.Write(payload)
		return sum.Sum32()
	}
	digest := xxh3.Hash128(data).Bytes()

	// Push: hello, a desc, its chunks in any order, and the end of the stream.
	push, err := service.PushTensors(ctx)
	require.NoError(t, err)
	transfer, id := uuid.Must(uuid.NewV7()), uuid.Must(uuid.NewV7())
	require.NoError(t, push.Send(&pb.Frame{
		Hello: &pb.Hello{Version: 1, SessionId: transfer[:], Checksum: pb.Checksum_CHECKSUM_CRC32C},
		Descs: []*pb.TensorDesc{{
			TensorId: id[:], Name: "weights/x", Dtype: pb.DataType_DATA_TYPE_FLOAT32, Shape: []int64{rows, columns},
			SizeBytes: uint64(len(data)), ChunkBytes: chunkBytes,
		}},
	}))
	for i := chunks - 1; i >= 0; i-- {
		payload := data[i*chunkBytes : min((i+1)*chunkBytes, len(data))]
		require.NoError(t, push.Send(&pb.Frame{Chunk: &pb.Chunk{
			TensorId: id[:], Index: uint32(i), Checksum: checksum(id[:], i, payload), Data: payload,
		}}))
	}
	pushed, err := push.CloseAndRecv()
	require.NoError(t, err)
	require.Len(t, pushed.GetSummaries(), 1)
	summary := pushed.GetSummaries()[0]
	require.Zero(t, summary.GetCode(), summary.GetMessage())
	require.Equal(t, digest[:], summary.GetDigest())
	require.True(t, summary.GetDurable())

	// The server remembers the push, and lists the tensor.
	state, err := service.GetTransfer(ctx, &pb.GetTransferRequest{TransferId: transfer[:]})
	require.NoError(t, err)
	require.EqualValues(t, len(data), state.GetTensors()[0].GetMovedBytes())
	list, err := service.ListTensors(ctx, &pb.ListTensorsRequest{Glob: "weights/*"})
	require.NoError(t, err)
	require.Equal(t, []int64{rows, columns}, list.GetTensors()[0].GetShape())

	// Pull: hello, a desc, its chunks, and a summary.
	another := uuid.Must(uuid.NewV7())
	pull, err := service.PullTensors(ctx, &pb.PullTensorsRequest{
		Hello:      &pb.Hello{Version: 1, SessionId: another[:], MaxChunkBytes: 100_000, Checksum: pb.Checksum_CHECKSUM_CRC32C},
		Selections: []*pb.Selection{{Name: "weights/x"}},
	})
	require.NoError(t, err)
	var desc *pb.TensorDesc
	var got []byte
	for {
		frame, err := pull.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if len(frame.GetDescs()) > 0 {
			desc = frame.GetDescs()[0]
			got = make([]byte, desc.GetSizeBytes())
		}
		if c := frame.GetChunk(); c != nil {
			require.Equal(t, checksum(desc.GetTensorId(), int(c.GetIndex()), c.GetData()), c.GetChecksum())
			copy(got[int(c.GetIndex())*int(desc.GetChunkBytes()):], c.GetData())
		}
		if len(frame.GetSummaries()) > 0 {
			require.Zero(t, frame.GetSummaries()[0].GetCode())
			sum := xxh3.Hash128(got).Bytes()
			require.Equal(t, sum[:], frame.GetSummaries()[0].GetDigest())
		}
	}
	require.Equal(t, []int64{rows, columns}, desc.GetShape())
	require.True(t, bytes.Equal(data, got))

	// Compute: one message each way.
	answer, err := service.Compute(ctx, &pb.ComputeRequest{Model: "relu", Inputs: []*pb.NamedTensor{{
		Port: "x", Dtype: pb.DataType_DATA_TYPE_FLOAT32, Shape: []int64{rows, columns}, Data: got,
	}}})
	require.NoError(t, err)
	require.True(t, bytes.Equal(mapFloats(data, relu), answer.GetOutputs()[0].GetData()))

	// Delete.
	deleted, err := service.DeleteTensors(ctx, &pb.DeleteTensorsRequest{Names: []string{"weights/*"}})
	require.NoError(t, err)
	require.Equal(t, []string{"weights/x"}, deleted.GetDeleted())
}
