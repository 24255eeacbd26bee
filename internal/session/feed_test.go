package session

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// alone is a server's machine in which a get is open; nobody hears it.
type alone struct {
	mu sync.Mutex
	m  *stream.Machine
}

func newAlone(t *testing.T) *alone {
	a := &alone{m: stream.New(stream.Config{Server: true, Stores: true, OneWay: true}, 0)}
	require.NoError(t, a.m.Control(0, &frame.Frame{
		Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: uint8(codec.CRC32C)},
		Calls: []frame.Call{{ID: tensor.ID{2}, Get: &frame.Get{}}},
	}))
	return a
}

func (a *alone) Do(f func(m *stream.Machine, now stream.Instant)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(a.m, 0)
	for _, ok := a.m.Event(); ok; _, ok = a.m.Event() {
	}
}

func bytesDesc(size, chunk int64) frame.Desc {
	return frame.Desc{
		Tensor: tensor.ID{3}, Call: tensor.ID{2}, Name: "x", ChunkBytes: uint32(chunk), Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{size}},
	}
}

func TestFeedsOfWhatIsHeldHashInTurns(t *testing.T) {
	testkit.Start(t)
	const (
		size = 1 << 37 // minutes, if one went on
		more = 8
	)
	room := max(1, runtime.GOMAXPROCS(0)-1)
	ctx, end := context.WithCancelCause(t.Context())
	data := make([]byte, 1<<20)
	var hashing, most, begun atomic.Int64
	var all sync.WaitGroup
	for range room + more {
		all.Go(func() {
			first := true
			f := Feed{Session: newAlone(t), Pieces: 1, Held: []frame.Range{{Off: 0, Len: size}}, View: func(_, n int64) ([]byte, interface{ Release() }, error) {
				if k := hashing.Add(1); k > most.Load() {
					most.Store(k)
				}
				if first {
					first = false
					begun.Add(1)
				}
				return data[:n], releaser(func() { hashing.Add(-1) }), nil
			}}
			_, err := f.Run(ctx, bytesDesc(size, 1<<20))
			require.ErrorIs(t, err, io.ErrClosedPipe)
		})
	}
	testkit.Eventually(t, func() bool { return begun.Load() == int64(room+more) }, "all feeds to have a turn")
	end(io.ErrClosedPipe)
	all.Wait()
	require.LessOrEqual(t, most.Load(), int64(room))
}

type releaser func()

func (r releaser) Release() { r() }

func TestAViewThatFailsIsTheSourcesFault(t *testing.T) {
	testkit.Start(t)
	why := errors.New("no disk")
	for name, view := range map[string]func(off, n int64) ([]byte, interface{ Release() }, error){
		"at once":   func(int64, int64) ([]byte, interface{ Release() }, error) { return nil, nil, why },
		"too short": func(_, n int64) ([]byte, interface{ Release() }, error) { return make([]byte, n-1), nil, nil },
	} {
		t.Run(name, func(t *testing.T) {
			f := Feed{Session: newAlone(t), Pieces: 2, View: view}
			_, err := f.Run(t.Context(), bytesDesc(100, 10))
			_, source := errors.AsType[*SourceError](err)
			require.True(t, source, err)
		})
	}
}

// kept is a place in memory. What it holds from the beginning it was told not to write.
type kept struct {
	data  []byte
	order codec.OrderedDigester
}

func (k *kept) WriteViews(off int64, views [][]byte) error {
	for _, v := range views {
		if &v[0] != &k.data[off] {
			copy(k.data[off:], v)
		}
		k.order.Wrote(off, v)
		off += int64(len(v))
	}
	return nil
}

// getter is the client of a get of one tensor.
type getter struct {
	*side
	landing *Landing
	ready   chan struct{}
	news    News
	pool    *slab.Pool
	sum     chan frame.Summary
	closed  chan struct{}
}

func (g *getter) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	switch e.Kind {
	case stream.EventChunk:
		g.news.Tell()
	case stream.EventTensor:
		g.landing = &Landing{
			Session: g.sess, Tensor: e.Tensor, Geo: tensor.Geometry{Size: int64(e.Desc.SizeBytes), ChunkBytes: int64(e.Desc.ChunkBytes)},
			Tell: g.news.Tell,
		}
		if e.Desc.OnAllowance {
			mem, err := g.pool.Get(int(e.Desc.SizeBytes))
			if err != nil {
				panic(err)
			}
			g.landing.Stage(m, now, mem)
		}
		close(g.ready)
	case stream.EventSummary:
		g.sum <- *e.Summary
	case stream.EventClosed:
		close(g.closed)
	}
}

func (*getter) Received(*stream.Machine) {}

// giver is the server of a get of one tensor.
type giver struct {
	sess *Session
	data []byte
	held []frame.Range
	done sync.WaitGroup
}

func (g *giver) Event(_ *stream.Machine, _ stream.Instant, e stream.Event) {
	if e.Kind != stream.EventReady {
		return
	}
	call, chunk := e.Call, min(int64(len(g.data)/7+1), 1<<20)
	g.done.Go(func() {
		f := Feed{Session: g.sess, Pieces: 3, Held: g.held, View: func(off, n int64) ([]byte, interface{ Release() }, error) {
			time.Sleep(time.Nanosecond) // until the client has acknowledged what it has
			return g.data[off : off+n], nil, nil
		}}
		d := bytesDesc(int64(len(g.data)), chunk)
		d.Call = call
		digest, err := f.Run(context.Background(), d)
		if err != nil {
			panic(err)
		}
		g.sess.Do(func(m *stream.Machine, now stream.Instant) {
			m.Summarize(now, frame.Summary{Call: call, Tensor: d.Tensor, Digest: digest})
			m.Finish(frame.Done{Call: call})
		})
	})
}

