package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// flightKind is Arrow Flight for Go as one writes it with its own readers and
// writers: a tensor is one column of float32, sent as record batches over it without
// a copy, and a batch that arrived is copied to its place in the tensor. An upload is
// a DoPut, an echo a DoExchange whose answer starts while its input comes. With sums,
// a batch's CRC32C goes along as its application metadata and is checked at its
// place, at every end. Everything is as Flight has it, but for the size of a message,
// which gRPC would keep below 4 MiB.
func flightKind(batch int, sums bool) bench.Kind {
	return bench.Kind{
		Name: flightName("Go", sums, batch),
		Serve: func(ctx context.Context, l net.Listener, p bench.Place) error {
			s := flight.NewServerWithMiddleware(nil, grpc.MaxRecvMsgSize(maxMessageBytes))
			s.InitListener(l)
			s.RegisterFlightService(&flightServer{remote: p.To, batch: batch, sums: sums})
			defer context.AfterFunc(ctx, s.Shutdown)()
			return s.Serve()
		},
		Dial: func(_ context.Context, p bench.Place) (bench.Client, error) {
			options := append(bench.DialOptions(p), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)))
			c, err := flight.NewClientWithMiddleware(bench.Target, nil, nil, options...)
			if err != nil {
				return bench.Client{}, err
			}
			f := &flightClient{c, p.Source, p.To, batch, sums}
			return bench.Client{Run: f.run, Close: c.Close}, nil
		},
	}
}

// flightName names Flight in a language, with a size of its batches.
func flightName(language string, sums bool, batch int) string {
	sum := "unchecked"
	if sums {
		sum = map[string]string{"Go": "CRC-32C", "C++": "CRC-32"}[language]
	}
	return fmt.Sprintf("Arrow Flight (%s), %s, %s", language, sum, bench.ByteText(batch))
}

// flights are Flight for Go with each batch size.
func flights() (all []bench.Kind) {
	for _, sums := range []bool{false, true} {
		for _, batch := range batchSizes {
			all = append(all, flightKind(batch, sums))
		}
	}
	return all
}

type flightServer struct {
	flight.BaseFlightServer
	remote []byte
	batch  int // bytes
	sums   bool
}

// DoPut receives a tensor and acknowledges the whole.
func (s *flightServer) DoPut(stream flight.FlightService_DoPutServer) error {
	l := newFlightLink(nil, stream, len(s.remote), s.sums)
	l.acknowledge = func() error { return stream.Send(&flight.PutResult{}) }
	return bench.Answer(l, bench.Upload, s.remote, s.batch)
}

// DoExchange receives a tensor and sends every batch back from its place there.
func (s *flightServer) DoExchange(stream flight.FlightService_DoExchangeServer) error {
	return bench.Answer(newFlightLink(stream, stream, len(s.remote), s.sums), bench.Echo, s.remote, s.batch)
}

type flightClient struct {
	flight.Client
	source, back []byte
	batch        int // bytes
	sums         bool
}

// run does op once, as one call.
func (c *flightClient) run(ctx context.Context, op bench.Op, first *time.Time) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var l *flightLink
	switch op {
	case bench.Upload:
		stream, err := c.DoPut(ctx)
		if err != nil {
			return err
		}
		l = newFlightLink(stream, nil, len(c.source), c.sums)
		l.sent = stream.CloseSend
		l.acknowledged = func() error {
			if _, err := stream.Recv(); err != nil {
				return err
			}
			if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
				return fmt.Errorf("peers: the put does not end after its result: %w", err)
			}
			return nil
		}
	case bench.Echo:
		stream, err := c.DoExchange(ctx)
		if err != nil {
			return err
		}
		l = newFlightLink(stream, stream, len(c.source), c.sums)
		l.sent = stream.CloseSend
	default:
		return fmt.Errorf("peers: Arrow Flight has no %s here", op)
	}
	l.close = cancel
	l.writer.SetFlightDescriptor(&flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{"tensor"}})
	return bench.Ask(ctx, l, op, c.source, c.back, c.batch, first)
}

