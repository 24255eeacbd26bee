package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// flightKind is Arrow Flight for Go as one writes it with its own readers and
// writers: a tensor is one column of float32, sent as record batches that are
// slices of it without a copy, and a batch that arrived is copied to its place in
// the tensor. An upload is a DoPut, an echo a DoExchange whose answer starts while
// its input comes. With sums, a batch's CRC32C goes along as its application
// metadata and is checked at its place, at every end. Everything is as Flight has
// it, but for the size of a message, which gRPC would keep below 4 MiB.
func flightKind(batch int, sums bool) bench.Kind {
	k := bench.Kind{
		Name: "flight", Text: "Arrow Flight",
		Serve: func(l net.Listener, remote []byte) (bench.Server, error) {
			return serveFlight(l, remote, batch, sums), nil
		},
		Dial: func(_ context.Context, network, address string, source, back []byte) (bench.Client, error) {
			return dialFlight(network, address, source, back, batch, sums)
		},
	}
	if sums {
		k.Name, k.Text = k.Name+"-crc", k.Text+", CRC-32C"
	}
	k.Name = fmt.Sprintf("%s-%dKiB", k.Name, batch>>10)
	k.Text += ", batches of " + bench.ByteText(batch)
	return k
}

type flightServer struct {
	flight.BaseFlightServer
	tensor flightTensor
	server flight.Server
	idle   chan struct{} // after each transfer, and at the end
	served chan error
}

func serveFlight(l net.Listener, remote []byte, batch int, sums bool) *flightServer {
	s := &flightServer{tensor: flightTensor{remote, batch, sums}, idle: make(chan struct{}, 1), served: make(chan error, 1)}
	s.server = flight.NewServerWithMiddleware(nil, grpc.MaxRecvMsgSize(maxMessageBytes))
	s.server.InitListener(l)
	s.server.RegisterFlightService(s)
	go func() { s.served <- s.server.Serve() }()
	return s
}

// Idle says that the tensor is not touched.
func (s *flightServer) Idle() <-chan struct{} { return s.idle }

// Close waits for the transfers, which end with their client, and for the serving
// goroutines.
func (s *flightServer) Close() error {
	s.server.Shutdown()
	close(s.idle)
	return <-s.served
}

// DoPut receives a tensor and acknowledges the whole.
func (s *flightServer) DoPut(stream flight.FlightService_DoPutServer) error {
	if err := s.tensor.receive(stream, func(region) {}); err != nil {
		return err
	}
	if err := stream.Send(&flight.PutResult{}); err != nil {
		return err
	}
	s.idle <- struct{}{}
	return nil
}

// DoExchange receives a tensor and sends every batch back from its place there.
func (s *flightServer) DoExchange(stream flight.FlightService_DoExchangeServer) error {
	whole := make(chan region, s.tensor.batches()) // room for all: the reader never waits for the writer
	sent := make(chan error, 1)
	go func() { sent <- s.tensor.send(stream, nil, whole) }() // ends when whole is closed, or with the gRPC stream
	err := s.tensor.receive(stream, func(r region) { whole <- r })
	close(whole)
	if err = errors.Join(err, <-sent); err != nil {
		return err
	}
	s.idle <- struct{}{}
	return nil
}

type flightClient struct {
	client       flight.Client
	source, back flightTensor
}

func dialFlight(network, address string, source, back []byte, batch int, sums bool) (*flightClient, error) {
	c, err := flight.NewClientWithMiddleware("passthrough:///bench", nil, nil,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		}))
	if err != nil {
		return nil, err
	}
	return &flightClient{c, flightTensor{source, batch, sums}, flightTensor{back, batch, sums}}, nil
}

// Run does op once, as one call.
func (c *flightClient) Run(ctx context.Context, op bench.Op) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	switch op {
	case bench.Upload:
		return c.put(ctx)
	case bench.Echo:
		return c.exchange(ctx, cancel)
	default:
		return fmt.Errorf("peers: Arrow Flight has no %s here", op)
	}
}

// Close ends the connection.
func (c *flightClient) Close() error { return c.client.Close() }

func (c *flightClient) put(ctx context.Context) error {
	stream, err := c.client.DoPut(ctx)
	if err != nil {
		return err
	}
	if err := c.send(stream); err != nil && !errors.Is(err, io.EOF) { // io.EOF: the server says why
		return err
	}
	if _, err := stream.Recv(); err != nil {
		return err
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("peers: the put does not end after its result: %w", err)
	}
	return nil
}

