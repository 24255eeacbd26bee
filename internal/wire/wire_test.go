package wire

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

var (
	tensorA = tensor.ID{1, 0xa}
	tensorB = tensor.ID{1, 0xb}
)

func TestWhateverIsNoMessageGoesThroughTheStockCodec(t *testing.T) {
	testkit.Start(t)
	in := &pb.GetServiceInfoResponse{Version: "1", Limits: map[string]int64{"a": 2}}
	data, err := Codec{}.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	out := new(pb.GetServiceInfoResponse)
	if err := (Codec{}).Unmarshal(data, out); err != nil || !proto.Equal(in, out) {
		t.Fatalf("read %v (%v), wrote %v", out, err, in)
	}
	if err := (Codec{}).Unmarshal(mem.BufferSlice{mem.SliceBuffer{0x0a, 200}}, out); err == nil {
		t.Fatal("the stock codec's error was lost")
	}
	if got := (Codec{}).Name(); got != encoding.GetCodecV2("proto").Name() {
		t.Fatalf("the codec is called %q", got)
	}
}

func TestListsOfNumbersCountAsTheyGrowInMemory(t *testing.T) {
	testkit.Start(t)
	shape := func(n int) []byte { // of a tensor of one Compute
		data, err := proto.Marshal(&pb.ComputeRequest{Inputs: []*pb.NamedTensor{{Shape: make([]int64, n)}}})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	var unpacked []byte
	for range 100 {
		unpacked = protowire.AppendVarint(protowire.AppendTag(unpacked, shapeField(t), protowire.VarintType), 1)
	}
	unpacked = protowire.AppendBytes(protowire.AppendTag(nil, inputsField(t), protowire.BytesType), unpacked)
	for name, tc := range map[string]struct {
		data  []byte
		count int
	}{
		"a shape":           {shape(8), 2},
		"packed, too many":  {shape(1600), 2 + 100},
		"unpacked":          {unpacked, 1 + 100},
		"nothing in a list": {shape(0), 1},
	} {
		if got := countParts(tc.data, new(pb.ComputeRequest).ProtoReflect().Descriptor()); got != tc.count {
			t.Errorf("%s: %d parts, want %d", name, got, tc.count)
		}
	}
	req := Request{Message: new(pb.ComputeRequest)}
	if err := (Codec{MaxRequestParts: 100}).Unmarshal(mem.BufferSlice{mem.SliceBuffer(shape(1600))}, &req); err != nil || req.Err == nil {
		t.Errorf("a list of 1 600 numbers was read: %v", err)
	}
}

func shapeField(t *testing.T) protowire.Number {
	t.Helper()
	return new(pb.NamedTensor).ProtoReflect().Descriptor().Fields().ByName("shape").Number()
}

func inputsField(t *testing.T) protowire.Number {
	t.Helper()
	return new(pb.ComputeRequest).ProtoReflect().Descriptor().Fields().ByName("inputs").Number()
}

func TestErrorsNameFieldPromisedAndGot(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		frame *pb.Frame
		kind  error
		text  string
	}{
		"short id": {
			&pb.Frame{Calls: []*pb.Call{{Id: tensorA[:]}, {Id: tensorA[:], Inputs: []*pb.Input{{TensorId: []byte("abc")}}}}},
			ErrMalformed, "wire: malformed frame: calls[1].inputs[0].tensor_id: want 16 bytes, not all zero, got 3 bytes",
		},
		"zero id": {
			&pb.Frame{Hello: &pb.Hello{SessionId: make([]byte, 16)}},
			ErrMalformed, "wire: malformed frame: hello.session_id: want 16 bytes, not all zero, got 0 bytes, or zeros",
		},
		"too many credits": {
			&pb.Frame{Credits: make([]*pb.Credit, MaxParts+1)},
			ErrTooLarge, "wire: frame over limit: credits: want at most 256 parts, got 257",
		},
		"too many bytes": {
			&pb.Frame{Drain: &pb.Drain{Reason: strings.Repeat("x", MaxControlBytes)}},
			ErrTooLarge, "wire: frame over limit: frame: want at most 65536 bytes beside the payload, got 65544",
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, err := proto.Marshal(tc.frame)
			if err != nil {
				t.Fatal(err)
			}
			var fe *FieldError
			switch err := decode(t, b).err; {
			case !errors.Is(err, tc.kind) || !errors.As(err, &fe):
				t.Fatalf("got %v", err)
			case err.Error() != tc.text:
				t.Fatalf("got  %s\nwant %s", err, tc.text)
			}
		})
	}
}