func (*giver) Received(*stream.Machine) {}

// bubble runs a test in a bubble.
func bubble(f func(*testing.T)) func(*testing.T) {
	return func(t *testing.T) { synctest.Test(t, f) }
}

func TestWhatAFeedSendsALandingPlaces(t *testing.T) {
	testkit.Start(t)
	random := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int64{0, 1, 6, 7, 8, 1000, 3 << 20, 9<<20 + 5} {
		for _, how := range []string{"memory", "slabs", "slabs, in order", "some is held", "all is held"} {
			t.Run(fmt.Sprintf("%d bytes, %s", size, how), bubble(func(t *testing.T) {
				data := make([]byte, size)
				for i := range data {
					data[i] = byte(random.Uint32())
				}
				var held []frame.Range
				switch {
				case size == 0:
				case how == "some is held":
					held = []frame.Range{{Off: 0, Len: size / 3}, {Off: size / 2, Len: size / 3}}
					if size < 3 {
						held = nil
					}
				case how == "all is held":
					held = []frame.Range{{Off: 0, Len: size}}
				}
				a, b := newLink()
				server := &giver{data: data, held: held}
				server.sess = New(stream.Config{Server: true, Stores: true, Limits: stream.Limits{TensorBytes: 1 << 30}}, server)
				client := &getter{side: &side{}, ready: make(chan struct{}), news: make(News, 1), pool: testkit.Pool(t), sum: make(chan frame.Summary, 1), closed: make(chan struct{})}
				client.sess = New(stream.Config{Session: tensor.ID{9}, Limits: stream.Limits{AllowanceBytes: 1}}, client)
				server.sess.Carry(b)
				client.sess.Carry(a)
				client.sess.Do(func(m *stream.Machine, now stream.Instant) {
					require.NoError(t, m.OpenCall(now, frame.Call{ID: tensor.ID{4}, Get: &frame.Get{Selections: []frame.Selection{{Name: "x", Held: held}}}}))
				})
				<-client.ready
				pool := slab.NewPool(0, slab.System)
				to := &kept{data: make([]byte, size)}
				for _, r := range held {
					copy(to.data[r.Off:r.Off+r.Len], data[r.Off:])
				}
				l := client.landing
				l.To, l.Held = to, held
				client.sess.Do(func(*stream.Machine, stream.Instant) { l.InOrder = how == "slabs, in order" })
				l.Slab = func(n int) (*slab.Slab, error) { return pool.Get(n) }
				if how == "memory" {
					l.Memory = to.data
				}
				for {
					require.NoError(t, l.Step())
					if l.Whole() {
						break
					}
					<-client.news
				}
				sum := <-client.sum
				client.sess.Do(func(m *stream.Machine, now stream.Instant) { m.Accept(now, l.Tensor) })
				<-client.closed
				require.True(t, l.Home())
				require.True(t, bytes.Equal(data, to.data))
				var want codec.Digester
				_, _ = want.Write(data)
				require.Equal(t, want.Sum(), sum.Digest)
				if len(held) == 0 {
					require.Equal(t, size, to.order.Next())
				}
				server.done.Wait()
				for _, s := range []*Session{client.sess, server.sess} {
					s.Stop(errCut)
				}
				a.cut()
				client.sess.Wait(frame.Unavailable, "over")
				server.sess.Wait(frame.Unavailable, "over")
				slabs, _ := pool.Live()
				require.Zero(t, slabs)
			}))
		}
	}
}

func TestALandingWhoseTensorIsGivenUpReleasesItsSlabs(t *testing.T) {
	testkit.Start(t)
	for name, give := range map[string]func(a *alone, l *Landing){
		"what was lent": func(a *alone, l *Landing) {
			require.NoError(t, l.Step())
			require.False(t, l.Home())
			a.Do(func(m *stream.Machine, _ stream.Instant) { m.FailTensor(l.Tensor, frame.Cancelled, "enough") })
		},
		"what is to be lent": func(a *alone, l *Landing) {
			a.Do(func(m *stream.Machine, _ stream.Instant) { m.FailTensor(l.Tensor, frame.Cancelled, "enough") })
			require.NoError(t, l.Step())
		},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			pool := testkit.Pool(t)
			a := &alone{m: stream.New(stream.Config{Server: true, Stores: true, StoredBytes: 1 << 30}, 0)}
			d := bytesDesc(3<<20, 1<<20)
			d.SizeBytes = 3 << 20
			require.NoError(t, a.m.Control(0, &frame.Frame{
				Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: uint8(codec.CRC32C)},
				Calls: []frame.Call{{ID: d.Call, Put: &frame.Put{}}}, Descs: []frame.Desc{d},
			}))
			l := &Landing{
				Session: a, Tensor: d.Tensor, Geo: tensor.Geometry{Size: 3 << 20, ChunkBytes: 1 << 20}, Tell: make(News, 1).Tell,
				To: &kept{}, Slab: func(n int) (*slab.Slab, error) { return pool.Get(n) },
			}
			give(a, l)
			require.True(t, l.Home())
			require.False(t, l.Whole())
			slabs, _ := pool.Live()
			require.Zero(t, slabs)
		})
	}
}
