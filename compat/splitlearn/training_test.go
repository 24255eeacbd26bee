package splitlearn_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// trunk is y = 2x, and what a Python model that trains has beside it.
type trunk struct {
	mu       sync.Mutex // guards all below
	holder   string     // token of the lease
	graphs   map[string]tensor.Shape
	released []string
	leases   int // taken
}

// abandoned is the size of an input whose graph is kept when nobody waits for the result any more.
var abandoned [12]byte

// companions are the models of docs/training.md that the service uses.
var companionParams = map[string][]string{
	"train": {"lease", "eval", "release"}, "backward": {"lease", "forward", "alone", "unused"}, "lease": {"token", "end"},
}

// companion is a model that sees its call.
func (f *fixture) companion(t testing.TB, name string, in, out []engine.Port, call func(ctx context.Context, c engine.Call, in []tensor.Tensor) ([]tensor.Tensor, error)) {
	info := engine.Info{Name: name, Inputs: in, Outputs: out}
	_, part, _ := strings.Cut(name, "/")
	for _, p := range companionParams[part] {
		info.Params = append(info.Params, engine.Param{Name: p, Kind: "text"})
	}
	m, err := cpu.Func{Info: info, Call: func(context.Context, []tensor.Tensor, map[string]string) ([]tensor.Tensor, error) { return nil, nil }}.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, f.models.Add(seen{m, f.host, info, call}))
}

// seen makes a Func for each call, which knows it.
type seen struct {
	engine.Model
	host *cpu.Host
	info engine.Info
	call func(ctx context.Context, c engine.Call, in []tensor.Tensor) ([]tensor.Tensor, error)
}

func (s seen) Open(ctx context.Context, c engine.Call) (engine.Run, error) {
	m, err := cpu.Func{Info: s.info, Call: func(ctx context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
		return s.call(ctx, c, in)
	}}.Model(s.host)
	if err != nil {
		return nil, err
	}
	return m.Open(ctx, c)
}

func (f *fixture) addTrunk(t testing.TB) *trunk {
	k := &trunk{graphs: make(map[string]tensor.Shape)}
	x, y := anyShape("x", tensor.Float32), anyShape("y", tensor.Float32)
	twice := func(in tensor.Tensor) tensor.Tensor {
		v := floats(t, in.Data)
		for i := range v {
			v[i] *= 2
		}
		return tensor.Tensor{Desc: in.Desc.Clone(), Data: raw(v...)}
	}
	refused := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", engine.ErrPrecondition, fmt.Sprintf(format, args...))
	}
	f.add(t, cpu.Func{Info: engine.Info{Name: "trunk", Inputs: x, Outputs: y}, Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
		return []tensor.Tensor{twice(in[0])}, nil
	}})
	f.companion(t, "trunk/train", x, y, func(ctx context.Context, c engine.Call, in []tensor.Tensor) ([]tensor.Tensor, error) {
		if len(in[0].Data) == len(abandoned) {
			<-ctx.Done()
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		switch {
		case c.Lifetime == nil:
			return nil, refused("a graph is kept for a session")
		case c.Params["lease"] != k.holder || k.holder == "":
			return nil, refused("nobody trains")
		case len(in[0].Data) > 100:
			return nil, refused("the graph is too large")
		}
		for id := range strings.SplitSeq(c.Params["release"], ",") {
			if _, kept := k.graphs[id]; kept {
				k.released = append(k.released, id)
				delete(k.graphs, id)
			}
		}
		k.graphs[c.ID.String()] = in[0].Shape.Clone()
		return []tensor.Tensor{twice(in[0])}, nil
	})
	f.companion(t, "trunk/backward", anyShape("y"), anyShape("x"), func(_ context.Context, c engine.Call, in []tensor.Tensor) ([]tensor.Tensor, error) {
		k.mu.Lock()
		defer k.mu.Unlock()
		shape, kept := k.graphs[c.Params["forward"]]
		switch {
		case c.Params["lease"] != k.holder || k.holder == "":
			return nil, refused("nobody trains")
		case !kept:
			return nil, refused("the graph is gone")
		case c.Params["alone"] != "true":
			return nil, refused("gradients of weights stay")
		case !shape.Equal(in[0].Shape):
			return nil, fmt.Errorf("%w: gradient of another shape", engine.ErrParam)
		}
		delete(k.graphs, c.Params["forward"])
		return []tensor.Tensor{twice(in[0])}, nil
	})
	f.companion(t, "trunk/lease", nil, []engine.Port{{Name: "y", Shape: []int64{1}}}, func(_ context.Context, c engine.Call, _ []tensor.Tensor) ([]tensor.Tensor, error) {
		k.mu.Lock()
		defer k.mu.Unlock()
		token := c.Params["token"]
		switch {
		case c.Lifetime == nil || token == "":
			return nil, refused("a lease is a session's")
		case k.holder != "" && k.holder != token:
			return nil, refused("another client trains")
		case c.Params["end"] == "true":
			clear(k.graphs)
			k.holder = ""
		default:
			k.leases++
			k.holder = token
		}
		return []tensor.Tensor{{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{1}}, Data: raw(0)}}, nil
	})
	return k
}

