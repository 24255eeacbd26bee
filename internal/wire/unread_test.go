package wire

import (
	"bytes"
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// account counts what is unread.
type account struct {
	mu              sync.Mutex // guards all below
	messages, looks int
	bytes           int64
}

func (a *account) Queue(n int64) (look int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.messages++
	a.looks++
	a.bytes += n
	return a.looks
}

func (a *account) Unqueue(n int64, look int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if look == 0 {
		panic("not what Queue returned")
	}
	a.messages--
	a.bytes -= n
}

// counts returns what is counted now.
func (a *account) counts() (messages int, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.messages, a.bytes
}

// send marshals v for a.
func (a *account) send(t testing.TB, v any) mem.BufferSlice {
	t.Helper()
	b, err := Codec{}.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestWhateverIsSentIsChargedUntilGRPCLetsGo(t *testing.T) {
	testkit.Start(t)
	list := func(n int) proto.Message { return &pb.ListTensorsResponse{NextPageToken: strings.Repeat("x", n)} }
	for name, tc := range map[string]struct {
		message any
		bytes   int64
	}{
		"a control frame": {frame.Frame{Failures: []frame.Failure{{Tensor: tensorA}}}, MediumBytes},
		"a chunk":         {hotFrame(make([]byte, 1<<20)), MediumBytes + 1<<20},
		"a small answer":  {list(10), MediumBytes},
		"a large answer":  {list(200 << 10), MediumBytes + 256<<10},
		"an empty answer": {list(0), MediumBytes},
	} {
		t.Run(name, func(t *testing.T) {
			a := new(account)
			var v any = &Answer{Message: tc.message, Outgoing: Outgoing{Unread: a}}
			want, _ := stock.Marshal(tc.message)
			if f, ok := tc.message.(frame.Frame); ok {
				v = &Message{Frame: f, Outgoing: Outgoing{Unread: a}}
				want, _ = stock.Marshal(toProto(&f))
			}
			b := a.send(t, v)
			if !bytes.Equal(b.Materialize(), want.Materialize()) {
				t.Error("not what the stock codec makes of it")
			}
			b.Ref()
			b.Free()
			if n, bytes := a.counts(); n != 1 || bytes != tc.bytes {
				t.Errorf("%d bytes are charged for %d messages, want %d", bytes, n, tc.bytes)
			}
			b.Free()
			if n, bytes := a.counts(); n != 0 || bytes != 0 {
				t.Error("it is still counted")
			}
		})
	}
	a := new(account)
	if b, err := (Codec{}).Marshal(&Answer{Message: "no message", Outgoing: Outgoing{Unread: a}}); err == nil || b != nil || a.messages != 0 {
		t.Errorf("got %v, %v", b, err)
	}
}

// forgetting is what a server's stats.Handler does.
type forgetting struct{ cut atomic.Int64 }

func (*forgetting) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (*forgetting) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*forgetting) HandleConn(context.Context, stats.ConnStats)                       {}
func (f *forgetting) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if out, ok := s.(*stats.OutPayload); ok && ctx.Err() != nil {
		f.cut.Add(1)
		out.Payload.(interface{ Forget() }).Forget()
	}
}

// flood sends frames until the RPC has ended.
type flood struct {
	pb.UnimplementedTensorServiceServer
	*account
	sent, released atomic.Int64
}

func (f *flood) Release() { f.released.Add(1) }

func (f *flood) StreamTensors(s grpc.BidiStreamingServer[pb.Frame, pb.Frame]) error {
	c := NewConn(s, f)
	go func() { // ends with the RPC
		for {
			if _, err := c.Recv(); err != nil {
				return
			}
		}
	}()
	payload := bytes.Repeat([]byte{7}, 4000)
	for {
		f.sent.Add(1)
		if err := c.Send(&frame.Frame{Chunk: frame.Chunk{Tensor: tensorA, Data: [][]byte{payload}}}, f); err != nil {
			return nil
		}
	}
}

// Whether gRPC forgets a frame depends on the moment of its RPC's end: here it forgets some.
func TestNothingOfRPCsThatAreCancelledStaysCharged(t *testing.T) {
	testkit.Start(t)
	rpcs := 500
	if testing.Short() {
		rpcs = 100
	}
	there, handler := &flood{account: new(account)}, new(forgetting)
	server := grpc.NewServer(grpc.ForceServerCodecV2(Codec{}), grpc.StatsHandler(handler))
	pb.RegisterTensorServiceServer(server, there)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }() // ends with Stop
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(Codec{})))
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	slots := make(chan struct{}, 4)
	for i := range rpcs {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			s, err := pb.NewTensorServiceClient(conn).StreamTensors(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			c := NewConn(s, nil)
			for range i % 8 {
				if _, err := c.Recv(); err != nil {
					t.Error(err)
				}
				c.Free()
			}
		})
	}
	work.Wait()
	testkit.Eventually(t, func() bool {
		n, bytes := there.counts()
		return n == 0 && bytes == 0 && there.released.Load() == there.sent.Load()
	}, "the end of all charges")
	t.Logf("%d frames; %d were sent when the RPC was over", there.sent.Load(), handler.cut.Load())
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	server.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// stopped is a stream that fails to send.
type stopped struct{ Stream }

func (stopped) SendMsg(any) error { return net.ErrClosed }

func TestWhatIsSentIsHeldNoLongerThanSend(t *testing.T) {
	testkit.Start(t)
	for name, s := range map[string]Stream{"a stream": &marshalled{}, "a stream that fails": stopped{}} {
		held := new(flood)
		err := NewConn(s, nil).Send(&frame.Frame{Chunk: frame.Chunk{Tensor: tensorA, Data: [][]byte{make([]byte, 5000)}}}, held)
		if failed := name != "a stream"; (err != nil) != failed || held.released.Load() != 1 {
			t.Errorf("%s: %v; released %d times", name, err, held.released.Load())
		}
	}
}

// marshalled is a stream that forgets what it is given.
type marshalled struct{ Stream }

func (*marshalled) SendMsg(m any) error {
	_, err := Codec{}.Marshal(m)
	return err
}
