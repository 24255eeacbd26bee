package session

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// pipe is one end of a connection in memory. Frames go through the real codec, so
// that whatever was lent is let go of the way grpc does.
type pipe struct {
	out, in chan []byte
	closed  chan struct{} // of both ends
	once    *sync.Once

	// fault, if set, is asked before message n is sent, in steps: before and after
	// it was encoded. What it returns is what SendMsg returns.
	fault func(n int, encoded bool) error
	// deaf, if set, is what RecvMsg returns instead of message n.
	deaf func(n int) error

	sent, received int
	bytes          atomic.Int64 // sent
}

func newPipe() (a, b *pipe) {
	there, back := make(chan []byte, 16), make(chan []byte, 16)
	closed, once := make(chan struct{}), new(sync.Once)
	return &pipe{out: there, in: back, closed: closed, once: once}, &pipe{out: back, in: there, closed: closed, once: once}
}

func (p *pipe) close() { p.once.Do(func() { close(p.closed) }) }

var errCut = errors.New("connection lost")

func (p *pipe) Context() context.Context { return context.Background() }

func (p *pipe) SendMsg(m any) error {
	n := p.sent
	p.sent++
	if p.fault != nil {
		if err := p.fault(n, false); err != nil {
			return err
		}
	}
	data, err := wire.Codec{}.Marshal(m)
	if err != nil {
		return err
	}
	b := data.Materialize()
	data.Free()
	p.bytes.Add(int64(len(b)))
	if p.fault != nil {
		if err := p.fault(n, true); err != nil {
			return err
		}
	}
	select {
	case p.out <- b:
		return nil
	case <-p.closed:
		return errCut
	}
}

func (p *pipe) RecvMsg(m any) error {
	if p.deaf != nil {
		if err := p.deaf(p.received); err != nil {
			return err
		}
	}
	p.received++
	select {
	case b, ok := <-p.in:
		if !ok {
			return io.EOF
		}
		return wire.Codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, m)
	case <-p.closed:
		return errCut
	}
}

// memory is lent or offered, and let go once.
type memory struct {
	t    testing.TB
	data []byte
	out  atomic.Int32 // 1 while it is offered
}

func (m *memory) release() {
	if m.out.Add(-1) != 0 {
		m.t.Error("released more than once")
	}
}

// side is a session with a holder: a server that echoes, or a client.
type side struct {
	t      testing.TB
	sess   *Session
	pipe   *pipe
	lost   <-chan error // the pipe was
	server bool
	// hold keeps the server from answering.
	hold bool
	// chunk is the size of a call's chunks.
	chunk uint32
	// ready, if set, is told that a call can begin.
	ready func()

	// Guarded by the session's lock.
	lent    map[tensor.ID][]byte
	offered []*memory
	closed  map[tensor.ID]int
	results map[tensor.ID][]byte // by call
	code    frame.Code
	chunks  int
	opened  bool
}

func newSide(t testing.TB, p *pipe, cfg stream.Config) *side {
	s := &side{t: t, pipe: p, server: cfg.Server, chunk: 1000, lent: map[tensor.ID][]byte{}, closed: map[tensor.ID]int{}, results: map[tensor.ID][]byte{}}
	s.sess = New(cfg, s)
	return s
}

// start has the pipe carry the session.
func (s *side) start() { s.lost = s.sess.Carry(wire.NewConn(s.pipe, nil)) }

func (s *side) offer(m *stream.Machine, now stream.Instant, id tensor.ID, data []byte) {
	mem := &memory{t: s.t, data: data}
	mem.out.Store(1)
	if err := m.Offer(now, id, 0, data, mem.release); err != nil {
		mem.out.Store(0)
		return
	}
	s.offered = append(s.offered, mem)
}

func (*side) Received(*stream.Machine) {}

func (s *side) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	switch e.Kind {
	case stream.EventOpened:
		s.opened = true
	case stream.EventReady:
		if s.ready != nil {
			s.ready()
		}
	case stream.EventTensor:
		s.lent[e.Tensor] = make([]byte, e.Desc.SizeBytes)
		if err := m.Lend(now, e.Tensor, s.lent[e.Tensor], nil); err != nil {
			s.t.Errorf("lend: %v", err)
		}
	case stream.EventChunk:
		s.chunks++
	case stream.EventWhole:
		if !s.server {
			s.results[e.Call] = s.lent[e.Tensor]
		} else if !s.hold {
			s.answer(m, now, e.Call, e.Desc.Desc, e.Desc.ChunkBytes, s.lent[e.Tensor])
		}
	case stream.EventClosed:
		s.closed[e.Call]++
		s.code = e.Code
	}
}

