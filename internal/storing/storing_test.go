package storing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

const mib = 1 << 20

// serve returns a Service on a Core of its own, which the test's end closes, and then finds
// without memory in use. change changes what sessions and the Service are limited to.
func serve(t *testing.T, limit int64, limits stream.Limits, change func(*Service)) *Service {
	t.Helper()
	limits = limits.WithDefaults()
	pool, budget, log := testkit.Pool(t), slab.NewBudget("memory", limit), slog.New(slog.DiscardHandler)
	var s *Service
	core := serving.New(serving.Config{
		Models: engine.NewRegistry(), Pool: pool, Budget: budget, Log: log, Session: limits,
		PrincipalOf: func(context.Context) string { return "" }, May: func(context.Context, string, string) error { return nil },
		Open: [admission.Kinds]int{100, 100, 100}, Health: func(string, serving.Health) {}, Status: statusOf, StoredBytes: 1 << 40, MemoryWait: time.Minute,
		Tasks: func(on *serving.Session, m *stream.Machine, now stream.Instant, part *frame.Call) serving.Task {
			return s.Task(on, m, now, part)
		},
	})
	s = &Service{Core: core, Store: memory.New(pool, 16*mib), Sources: new(store.Sources)}
	if change != nil {
		change(s)
	}
	t.Cleanup(func() {
		core.Close()
		core.Wait()
		core.Forget()
		require.NoError(t, s.Store.Close())
		used, _, _ := budget.Used()
		require.Zero(t, used)
	})
	return s
}

// statusOf stands in for the server's.
func statusOf(err error) (frame.Code, string) {
	var broken *frame.Error
	var refused *terms.RefusedError
	switch {
	case err == nil, errors.Is(err, session.ErrPeerClosed), errors.Is(err, serving.ErrServed):
		return frame.OK, ""
	case errors.As(err, &broken):
		return broken.Code, broken.Text
	case errors.As(err, &refused):
		return refused.Code, refused.Text
	case errors.Is(err, context.Canceled):
		return frame.Cancelled, err.Error()
	}
	return frame.Internal, err.Error()
}

// link is a client's RPC, without gRPC: a queue of frames each way.
type link struct {
	ctx context.Context
	end context.CancelFunc
	in  chan *frame.Frame // to the server; closed when the client has ended its side
	out chan *frame.Frame

	room int64 // for what the server keeps
	kept atomic.Int64
}

func newLink(t *testing.T) *link {
	l := &link{in: make(chan *frame.Frame, 8), out: make(chan *frame.Frame, 8), room: 16 * mib}
	l.ctx, l.end = context.WithCancel(context.Background())
	t.Cleanup(l.end)
	return l
}

// send sends a frame, unless the RPC has ended.
func (l *link) send(f *frame.Frame) bool {
	select {
	case l.in <- f:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// Context is of a Conn, as all below.
func (l *link) Context() context.Context { return l.ctx }

func (l *link) Send(f *frame.Frame, held interface{ Release() }) error {
	if held != nil {
		defer held.Release()
	}
	own := *f
	own.Chunk.Data = [][]byte{bytes.Join(f.Chunk.Data, nil)}
	own.Descs, own.Summaries = slices.Clone(f.Descs), slices.Clone(f.Summaries)
	select {
	case l.out <- &own:
		return nil
	case <-l.ctx.Done():
		return l.ctx.Err()
	}
}

func (l *link) Recv() (*frame.Frame, error) {
	select {
	case f, ok := <-l.in:
		if !ok {
			return nil, io.EOF
		}
		return f, nil
	case <-l.ctx.Done():
		return nil, l.ctx.Err()
	}
}

func (*link) Free()                             {}
func (*link) Clear(int) bool                    { return true }
func (*link) Opened()                           {}
func (*link) Comes(float64, time.Duration) bool { return false }

func (l *link) Take(bytes int64) bool {
	l.kept.Store(bytes)
	return bytes <= l.room
}

func hello() *frame.Hello {
	return &frame.Hello{Version: frame.Version, Session: tensor.NewID(), MaxChunkBytes: 64 << 10, Checksum: uint8(codec.CRC32C)}
}

// parcel is a tensor of bytes for a push.
type parcel struct {
	desc frame.Desc
	data []byte
}

// ten is a tensor of 10 bytes in chunks of 4.
func ten(name string) *parcel { return pack(name, []byte("0123456789"), 4) }

func pack(name string, data []byte, chunk uint32) *parcel {
	n := len(data)
	return &parcel{frame.Desc{
		Tensor: tensor.NewID(), Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(n)}}, SizeBytes: uint64(n), ChunkBytes: chunk, Name: name,
	}, data}
}