func TestControlBytesAreCountedBesideThePayload(t *testing.T) {
	testkit.Start(t)
	chunk := &pb.Chunk{TensorId: tensorA[:], Data: make([]byte, 2*MaxControlBytes)}
	for name, over := range map[string]int{"at the limit": 0, "one over": 1} {
		t.Run(name, func(t *testing.T) {
			f := &pb.Frame{Chunk: chunk, Drain: &pb.Drain{Reason: "x"}}
			rest := proto.Size(f) - len(chunk.Data)
			f.Drain.Reason = strings.Repeat("x", MaxControlBytes-rest-4+1+over) // lengths now take three bytes, twice
			if got := proto.Size(f) - len(chunk.Data); got != MaxControlBytes+over {
				t.Fatalf("the test makes %d bytes", got)
			}
			b, err := proto.Marshal(f)
			if err != nil {
				t.Fatal(err)
			}
			if err := decode(t, b, 255).err; errors.Is(err, ErrTooLarge) != (over > 0) {
				t.Fatalf("got %v", err)
			}
			b = append(b, 0xc0, 0x02, 0) // an unknown field: the joined path
			if err := decode(t, b, 255).err; !errors.Is(err, ErrTooLarge) {
				t.Fatalf("got %v", err)
			}
		})
	}
}

func TestMarshalRefusesWhatThePeerWouldRefuse(t *testing.T) {
	testkit.Start(t)
	many := make([]frame.Call, MaxCalls)
	for i := range many {
		many[i] = frame.Call{ID: tensorA, Params: map[string]string{"k": strings.Repeat("v", 1100)}}
	}
	for name, tc := range map[string]struct {
		frame frame.Frame
		want  error
	}{
		"model not UTF-8":       {frame.Frame{Calls: []frame.Call{{ID: tensorA, Model: "\xff"}}}, ErrMalformed},
		"port not UTF-8":        {frame.Frame{Dones: []frame.Done{{Call: tensorA, Outputs: []frame.Binding{{Port: "\xff"}}}}}, ErrMalformed},
		"metadata not UTF-8":    {frame.Frame{Descs: []frame.Desc{{Tensor: tensorA, Metadata: map[string]string{"k": "\xff"}}}}, ErrMalformed},
		"too many bindings":     {frame.Frame{Calls: []frame.Call{{ID: tensorA, Inputs: make([]frame.Binding, MaxCalls+1)}}}, ErrTooLarge},
		"too many control data": {frame.Frame{Calls: many}, ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Message{Frame: tc.frame}
			m.Frame.Chunk = frame.Chunk{Tensor: tensorA, Data: [][]byte{make([]byte, 5000)}}
			if data, err := (Codec{}).Marshal(m); !errors.Is(err, tc.want) || data != nil {
				t.Fatalf("got %v, %v", data, err)
			}
		})
	}
}

// A field that somebody adds to a message must not get lost on its way.
func TestEveryFieldOfEveryMessageIsKept(t *testing.T) {
	testkit.Start(t)
	b := full((*pb.Frame)(nil).ProtoReflect().Descriptor())
	d := decode(t, b)
	if d.err != nil {
		t.Fatal(d.err)
	}
	d.frame.Chunk.Data = [][]byte{d.payload}
	var want, back pb.Frame
	if err := errors.Join(proto.Unmarshal(b, &want), proto.Unmarshal(encode(t, &d.frame), &back)); err != nil {
		t.Fatal(err)
	}
	for what, got := range map[string]*pb.Frame{"read and written": &back, "read, by toProto": toProto(&d.frame)} {
		if diff := cmp.Diff(&want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%s: %s", what, diff)
		}
	}
}

// full returns a message in which every field, and every field of the messages in it, is set.
func full(m protoreflect.MessageDescriptor) (b []byte) {
	for i := range m.Fields().Len() {
		switch f := m.Fields().Get(i); f.Kind() {
		case protoreflect.MessageKind: // or an entry of a map
			b = protowire.AppendBytes(protowire.AppendTag(b, f.Number(), protowire.BytesType), full(f.Message()))
		case protoreflect.BytesKind, protoreflect.StringKind:
			v := bytes.Repeat([]byte("X"), len(tensor.ID{}))
			if f.Name() == "lane_token" {
				v = bytes.Repeat([]byte("X"), len(frame.LaneToken{}))
			}
			b = protowire.AppendBytes(protowire.AppendTag(b, f.Number(), protowire.BytesType), v)
		case protoreflect.Fixed32Kind:
			b = protowire.AppendFixed32(protowire.AppendTag(b, f.Number(), protowire.Fixed32Type), 1)
		default:
			b = protowire.AppendVarint(protowire.AppendTag(b, f.Number(), protowire.VarintType), 1)
		}
	}
	return b
}