func (k *trunk) see(what func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	what()
}

func train(data []byte, id string, shape ...int32) *pb.ComputeRequest {
	req := &pb.ComputeRequest{Data: data, Shape: shape, ModelId: "trunk", TrainingMode: new(true)}
	if id != "" {
		req.ForwardId = &id
	}
	return req
}

func gradient(data []byte, id string, shape ...int32) *pb.BackwardRequest {
	return &pb.BackwardRequest{GradOutputData: data, GradOutputShape: shape, ForwardId: id}
}

func isGone(t testing.TB, id string, err error) {
	t.Helper()
	hasCode(t, codes.NotFound, err)
	require.Equal(t, "'Activation "+id+" not found in cache (may have expired or never cached)'", status.Convert(err).Message())
}

func TestTheGradientIsTrueAndGivenOnce(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	for name, tc := range map[string]struct {
		x, g []byte
		want func(b []byte)
	}{
		"float32": {raw(1, 2), raw(5, 7), func(b []byte) { require.Equal(t, []float32{10, 14}, floats(t, b)) }},
		"float16": {half(1, 2), half(5, 7), func(b []byte) { require.Equal(t, half(10, 14), b) }},
		"zlib":    {deflate(raw(1, 2), 6), deflate(raw(5, 7), 6), func(b []byte) { require.Equal(t, []float32{10, 14}, floats(t, inflate(t, b))) }},
	} {
		y, err := f.Compute(t.Context(), train(tc.x, name, 2))
		require.NoError(t, err, name)
		require.Equal(t, name, y.GetForwardId())
		g, err := f.ComputeBackward(t.Context(), gradient(tc.g, name, 2))
		require.NoError(t, err, name)
		require.Equal(t, name, g.GetForwardId())
		require.Equal(t, []int32{2}, g.GetGradInputShape())
		require.Positive(t, g.GetBackwardTimeMs())
		require.NotNil(t, g.GetMonitoringData())
		tc.want(g.GetGradInputData())
		_, err = f.ComputeBackward(t.Context(), gradient(tc.g, name, 2))
		isGone(t, name, err)
	}
	k.see(func() { require.Equal(t, 1, k.leases, "one lease for all") })
	// Without an id the server draws one.
	y, err := f.Compute(t.Context(), train(raw(1), "", 1))
	require.NoError(t, err)
	require.Len(t, y.GetForwardId(), 36)
	for model, want := range map[string]codes.Code{"echo": codes.FailedPrecondition, "nothing": codes.NotFound} {
		req := gradient(raw(1), y.GetForwardId(), 1) // which leaves it to its own model
		req.ModelId = &model
		_, err = f.ComputeBackward(t.Context(), req)
		hasCode(t, want, err)
	}
	named := "trunk"
	req := gradient(raw(1), "never", 1)
	req.ModelId = &named
	_, err = f.ComputeBackward(t.Context(), req)
	isGone(t, "never", err)
	_, err = f.ComputeBackward(t.Context(), gradient(raw(1), y.GetForwardId(), 3))
	hasCode(t, codes.InvalidArgument, err)
	_, err = f.ComputeBackward(t.Context(), gradient(raw(1, 2), y.GetForwardId(), 2))
	hasCode(t, codes.InvalidArgument, err) // and it is gone
	req.ForwardId = y.GetForwardId()
	_, err = f.ComputeBackward(t.Context(), req)
	isGone(t, y.GetForwardId(), err)
	_, err = f.Compute(t.Context(), train(raw(1), strings.Repeat("x", 513), 1))
	hasCode(t, codes.InvalidArgument, err)
	_, err = f.Compute(t.Context(), train(make([]byte, 400), "large", 100))
	hasCode(t, codes.InvalidArgument, err)
}

