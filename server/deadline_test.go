package server_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
)

// TestADeadlineIsToldBeforeItPasses has a clock that all share: what a client is told before its
// own deadline is the server's status, and not a reset.
func TestADeadlineIsToldBeforeItPasses(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		registry := prometheus.NewPedanticRegistry()
		f := serve(t, func(c *server.Config) { c.Metrics = registry })
		conn := f.dial(t)
		slow := &pb.ComputeRequest{
			Model: "slow", Params: map[string]string{"delay": "1m"},
			Inputs: []*pb.NamedTensor{{Port: "x", Dtype: pb.DataType_DATA_TYPE_FLOAT32, Shape: []int64{1}, Data: make([]byte, 4)}},
		}
		for method, wait := range map[string]func(ctx context.Context) error{
			"unary": func(ctx context.Context) error {
				_, err := pb.NewTensorServiceClient(conn).Compute(ctx, slow)
				return err
			},
			"streaming": func(ctx context.Context) error {
				s, err := healthpb.NewHealthClient(conn).Watch(ctx, &healthpb.HealthCheckRequest{})
				for err == nil {
					_, err = s.Recv()
				}
				return err
			},
		} {
			for timeout, early := range map[time.Duration]time.Duration{
				5 * time.Millisecond: time.Millisecond, 100 * time.Millisecond: 5 * time.Millisecond, 10 * time.Second: 50 * time.Millisecond,
			} {
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				began := time.Now()
				err := wait(ctx)
				require.Equal(t, timeout-early, time.Since(began), "%s %v", method, timeout)
				require.Equal(t, codes.DeadlineExceeded, status.Code(err))
				cancel()
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		_, err := pb.NewTensorServiceClient(conn).Compute(ctx, slow)
		require.Equal(t, codes.Canceled, status.Code(err))
		f.isEmpty(t)
		require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`# HELP tensorferry_ended_rpcs_total RPCs that have ended, of every service.
# TYPE tensorferry_ended_rpcs_total counter
tensorferry_ended_rpcs_total{code="CANCELLED",service="tensorferry.v1.TensorService"} 1
tensorferry_ended_rpcs_total{code="DEADLINE_EXCEEDED",service="grpc.health.v1.Health"} 3
tensorferry_ended_rpcs_total{code="DEADLINE_EXCEEDED",service="tensorferry.v1.TensorService"} 3
`), "tensorferry_ended_rpcs_total"))
	})
}
