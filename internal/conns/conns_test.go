package conns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestOneConnectionTooManyIsToldSoAndTheOthersAreServed(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		var hold atomic.Bool
		released := make(chan struct{})
		f := serve(t, func(c *Config, _ *fixture) {
			c.Connections = 2
			c.Full = func(conn net.Conn) {
				if hold.Load() {
					<-released
				}
				_, _ = io.WriteString(conn, "full")
			}
		})
		conn := f.client(t)
		require.NoError(t, echo(t, conn, []byte("a")))
		second := f.dial(t)
		f.accepts(t, 2)
		for range 5 {
			require.Equal(t, "full", ends(t, f.dial(t)))
		}
		require.NoError(t, echo(t, conn, []byte("b")), "who is there is served")
		require.Equal(t, 3, f.lines("connections refused: the limit is reached"), "the first, the second and the fourth")
		require.Equal(t, 1, f.lines("limit=2 refused=4"))
		hold.Store(true)
		var told []net.Conn
		for range refusals {
			told = append(told, f.dial(t))
		}
		synctest.Wait()
		require.Empty(t, ends(t, f.dial(t)), "closed, without a byte, while so many are being told")
		close(released)
		for _, c := range told {
			require.Equal(t, "full", ends(t, c))
		}
		synctest.Wait()
		require.Zero(t, f.refusing)
		require.NoError(t, second.Close()) // makes room for one
		f.accepts(t, 1)
		require.NoError(t, echo(t, f.client(t), []byte("c")))
	})
}

// exhausted is a listener of a process without descriptors, at first.
type exhausted struct {
	net.Listener
	left *int
}

func (e exhausted) Accept() (net.Conn, error) {
	if *e.left--; *e.left >= 0 {
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return nil, net.ErrClosed
}

func TestConnectionsThatCannotBeAcceptedAreLogged(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		require.NoError(t, echo(t, f.client(t), []byte("a")), "it serves")
		left := 5
		l := f.Listener(exhausted{nil, &left})
		for range 7 {
			_, err := l.Accept()
			require.Error(t, err)
		}
		require.Equal(t, 3, f.lines("connections cannot be accepted"), "the first, the second and the fourth")
		require.Equal(t, 3, f.lines("too many open files"))
	})
}

func TestAConnectionThatDoesNotSayWhatItIsIsClosed(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		says    string
		refused int64
	}{
		"nothing":                       {"", 0},
		"half of a lane's magic":        {"TFLA", 0},
		"no token":                      {"TFLANE/1", 1},
		"half of a token":               {"TFLANE/1" + strings.Repeat("x", 16), 1},
		"a token and half of its count": {"TFLANE/1" + strings.Repeat("x", 36), 1},
		"half of the preface":           {"PRI * HTTP/2", 0},
	} {
		for _, secure := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", TLS ", secure), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					f := serve(t, secureOr(t, secure))
					began := time.Now()
					c := f.dial(t)
					for i := range tc.says { // a byte at a time, over half of the time
						_, err := c.Write([]byte{tc.says[i]})
						require.NoError(t, err)
						time.Sleep(handshake / 2 / time.Duration(len(tc.says)))
					}
					ends(t, c)
					require.Equal(t, handshake, time.Since(began))
					f.accepts(t, 0)
					require.Equal(t, tc.refused, f.LanesRefused.Load())
					require.Zero(t, f.HandshakesFailed.Load())
					require.NoError(t, echo(t, f.client(t), []byte("a")))
				})
			})
		}
	}
}

func TestAGreetingBeforeTheHandshakeIsAHandshakeThatFails(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, secureOr(t, true))
		s, _ := f.session(t)
		f.tls = nil
		_, how := f.greet(t, s.token[:], 0)
		require.Equal(t, -1, how)
		require.EqualValues(t, 1, f.HandshakesFailed.Load())
		require.Zero(t, f.LanesRefused.Load())
		f.accepts(t, 0)
	})
}

// refusing are credentials that nobody satisfies.
type refusing struct {
	credentials.TransportCredentials
}

func (refusing) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("no such certificate")
}

func TestHandshakesThatFailAreCountedAndDoNotFillTheLog(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(_ *Config, f *fixture) { f.creds = refusing{f.creds} })
		for range 7 {
			require.Empty(t, ends(t, f.dial(t)))
		}
		f.accepts(t, 0)
		require.EqualValues(t, 7, f.HandshakesFailed.Load())
		require.Zero(t, f.LanesRefused.Load())
		require.Equal(t, 3, f.lines("handshake failed"), "the first, the second and the fourth")
		require.Equal(t, 3, f.lines(`reason="no such certificate"`))
	})
}

// pour sends frames until the RPC ends.
func pour(r *Frames) error {
	data := make([]byte, 32<<10)
	for {
		if err := r.Send(&frame.Frame{Chunk: frame.Chunk{Tensor: tensor.ID{1}, Data: [][]byte{data}}}, nil); err != nil {
			return err
		}
	}
}

