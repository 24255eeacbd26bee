package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// stranger is a server that knows nothing but the proto, and plays a script.
type stranger struct {
	pb.UnimplementedTensorServiceServer
	script func(s pb.TensorService_StreamTensorsServer) error
}

func (s *stranger) StreamTensors(stream pb.TensorService_StreamTensorsServer) error {
	return s.script(stream)
}

// visit opens a client of a server that plays the script.
func visit(t *testing.T, script func(s pb.TensorService_StreamTensorsServer) error) *client.Client {
	t.Helper()
	return beguile(t, &stranger{script: script}, client.Config{})
}

func newID() []byte { id := uuid.Must(uuid.NewV7()); return id[:] }

// hello answers the client's hello.
func hello(s pb.TensorService_StreamTensorsServer, change func(*pb.Hello)) error {
	f, err := s.Recv()
	if err != nil {
		return err
	}
	h := &pb.Hello{
		Version: 1, SessionId: f.Hello.GetSessionId(), MaxChunkBytes: mib, AllowanceBytes: mib,
		Checksum: f.Hello.GetChecksum(), MaxOpenTensors: 64,
	}
	if change != nil {
		change(h)
	}
	return s.Send(&pb.Frame{Hello: h})
}

// linger reads until the client has gone.
func linger(s pb.TensorService_StreamTensorsServer) error {
	for {
		if _, err := s.Recv(); err != nil {
			return nil
		}
	}
}

func TestAServerThatBreaksTheRulesOfASessionEndsItWithAClearError(t *testing.T) {
	testkit.Start(t)
	greet := func(change func(*pb.Hello)) func(pb.TensorService_StreamTensorsServer) error {
		return func(s pb.TensorService_StreamTensorsServer) error {
			if err := hello(s, change); err != nil {
				return err
			}
			return linger(s)
		}
	}
	after := func(f *pb.Frame) func(pb.TensorService_StreamTensorsServer) error {
		return func(s pb.TensorService_StreamTensorsServer) error {
			if err := hello(s, nil); err != nil {
				return err
			}
			if err := s.Send(f); err != nil {
				return err
			}
			return linger(s)
		}
	}
	for name, tc := range map[string]struct {
		script func(pb.TensorService_StreamTensorsServer) error
		code   codes.Code
		says   string
	}{
		"leaves at once": {func(pb.TensorService_StreamTensorsServer) error { return nil }, codes.Unavailable, "server ended the session"},
		"refuses": {func(pb.TensorService_StreamTensorsServer) error {
			return status.Error(codes.PermissionDenied, "not you")
		}, codes.PermissionDenied, "not you"},
		"sends no hello": {func(s pb.TensorService_StreamTensorsServer) error {
			_ = s.Send(&pb.Frame{Credits: []*pb.Credit{{TensorId: newID()}}})
			return linger(s)
		}, codes.InvalidArgument, "hello"},
		"speaks another version": {greet(func(h *pb.Hello) { h.Version = 3 }), codes.FailedPrecondition, "version 3"},
		"names another session":  {greet(func(h *pb.Hello) { h.SessionId = newID() }), codes.InvalidArgument, "another session"},
		"names another checksum": {greet(func(h *pb.Hello) { h.Checksum = pb.Checksum_CHECKSUM_CRC32 }), codes.InvalidArgument, "checksum"},
		"cancels":                {after(&pb.Frame{Cancels: []*pb.Cancel{{CallId: newID()}}}), codes.InvalidArgument, "cancel came from the server"},
		"calls":                  {after(&pb.Frame{Calls: []*pb.Call{{Id: newID(), Model: "m"}}}), codes.InvalidArgument, "call came from the server"},
		"sends an ID of 3 bytes": {after(&pb.Frame{Acks: []*pb.Ack{{TensorId: []byte("abc")}}}), codes.InvalidArgument, "acks[0].tensor_id"},
		"sends too much":         {after(&pb.Frame{Chunk: &pb.Chunk{TensorId: newID(), Data: make([]byte, 2*mib)}}), codes.ResourceExhausted, "larger than max"},
		"says hello twice": {func(s pb.TensorService_StreamTensorsServer) error {
			if err := hello(s, nil); err != nil {
				return err
			}
			_ = s.Send(&pb.Frame{Hello: &pb.Hello{Version: 1, SessionId: newID(), Checksum: 1}})
			return linger(s)
		}, codes.InvalidArgument, "second hello"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			c := visit(t, tc.script)
			s, err := c.Session(t.Context())
			if err == nil {
				_, err = s.Compute(t.Context(), "echo", input(t, 10))
			}
			require.Error(t, err)
			require.Equal(t, tc.code, status.Code(err), err)
			require.ErrorContains(t, err, tc.says)
		})
	}
}