// answer sends data back as the only result of a call.
func (s *side) answer(m *stream.Machine, now stream.Instant, call tensor.ID, d tensor.Desc, chunk uint32, data []byte) {
	id := tensor.NewID()
	if err := m.OpenTensor(now, frame.Desc{Tensor: id, Desc: d, ChunkBytes: chunk, Call: call, Port: "y", RetainChunks: 4}); err != nil {
		return
	}
	s.offer(m, now, id, bytes.Clone(data))
	m.Finish(frame.Done{Call: call, Outputs: []frame.Binding{{Port: "y", Tensor: id}}})
}

// call opens a call of one input.
func (s *side) call(data []byte) tensor.ID {
	id, x := tensor.NewID(), tensor.NewID()
	s.sess.DoSend(func(m *stream.Machine, now stream.Instant) {
		err := m.OpenCall(now, frame.Call{ID: id, Model: "echo", Inputs: []frame.Binding{{Port: "x", Tensor: x}}})
		if err != nil {
			return
		}
		d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(data))}}
		if err := m.OpenTensor(now, frame.Desc{Tensor: x, Desc: d, ChunkBytes: s.chunk, Call: id, Port: "x"}); err != nil {
			s.t.Errorf("open: %v", err)
		}
		s.offer(m, now, x, data)
	})
	return id
}

func (s *side) ended(call tensor.ID) (ended bool) {
	s.sess.Do(func(*stream.Machine, stream.Instant) { ended = s.closed[call] > 0 })
	return ended
}

func (s *side) idle() (idle bool) {
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) { idle = m.Status().Calls == 0 })
	return idle
}

// over ends the session as its edges do, and looks whether everything is home.
func (s *side) over(cause error) {
	s.t.Helper()
	s.sess.Stop(cause)
	if s.pipe != nil {
		s.pipe.close()
	}
	s.sess.Wait(frame.Unavailable, "over")
	require.True(s.t, s.idle(), "calls left in the machine")
	for id, n := range s.closed {
		require.Equal(s.t, 1, n, "call %s closed", id)
	}
	testkit.Eventually(s.t, func() bool { // a caller of DoSend may be on its way out
		return !slices.ContainsFunc(s.offered, func(m *memory) bool { return m.out.Load() != 0 })
	}, "what was lent")
}

// pair opens a session between a client and an echoing server.
func pair(t testing.TB, change func(client, server *side)) (client, server *side) {
	return pairIn(t, nil, change)
}

// pairIn is pair with a client that names codecs.
func pairIn(t testing.TB, codecs []codec.Codec, change func(client, server *side)) (client, server *side) {
	a, b := newPipe()
	client = newSide(t, a, stream.Config{
		Session: tensor.NewID(), Codecs: codecs, Limits: stream.Limits{SessionIdle: stream.Instant(365 * 24 * time.Hour)},
	})
	server = newSide(t, b, stream.Config{Server: true, Codecs: codec.All()})
	if change != nil {
		change(client, server)
	}
	for _, s := range []*side{client, server} {
		s.start()
		go func() { // as the edges do
			select {
			case err := <-s.lost:
				s.sess.Stop(err)
			case <-s.sess.Stopped():
			}
			s.pipe.close()
		}()
	}
	return client, server
}

func TestASessionEchoesInMemory(t *testing.T) {
	testkit.Start(t)
	client, server := pair(t, nil)
	for _, n := range []int{0, 1, 999, 1000, 1001, 20_000, 3 << 20} {
		data := testkit.Bytes(n, uint64(n))
		call := client.call(data)
		testkit.Eventually(t, func() bool { return client.ended(call) }, "the call's end")
		var code frame.Code
		var result []byte
		client.sess.Do(func(*stream.Machine, stream.Instant) { code, result = client.code, client.results[call] })
		require.Equal(t, frame.OK, code)
		require.Equal(t, string(data), string(result))
	}
	client.over(io.EOF)
	server.over(io.EOF)
	require.Equal(t, io.EOF, client.sess.Cause())
}