func TestAReasonIsOneOrNone(t *testing.T) {
	testkit.Start(t)
	long := reason.Reason(strings.Repeat("X", reason.Bytes+1))
	for given, want := range map[reason.Reason]reason.Reason{"": "", "STORE_FULL": "STORE_FULL", "OF_A_NEWER_PEER_2": "OF_A_NEWER_PEER_2", "a text": "", "A-B": "", long[1:]: long[1:], long: ""} {
		sent := encode(t, &frame.Frame{Failures: []frame.Failure{{Tensor: tensorA, Reason: given}}})
		came, err := proto.Marshal(&pb.Frame{Failures: []*pb.Failure{{TensorId: tensorA[:], Reason: string(given)}}})
		if err != nil {
			t.Fatal(err)
		}
		for what, b := range map[string][]byte{"sent": sent, "read": came} {
			if d := decode(t, b); d.err != nil || d.frame.Failures[0].Reason != want {
				t.Fatalf("%q, %s, became %q: %v", given, what, d.frame.Failures[0].Reason, d.err)
			}
		}
	}
}

func TestTextForPeopleIsMadeToFit(t *testing.T) {
	testkit.Start(t)
	long := strings.Repeat("é", frame.TextBytes) // two bytes each
	for name, text := range map[string]string{"long": long, "long and odd": "x" + long, "no text": "a\xff\xfeb"} {
		t.Run(name, func(t *testing.T) {
			b := encode(t, &frame.Frame{Failures: []frame.Failure{{Tensor: tensorA, Message: text}}})
			d := decode(t, b)
			if d.err != nil {
				t.Fatal(d.err)
			}
			got := d.frame.Failures[0].Message
			if len(got) > frame.TextBytes || len(got) < min(len(text), frame.TextBytes)-utf8.UTFMax || strings.ContainsRune(got, utf8.RuneError) {
				t.Fatalf("%d bytes became %d", len(text), len(got))
			}
		})
	}
}

func TestAPayloadIsCopiedOnTheWayOutAndSharedOnTheWayIn(t *testing.T) {
	testkit.Start(t)
	payload := bytes.Repeat([]byte("x"), 3<<10)
	m := &Message{Frame: frame.Frame{Chunk: frame.Chunk{Tensor: tensorA, Data: [][]byte{payload}}}}
	data, err := Codec{}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	clear(payload)
	var in Message
	in.unmarshal(data)
	whole := data[0].ReadOnlyData()
	if got := in.Frame.Chunk.Data[0]; len(data) != 1 || &got[0] != &whole[len(whole)-len(got)] || got[0] != 'x' {
		t.Fatal("not one buffer that both sides share")
	}
	data.Free()
	in.Free()
}

func TestViewsOfAnySizeKeepTheirPlace(t *testing.T) {
	testkit.Start(t)
	f := frame.Frame{Chunk: frame.Chunk{Tensor: tensorA, Index: 9, Sum: 5}}
	for i, n := range []int{3, 5000, 1, 0, 1024, 1025, 2, 4000, 4000, 1, 1} {
		f.Chunk.Data = append(f.Chunk.Data, bytes.Repeat([]byte{byte(i + 1)}, n))
	}
	b := encode(t, &f)
	want, err := proto.Marshal(toProto(&f))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Fatal("the bytes are not those of the stock codec")
	}
}

func TestUnmarshalFreesWhatTheMessageStillHolds(t *testing.T) {
	testkit.Start(t)
	frame := frame.Frame{Chunk: frame.Chunk{Tensor: tensorA, Data: [][]byte{bytes.Repeat([]byte("x"), 5000)}}}
	b := encode(t, &frame)
	l := &ledger{t: t}
	var m Message
	for range 3 {
		data := l.split(b, 250)
		m.unmarshal(data)
		data.Free()
	}
	if l.in*3 != l.made*2 {
		t.Fatalf("%d of %d buffers released, want two thirds", l.in, l.made)
	}
	data := l.split([]byte{0xff})
	m.unmarshal(data)
	data.Free()
	if m.Err == nil || !m.Frame.Empty() || l.in != l.made {
		t.Fatalf("error %v, empty %v, %d of %d released", m.Err, m.Frame.Empty(), l.in, l.made)
	}
	if m.unmarshal(nil); m.Err != nil {
		t.Fatalf("the error of the frame before is still there: %v", m.Err)
	}
}

// hotFrame is what the middle of a large tensor looks like in both directions.
func hotFrame(payload []byte) frame.Frame {
	return frame.Frame{
		Credits: []frame.Credit{{Tensor: tensorB, Limit: 77}},
		Acks:    []frame.Ack{{Tensor: tensorB, Below: 60}},
		Chunk:   frame.Chunk{Tensor: tensorA, Index: 12, Sum: 0x12345678, Data: [][]byte{payload}},
	}
}

