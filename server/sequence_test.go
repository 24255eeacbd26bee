package server_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// counted is the state of a model that says how many rows have come.
type counted struct {
	rows atomic.Uint32
	open *atomic.Int64
}

func (*counted) Rows(c engine.Call) (int64, error) { return c.Inputs[0].Desc.Shape[0], nil }
func (*counted) Bytes() int64                      { return 4 }
func (s *counted) Close()                          { s.open.Add(-1) }

// addCounter adds the model, which answers each row of a sequence with its number, waits where it
// is 9, and loses the state where it is 8.
func addCounter(t testing.TB, f *fixture) (open *atomic.Int64, waiting chan struct{}) {
	open, waiting = new(atomic.Int64), make(chan struct{}, 1)
	port := []engine.Port{{Name: "x", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.Free, 4}}}
	out := []engine.Port{{Name: "y", DTypes: port[0].DTypes, Shape: port[0].Shape}}
	f.add(t, cpu.RowFunc{
		Info: engine.Info{Name: "counter", Rows: 1, BlockRows: 1 << 20, Inputs: port, Outputs: out},
		Begin: func(context.Context, engine.Sequence) (engine.State, error) {
			open.Add(1)
			return &counted{open: open}, nil
		},
		Bind: func(c engine.Call) (cpu.RowsFunc, error) {
			s, _ := c.State.(*counted)
			return func(ctx context.Context, b cpu.RowBlock) error {
				for r := range int(b.Rows) {
					switch b.In[0][4*r] {
					case 9:
						waiting <- struct{}{}
						<-ctx.Done()
						return context.Cause(ctx)
					case 8:
						return engine.ErrStateLost
					}
					binary.LittleEndian.PutUint32(b.Out[0][4*r:], s.rows.Add(1))
				}
				return nil
			}, nil
		},
	})
	return open, waiting
}

func beginning(id []byte, model string, rows uint64) *pb.Call {
	return &pb.Call{Id: newID(), Model: model, Sequence: &pb.Sequence{Id: id, MaxRows: rows}}
}

// stepping is a step of rows that begin with a byte.
func stepping(id []byte, first byte, rows int) *offer {
	data := make([]byte, 4*rows)
	data[0] = first
	o := offering("", data, 4*rows).as(pb.DataType_DATA_TYPE_UINT8, int64(rows), 4)
	o.call.Sequence, o.desc.OnAllowance = &pb.Sequence{Id: id}, true
	return o
}

// sendStep sends a step whole.
func (r *raw) sendStep(o *offer) *pb.Call {
	r.send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}, Chunk: o.chunk(0)})
	return o.call
}

// ends wants a done with a code, and words of its message.
func (r *raw) ends(c *pb.Call, code codes.Code, reason, says string) *pb.Done {
	r.t.Helper()
	d := r.done(c.Id)
	require.Equal(r.t, code, codes.Code(d.Code), "%v", d)
	require.Equal(r.t, reason, d.Reason, "%v", d)
	require.Contains(r.t, d.Message, says)
	return d
}