func TestConnectionsThatNobodyReadsDoNotFillTheLog(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		const idle = 200 * time.Millisecond
		f := serve(t, func(_ *Config, f *fixture) { f.frames = pour })
		done := make(chan struct{})
		defer close(done)
		began := time.Now()
		go func() { // ends with the test
			for tick := time.NewTicker(idle); ; {
				select {
				case <-tick.C:
					f.memory.Look()
				case <-done:
					tick.Stop()
					return
				}
			}
		}()
		reads := f.client(t)
		reading := stream(t, reads)
		read := make(chan error, 1)
		go func() { // ends with the bubble's context
			for {
				if _, err := reading.Recv(); err != nil {
					read <- err
					return
				}
				reading.Free()
				if time.Since(began) > 10*idle {
					read <- nil
					return
				}
				time.Sleep(time.Millisecond)
			}
		}()
		var conns []*grpc.ClientConn
		for range 7 {
			conn := f.client(t)
			conns = append(conns, conn)
			stream(t, conn)
		}
		for _, conn := range conns {
			testkit.Eventually(t, func() bool { return conn.GetState() != connectivity.Ready }, "the end of the connection")
		}
		took := time.Since(began)
		require.GreaterOrEqual(t, took, idle)
		require.LessOrEqual(t, took, 3*idle)
		require.Equal(t, 3, f.lines("connection closed: its peer does not read"), "the first, the second and the fourth")
		require.NoError(t, <-read, "who reads is served")
		require.NoError(t, reads.Close())
	})
}

func TestAConnectionThatIsClosedForItsFramesIsToldAndLogged(t *testing.T) {
	testkit.Start(t)
	for name, encrypted := range map[string]bool{"in clear": false, "over TLS": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, secureOr(t, encrypted))
				c := f.dial(t)
				go func() { // ends with the connection
					_, _ = c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
					for err := error(nil); err == nil; {
						_, err = c.Write(bytes.Repeat([]byte("\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x01"), 100))
					}
				}()
				sent, _ := io.ReadAll(c)
				text := strings.TrimPrefix(inbound.ErrControl.Error(), "inbound: ")
				require.Contains(t, string(sent), "\x00\x00\x00\x0b"+text, "GOAWAY, ENHANCE_YOUR_CALM")
				require.Equal(t, 1, f.lines(text))
			})
		})
	}
}

func TestWhatIsKeptOfAPeersFramesIsCharged(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		kept, next := make(chan *Frames, 1), make(chan struct{})
		f := serve(t, func(_ *Config, f *fixture) {
			f.frames = func(r *Frames) error {
				f, err := r.Recv()
				if err != nil {
					return err
				}
				r.Opened()
				kept <- r
				<-next
				return r.Send(f, nil)
			}
		})
		used := func() int64 { n, _, _ := f.memory.Used(); return n }
		conn := f.client(t)
		s := stream(t, conn)
		x := frame.Chunk{Tensor: tensor.ID{1}, Index: 7, Data: [][]byte{[]byte("some bytes")}}
		require.NoError(t, s.Send(&frame.Frame{Chunk: x}, nil))
		r := <-kept
		before := used()
		require.True(t, r.Take(mib))
		require.InDelta(t, before+inbound.HeapShare*mib, used(), 64<<10)
		require.True(t, r.Take(2*mib))
		require.InDelta(t, before+inbound.HeapShare*2*mib, used(), 64<<10, "it is what is kept in all")
		require.False(t, r.Take(1<<30), "there is no memory for that")
		close(next)
		got, err := s.Recv()
		require.NoError(t, err)
		require.Equal(t, x.Index, got.Chunk.Index)
		require.Equal(t, x.Data, got.Chunk.Data)
		require.NoError(t, conn.Close())
		testkit.Eventually(t, func() bool { return used() == 0 }, "the end of the connection's account")
	})
}

func TestAnswersForWhichThereIsNoMemoryAreNotMade(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(_ *Config, f *fixture) {
			f.unary = func(ctx context.Context, in *wrapperspb.BytesValue) error {
				in.Value = make([]byte, len(in.GetValue())*mib)
				return nil
			}
		})
		conn := f.client(t)
		ask := func(mibs int) error {
			var got wrapperspb.BytesValue
			err := conn.Invoke(t.Context(), "/test.Service/Echo", &wrapperspb.BytesValue{Value: make([]byte, mibs)}, &got, grpc.MaxCallRecvMsgSize(1<<30))
			require.True(t, err != nil || len(got.GetValue()) == mibs*mib)
			return err
		}
		require.NoError(t, ask(1))
		require.ErrorContains(t, ask(64), "no memory for what clients send")
		require.NoError(t, ask(1))
	})
}

func TestTheContextOfARejectedRPCEnds(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		contexts := make(chan context.Context, 1)
		f := serve(t, func(_ *Config, f *fixture) {
			f.reject = func(ctx context.Context, method string) error {
				if method == "/test.Service/Echo" {
					return nil
				}
				contexts <- ctx
				return errors.New("there is no such method")
			}
		})
		conn := f.client(t)
		ctx, cancel := context.WithTimeout(t.Context(), 1000*time.Hour) // nothing else would end it before
		defer cancel()
		began := time.Now()
		for range 100 {
			err := conn.Invoke(ctx, "/test.Service/Nothing", &wrapperspb.BytesValue{}, &wrapperspb.BytesValue{})
			require.ErrorContains(t, err, "there is no such method")
			rejected := <-contexts
			_, timed := rejected.Deadline()
			require.True(t, timed)
			<-rejected.Done()
			require.NoError(t, echo(t, conn, []byte("a")), "the next is served")
		}
		require.Less(t, time.Since(began), time.Hour)
	})
}
