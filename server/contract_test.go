package server_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// addCounting adds a model without inputs, whose rows of two numbers are numbered.
func addCounting(t testing.TB, f *fixture) {
	f.add(t, cpu.RowFunc{
		Info: engine.Info{
			Name: "counting", Rows: 1, Params: []engine.Param{{Name: "rows", Kind: "rows", Meaning: "how many to make"}},
			Outputs: []engine.Port{{Name: "y", DTypes: []tensor.DataType{tensor.Uint32}, Shape: []int64{engine.Free, 2}}},
		},
		Outs: func(_ []tensor.Desc, params map[string]string) ([]tensor.Desc, error) {
			var rows int64
			_, err := fmt.Sscan(params["rows"], &rows)
			return []tensor.Desc{{DType: tensor.Uint32, Shape: tensor.Shape{rows, 2}}}, err
		},
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			for i := range 2 * b.Rows {
				binary.LittleEndian.PutUint32(b.Out[0][4*i:], uint32(b.Row+i/2))
			}
			return nil
		},
	})
}

func requireCounted(t testing.TB, rows int64, data []byte) {
	t.Helper()
	require.Len(t, data, int(8*rows))
	for i := range 2 * rows {
		require.EqualValues(t, i/2, binary.LittleEndian.Uint32(data[4*i:]))
	}
}

func TestAModelWithoutInputsIsCalled(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	addCounting(t, f)
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer c.Close()
	s, err := c.Session(t.Context())
	require.NoError(t, err)
	for _, rows := range []int64{0, 1000} { // internal/serving has more
		t.Run(fmt.Sprint(rows), func(t *testing.T) {
			call, err := s.Call(t.Context(), client.Request{Model: "counting", Params: map[string]string{"rows": fmt.Sprint(rows)}})
			require.NoError(t, err)
			results, err := call.Wait()
			require.NoError(t, err)
			requireCounted(t, rows, results["y"].Data)
		})
	}
	t.Run("in one RPC", func(t *testing.T) {
		resp, err := pb.NewTensorServiceClient(f.dial(t)).Compute(t.Context(), &pb.ComputeRequest{Model: "counting", Params: map[string]string{"rows": "1000"}})
		require.NoError(t, err)
		requireCounted(t, 1000, resp.GetOutputs()[0].GetData())
	})
	t.Run("with an input it has not", func(t *testing.T) {
		_, err := s.Compute(t.Context(), "counting", tensor.Tensor{Desc: tensor.Desc{DType: tensor.Int8}, Data: []byte{1}})
		var e *client.Error
		require.ErrorAs(t, err, &e)
	})
}

// listening is a model that keeps what it was told in Open.
type listening struct {
	engine.Model
	calls chan engine.Call
}

func (l listening) Open(ctx context.Context, c engine.Call) (engine.Run, error) {
	l.calls <- c
	return l.Model.Open(ctx, c)
}

func TestNothingOutlastsASmallCall(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	heard := listening{f.named(t, "heard"), make(chan engine.Call, 1)}
	require.NoError(t, f.models.Add(heard))
	_, err := pb.NewTensorServiceClient(f.dial(t)).Compute(t.Context(), asking("heard", pb.DataType_DATA_TYPE_UINT8, []byte{1}, 1))
	require.NoError(t, err)
	require.Nil(t, (<-heard.calls).Lifetime)
}

// fitful is a model that runs when it likes, and measures its patience.
type fitful struct {
	engine.Model
	mu   sync.Mutex // guards all below
	told func(error)
}

func (m *fitful) WatchHealth(told func(error)) (stop func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.told = told
	told(nil)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.told = nil
	}
}

// becomes tells how the model is, and reports whether somebody listens.
func (m *fitful) becomes(err error) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.told == nil {
		return false
	}
	m.told(err)
	return true
}

func (*fitful) Gauges() []engine.Gauge {
	return []engine.Gauge{{Name: "patience_seconds", Meaning: "how long it will bear it", Value: 1.5}}
}

func TestWhatAModelTellsIsShownAndItsHealthFollowed(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	affine, release, err := f.models.Lookup("affine")
	require.NoError(t, err)
	defer release()
	m := &fitful{Model: enginetest.Named("moody", affine)}
	require.NoError(t, f.models.Add(enginetest.Named("moody", m)))
	conn := f.dial(t)
	stub, health := pb.NewTensorServiceClient(conn), healthpb.NewHealthClient(conn)

	listed, err := stub.ListModels(t.Context(), &pb.ListModelsRequest{})
	require.NoError(t, err)
	for _, l := range listed.GetModels() {
		if l.GetName() == "moody" {
			require.Len(t, l.GetParams(), 2)
			require.Equal(t, "1", l.GetParams()[0].GetDefault())
		}
	}
	shows := func(status healthpb.HealthCheckResponse_ServingStatus, unavailable string) {
		t.Helper()
		got, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "model/moody"})
		require.NoError(t, err)
		require.Equal(t, status, got.GetStatus())
		info, err := stub.GetServiceInfo(t.Context(), &pb.GetServiceInfoRequest{})
		require.NoError(t, err)
		for _, s := range info.GetModels() {
			if s.GetName() == "moody" {
				require.Equal(t, unavailable, s.GetUnavailable())
				require.Equal(t, map[string]float64{"patience_seconds": 1.5}, s.GetGauges())
				return
			}
		}
		t.Error("the model is not shown")
	}
	shows(healthpb.HealthCheckResponse_SERVING, "")
	require.True(t, m.becomes(engine.ErrUnavailable))
	shows(healthpb.HealthCheckResponse_NOT_SERVING, engine.ErrUnavailable.Error())
	require.True(t, m.becomes(nil))
	shows(healthpb.HealthCheckResponse_SERVING, "")
	require.NoError(t, f.models.Remove("moody"))
	require.False(t, m.becomes(nil), "nobody listens to a model that is out")
}