// result sends a result of 10 bytes in chunks of 4, spoilt by change, and done.
func result(s pb.TensorService_StreamTensorsServer, call []byte, change func(d *pb.TensorDesc, chunks []*pb.Chunk, done *pb.Done)) error {
	data := []byte("0123456789")
	d := &pb.TensorDesc{
		TensorId: newID(), Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{10}, SizeBytes: 10, ChunkBytes: 4,
		CallId: call, Port: "y", OnAllowance: true,
	}
	var chunks []*pb.Chunk
	table := crc32.MakeTable(crc32.Castagnoli)
	for i := range 3 {
		part := data[4*i : min(4*i+4, 10)]
		name := binary.LittleEndian.AppendUint32(bytes.Clone(d.TensorId), uint32(i))
		chunks = append(chunks, &pb.Chunk{
			TensorId: d.TensorId, Index: uint32(i), Data: part, Checksum: crc32.Update(crc32.Checksum(name, table), table, part),
		})
	}
	done := &pb.Done{CallId: call, Outputs: []*pb.Output{{Port: "y", TensorId: d.TensorId}}}
	change(d, chunks, done)
	if err := s.Send(&pb.Frame{Descs: []*pb.TensorDesc{d}}); err != nil {
		return err
	}
	for _, c := range chunks {
		if err := s.Send(&pb.Frame{Chunk: c}); err != nil {
			return err
		}
	}
	return s.Send(&pb.Frame{Dones: []*pb.Done{done}})
}

func TestABadResultFailsItsCallAloneWithAClearError(t *testing.T) {
	testkit.Start(t)
	type change = func(d *pb.TensorDesc, chunks []*pb.Chunk, done *pb.Done)
	for name, tc := range map[string]struct {
		change change
		says   string
	}{
		"chunk out of range":   {func(_ *pb.TensorDesc, c []*pb.Chunk, _ *pb.Done) { c[1].Index = 7 }, "index 7"},
		"chunk of wrong size":  {func(_ *pb.TensorDesc, c []*pb.Chunk, _ *pb.Done) { c[1].Data = []byte("1") }, "1 bytes"},
		"no data type":         {func(d *pb.TensorDesc, _ []*pb.Chunk, _ *pb.Done) { d.Dtype = 0 }, "data type"},
		"size not the shape's": {func(d *pb.TensorDesc, _ []*pb.Chunk, _ *pb.Done) { d.SizeBytes = 11 }, "size_bytes is 11"},
		"chunks too large":     {func(d *pb.TensorDesc, _ []*pb.Chunk, _ *pb.Done) { d.ChunkBytes = 2 * mib }, "chunk_bytes is 2097152"},
		"over the allowance": {func(d *pb.TensorDesc, _ []*pb.Chunk, _ *pb.Done) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{2 * mib}, 2*mib, mib
		}, "allowance"},
		"output never announced": {func(_ *pb.TensorDesc, _ []*pb.Chunk, done *pb.Done) { done.Outputs[0].TensorId = newID() }, "never announced"},
		"over ResultBytes": {func(d *pb.TensorDesc, _ []*pb.Chunk, _ *pb.Done) {
			d.Shape, d.SizeBytes, d.ChunkBytes, d.OnAllowance = []int64{8 << 30}, 8<<30, mib, false
		}, "ResultBytes"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			c := visit(t, func(s pb.TensorService_StreamTensorsServer) error {
				if err := hello(s, nil); err != nil {
					return err
				}
				for calls := 0; ; {
					f, err := s.Recv()
					if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled {
						return nil
					}
					if err != nil {
						return err
					}
					for _, c := range f.Calls {
						spoil := tc.change
						if calls++; calls > 1 {
							spoil = func(*pb.TensorDesc, []*pb.Chunk, *pb.Done) {}
						}
						if err := result(s, c.Id, spoil); err != nil {
							return err
						}
					}
				}
			})
			s, err := c.Session(t.Context())
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err = s.Compute(ctx, "echo", input(t, 10))
			require.Error(t, err)
			require.NotEqual(t, codes.DeadlineExceeded, status.Code(err), err)
			require.ErrorContains(t, err, tc.says)
			y, err := s.Compute(ctx, "echo", input(t, 10))
			require.NoError(t, err, "the session lives on")
			require.Equal(t, "0123456789", string(y.Data))
		})
	}
}

