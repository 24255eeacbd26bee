package session

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	wirelane "github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// poisoned is a side whose memory that is given up is overwritten as soon as it is back.
type poisoned struct {
	*side
	mu   sync.Mutex
	gone [][]byte // guarded by mu
}

func (p *poisoned) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	if e.Kind != stream.EventTensor {
		p.side.Event(m, now, e)
		return
	}
	mem := make([]byte, e.Desc.SizeBytes)
	p.lent[e.Tensor] = mem
	if err := m.Lend(now, e.Tensor, mem, func(filled bool) {
		if filled {
			return
		}
		for i := range mem {
			mem[i] = poison
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.gone = append(p.gone, mem)
	}); err != nil {
		p.t.Errorf("lend: %v", err)
	}
}

const poison = 0xdb

// check looks whether memory was written after it came back.
func (p *poisoned) check(t *testing.T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.gone {
		for i := range g {
			if g[i] != poison {
				t.Fatalf("byte %d of %d of memory that was returned has been written", i, len(g))
			}
		}
	}
}

func connected(t *testing.T) (a, b net.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	a, err = net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	b, err = l.Accept()
	require.NoError(t, err)
	return a, b
}

// laneSession makes calls on a session whose lanes come, are replaced and are cut at any
// moment, on both sides.
func laneSession(t *testing.T, seed uint64, calls int) {
	r := rand.New(rand.NewPCG(seed, 7))
	a, b := newPipe()
	limits := stream.Limits{SessionIdle: stream.Instant(365 * 24 * time.Hour), AllowanceBytes: 1, ChunkIdle: stream.Instant(20 * time.Second)}
	cp, sp := &poisoned{side: &side{t: t, pipe: a, chunk: uint32(1000 + r.IntN(60000)), lent: map[tensor.ID][]byte{}, closed: map[tensor.ID]int{}, results: map[tensor.ID][]byte{}}},
		&poisoned{side: &side{t: t, pipe: b, server: true, chunk: 1000, lent: map[tensor.ID][]byte{}, closed: map[tensor.ID]int{}, results: map[tensor.ID][]byte{}}}
	cp.sess = New(stream.Config{Session: tensor.NewID(), Lanes: 1, LanesAtOnce: 1 + r.Uint32N(4), Limits: limits}, cp)
	sp.sess = New(stream.Config{Server: true, Limits: limits}, sp)
	sp.sess.Do(func(m *stream.Machine, _ stream.Instant) { m.OfferLanes(frame.LaneToken{1}, 8, 4) })
	for _, p := range []*poisoned{cp, sp} {
		p.start()
		go func() {
			select {
			case err := <-p.lost:
				p.sess.Stop(err)
			case <-p.sess.Stopped():
			}
			p.pipe.close()
		}()
	}
	testkit.Eventually(t, func() (ok bool) {
		cp.sess.Do(func(*stream.Machine, stream.Instant) { ok = cp.opened })
		return ok
	}, "hello")
	stop := make(chan struct{})
	var work sync.WaitGroup
	var added, ended atomic.Int64
	for w := range 2 { // two that open lanes, at once
		lr := rand.New(rand.NewPCG(seed, uint64(w)))
		work.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Duration(lr.IntN(4000)) * time.Microsecond):
				}
				x, y := connected(t)
				ends := []struct {
					sess *Session
					conn net.Conn
				}{{cp.sess, x}, {sp.sess, y}}
				if lr.IntN(2) == 0 {
					slices.Reverse(ends)
				}
				for _, e := range ends {
					added.Add(1)
					e.sess.AddLane(wirelane.New(e.conn, nil), func(error) { ended.Add(1) })
				}
				switch lr.IntN(4) {
				case 0:
					_ = x.Close()
				case 1:
					_ = y.Close()
				}
			}
		})
	}
	var all []tensor.ID
	want := map[tensor.ID][]byte{}
	for range calls {
		data := testkit.Bytes(50_000+r.IntN(500_000), r.Uint64())
		id := cp.call(data)
		all = append(all, id)
		if r.IntN(3) == 0 {
			if r.IntN(2) == 0 { // some of it has gone
				testkit.Eventually(t, func() (gone bool) {
					cp.sess.Do(func(m *stream.Machine, _ stream.Instant) { gone = m.Status().Stats.BytesOut > 0 })
					return gone
				}, "bytes")
			}
			cp.sess.Do(func(m *stream.Machine, _ stream.Instant) {
				m.Finish(frame.Done{Call: id, Code: frame.Cancelled, Message: "enough"})
			})
		} else {
			want[id] = data
		}
		if r.IntN(4) == 0 {
			testkit.Eventually(t, func() bool { return cp.ended(id) }, "the call's end")
		}
	}
	if r.IntN(3) > 0 { // else the session ends in mid-call
		for _, id := range all {
			testkit.Eventually(t, func() bool { return cp.ended(id) }, "the call's end")
		}
		cp.sess.Do(func(*stream.Machine, stream.Instant) {
			for id, data := range want {
				if !bytes.Equal(cp.results[id], data) {
					t.Error("wrong result")
				}
			}
		})
	}
	first, second := cp, sp
	if r.IntN(2) == 0 {
		first, second = sp, cp
	}
	if r.IntN(2) == 0 {
		close(stop)
		work.Wait()
		first.over(errors.New("it is enough"))
		second.over(io.EOF)
	} else { // lanes are added to a session that ends
		first.over(errors.New("it is enough"))
		second.over(io.EOF)
		close(stop)
		work.Wait()
	}
	testkit.Eventually(t, func() bool { return added.Load() == ended.Load() }, "every lane has ended once")
	cp.check(t)
	sp.check(t)
}