func (p *parcel) announced() *frame.Frame { return &frame.Frame{Descs: []frame.Desc{p.desc}} }

func (p *parcel) chunk(i uint32) *frame.Frame {
	n := p.desc.ChunkBytes
	data := p.data[i*n : min((i+1)*n, uint32(len(p.data)))]
	sum := codec.CRC32C.Update(codec.CRC32C.Seed(p.desc.Tensor, i), data)
	return &frame.Frame{Chunk: frame.Chunk{Tensor: p.desc.Tensor, Index: i, Sum: sum, Data: [][]byte{data}}}
}

// trickle sends frames until the RPC ends.
func (l *link) trickle(next func() *frame.Frame) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for l.send(next()) {
		select {
		case <-tick.C:
		case <-l.ctx.Done():
		}
	}
}

func TestAPushWhosePeerDoesNothingEnds(t *testing.T) {
	testkit.Start(t)
	const idle = stream.Instant(300 * time.Millisecond)
	for name, tc := range map[string]struct {
		do   func(l *link)
		code frame.Code
		says []string
	}{
		"no hello":            {func(*link) {}, frame.DeadlineExceeded, []string{"no hello"}},
		"nothing after hello": {func(l *link) { l.send(&frame.Frame{Hello: hello()}) }, frame.DeadlineExceeded, []string{"no chunk", "push again"}},
		"an announcement": {func(l *link) {
			l.send(&frame.Frame{Hello: hello()})
			l.send(pack("x", make([]byte, 8*mib), mib).announced())
		}, frame.DeadlineExceeded, []string{"no chunk"}},
		"a chunk and no other": {func(l *link) {
			l.send(&frame.Frame{Hello: hello()})
			o := ten("x")
			l.send(o.announced())
			l.send(o.chunk(0))
		}, frame.DeadlineExceeded, []string{"no chunk"}},
		"a trickle of empty frames": {func(l *link) {
			l.send(&frame.Frame{Hello: hello()})
			l.trickle(func() *frame.Frame { return &frame.Frame{} })
		}, frame.DeadlineExceeded, []string{"no chunk", "--input-idle"}},
		"a trickle of descs": {func(l *link) {
			l.send(&frame.Frame{Hello: hello()})
			n := 0
			l.trickle(func() *frame.Frame { n++; return ten(fmt.Sprint(min(n, PushTensors))).announced() })
		}, frame.ResourceExhausted, []string{"1024"}}, // as many as a push may have
		"a trickle of one chunk": {func(l *link) {
			l.send(&frame.Frame{Hello: hello()})
			o := ten("x")
			l.send(o.announced())
			l.trickle(func() *frame.Frame { return o.chunk(0) })
		}, frame.DeadlineExceeded, []string{"no chunk"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, 64*mib, stream.Limits{FirstFrame: idle, ChunkIdle: idle, InputIdle: 2 * idle}, nil)
				l := newLink(t)
				go tc.do(l) // ends with the RPC; the client does not end its side
				err := s.Push(new(admission.Caller), l, func([]frame.Summary) error { return nil })
				l.end()
				code, text := statusOf(err)
				require.Equal(t, tc.code, code, "%v", err)
				for _, what := range tc.says {
					require.Contains(t, text, what)
				}
				synctest.Wait()
				used, _ := s.Store.(*memory.Store).Used()
				require.Zero(t, used, "the store's memory")
			})
		})
	}
}