// compressible is n bytes, the second half of which says nothing.
func compressible(n int) []byte {
	data := testkit.Bytes(n, uint64(n))
	for i := range data {
		if i/100%2 == 1 {
			data[i] = 0
		}
	}
	return data
}

func TestASessionEchoesInTheCodecThatBothKnow(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		codecs []codec.Codec
		data   func(n int) []byte
		most   float64 // bytes sent for each of the data
	}{
		"lz4":                       {codec.All(), compressible, 0.6},
		"lz4, nothing to be gained": {codec.All(), func(n int) []byte { return testkit.Bytes(n, 7) }, 1.01},
		"none":                      {nil, compressible, 1.01},
		"one of the future":         {[]codec.Codec{77}, compressible, 1.01},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			client, server := pairIn(t, tc.codecs, func(client, _ *side) { client.chunk = 16_000 })
			for _, n := range []int{0, 1, 511, 512, 15_999, 16_000, 16_001, 200_000, 1 << 20} {
				data := tc.data(n)
				call := client.call(data)
				testkit.Eventually(t, func() bool { return client.ended(call) }, "the call's end")
				var code frame.Code
				var result []byte
				client.sess.Do(func(*stream.Machine, stream.Instant) { code, result = client.code, client.results[call] })
				require.Equal(t, frame.OK, code)
				require.True(t, bytes.Equal(data, result), "%d bytes", n)
			}
			client.over(io.EOF)
			server.over(io.EOF)
			const total = 512 + 511 + 1 + 3*16_000 + 200_000 + 1<<20
			for _, s := range []*side{client, server} {
				require.LessOrEqual(t, float64(s.pipe.bytes.Load()), tc.most*total+10_000)
				require.EqualValues(t, total, s.sess.m.Status().Stats.BytesOut, "counted before the codec")
			}
		})
	}
}

// TestWhateverFailsWhatWasLentComesHomeOnce lets each side's n-th message fail,
// before and after the codec took it over, and each side's n-th read.
func TestWhateverFailsWhatWasLentComesHomeOnce(t *testing.T) {
	testkit.Start(t)
	faults := map[string]func(p *pipe, n int){
		"send, not encoded": func(p *pipe, at int) {
			p.fault = func(n int, encoded bool) error { return errIf(n == at && !encoded) }
		},
		"send, encoded": func(p *pipe, at int) {
			p.fault = func(n int, encoded bool) error { return errIf(n == at && encoded) }
		},
		"receive": func(p *pipe, at int) { p.deaf = func(n int) error { return errIf(n == at) } },
	}
	for name, set := range faults {
		for _, k := range []struct {
			who   string
			codec codec.Codec
		}{{"client", codec.None}, {"server", codec.None}, {"client", codec.LZ4}, {"server", codec.LZ4}} {
			who := k.who
			t.Run(fmt.Sprintf("%s/%s/%v", name, who, k.codec), func(t *testing.T) {
				testkit.Start(t)
				for at := range 30 {
					client, server := pairIn(t, []codec.Codec{k.codec}, func(client, server *side) {
						if k.codec == codec.LZ4 {
							client.chunk = 3000 // more than grpc copies, encoded too
						}
						if who == "client" {
							set(client.pipe, at)
						} else {
							set(server.pipe, at)
						}
					})
					for range 3 {
						client.call(compressible(7500))
					}
					if who == "client" {
						waitFor(t, client.sess)
						require.ErrorIs(t, client.sess.Cause(), errCut)
					} else {
						waitFor(t, server.sess)
						require.ErrorIs(t, server.sess.Cause(), errCut)
					}
					client.over(errCut)
					server.over(errCut)
					require.Len(t, client.closed, 3, "every call of the client ends")
				}
			})
		}
	}
}

func errIf(bad bool) error {
	if bad {
		return errCut
	}
	return nil
}

// waitFor waits for a session's end by itself; one that is done with its calls
// before its fault is struck now.
func waitFor(t *testing.T, s *Session) {
	t.Helper()
	testkit.Eventually(t, func() bool {
		select {
		case <-s.Stopped():
			return true
		default:
		}
		idle := false
		s.Do(func(m *stream.Machine, _ stream.Instant) {
			idle = m.Status().Open && m.Status().Calls == 0 && m.Status().Stats.CallsOpened == 3
		})
		if idle {
			s.Stop(errCut)
		}
		return idle
	}, "the fault")
}