func TestLanesMayComeAndGoAtAnyMoment(t *testing.T) {
	testkit.Start(t)
	for seed := range uint64(12) {
		laneSession(t, seed, 25)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// halfRead is a lane that brings the header of a chunk, and half of its payload. The
// reader lets go of it when told to.
type halfRead struct {
	chunk  frame.Chunk
	n      int
	begun  bool
	letGo  chan struct{}
	closed chan struct{}
}

func (l *halfRead) Next(ch *frame.Chunk) (int, error) {
	if l.begun {
		<-l.closed
		return 0, io.EOF
	}
	l.begun = true
	*ch = l.chunk
	return l.n, nil
}

func (l *halfRead) Read([]byte) (int, error) {
	<-l.letGo
	return 0, io.ErrUnexpectedEOF
}

func (*halfRead) Send(*frame.Chunk) error          { return nil }
func (*halfRead) RoundTrip() time.Duration         { return 0 }
func (*halfRead) SetReadDeadline(time.Time) error  { return nil }
func (*halfRead) SetWriteDeadline(time.Time) error { return nil }

func (l *halfRead) Close() error {
	close(l.closed)
	return nil
}

func TestASessionWhoseClientEndsItsSideEndsWithTheLastChunkOfALane(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		server := newSide(t, nil, stream.Config{Server: true, NoAllowance: true})
		server.sess.Do(func(m *stream.Machine, _ stream.Instant) { m.OfferLanes(frame.LaneToken{1}, 8, 4) })
		a, b := newLink()
		server.sess.Carry(b)
		call, x := tensor.NewID(), tensor.NewID()
		const n = 1000
		require.NoError(t, a.Send(&frame.Frame{
			Hello: &frame.Hello{Version: frame.Version, Session: tensor.NewID(), MaxChunkBytes: n, MaxOpenTensors: 1, Checksum: 1, Lanes: 1},
			Calls: []frame.Call{{ID: call, Model: "echo", Inputs: []frame.Binding{{Port: "x", Tensor: x}}}},
			Descs: []frame.Desc{{Tensor: x, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{n}}, SizeBytes: n, ChunkBytes: n, Call: call, Port: "x"}},
		}, nil))
		synctest.Wait()
		l := &halfRead{chunk: frame.Chunk{Tensor: x}, n: n, letGo: make(chan struct{}), closed: make(chan struct{})}
		server.sess.AddLane(l, func(error) {})
		synctest.Wait()
		close(a.out) // the client ends its side
		synctest.Wait()
		require.False(t, server.ended(call), "a chunk is being read to its place")
		var done []frame.Done
		for len(a.in) > 0 {
			f, err := a.Recv()
			require.NoError(t, err)
			done = append(done, f.Dones...)
		}
		require.Len(t, done, 1)
		require.Equal(t, frame.InvalidArgument, done[0].Code)
		close(l.letGo)
		synctest.Wait()
		require.True(t, isStopped(server.sess), "nothing is left to wait for")
		require.Equal(t, ErrPeerClosed, server.sess.Cause())
		a.cut()
		server.over(nil)
	})
}

func isStopped(s *Session) bool {
	select {
	case <-s.Stopped():
		return true
	default:
		return false
	}
}
