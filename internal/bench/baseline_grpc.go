package bench

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// StockGRPC is what one writes with generated code: a bidirectional gRPC stream
// of frames, the proto codec and every window as gRPC has it, CRC32C computed
// and checked for each chunk, the payload copied to its place.
type StockGRPC struct {
	mem    Memory
	pair   *grpcPair
	stream grpc.BidiStreamingClient[tensorferryv1.Frame, tensorferryv1.Frame]
	server *stockServer
	cancel context.CancelFunc
}

var _ Baseline = (*StockGRPC)(nil)

// NewStockGRPC connects over "tcp" or "unix" and starts goroutines that serve
// until Close. It is lent mem until then.
func NewStockGRPC(network string, mem Memory) (*StockGRPC, error) {
	if err := mem.check(); err != nil {
		return nil, err
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true)) // they write to memory that is lent until Close
	handler := &stockServer{mem: mem, idle: make(chan struct{}, 1)}
	tensorferryv1.RegisterTensorServiceServer(server, handler)
	pair, err := newGRPCPair(network, server)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s, err := tensorferryv1.NewTensorServiceClient(pair.conn).StreamTensors(ctx)
	if err != nil {
		cancel()
		return nil, errors.Join(err, pair.close())
	}
	return &StockGRPC{mem: mem, pair: pair, stream: s, server: handler, cancel: cancel}, nil
}

// Move does op once; the acknowledgement of an upload is a frame with a done.
func (g *StockGRPC) Move(ctx context.Context, op Op) (Sample, error) {
	defer context.AfterFunc(ctx, g.cancel)()
	to := [][]byte{g.mem.Remote}
	if op != Upload {
		to = append(to, g.mem.Back)
	}
	return g.mem.measured(op, func() error {
		if op == Upload {
			if err := g.send(op); err != nil {
				return err
			}
			f, err := g.stream.Recv()
			if err == nil && len(f.Dones) != 1 {
				err = fmt.Errorf("bench: a frame without done ends the upload: %v", f)
			}
			return err
		}
		sent := make(chan error, 1)
		go func() { sent <- g.send(op) }() // ends with the source or the gRPC stream
		for i := range g.mem.chunks() {
			f, err := g.stream.Recv()
			if err == nil {
				err = place(f.Chunk, g.mem.Back, i)
			}
			if err != nil {
				g.cancel()
				return errors.Join(err, <-sent)
			}
		}
		return <-sent
	}, g.server.idle, to...)
}

// Close ends the connection and waits for the serving goroutines.
func (g *StockGRPC) Close() error {
	g.cancel()
	return g.pair.close()
}

func (g *StockGRPC) send(op Op) error {
	if err := g.stream.Send(&tensorferryv1.Frame{Calls: []*tensorferryv1.Call{{Model: string(op)}}}); err != nil {
		return err
	}
	s := newFrameSender(g.stream)
	for i := range g.mem.chunks() {
		if err := s.send(i, chunk(g.mem.Source, i)); err != nil {
			return err
		}
	}
	return nil
}

// benchTensor is the tensor that every baseline's chunks are said to be of.
var benchTensor = tensor.ID{15: 1}

// frameSender sends chunks in one reused frame.
type frameSender struct {
	stream interface {
		Send(*tensorferryv1.Frame) error
	}
	frame *tensorferryv1.Frame
}

func newFrameSender(s interface {
	Send(*tensorferryv1.Frame) error
}) *frameSender {
	return &frameSender{s, &tensorferryv1.Frame{Chunk: &tensorferryv1.Chunk{TensorId: benchTensor[:]}}}
}

func (s *frameSender) send(i int, data []byte) error {
	c := s.frame.Chunk
	c.Index, c.Data = uint32(i), data
	c.Checksum = codec.CRC32C.Update(codec.CRC32C.Seed(benchTensor, c.Index), data)
	return s.stream.Send(s.frame)
}

// place checks the i-th chunk and copies it to its place in dst.
func place(c *tensorferryv1.Chunk, dst []byte, i int) error {
	to := chunk(dst, i)
	if c.GetIndex() != uint32(i) || len(c.GetData()) != len(to) {
		return fmt.Errorf("bench: chunk %d of %d bytes came, want %d of %d", c.GetIndex(), len(c.GetData()), i, len(to))
	}
	copy(to, c.Data)
	if got := codec.CRC32C.Update(codec.CRC32C.Seed(benchTensor, c.Index), to); got != c.Checksum {
		return checksumError(i, c.Checksum, got)
	}
	return nil
}

// stockServer is the other end of StockGRPC.
type stockServer struct {
	tensorferryv1.UnimplementedTensorServiceServer
	mem  Memory
	idle chan struct{} // after each transfer, and at the end
}

// StreamTensors receives one source after the other, until the client leaves.
func (s *stockServer) StreamTensors(stream grpc.BidiStreamingServer[tensorferryv1.Frame, tensorferryv1.Frame]) error {
	defer close(s.idle) // there is one gRPC stream
	for {
		f, err := stream.Recv()
		if err != nil {
			return err // io.EOF, or the cancellation that ends every baseline
		}
		if len(f.Calls) != 1 {
			return errors.New("bench: a chunk before its call")
		}
		op := Op(f.Calls[0].Model)
		if op == Upload {
			if err := s.receive(stream, func(int) {}); err != nil {
				return err
			}
			if err := stream.Send(&tensorferryv1.Frame{Dones: []*tensorferryv1.Done{{}}}); err != nil {
				return err
			}
			s.idle <- struct{}{}
			continue
		}
		whole := make(chan int, s.mem.chunks()) // room for all: the reader never waits for the writer
		sent := make(chan error, 1)
		go func() { // ends when whole is closed, or with the gRPC stream
			out := newFrameSender(stream)
			var err error
			for i := range whole {
				c := chunk(s.mem.Remote, i)
				if op == ReLU {
					relu(c)
				}
				if err = out.send(i, c); err != nil {
					break
				}
			}
			sent <- err
		}()
		err = s.receive(stream, func(i int) { whole <- i })
		close(whole)
		if err = errors.Join(err, <-sent); err != nil {
			return err
		}
		s.idle <- struct{}{}
	}
}

func (s *stockServer) receive(stream grpc.BidiStreamingServer[tensorferryv1.Frame, tensorferryv1.Frame], whole func(int)) error {
	for i := range s.mem.chunks() {
		f, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := place(f.Chunk, s.mem.Remote, i); err != nil {
			return err
		}
		whole(i)
	}
	return nil
}
