package server_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionalphapb "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
)

// everyRPC are those of a server.
func everyRPC() (all []string) {
	for _, s := range []grpc.ServiceDesc{
		pb.TensorService_ServiceDesc, healthpb.Health_ServiceDesc,
		reflectionpb.ServerReflection_ServiceDesc, reflectionalphapb.ServerReflection_ServiceDesc,
	} {
		for _, m := range s.Methods {
			all = append(all, "/"+s.ServiceName+"/"+m.MethodName)
		}
		for _, m := range s.Streams {
			all = append(all, "/"+s.ServiceName+"/"+m.StreamName)
		}
	}
	return all
}

// quiet has a server with a store log at info level.
func quiet(t testing.TB, to *notes) func(*server.Config) {
	return func(c *server.Config) {
		c.Store = shelf(t, mib)
		c.Reflection = true
		c.Log = slog.New(slog.NewTextHandler(to, &slog.HandlerOptions{Level: slog.LevelInfo}))
	}
}

func TestBytesThatAreNoMessageAreAnInvalidArgumentOfAnyRPCAndNotLogged(t *testing.T) {
	testkit.Start(t)
	log := &notes{}
	f := serve(t, quiet(t, log))
	conn := f.dial(t)
	for _, rpc := range everyRPC() {
		for name, garbage := range map[string]string{
			"no tag":            "\xff\xff\xff\xff garbage \xff",
			"a length too long": "\x0a\x7fabc",
			"an open group":     "\x0b",
		} {
			t.Run(rpc+"/"+name, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), rawLife)
				defer cancel()
				s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, rpc, asItIs())
				require.NoError(t, err)
				require.NoError(t, s.SendMsg([]byte(garbage)))
				require.NoError(t, s.CloseSend())
				st := status.Convert(s.RecvMsg(&pb.Frame{}))
				require.Equal(t, codes.InvalidArgument, st.Code(), st.Message())
				require.Contains(t, st.Message(), "malformed")
			})
		}
	}
	f.isEmpty(t)
	require.Empty(t, log.String())
}

// What never comes to a codec grpc answers itself, with INTERNAL.
func TestBytesThatAreNoMessageOfGRPCAreNotLogged(t *testing.T) {
	testkit.Start(t)
	log := &notes{}
	f := serve(t, quiet(t, log))
	only := new(http.Protocols)
	only.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: only}
	defer transport.CloseIdleConnections()
	raw := http.Client{Transport: transport, Timeout: rawLife}
	for _, rpc := range everyRPC() {
		for name, body := range map[string]string{
			"a message cut short": "\x00\x00\x00\x00\x05ab",
			"a header cut short":  "\x00\x00",
			"compressed":          "\x01\x00\x00\x00\x02\x0a\x00",
			"no such format":      "\x07\x00\x00\x00\x00",
			"none":                "",
			"two":                 "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		} {
			t.Run(rpc+"/"+name, func(t *testing.T) {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+f.addr+rpc, bytes.NewReader([]byte(body)))
				require.NoError(t, err)
				req.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}}
				resp, err := raw.Do(req)
				require.NoError(t, err)
				_, err = io.Copy(io.Discard, resp.Body)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				code := resp.Header.Get("Grpc-Status") + resp.Trailer.Get("Grpc-Status")
				require.NotEmpty(t, code)
			})
		}
	}
	testkit.Eventually(t, f.isIdle, "the end of every RPC")
	require.Empty(t, log.String())
}

func TestRequestsThatBreakARuleAreNotLogged(t *testing.T) {
	testkit.Start(t)
	log := &notes{}
	f := serve(t, quiet(t, log))
	hello := func() *pb.Hello {
		return &pb.Hello{Version: 1, SessionId: newID(), Checksum: pb.Checksum_CHECKSUM_CRC32C}
	}
	for name, req := range map[string]*pb.PullTensorsRequest{
		"nothing":           {},
		"no selection":      {Hello: hello()},
		"a selection empty": {Hello: hello(), Selections: []*pb.Selection{{}}},
		"no session id":     {Hello: &pb.Hello{Version: 1, Checksum: 1}, Selections: []*pb.Selection{{Name: "x"}}},
		"params of a name":  {Hello: hello(), Selections: []*pb.Selection{{Name: "x", Params: map[string]string{"a": "b"}}}},
		"a range of 0":      {Hello: hello(), Selections: []*pb.Selection{{Name: "x", Held: []*pb.Range{{}}}}},
		"a digest of 1":     {Hello: hello(), Selections: []*pb.Selection{{Name: "x", HeldDigest: []byte{1}}}},
	} {
		t.Run("pull/"+name, func(t *testing.T) {
			s, err := pb.NewTensorServiceClient(f.dial(t)).PullTensors(t.Context(), req)
			require.NoError(t, err)
			_, err = s.Recv()
			require.Equal(t, codes.InvalidArgument, status.Code(err), err)
		})
	}
	for name, frames := range map[string][]*pb.Frame{
		"no hello":      {{}},
		"a second one":  {{Hello: hello()}, {Hello: hello()}},
		"credit":        {{Hello: hello(), Credits: []*pb.Credit{{TensorId: newID()}}}},
		"a summary":     {{Hello: hello(), Summaries: []*pb.Summary{{TensorId: newID()}}}},
		"an id too few": {{Hello: hello(), Descs: []*pb.TensorDesc{{TensorId: []byte{1}}}}},
	} {
		t.Run("push/"+name, func(t *testing.T) {
			s, err := pb.NewTensorServiceClient(f.dial(t)).PushTensors(t.Context())
			require.NoError(t, err)
			for _, one := range frames {
				if s.Send(one) != nil {
					break // it has ended
				}
			}
			_, err = s.CloseAndRecv()
			require.Equal(t, codes.InvalidArgument, status.Code(err), err)
		})
	}
	for name, req := range map[string]*pb.ComputeRequest{
		"nothing":           {},
		"a data type":       {Model: "echo", Inputs: []*pb.NamedTensor{{Port: "x", Dtype: 99, Shape: []int64{1}, Data: []byte{1}}}},
		"a negative axis":   {Model: "echo", Inputs: []*pb.NamedTensor{{Port: "x", Dtype: 6, Shape: []int64{-1}}}},
		"too few bytes":     {Model: "echo", Inputs: []*pb.NamedTensor{{Port: "x", Dtype: 6, Shape: []int64{2}, Data: []byte{1}}}},
		"a port twice":      {Model: "echo", Inputs: []*pb.NamedTensor{{Port: "x", Dtype: 6}, {Port: "x", Dtype: 6}}},
		"a parameter of \a": {Model: "\a"},
	} {
		t.Run("compute/"+name, func(t *testing.T) {
			_, err := pb.NewTensorServiceClient(f.dial(t)).Compute(t.Context(), req)
			require.Equal(t, codes.InvalidArgument, status.Code(err), err)
		})
	}
	testkit.Eventually(t, f.isIdle, "the end of every RPC")
	require.Empty(t, log.String())
}