func TestWhatAPullSelectsIsCharged(t *testing.T) {
	testkit.Start(t)
	const ranges = 15_000
	held := make([]frame.Range, ranges)
	for i := range held {
		held[i] = frame.Range{Off: 2 * int64(i), Len: 1}
	}
	endless := []frame.Selection{{Name: "gen", Source: true, Params: map[string]string{"shape": "4294967296", "dtype": "uint8", "fill": "zeros"}, Held: held}}
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, 4*mib, stream.Limits{}, func(c *Service) { require.NoError(t, c.Sources.Add("gen", store.Generator())) })
		pull := func(room int64) (*link, <-chan error) {
			l, ended := newLink(t), make(chan error, 1)
			l.room = room
			go func() { ended <- s.Pull(new(admission.Caller), l, hello(), endless) }() // ends with l
			synctest.Wait()
			return l, ended
		}
		l, ended := pull(mib)
		require.Empty(t, ended)
		require.GreaterOrEqual(t, l.kept.Load(), int64(16*ranges))
		l.end()
		require.Error(t, <-ended)

		_, ended = pull(16*ranges - 1)
		refused, ok := errors.AsType[*terms.RefusedError](<-ended)
		require.True(t, ok)
		require.Equal(t, frame.ResourceExhausted, refused.Code)
		require.Contains(t, refused.Text, "memory")
		require.Contains(t, refused.Text, "later")
		require.Positive(t, refused.RetryMillis, "how long to wait")
	})
}

func TestChunksOfAPushToAFolderMayComeInAnyOrder(t *testing.T) {
	testkit.Start(t)
	f, err := folder.Open(t.TempDir(), folder.Config{Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	// Less memory than the tensor, and far less than the pieces in which a put would land.
	s := serve(t, mib, stream.Limits{}, func(c *Service) {
		require.NoError(t, c.Store.Close())
		c.Store = f
	})
	l := newLink(t)
	const chunks = 100
	p := pack("x", testkit.Bytes(chunks*64<<10, 1), 64<<10)
	go func() { // ends with the push
		l.send(&frame.Frame{Hello: hello()})
		l.send(p.announced())
		for i := range uint32(chunks) {
			l.send(p.chunk(chunks - 1 - i))
		}
		close(l.in)
	}()
	require.NoError(t, s.Push(new(admission.Caller), l, func(list []frame.Summary) error {
		require.Len(t, list, 1)
		require.Equal(t, frame.OK, list[0].Code, list[0].Message)
		return nil
	}))
	l.end()
}

// sessionLink is a session's client that counts what ends.
type sessionLink struct {
	*link
	told chan frame.Done
}

func (l *sessionLink) Send(f *frame.Frame, held interface{ Release() }) error {
	if held != nil {
		held.Release()
	}
	for _, d := range f.Dones {
		l.told <- d
	}
	for _, s := range f.Summaries {
		l.told <- frame.Done{Call: s.Call, Code: s.Code}
	}
	return nil
}

// TestASetWhoseLastTensorIsBadIsNotStored has the bad desc come with the end of the put: what
// was to be stored is not, whichever the store sees first.
func TestASetWhoseLastTensorIsBadIsNotStored(t *testing.T) {
	testkit.Start(t)
	s := serve(t, 64*mib, stream.Limits{}, nil)
	l, ended := open(t, s)
	h := hello()
	h.MaxOpenTensors = 64
	l.send(&frame.Frame{Hello: h})
	const sets = 40
	last := new(frame.Frame)
	var calls []tensor.ID
	for i := range sets {
		good, bad := ten(fmt.Sprint("good", i)), ten("bad")
		call := tensor.NewID()
		good.desc.Call, good.desc.OnAllowance, bad.desc.Call, bad.desc.SizeBytes = call, true, call, 11
		l.send(&frame.Frame{Calls: []frame.Call{{ID: call, Put: &frame.Put{All: true}}}, Descs: []frame.Desc{good.desc}})
		for c := range uint32(3) {
			l.send(good.chunk(c))
		}
		require.Equal(t, frame.OK, testkit.Receive(t, l.told).Code)
		last.Descs = append(last.Descs, bad.desc)
		last.Ends = append(last.Ends, frame.End{Call: call, Tensors: 2})
		calls = append(calls, call)
	}
	l.send(last)
	for range 2 * sets {
		require.Equal(t, frame.InvalidArgument, testkit.Receive(t, l.told).Code)
	}
	l.end()
	require.Error(t, testkit.Receive(t, ended))
	s.Core.Wait()
	for _, call := range calls {
		_, tensors, known := s.State(call)
		require.True(t, known)
		for _, x := range tensors {
			require.Equal(t, frame.InvalidArgument, x.Summary.Code, "%q is not stored", x.Summary.Name)
		}
	}
	infos, err := s.Store.List(t.Context(), "", "", 2*sets)
	require.NoError(t, err)
	require.Empty(t, infos)
	require.Equal(t, map[metrics.Outcome]int64{{Of: "push", Code: "INVALID_ARGUMENT"}: 2 * sets}, s.Values().EndedTensors)
}

// What a push with the ID of an open put is told leaves the put alone.
func TestAPushWithTheIDOfAnOpenPutLeavesItOpen(t *testing.T) {
	testkit.Start(t)
	s := serve(t, 64*mib, stream.Limits{}, nil)
	l, ended := open(t, s)
	x, h := ten("x"), hello()
	x.desc.Call, x.desc.OnAllowance, h.MaxOpenTensors = tensor.NewID(), true, 64
	l.send(&frame.Frame{Hello: h, Calls: []frame.Call{{ID: x.desc.Call, Put: new(frame.Put)}}, Descs: []frame.Desc{x.desc}})
	for c := range uint32(3) {
		l.send(x.chunk(c))
	}
	require.Equal(t, frame.OK, testkit.Receive(t, l.told).Code)
	other := newLink(t)
	again := hello()
	again.Session = x.desc.Call
	other.send(&frame.Frame{Hello: again})
	close(other.in)
	require.ErrorContains(t, s.Push(new(admission.Caller), other, nil), "already open")
	of, _, known := s.State(x.desc.Call)
	require.True(t, known && of.Open)
	l.send(&frame.Frame{Ends: []frame.End{{Call: x.desc.Call, Tensors: 1}}})
	require.Equal(t, frame.OK, testkit.Receive(t, l.told).Code)
	l.end()
	require.Error(t, testkit.Receive(t, ended))
	testkit.Eventually(t, func() bool { return s.Values().OpenTransfers["push"] == 0 }, "the end of both")
}

// overtaken is a store in which something is done before each Open and each List.
type overtaken struct {
	*memory.Store
	before func()
}

func (s overtaken) Open(ctx context.Context, name string) (store.Reader, error) {
	s.before()
	return s.Store.Open(ctx, name)
}

func (s overtaken) List(ctx context.Context, glob, after string, most int) ([]store.Info, error) {
	s.before()
	return s.Store.List(ctx, glob, after, most)
}

// set puts a set of tensors that hold the same byte.
func set(t *testing.T, s store.Store, b byte, names ...string) {
	t.Helper()
	var all []store.Writer
	for _, name := range names {
		w, err := s.Create(t.Context(), name, tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1}}, nil)
		require.NoError(t, err)
		require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{{b}}))
		all = append(all, w)
	}
	_, err := s.(store.Sets).CommitAll(t.Context(), all)
	require.NoError(t, err)
}