var (
	flightSchema = arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Float32}}, nil)
	errNoSum     = errors.New("peers: a batch came without its checksum")
)

// flightLink is one end of one call, whose batches are a tensor's chunks.
type flightLink struct {
	sums        bool
	writer      *flight.Writer
	from        flight.DataStreamReader
	reader      *flight.Reader // of from, once there is something to read
	unsent, due int            // bytes

	acknowledge  func() error // sends that an upload is whole, and
	acknowledged func() error // receives that
	sent         func() error // closes the sending side
	close        func()
}

func newFlightLink(to flight.DataStreamWriter, from flight.DataStreamReader, size int, sums bool) *flightLink {
	nothing := func() error { return nil }
	l := &flightLink{sums: sums, from: from, unsent: size, due: size, sent: nothing, close: func() {}}
	if to != nil {
		l.writer = flight.NewRecordWriter(to, ipc.WithSchema(flightSchema))
	}
	return l
}

func (l *flightLink) Close() error {
	l.close()
	return nil
}

// Send sends a chunk as a batch, and the end after the last.
func (l *flightLink) Send(chunk []byte) error {
	if l.acknowledge != nil {
		return l.acknowledge()
	}
	n := len(chunk) / arrow.Float32SizeBytes
	data := array.NewData(arrow.PrimitiveTypes.Float32, n, []*memory.Buffer{nil, memory.NewBufferBytes(chunk)}, nil, 0, 0)
	defer data.Release()
	column := array.NewFloat32Data(data)
	defer column.Release()
	batch := array.NewRecordBatch(flightSchema, []arrow.Array{column}, int64(n))
	defer batch.Release()
	var sum []byte
	if l.sums {
		sum = binary.LittleEndian.AppendUint32(nil, codec.CRC32C.Update(0, chunk))
	}
	err := l.writer.WriteWithAppMetadata(batch, sum)
	if l.unsent -= len(chunk); err != nil || l.unsent > 0 {
		return err
	}
	return errors.Join(l.writer.Close(), l.sent())
}

// Receive copies the next batch to its place, and expects the end after the last.
func (l *flightLink) Receive(chunk []byte) (err error) {
	if l.acknowledged != nil {
		return l.acknowledged()
	}
	if l.due == 0 {
		return io.EOF
	}
	if l.reader == nil {
		if l.reader, err = flight.NewRecordReader(l.from); err != nil {
			return err
		}
	}
	if !l.reader.Next() {
		return errors.Join(l.reader.Err(), fmt.Errorf("peers: the tensor ends %d bytes before its end", l.due))
	}
	batch := l.reader.RecordBatch()
	if len(batch.Columns()) != 1 {
		return fmt.Errorf("peers: a batch of %d columns came, want 1", len(batch.Columns()))
	}
	column, ok := batch.Column(0).(*array.Float32)
	if !ok {
		return fmt.Errorf("peers: a batch of %v came, want float32", batch.Column(0).DataType())
	}
	values := arrow.Float32Traits.CastToBytes(column.Float32Values())
	if len(values) != len(chunk) {
		return fmt.Errorf("peers: a batch of %d bytes came, want %d", len(values), len(chunk))
	}
	copy(chunk, values)
	if sum := l.reader.LatestAppMetadata(); l.sums && len(sum) != 4 {
		return errNoSum
	} else if l.sums {
		if err := bench.CheckSum(codec.CRC32C, chunk, 0, binary.LittleEndian.Uint32(sum)); err != nil {
			return fmt.Errorf("%w, %d bytes before the end", err, l.due)
		}
	}
	if l.due -= len(chunk); l.due > 0 {
		return nil
	}
	defer l.reader.Release()
	if l.reader.Next() {
		return errors.New("peers: a batch came after the tensor's last")
	}
	return l.reader.Err()
}