func TestACorruptResultIsAskedForAgainAndGivenUpTheThirdTime(t *testing.T) {
	testkit.Start(t)
	for _, times := range []int{2, 3} {
		t.Run(fmt.Sprint(times), func(t *testing.T) {
			testkit.Start(t)
			c := visit(t, func(s pb.TensorService_StreamTensorsServer) error {
				if err := hello(s, nil); err != nil {
					return err
				}
				var good *pb.Chunk
				for sent := 0; ; {
					f, err := s.Recv()
					if err != nil {
						return nil
					}
					for _, c := range f.Calls {
						err := result(s, c.Id, func(_ *pb.TensorDesc, chunks []*pb.Chunk, _ *pb.Done) {
							good = chunks[1]
							bad := &pb.Chunk{TensorId: good.TensorId, Index: 1, Checksum: good.Checksum, Data: []byte("evil")}
							chunks[1] = bad
							sent = 1
						})
						if err != nil {
							return err
						}
					}
					for _, a := range f.Acks {
						for _, i := range a.Resend {
							chunk := good
							if sent++; sent <= times {
								chunk = &pb.Chunk{TensorId: good.TensorId, Index: i, Checksum: good.Checksum, Data: []byte("evil")}
							}
							if err := s.Send(&pb.Frame{Chunk: chunk}); err != nil {
								return err
							}
						}
					}
				}
			})
			y, err := c.Compute(t.Context(), "echo", input(t, 10))
			if times < 3 {
				require.NoError(t, err)
				require.Equal(t, "0123456789", string(y.Data))
				return
			}
			require.ErrorContains(t, err, "chunk 1")
			require.ErrorContains(t, err, "3 times")
		})
	}
}

func TestAServersTextsAndRetryReachTheCaller(t *testing.T) {
	testkit.Start(t)
	c := visit(t, func(s pb.TensorService_StreamTensorsServer) error {
		if err := hello(s, nil); err != nil {
			return err
		}
		f, err := s.Recv()
		for err == nil && len(f.Calls) == 0 {
			f, err = s.Recv()
		}
		if err != nil {
			return err
		}
		unknown := &pb.Done{CallId: newID()}
		done := &pb.Done{CallId: f.Calls[0].Id, Code: uint32(codes.ResourceExhausted), Message: "memory: none", RetryAfterMillis: 250}
		if err := s.Send(&pb.Frame{Dones: []*pb.Done{unknown, done, done}}); err != nil {
			return err
		}
		return linger(s)
	})
	_, err := c.Compute(t.Context(), "echo", input(t, 10))
	var own *client.Error
	require.ErrorAs(t, err, &own)
	require.Equal(t, codes.ResourceExhausted, own.Code)
	require.Equal(t, "memory: none", own.Message)
	require.Equal(t, 250*time.Millisecond, own.RetryAfter)
}

func TestAResultThatIsAnnouncedAndNotDeliveredIsNoSuccess(t *testing.T) {
	testkit.Start(t)
	c := visit(t, func(s pb.TensorService_StreamTensorsServer) error {
		if err := hello(s, nil); err != nil {
			return err
		}
		for {
			f, err := s.Recv()
			if err != nil {
				return nil
			}
			for _, call := range f.Calls {
				err := s.Send(&pb.Frame{
					Descs: []*pb.TensorDesc{{
						TensorId: newID(), Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{10}, SizeBytes: 10,
						ChunkBytes: mib, CallId: call.Id, Port: "y", OnAllowance: true,
					}},
					Dones: []*pb.Done{{CallId: call.Id}},
				})
				if err != nil {
					return nil
				}
			}
		}
	})
	_, err := c.Compute(t.Context(), "echo", input(t, 10))
	require.Equal(t, codes.DataLoss, status.Code(err), err)
	require.ErrorContains(t, err, `announced result "y"`)
}

func TestASessionEndsWhenTheServerLeavesInTheMiddleOfAnInput(t *testing.T) {
	testkit.Start(t)
	for range 10 {
		c := visit(t, func(s pb.TensorService_StreamTensorsServer) error {
			if err := hello(s, nil); err != nil {
				return err
			}
			for chunks := 0; chunks < 4; {
				f, err := s.Recv()
				if err != nil {
					return nil
				}
				for _, d := range f.Descs {
					if err := s.Send(&pb.Frame{Credits: []*pb.Credit{{TensorId: d.TensorId, ChunkLimit: 64}}}); err != nil {
						return nil
					}
				}
				if f.Chunk != nil {
					chunks++
				}
			}
			return nil
		})
		s, err := c.Session(t.Context())
		require.NoError(t, err)
		_, err = s.Compute(t.Context(), "echo", input(t, 16*mib))
		require.Equal(t, codes.Unavailable, status.Code(err), err)
		_, err = s.Compute(t.Context(), "echo", input(t, 10))
		require.Equal(t, codes.Unavailable, status.Code(err), err)
	}
}