func TestHundredPassesAreKeptAndTheOldestGoFirst(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	for n := range 102 {
		_, err := f.Compute(t.Context(), train(raw(1), fmt.Sprint(n), 1))
		require.NoError(t, err)
	}
	k.see(func() { require.Len(t, k.graphs, 100) })
	var err error
	for _, n := range []string{"0", "1"} {
		_, err = f.ComputeBackward(t.Context(), func() *pb.BackwardRequest {
			r := gradient(raw(1), n, 1)
			r.ModelId = new("trunk")
			return r
		}())
		isGone(t, n, err)
	}
	for n := 2; n < 102; n++ {
		_, err = f.ComputeBackward(t.Context(), gradient(raw(1), fmt.Sprint(n), 1))
		require.NoError(t, err, n)
	}
	k.see(func() { require.Empty(t, k.graphs) })
}

func (f *fixture) other(t testing.TB) (client pb.ComputeServiceClient, leave func()) {
	conn := dial(t, f.addr)
	return pb.NewComputeServiceClient(conn), func() { require.NoError(t, conn.Close()) }
}

func TestAPassBelongsToItsConnection(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	other, leave := f.other(t)
	_, err := f.Compute(t.Context(), train(raw(1, 2), "f", 2))
	require.NoError(t, err)
	for _, c := range []pb.ComputeServiceClient{f, other} { // clients in one process may share a connection
		_, err = c.Compute(t.Context(), train(raw(1), "f", 1))
		hasCode(t, codes.AlreadyExists, err)
	}
	_, err = other.ComputeBackward(t.Context(), gradient(raw(1), "f", 1))
	isGone(t, "f", err)
	g, err := f.ComputeBackward(t.Context(), gradient(raw(5, 7), "f", 2))
	require.NoError(t, err)
	require.Equal(t, []float32{10, 14}, floats(t, g.GetGradInputData()))

	_, err = other.Compute(t.Context(), train(raw(1), "f", 1))
	require.NoError(t, err, "the name is free again")
	leave()
	testkit.Eventually(t, func() bool {
		_, err := f.Compute(t.Context(), train(raw(1), "f", 1))
		return err == nil
	}, "the name, when the other's connection has ended")
	k.see(func() { require.Len(t, k.graphs, 1, "and its graph is released") })
}

func TestOfTwoPassesOfANameAtATimeOneIsKept(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	for n := range 20 {
		name, ended := fmt.Sprint(n), make(chan error)
		for range 2 {
			go func() {
				_, err := f.Compute(t.Context(), train(raw(1), name, 1))
				ended <- err
			}()
		}
		a, b := <-ended, <-ended
		if a == nil {
			a, b = b, a
		}
		hasCode(t, codes.AlreadyExists, a)
		require.NoError(t, b)
		for range 2 {
			go func() {
				_, err := f.ComputeBackward(t.Context(), gradient(raw(5), name, 1))
				ended <- err
			}()
		}
		a, b = <-ended, <-ended
		if a == nil {
			a, b = b, a
		}
		isGone(t, name, a)
		require.NoError(t, b)
	}
	k.see(func() { require.Empty(t, k.graphs) })
}

