package server_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// pairOf makes a call of pair with rows of x on credit and a w of n bytes on
// allowance.
func pairOf(rows, n int) (x, w *offer) {
	x = offering("pair", floats(rows*n/4), n).as(pb.DataType_DATA_TYPE_FLOAT32, int64(rows), int64(n/4))
	w = offering("pair", floats(n/4), n).as(pb.DataType_DATA_TYPE_FLOAT32, int64(n/4))
	w.call, w.desc.CallId, w.desc.Port, w.desc.OnAllowance = x.call, x.call.Id, "w", true
	x.call.Inputs = append(x.call.Inputs, &pb.Input{Port: "w", TensorId: w.desc.TensorId})
	return x, w
}

// covered fails when more memory is handed out than the budget knows of.
func (f *fixture) covered(t testing.TB) {
	t.Helper()
	_, live := f.host.Pool().Live()
	used, _, _ := f.host.Budget().Used()
	require.LessOrEqual(t, live, used, "bytes handed out beside the budget")
}

func TestTensorsOnAllowanceWaitWithinTheBudget(t *testing.T) {
	testkit.Start(t)
	const budget = 16 * mib
	f := serveWithin(t, budget, nil)
	addPair(t, f)
	r := openRaw(t, f.addr)
	refused := 0
	for range 60 {
		_, w := pairOf(1, mib) // x never comes
		r.open(w)
		r.send(&pb.Frame{Chunk: r.chunk(w, 0)})
		// The acknowledgement gives the allowance back to the peer.
		r.until(func() bool {
			return r.acks[string(w.desc.TensorId)].GetReceivedBelow() == 1 || len(r.dones[string(w.call.Id)]) > 0
		})
		f.covered(t)
		if ended := r.dones[string(w.call.Id)]; len(ended) > 0 {
			refused++
			require.Equal(t, codes.ResourceExhausted, codes.Code(ended[0].Code))
			require.Contains(t, ended[0].Message, fmt.Sprint(budget))
			require.Positive(t, ended[0].RetryAfterMillis)
		}
	}
	_, live := f.host.Pool().Live()
	require.LessOrEqual(t, live, int64(budget/2+mib), "of one session")
	require.Greater(t, refused, 50)
}

func TestATensorOnAllowanceMakesRoomOnceItLiesInABlock(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	addPair(t, f)
	r := openRaw(t, f.addr)
	const calls = 8
	var last [calls]*offer
	for i := range last {
		x, w := pairOf(1, mib)
		r.send(&pb.Frame{Calls: []*pb.Call{x.call}, Descs: []*pb.TensorDesc{w.desc, x.desc}})
		r.deliver(w)
		r.credit(x.desc.TensorId, 1) // the block of w is full
		last[i] = x
	}
	f.covered(t)
	// Each run holds w and a block of x; none of them waits on the side.
	_, live := f.host.Pool().Live()
	require.Less(t, live, int64(calls*2*mib+mib))
	for _, x := range last {
		r.deliver(x)
		r.result(x)
	}
}

func TestAnAllowanceDoesNotHoldUpALargeCallOfItsSession(t *testing.T) {
	testkit.Start(t)
	f := serveWithin(t, 16*mib, nil)
	g := addGate(t, f, "gate")
	first, second, third := openRaw(t, f.addr), openRaw(t, f.addr), openRaw(t, f.addr)
	s := small("echo")
	s.desc.OnAllowance = true
	second.run(s) // from now on it holds its allowance
	o := offering("gate", make([]byte, 6*mib), mib)
	first.open(o)
	first.credit(o.desc.TensorId, 1)
	large := offering("sink", make([]byte, 10*mib), mib) // more than half, and than is left
	second.open(large)
	probe := slab.NewPrincipal("probe")
	testkit.Eventually(t, func() bool {
		granted := f.host.Budget().TryAcquire(probe, 1)
		if granted {
			f.host.Budget().Release(probe, 1)
		}
		return !granted
	}, "a call that waits for memory")
	behind := offering("sink", make([]byte, 7*mib), mib)
	third.open(behind)
	close(g.open)
	first.deliver(o)
	first.result(o)
	second.deliver(large)
	second.result(large)
	third.deliver(behind)
	third.result(behind)
}

func TestIdleSessionsGiveWhatTheyWerePromisedToWhoLacksIt(t *testing.T) {
	testkit.Start(t)
	// Room for some promises, and the calls of one.
	f := serveWithin(t, 8*mib, nil)
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer c.Close()
	var all []*client.Session
	x := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{4096}}, Data: make([]byte, 4096)}
	for range 60 { // who finds no room for a promise is served without
		s, err := c.Session(t.Context())
		require.NoError(t, err)
		all = append(all, s)
		_, err = s.Compute(t.Context(), "echo", x)
		require.NoError(t, err)
	}
	// And a call as large as the budget allows needs all that is idle.
	big := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{32 * mib}}, Data: make([]byte, 32*mib)}
	_, err = all[0].Compute(t.Context(), "echo", big)
	require.NoError(t, err)
}