// pulled pulls selections, and returns what came: name and byte, or the code of its failure.
func pulled(t *testing.T, s *Service, names ...string) (got []string, err error) {
	t.Helper()
	var list []frame.Selection
	for _, name := range names {
		list = append(list, frame.Selection{Name: name})
	}
	l, ended := newLink(t), make(chan error, 1)
	go func() { ended <- s.Pull(new(admission.Caller), l, hello(), list) }() // ends with l
	called := map[tensor.ID]string{}
	take := func(f *frame.Frame) {
		for _, d := range f.Descs {
			called[d.Tensor] = d.Name
		}
		for _, sum := range f.Summaries {
			text := fmt.Sprintf("%s %d", sum.Name, sum.Code)
			for b := range byte(4) {
				var d codec.Digester
				_, _ = d.Write([]byte{b}) // it never fails
				if sum.Digest == d.Sum() {
					text = fmt.Sprintf("%s=%d", called[sum.Tensor], b)
				}
			}
			got = append(got, text)
		}
	}
	for {
		select {
		case f := <-l.out:
			take(f)
		case err := <-ended:
			for len(l.out) > 0 {
				take(testkit.Receive(t, l.out))
			}
			return got, err
		}
	}
}

// TestAGetThatASetOvertakesIsOfOneStateOfTheStore commits sets at every step of a get in turn:
// the get neither keeps them waiting nor has parts of two.
func TestAGetThatASetOvertakesIsOfOneStateOfTheStore(t *testing.T) {
	testkit.Start(t)
	states := [][]string{
		{"[c]=1", "a=1", "b=1", "a=1", "b=1", "[c]=1", "new 5", "none* 5"},
		{"[c]=1", "a=2", "b=2", "new=2", "none*=2", "a=2", "b=2", "[c]=1", "new=2", "none*=2"},
		{"[c]=1", "a=2", "b=2", "new=3", "none*=2", "old=3", "a=2", "b=2", "[c]=1", "new=3", "none*=2"},
	}
	for step, over := 1, false; !over; step++ {
		for apart := range 4 { // steps between two sets; 0: there is only one
			s := serve(t, 4*mib, stream.Limits{}, nil)
			m := s.Store.(*memory.Store)
			set(t, m, 1, "a", "b", "[c]")
			n, state := 0, 0
			s.Store = overtaken{m, func() {
				switch n++; {
				case n == step:
					set(t, m, 2, "a", "b", "new", "none*")
					state = 1
				case apart > 0 && n == step+apart:
					set(t, m, 3, "new", "old")
					state = 2
				}
			}}
			got, err := pulled(t, s, "?*", "[ab]", "[c]", "new", "none*")
			require.NoError(t, err)
			require.Equal(t, states[state], got, "a set at step %d, and another %d later", step, apart)
			over = state == 0
		}
	}
}