// http2Views cuts data as gRPC's transport does, into pooled buffers of 16 KiB.
func http2Views(dst, data mem.BufferSlice, pool mem.BufferPool) mem.BufferSlice {
	const frame = 16 << 10
	var buf *[]byte
	used := 0
	for _, b := range data {
		for rest := b.ReadOnlyData(); len(rest) > 0; {
			if buf == nil {
				buf, used = pool.Get(frame), 0
			}
			n := copy((*buf)[used:], rest)
			used += n
			rest = rest[n:]
			if used == frame {
				dst = append(dst, mem.NewBuffer(buf, pool))
				buf = nil
			}
		}
	}
	if buf != nil {
		*buf = (*buf)[:used]
		dst = append(dst, mem.NewBuffer(buf, pool))
	}
	return dst
}

func TestAChunkFrameAllocatesNothing(t *testing.T) {
	testkit.Start(t)
	if raceEnabled {
		t.Skip("under the race detector sync.Pool drops items at random")
	}
	pool := mem.NewTieredBufferPool(16 << 10)
	out := &Message{Frame: hotFrame(make([]byte, 1<<20)), Outgoing: Outgoing{Unread: new(account)}}
	in := new(Message)
	var views mem.BufferSlice
	round := func() {
		data, err := Codec{}.Marshal(out)
		if err != nil {
			t.Fatal(err)
		}
		views = http2Views(views[:0], data, pool)
		data.Free()
		if err := (Codec{}).Unmarshal(views, in); err != nil || in.Err != nil {
			t.Fatal(err, in.Err)
		}
		views.Free()
		if in.Frame.Chunk.Len() != 1<<20 || len(in.Frame.Acks) != 1 || len(in.Frame.Credits) != 1 {
			t.Fatal("not the frame that was sent")
		}
		in.Free()
	}
	round()
	if n := testing.AllocsPerRun(200, round); n != 0 {
		t.Fatalf("a frame of 1 MiB with a credit and an ack costs %v allocations", n)
	}
}

func BenchmarkMarshal(b *testing.B) {
	for name, size := range map[string]int{"chunk=1KiB": 1 << 10, "chunk=1MiB": 1 << 20} {
		b.Run(name, func(b *testing.B) {
			m := &Message{Frame: hotFrame(make([]byte, size))}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				data, err := Codec{}.Marshal(m)
				if err != nil {
					b.Fatal(err)
				}
				data.Free()
			}
		})
	}
}

func BenchmarkUnmarshal(b *testing.B) {
	for name, size := range map[string]int{"chunk=1KiB": 1 << 10, "chunk=1MiB": 1 << 20} {
		f := hotFrame(make([]byte, size))
		wire, err := proto.Marshal(toProto(&f))
		if err != nil {
			b.Fatal(err)
		}
		views := http2Views(nil, mem.BufferSlice{mem.SliceBuffer(wire)}, mem.DefaultBufferPool())
		b.Run(name, func(b *testing.B) {
			m := new(Message)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if err := (Codec{}).Unmarshal(views, m); err != nil || m.Err != nil {
					b.Fatal(err, m.Err)
				}
				m.Free()
			}
		})
		b.Run(name+"/codec=stock", func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if err := stock.Unmarshal(views, new(pb.Frame)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// echoServer sends every frame back as the fast codec reads and writes it.
type echoServer struct {
	pb.UnimplementedTensorServiceServer
}

func (echoServer) StreamTensors(s grpc.BidiStreamingServer[pb.Frame, pb.Frame]) error {
	var in Message
	for {
		if err := s.RecvMsg(&in); err != nil {
			return err // io.EOF when the client is done
		}
		if in.Err != nil {
			return in.Err
		}
		if err := s.SendMsg(&Message{Frame: in.Frame}); err != nil {
			return err
		}
	}
}

// connect serves echoes on a real socket and dials it.
func connect(t *testing.T, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.ForceServerCodecV2(Codec{}))
	pb.RegisterTensorServiceServer(server, echoServer{})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends with Stop
	opts = append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))
	conn, err := grpc.NewClient(listener.Addr().String(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return conn
}

func TestAStockPeerReadsAndWritesTheSameFramesOverASocket(t *testing.T) {
	testkit.Start(t)
	conn := connect(t)
	s, err := pb.NewTensorServiceClient(conn).StreamTensors(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{0, 1, 1024, 1025, 16383, 16384, 16385, 1 << 20} {
		f := hotFrame(bytes.Repeat([]byte{byte(n)}, n))
		f.Calls = []frame.Call{{ID: tensorA, Model: "echo"}}
		want := toProto(&f)
		if err := s.Send(want); err != nil {
			t.Fatal(err)
		}
		got, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(got, want) {
			t.Fatalf("a chunk of %d bytes came back different", n)
		}
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
}