// exchange cancels the call when its results fail, or the sender would wait.
func (c *flightClient) exchange(ctx context.Context, cancel context.CancelFunc) error {
	stream, err := c.client.DoExchange(ctx)
	if err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() { sent <- c.send(stream) }() // ends with the source or the gRPC stream
	if err := c.back.receive(stream, func(region) {}); err != nil {
		cancel()
		return errors.Join(err, <-sent)
	}
	return <-sent
}

// send sends the source and closes the sending side.
func (c *flightClient) send(stream interface {
	flight.DataStreamWriter
	CloseSend() error
}) error {
	all := make(chan region, c.source.batches())
	for at := 0; at < len(c.source.data); at += c.source.batch {
		all <- region{at, min(c.source.batch, len(c.source.data)-at)}
	}
	close(all)
	descriptor := &flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{"tensor"}}
	if err := c.source.send(stream, descriptor, all); err != nil {
		return err
	}
	return stream.CloseSend()
}

// flightTensor is memory of float32 that goes as record batches. Its memory is
// lent to whoever sends or receives.
type flightTensor struct {
	data  []byte
	batch int // bytes
	sums  bool
}

// region is where a batch lies, in bytes.
type region struct{ at, n int }

func (t flightTensor) batches() int { return (len(t.data) + t.batch - 1) / t.batch }

var (
	flightSchema = arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Float32}}, nil)
	errNoSum     = errors.New("peers: a batch came without its checksum")
)

// send sends each region as a batch, until there are no more.
func (t flightTensor) send(to flight.DataStreamWriter, descriptor *flight.FlightDescriptor, regions <-chan region) error {
	n := len(t.data) / arrow.Float32SizeBytes
	data := array.NewData(arrow.PrimitiveTypes.Float32, n, []*memory.Buffer{nil, memory.NewBufferBytes(t.data)}, nil, 0, 0)
	defer data.Release()
	column := array.NewFloat32Data(data)
	defer column.Release()
	whole := array.NewRecordBatch(flightSchema, []arrow.Array{column}, int64(n))
	defer whole.Release()
	w := flight.NewRecordWriter(to, ipc.WithSchema(flightSchema))
	w.SetFlightDescriptor(descriptor)
	for r := range regions {
		var sum []byte
		if t.sums {
			sum = binary.LittleEndian.AppendUint32(nil, codec.CRC32C.Update(0, t.data[r.at:r.at+r.n]))
		}
		batch := whole.NewSlice(int64(r.at/arrow.Float32SizeBytes), int64((r.at+r.n)/arrow.Float32SizeBytes))
		err := w.WriteWithAppMetadata(batch, sum)
		batch.Release()
		if err != nil {
			return err
		}
	}
	return w.Close()
}

// receive fills the tensor and tells of each batch that is in its place and
// checked. It returns at the end of the gRPC stream, with an error if that is not the
// end of the tensor.
func (t flightTensor) receive(from flight.DataStreamReader, whole func(region)) error {
	r, err := flight.NewRecordReader(from)
	if err != nil {
		return err
	}
	defer r.Release()
	at := 0
	for r.Next() {
		if len(r.RecordBatch().Columns()) != 1 {
			return fmt.Errorf("peers: a batch of %d columns came, want 1", len(r.RecordBatch().Columns()))
		}
		column, ok := r.RecordBatch().Column(0).(*array.Float32)
		if !ok {
			return fmt.Errorf("peers: a batch of %v came, want float32", r.RecordBatch().Column(0).DataType())
		}
		values := arrow.Float32Traits.CastToBytes(column.Float32Values())
		if len(values) > len(t.data)-at {
			return fmt.Errorf("peers: a batch [%d,+%d) came, outside a tensor of %d bytes", at, len(values), len(t.data))
		}
		place := t.data[at : at+len(values)]
		copy(place, values)
		if t.sums {
			if err := check(place, r.LatestAppMetadata()); err != nil {
				return fmt.Errorf("%w, at byte %d", err, at)
			}
		}
		whole(region{at, len(values)})
		at += len(values)
	}
	if err := r.Err(); err != nil {
		return err
	}
	if at != len(t.data) {
		return fmt.Errorf("peers: %d bytes came of a tensor of %d", at, len(t.data))
	}
	return nil
}

// check compares a batch that is in its place with the checksum that came along.
func check(place, sum []byte) error {
	if len(sum) != 4 {
		return errNoSum
	}
	if want, got := binary.LittleEndian.Uint32(sum), codec.CRC32C.Update(0, place); got != want {
		return fmt.Errorf("peers: a batch has checksum %08x, sent was %08x", got, want)
	}
	return nil
}