func TestEachConnectionHasAShareOfTheHundred(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	other, _ := f.other(t)
	forward := func(c pb.ComputeServiceClient, who string, n int) {
		_, err := c.Compute(t.Context(), train(raw(1), fmt.Sprint(who, n), 1))
		require.NoError(t, err)
	}
	for n := range 40 {
		forward(f, "mine", n)
	}
	for n := range 300 {
		forward(other, "other", n)
	}
	k.see(func() { require.Len(t, k.graphs, 100) })
	for n := 40; n < 60; n++ { // beyond its share a connection makes room itself
		forward(f, "mine", n)
	}
	for n := range 60 {
		_, err := f.ComputeBackward(t.Context(), gradient(raw(1), fmt.Sprint("mine", n), 1))
		if n < 10 {
			isGone(t, fmt.Sprint("mine", n), err)
		} else {
			require.NoError(t, err, n)
		}
	}
	for n := 250; n < 300; n++ {
		_, err := other.ComputeBackward(t.Context(), gradient(raw(1), fmt.Sprint("other", n), 1))
		require.NoError(t, err, n)
	}
}

func TestManyConnectionsOfAClientHaveTheShareOfOne(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", func(c *server.Config) {
		c.Identify = func(_ credentials.AuthInfo, authorization []string) (string, error) {
			return strings.Join(authorization, ""), nil
		}
	})
	k := f.addTrunk(t)
	as := func(who string) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), "authorization", who)
	}
	forward := func(c pb.ComputeServiceClient, who, id string) {
		_, err := c.Compute(as(who), train(raw(1), id, 1))
		require.NoError(t, err)
	}
	for n := range 40 {
		forward(f, "alice", fmt.Sprint(n))
	}
	for n := range 80 {
		other, _ := f.other(t)
		forward(other, "mallory", fmt.Sprint(n))
	}
	k.see(func() { require.Len(t, k.graphs, 100) })
	for n := range 40 {
		_, err := f.ComputeBackward(as("alice"), gradient(raw(1), fmt.Sprint(n), 1))
		require.NoError(t, err, n)
	}
}

func TestAPassThatItsClientIsNotToldOfIsNotKept(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	_, err := f.Compute(t.Context(), train(raw(1), "e", 1)) // has the lease
	require.NoError(t, err)
	_, err = f.ComputeBackward(t.Context(), gradient(raw(5), "e", 1))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = f.Compute(ctx, train(abandoned[:], "f", 3))
	hasCode(t, codes.DeadlineExceeded, err)
	testkit.Eventually(t, func() bool {
		_, err := f.Compute(t.Context(), train(raw(1), "f", 1))
		return err == nil
	}, "the name is free")
	_, err = f.ComputeBackward(t.Context(), gradient(raw(5), "f", 1))
	require.NoError(t, err)
	_, err = f.Compute(t.Context(), train(raw(1), "g", 1))
	require.NoError(t, err)
	k.see(func() { require.Len(t, k.graphs, 1, "the first one's graph is released") })
}

func TestTheLeaseIsTakenAnewWhenItIsLostAndNotTakenFromOthers(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	_, err := f.Compute(t.Context(), train(raw(1), "a", 1))
	require.NoError(t, err)
	k.see(func() { k.holder = ""; clear(k.graphs) }) // as after a restart of its process
	_, err = f.ComputeBackward(t.Context(), gradient(raw(1), "a", 1))
	isGone(t, "a", err)
	_, err = f.Compute(t.Context(), train(raw(1), "b", 1))
	require.NoError(t, err)
	g, err := f.ComputeBackward(t.Context(), gradient(raw(5), "b", 1))
	require.NoError(t, err)
	require.Equal(t, []float32{10}, floats(t, g.GetGradInputData()))
	k.see(func() { k.holder = "somebody" })
	_, err = f.Compute(t.Context(), train(raw(1), "c", 1))
	hasCode(t, codes.PermissionDenied, err)
	require.Contains(t, status.Convert(err).Message(), "another client")
	_, err = f.Compute(t.Context(), &pb.ComputeRequest{Data: raw(1), Shape: []int32{1}, ModelId: "trunk"})
	require.NoError(t, err, "without training mode")
}