// stall returns a fault that blocks from message at on, until the pipe is closed.
func stall(p *pipe, at int) {
	p.fault = func(n int, encoded bool) error {
		if n < at || encoded {
			return nil
		}
		<-p.closed
		return errCut
	}
}

func TestAPeerThatDoesNotReadEndsTheSession(t *testing.T) {
	testkit.Start(t)
	for name, at := range map[string]int{"from the first call on": 1, "amid chunks": 3} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				client, server := pair(t, func(client, _ *side) { stall(client.pipe, at) })
				synctest.Wait() // the hellos
				go client.call(make([]byte, 7500))
				<-client.sess.Stopped()
				var se *frame.Error
				require.ErrorAs(t, client.sess.Cause(), &se)
				require.Equal(t, frame.DeadlineExceeded, se.Code)
				require.Contains(t, se.Text, "not read for 30 s")
				require.LessOrEqual(t, time.Since(begin), 2*writeStall+time.Second)
				client.over(nil)
				server.over(nil)
			})
		})
	}
}

func TestAStalledWriterIsSeenWithoutAnyCallOpen(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := pair(t, func(_, server *side) {
			server.hold = true
			stall(server.pipe, 2) // the hello and the first credit go
		})
		synctest.Wait()
		call := client.call(make([]byte, 3<<20))
		synctest.Wait()
		server.sess.Do(func(m *stream.Machine, now stream.Instant) {
			m.Finish(frame.Done{Call: call, Code: frame.Aborted, Message: "no more"}) // what stalls
		})
		synctest.Wait()
		require.True(t, server.idle())
		<-server.sess.Stopped()
		require.ErrorContains(t, server.sess.Cause(), "not read for 30 s")
		client.over(nil)
		server.over(nil)
	})
}

func TestTheReaderNeverWaitsOnTheWriter(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := pair(t, func(_, server *side) { stall(server.pipe, 1) }) // only the hello goes
		synctest.Wait()
		for range 5 {
			client.call(make([]byte, 100_000)) // on allowance
		}
		synctest.Wait()
		chunks := 0
		server.sess.Do(func(*stream.Machine, stream.Instant) { chunks = server.chunks })
		require.Equal(t, 500, chunks, "chunks read while the writer is stuck")
		client.over(nil)
		server.over(nil)
	})
}

func TestAServerThatDoesNotEvenReadTheHelloIsGivenUp(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		a, _ := newPipe()
		client := newSide(t, a, stream.Config{Session: tensor.NewID()})
		stall(a, 0)
		client.start()
		<-client.sess.Stopped()
		require.ErrorContains(t, client.sess.Cause(), "no hello for 10 s")
		client.over(nil)
	})
}

func TestAClientThatSaysNothingIsSentAway(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		_, b := newPipe()
		server := newSide(t, b, stream.Config{Server: true})
		server.start()
		<-server.sess.Stopped()
		require.ErrorContains(t, server.sess.Cause(), "no hello")
		require.Equal(t, 10*time.Second, time.Since(begin))
		server.over(nil)
	})
}

func TestAnIdleSessionIsSentAwayAndABusyOneIsNot(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := pair(t, nil)
		for range 5 {
			time.Sleep(9 * time.Minute)
			call := client.call(make([]byte, 10))
			synctest.Wait()
			require.True(t, client.ended(call))
		}
		begin := time.Now()
		<-server.sess.Stopped()
		require.ErrorContains(t, server.sess.Cause(), "no call for 600 s")
		require.InDelta(t, 10*time.Minute, time.Since(begin), float64(2*time.Second))
		client.over(nil)
		server.over(nil)
	})
}

func TestAnAcknowledgementThatNobodyWaitsForGoesAlone(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := pair(t, nil)
		client.call(make([]byte, 10))
		synctest.Wait()
		server.sess.Do(func(m *stream.Machine, _ stream.Instant) {
			require.False(t, m.Status().Calls == 0, "its result is not acknowledged yet")
		})
		time.Sleep(30 * time.Millisecond)
		synctest.Wait()
		require.True(t, server.idle())
		client.over(nil)
		server.over(nil)
	})
}