func TestSequencesOfAPeerThatObeysNoRule(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	open, waiting := addCounter(t, f)
	r := openRaw(t, f.addr)
	require.True(t, r.hello.Sequences)
	id, end := newID(), func(id []byte) *pb.Call {
		return &pb.Call{Id: newID(), Sequence: &pb.Sequence{Id: id, End: true}}
	}
	one := func(c *pb.Call) *pb.Call {
		r.send(&pb.Frame{Calls: []*pb.Call{c}})
		return c
	}

	// What is no call of a sequence.
	for says, c := range map[string]*pb.Call{
		"names a model and has no inputs":  beginning(id, "", 1),
		"max_rows is":                      beginning(id, "counter", math.MaxInt64+1),
		"names no model and has no params": {Id: newID(), Model: "counter", Sequence: &pb.Sequence{Id: id}},
		"either begins a sequence or ends": {Id: newID(), Model: "counter", Sequence: &pb.Sequence{Id: id, MaxRows: 1, End: true}},
		"has inputs":                       {Id: newID(), Sequence: &pb.Sequence{Id: id}},
		"is of no sequence":                {Id: newID(), Put: &pb.Put{}, Sequence: &pb.Sequence{Id: id, MaxRows: 1}},
	} {
		if says == "is of no sequence" {
			one(c)
			require.NotZero(t, r.done(c.Id).Code)
			continue
		}
		r.ends(one(c), codes.InvalidArgument, "", says)
	}
	r.ends(one(beginning(id, "sink", 1)), codes.FailedPrecondition, "MODEL_NOT_READY", "takes whole tensors")
	r.ends(r.sendStep(stepping(id, 0, 1)), codes.FailedPrecondition, "STATE_LOST", "there is no sequence")
	r.ends(one(end(id)), codes.OK, "", "")

	// A step before it has begun, twice the same, and more than there may be.
	first := beginning(id, "counter", 5)
	r.ends(one(first), codes.OK, "", "")
	r.ends(one(beginning(id, "counter", 5)), codes.InvalidArgument, "", "has begun before")
	require.EqualValues(t, 1, r.ends(r.sendStep(stepping(id, 0, 1)), codes.OK, "", "").Rows)
	r.ends(r.sendStep(stepping(id, 0, 5)), codes.FailedPrecondition, "", "a step of 5 rows, and its sequence has room for 4 of its 5")
	o := stepping(id, 0, 1)
	require.EqualValues(t, 2, r.ends(r.sendStep(o), codes.OK, "", "").Rows)
	for _, in := range r.results {
		if string(in.desc.CallId) == string(o.call.Id) {
			require.EqualValues(t, 2, binary.LittleEndian.Uint32(in.data))
		}
	}

	// Another session has no part in it.
	other := openRaw(t, f.addr)
	other.ends(other.sendStep(stepping(id, 0, 1)), codes.FailedPrecondition, "STATE_LOST", "")
	require.NoError(t, other.stream.CloseSend())

	// Two at a time, and an end while one computes: the state is closed when that is over.
	busy := r.sendStep(stepping(id, 9, 1))
	<-waiting
	r.ends(r.sendStep(stepping(id, 0, 1)), codes.FailedPrecondition, "MODEL_NOT_READY", "a step is under way")
	r.ends(one(end(id)), codes.OK, "", "")
	r.ends(r.sendStep(stepping(id, 0, 1)), codes.FailedPrecondition, "STATE_LOST", "")
	require.EqualValues(t, 1, open.Load())
	r.send(&pb.Frame{Cancels: []*pb.Cancel{{CallId: busy.Id}}})
	r.ends(busy, codes.Canceled, "", "")
	testkit.Eventually(t, func() bool { return open.Load() == 0 }, "the state is closed")

	// One whose state is lost says how many rows were answered, and is over.
	id = newID()
	r.ends(one(beginning(id, "counter", 5)), codes.OK, "", "")
	r.ends(r.sendStep(stepping(id, 0, 3)), codes.OK, "", "")
	r.ends(r.sendStep(stepping(id, 8, 1)), codes.FailedPrecondition, "STATE_LOST", "3 rows were answered")
	r.ends(r.sendStep(stepping(id, 0, 1)), codes.FailedPrecondition, "STATE_LOST", "there is no sequence")

	// What a step leaves behind when its input never comes ends with it.
	id = newID()
	r.ends(one(beginning(id, "counter", 5)), codes.OK, "", "")
	o = stepping(id, 0, 2)
	r.send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}})
	r.send(&pb.Frame{Cancels: []*pb.Cancel{{CallId: o.call.Id}}})
	r.ends(o.call, codes.Canceled, "", "")
	r.end()
	testkit.Eventually(t, func() bool { return open.Load() == 0 && f.counters(t)["sequences"] == 0 }, "nothing is left")
}

func TestOneSequenceOverTheLimitIsRefusedAsLater(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.QueuedCalls = 8 })
	open, _ := addCounter(t, f)
	s := f.session(t, client.Config{})
	begin := func() (*client.Sequence, error) {
		return s.Sequence(t.Context(), client.SequenceRequest{Model: "counter", MaxRows: 1})
	}
	for range 6 { // the rest is for others
		_, err := begin()
		require.NoError(t, err)
	}
	_, err := begin()
	require.ErrorContains(t, err, "sequences: the limit of the server is 8")
	own, ok := errors.AsType[*client.Error](err)
	require.True(t, ok)
	require.Equal(t, reason.Open, own.Why())
	require.True(t, own.Retryable())
	require.EqualValues(t, 1, f.counters(t)["sequences_refused_total"])
	q, err := f.session(t, client.Config{}).Sequence(t.Context(), client.SequenceRequest{Model: "counter", MaxRows: 1})
	require.NoError(t, err)
	require.NoError(t, q.Close())
	require.NoError(t, s.Close())
	testkit.Eventually(t, func() bool { return open.Load() == 0 && f.counters(t)["sequences"] == 0 }, "none is left")
}