func TestAPassOutlivesARefusalThatIsRetried(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", func(c *server.Config) { c.QueuedCalls = 2 })
	f.addTrunk(t)
	running, _ := f.addBlocker(t)
	_, err := f.Compute(t.Context(), train(raw(1), "a", 1))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	for range 2 {
		go func() {
			_, _ = f.Compute(ctx, &pb.ComputeRequest{Data: raw(1), Shape: []int32{1}, ModelId: "blocker"})
		}()
	}
	testkit.Eventually(t, func() bool { return running.Load() > 0 && f.counters(t)["calls"] == 2 }, "as many calls as there may be")
	_, err = f.ComputeBackward(t.Context(), gradient(raw(5), "a", 1))
	hasCode(t, codes.ResourceExhausted, err)
	cancel()
	testkit.Eventually(t, func() bool {
		g, err := f.ComputeBackward(t.Context(), gradient(raw(5), "a", 1))
		return err == nil && string(g.GetGradInputData()) == string(raw(10))
	}, "the gradient, when there is room")
}

func TestALeaseThatNobodyNeedsIsGivenUp(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	_, err := f.Compute(t.Context(), train(raw(1), "a", 1))
	require.NoError(t, err)
	_, err = f.ComputeBackward(t.Context(), gradient(raw(5), "a", 1))
	require.NoError(t, err)
	testkit.Eventually(t, func() (free bool) {
		k.see(func() { free = k.holder == "" })
		return free
	}, "a lease that others can take")
	_, err = f.Compute(t.Context(), train(raw(1), "b", 1))
	require.NoError(t, err, "and it is taken again")
}

func TestALeaseIsGivenUpWhenThereIsRoomForTheCall(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", func(c *server.Config) { c.QueuedCalls = 2 })
	k := f.addTrunk(t)
	f.addBlocker(t)
	_, err := f.Compute(t.Context(), train(raw(1), "a", 1))
	require.NoError(t, err)
	_, err = f.ComputeBackward(t.Context(), gradient(raw(5), "a", 1))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	for range 2 {
		go func() {
			_, _ = f.Compute(ctx, &pb.ComputeRequest{Data: raw(1), Shape: []int32{1}, ModelId: "blocker"})
		}()
	}
	testkit.Eventually(t, func() bool { return f.counters(t)["calls_refused_total"] > 0 }, "a lease that cannot be given up")
	cancel()
	testkit.Eventually(t, func() (free bool) {
		k.see(func() { free = k.holder == "" })
		return free
	}, "a lease that others can take")
}

func TestManyClientsTrainUnderOneLease(t *testing.T) {
	testkit.Start(t)
	f := serveModel(t, 256*mib, "trunk", nil)
	k := f.addTrunk(t)
	ended := make(chan error)
	for n := range 10 {
		c := pb.NewComputeServiceClient(dial(t, f.addr))
		go func() {
			var err error
			for i := 0; i < 20 && err == nil; i++ {
				var y *pb.ComputeResponse
				var g *pb.BackwardResponse
				if y, err = c.Compute(t.Context(), train(raw(1), "", 1)); err == nil {
					g, err = c.ComputeBackward(t.Context(), gradient(raw(float32(n)), y.GetForwardId(), 1))
				}
				if err == nil && string(g.GetGradInputData()) != string(raw(float32(2*n))) {
					err = status.Error(codes.DataLoss, "another's gradient")
				}
			}
			ended <- err
		}()
	}
	for range 10 {
		require.NoError(t, <-ended)
	}
	k.see(func() { require.Empty(t, k.graphs) })
}