func TestDrainWaitsForTheLastFrameToGo(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		client, server := pair(t, func(_, server *side) {
			server.hold = true
			server.pipe.fault = func(n int, encoded bool) error {
				if n == 2 && !encoded { // after hello and drain
					<-release
				}
				return nil
			}
		})
		call := client.call(make([]byte, 10))
		synctest.Wait()
		drained := make(chan error, 1)
		go func() { drained <- server.sess.Drain(context.Background(), "bye") }()
		synctest.Wait()
		client.sess.Do(func(m *stream.Machine, _ stream.Instant) { require.True(t, m.Status().Draining) })
		server.sess.Do(func(m *stream.Machine, now stream.Instant) {
			m.Finish(frame.Done{Call: call, Code: frame.Aborted, Message: "no more"})
		})
		time.Sleep(time.Second)
		synctest.Wait()
		require.Empty(t, drained, "done is still on its way")
		close(release)
		require.NoError(t, <-drained)
		synctest.Wait()
		require.True(t, client.ended(call))
		client.over(nil)
		server.over(nil)
	})
}

func TestDrainEndsWithItsContextOrTheSession(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := pair(t, func(_, server *side) { server.hold = true })
		client.call(make([]byte, 10))
		synctest.Wait()
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, fmt.Errorf("enough"))
		defer cancel()
		require.ErrorContains(t, server.sess.Drain(ctx, "bye"), "enough")
		server.sess.Stop(errCut)
		require.NoError(t, server.sess.Drain(t.Context(), "bye"))
		client.over(nil)
		server.over(nil)
	})
}

func TestThePeersEndInOrderEndsTheSessionAfterItsLastAnswer(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := pair(t, nil)
		call := client.call(make([]byte, 10))
		synctest.Wait()
		close(client.pipe.out) // nothing more comes from the client
		synctest.Wait()
		<-server.sess.Stopped()
		require.Equal(t, ErrPeerClosed, server.sess.Cause())
		require.True(t, client.ended(call))
		server.sess.Wait(frame.Unavailable, "over")
		client.over(nil)
	})
}

func TestASessionMayBeAskedBeforeItStartsAndAfterItsEnd(t *testing.T) {
	testkit.Start(t)
	a, b := newPipe()
	s := newSide(t, a, stream.Config{Session: tensor.NewID()})
	asked := 0
	ask := func(m *stream.Machine, _ stream.Instant) { asked++ }
	s.sess.Do(ask)
	s.start()
	s.sess.Do(ask)
	s.over(errCut)
	s.sess.Stop(io.EOF)
	require.Equal(t, errCut, s.sess.Cause(), "the first cause stands")
	s.sess.Do(ask)
	s.sess.DoSend(ask)
	require.Equal(t, 4, asked)
	b.close()
}

func TestBytesThatAreNoFrameEndTheSessionWithTheRightCode(t *testing.T) {
	testkit.Start(t)
	many := bytes.Repeat([]byte{4<<3 | 2, 0}, 300) // 300 credits
	for code, b := range map[frame.Code][]byte{frame.InvalidArgument: []byte("\xff"), frame.ResourceExhausted: many} {
		a, peer := newPipe()
		s := newSide(t, a, stream.Config{Server: true})
		s.start()
		peer.out <- b
		<-s.sess.Stopped()
		var se *frame.Error
		require.ErrorAs(t, s.sess.Cause(), &se)
		require.Equal(t, code, se.Code, se.Text)
		s.over(nil)
	}
}

// 10 000 sessions may be open and idle: what each keeps counts.
func TestAnIdleSessionIsOneGoroutineAndAFewKiB(t *testing.T) {
	testkit.Start(t)
	const n, most = 500, 16 << 10 // about 7 KiB, 12 under -race
	measure := func() (bytes, goroutines int) {
		runtime.GC() // twice: the first shrinks stacks
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc + m.StackInuse), runtime.NumGoroutine()
	}
	before, routines := measure()
	var sides []*side
	var clients []*pipe
	for range n {
		a, b := newPipe()
		s := newSide(t, b, stream.Config{Server: true})
		s.start()
		var hello wire.Message
		hello.Frame.Hello = &frame.Hello{Version: frame.Version, Session: tensor.NewID(), Checksum: 1}
		require.NoError(t, a.SendMsg(&hello))
		<-a.in // the server's
		sides, clients = append(sides, s), append(clients, a)
	}
	testkit.Eventually(t, func() bool { return runtime.NumGoroutine() <= routines+n }, "writers that have nothing to write")
	after, now := measure()
	require.LessOrEqual(t, now-routines, n, "goroutines")
	require.Less(t, (after-before)/n, most, "bytes")
	for i, s := range sides {
		clients[i].close()
		s.over(io.EOF)
	}
}
