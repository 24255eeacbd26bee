package bench

import (
	"context"
	"errors"
	"fmt"
	"net"

	"google.golang.org/grpc"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// StockGRPC is what one writes with generated code: a bidirectional gRPC stream
// of frames, the proto codec and every window as gRPC has it, CRC32C computed
// and checked for each chunk, the payload copied to its place.
var StockGRPC = Kind{
	Name: "grpc", Text: peerTexts["grpc"],
	Serve: func(l net.Listener, remote []byte) (Server, error) {
		s := &stockServer{remote: remote, idle: make(chan struct{}, 1)}
		server := grpc.NewServer(grpc.WaitForHandlers(true)) // they write to memory that is lent until Close
		tensorferryv1.RegisterTensorServiceServer(server, s)
		s.grpcServer = serveGRPC(l, server)
		return s, nil
	},
	Dial: func(_ context.Context, network, address string, source, back []byte) (Client, error) {
		conn, err := dialGRPC(network, address)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithCancel(context.Background()) // until Close
		s, err := tensorferryv1.NewTensorServiceClient(conn).StreamTensors(ctx)
		if err != nil {
			cancel()
			return nil, errors.Join(err, conn.Close())
		}
		return &stockClient{conn, s, cancel, source, back}, nil
	},
}

type stockClient struct {
	conn         *grpc.ClientConn
	stream       grpc.BidiStreamingClient[tensorferryv1.Frame, tensorferryv1.Frame]
	cancel       context.CancelFunc
	source, back []byte
}

// Run does op once; the acknowledgement of an upload is a frame with a done.
func (g *stockClient) Run(ctx context.Context, op Op) error {
	defer context.AfterFunc(ctx, g.cancel)()
	if !op.Back() {
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
	for i := range chunks(g.back) {
		f, err := g.stream.Recv()
		if err == nil {
			err = place(f.Chunk, g.back, i)
		}
		if err != nil {
			g.cancel()
			return errors.Join(err, <-sent)
		}
	}
	return <-sent
}

// Close ends the connection.
func (g *stockClient) Close() error {
	g.cancel()
	return g.conn.Close()
}

func (g *stockClient) send(op Op) error {
	if err := g.stream.Send(&tensorferryv1.Frame{Calls: []*tensorferryv1.Call{{Model: string(op)}}}); err != nil {
		return err
	}
	s := newFrameSender(g.stream)
	for i := range chunks(g.source) {
		if err := s.send(i, chunk(g.source, i)); err != nil {
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

// stockServer serves one gRPC stream.
type stockServer struct {
	tensorferryv1.UnimplementedTensorServiceServer
	grpcServer
	remote []byte
	idle   chan struct{} // after each transfer, and at the end
}

// Idle says that Remote is not touched.
func (s *stockServer) Idle() <-chan struct{} { return s.idle }

// Close ends the connection and waits for the serving goroutines.
func (s *stockServer) Close() error { return s.close() }

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
		if _, ok := ops[op]; !ok {
			return fmt.Errorf("bench: no operation is named %q", op)
		}
		if !op.Back() {
			if err := s.receive(stream, func(int) {}); err != nil {
				return err
			}
			if err := stream.Send(&tensorferryv1.Frame{Dones: []*tensorferryv1.Done{{}}}); err != nil {
				return err
			}
			s.idle <- struct{}{}
			continue
		}
		whole := make(chan int, chunks(s.remote)) // room for all: the reader never waits for the writer
		sent := make(chan error, 1)
		go func() { // ends when whole is closed, or with the gRPC stream
			out := newFrameSender(stream)
			var err error
			for i := range whole {
				c := chunk(s.remote, i)
				ops[op].compute(c)
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
	for i := range chunks(s.remote) {
		f, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := place(f.Chunk, s.remote, i); err != nil {
			return err
		}
		whole(i)
	}
	return nil
}