func TestAGetDoesNotRunAfterSetsForEver(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, 4*mib, stream.Limits{}, nil)
		m := s.Store.(*memory.Store)
		set(t, m, 1, "a", "b")
		sets := 0
		s.Store = overtaken{m, func() {
			sets++
			time.Sleep(pickTime / 4)
			set(t, m, 2, "a", "b")
		}}
		_, err := pulled(t, s, "*")
		require.ErrorContains(t, err, "faster than it can be opened")
		require.Less(t, sets, 20)
	})
}

// open opens a session, which ends with its link.
func open(t *testing.T, s *Service) (*sessionLink, <-chan error) {
	sess, err := s.Core.OpenSession(new(admission.Caller))
	require.NoError(t, err)
	l := &sessionLink{newLink(t), make(chan frame.Done, 1000)}
	ended := make(chan error, 1)
	go func() { ended <- sess.Serve(l.ctx, l) }()
	return l, ended
}

// late is a store that has stored a set when its call is cancelled.
type late struct{ *memory.Store }

func (s late) CommitAll(ctx context.Context, set []store.Writer) ([]store.Info, error) {
	infos, err := s.Store.CommitAll(ctx, set)
	<-ctx.Done()
	return infos, err
}

func TestASetThatWasStoredWhileItWasCancelledIsKnownAsStored(t *testing.T) {
	testkit.Start(t)
	s := serve(t, 64*mib, stream.Limits{}, nil)
	s.Store = late{s.Store.(*memory.Store)}
	l, ended := open(t, s)
	x, h := ten("x"), hello()
	x.desc.Call, x.desc.OnAllowance, h.MaxOpenTensors = tensor.NewID(), true, 64
	call := x.desc.Call
	l.send(&frame.Frame{Hello: h, Calls: []frame.Call{{ID: call, Put: &frame.Put{All: true}}}, Descs: []frame.Desc{x.desc}})
	for c := range uint32(3) {
		l.send(x.chunk(c))
	}
	require.Equal(t, frame.OK, testkit.Receive(t, l.told).Code)
	l.send(&frame.Frame{Ends: []frame.End{{Call: call, Tensors: 1}}})
	testkit.Eventually(t, func() bool {
		infos, err := s.Store.List(t.Context(), "", "", 2)
		return err == nil && len(infos) == 1
	}, "the set")
	l.send(&frame.Frame{Cancels: []tensor.ID{call}})
	require.Equal(t, frame.Cancelled, testkit.Receive(t, l.told).Code)
	testkit.Eventually(t, func() bool {
		of, tensors, known := s.State(call)
		return known && !of.Open && of.Code == frame.OK && tensors[0].Summary.Code == frame.OK
	}, "what is known of it")
	l.end()
	require.Error(t, testkit.Receive(t, ended))
}
