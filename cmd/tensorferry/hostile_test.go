package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// nasty is what a server may say to a terminal.
const nasty = "a\x1b[31m\u009b2J\u202eb\u2028c\u2029\U000e0001\x7f\r\nhint: run this"

// rogue is a server that says nasty things, and says OK to a pull of which it sends nothing.
type rogue struct {
	pb.UnimplementedTensorServiceServer
	tensors []*pb.StoredTensor
	fail    atomic.Pointer[error] // of a list
}

func (r *rogue) ListTensors(context.Context, *pb.ListTensorsRequest) (*pb.ListTensorsResponse, error) {
	if err := r.fail.Load(); err != nil {
		return nil, *err
	}
	return &pb.ListTensorsResponse{Tensors: r.tensors, Sources: []string{nasty}}, nil
}

func (r *rogue) StreamTensors(s grpc.BidiStreamingServer[pb.Frame, pb.Frame]) error {
	f, err := s.Recv()
	if err == nil {
		h := f.GetHello()
		err = s.Send(&pb.Frame{Hello: &pb.Hello{Version: 1, SessionId: h.GetSessionId(), Checksum: h.GetChecksum(), Stores: true}})
	}
	for err == nil {
		if f, err = s.Recv(); err != nil {
			return nil
		}
		for _, c := range f.GetCalls() {
			err = s.Send(&pb.Frame{Dones: []*pb.Done{{CallId: c.GetId()}}})
		}
	}
	return err
}

func (r *rogue) ListModels(context.Context, *pb.ListModelsRequest) (*pb.ListModelsResponse, error) {
	port := &pb.Port{Name: nasty, Dtypes: []pb.DataType{300, -1, 12}, Shape: []int64{math.MinInt64}}
	return &pb.ListModelsResponse{Models: []*pb.Model{{Name: nasty, Version: nasty, Device: nasty, Inputs: []*pb.Port{port, nil}}}}, nil
}

func (r *rogue) GetServiceInfo(context.Context, *pb.GetServiceInfoRequest) (*pb.GetServiceInfoResponse, error) {
	return &pb.GetServiceInfoResponse{
		Version: nasty, Limits: map[string]int64{nasty: -1}, Counters: map[string]int64{nasty: math.MinInt64}, Codecs: []pb.Codec{257, -1},
	}, nil
}

// at has the command talk to a rogue until the test's end, and returns what runs it. An
// argument $SERVER is its address.
func (r *rogue) at(t *testing.T) func(args ...string) (stdout, stderr string, code int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer()
	pb.RegisterTensorServiceServer(s, r)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with Stop
	t.Cleanup(func() {
		s.Stop()
		require.NoError(t, <-served)
	})
	return func(args ...string) (string, string, int) {
		if i := slices.Index(args, "$SERVER"); i >= 0 {
			args[i] = l.Addr().String()
		}
		var out, said bytes.Buffer
		c := program(t, "tensorferry", args...)
		c.Env = append(os.Environ(), "TENSORFERRY_SERVER="+l.Addr().String())
		c.Stdout, c.Stderr = &out, &said
		err := c.Run()
		if _, ended := errors.AsType[*exec.ExitError](err); !ended {
			require.NoError(t, err)
		}
		return out.String(), said.String(), c.ProcessState.ExitCode()
	}
}

func TestAServerThatSaysOKAndSendsNothingMakesNoCommandSucceed(t *testing.T) {
	testkit.Start(t)
	r := &rogue{tensors: []*pb.StoredTensor{{Name: "x", Dtype: 12, Shape: []int64{4}, SizeBytes: 16}}}
	run := r.at(t)
	dir := t.TempDir()
	for _, args := range [][]string{
		{"pull", "x", "-o", filepath.Join(dir, "o.npy")},
		{"pull", "x*", "-o", filepath.Join(dir, "o.npy")},
		{"pull", "x", "-o", filepath.Join(dir, "o.safetensors")},
		{"pull", "x", "--raw", "--output", "-"},
		{"pull", "--source", "gen", "-o", filepath.Join(dir, "o.npy"), "--json"},
		{"cp", "x", "z"},
		{"show", "--server", "$SERVER", "x"},
	} {
		t.Run(strings.Join(args[:2], " "), func(t *testing.T) {
			out, said, code := run(args...)
			require.Equal(t, fail.ExitIntegrity, code, said)
			require.Empty(t, out)
			require.Contains(t, said, "without mentioning it")
			require.NotContains(t, said, "panic")
			require.Empty(t, leftIn(t, dir))
		})
	}
}

func TestWhatAServerSaysDoesNotReachTheTerminalAsACommand(t *testing.T) {
	testkit.Start(t)
	r := &rogue{tensors: []*pb.StoredTensor{
		{Name: nasty, Dtype: 99, Shape: []int64{-1, math.MinInt64}, SizeBytes: math.MaxUint64, StoredMillis: math.MaxInt64, File: nasty, Digest: []byte("1234")},
		{Name: "y", Dtype: 12, StoredMillis: math.MinInt64},
		{Name: "z", Dtype: 12, StoredMillis: 1000},
	}}
	run := r.at(t)
	harmless := func(t *testing.T, text string) {
		t.Helper()
		require.NotContains(t, text, "\nhint: run this")
		for _, c := range text {
			require.True(t, c == '\n' || unicode.IsPrint(c), "%U in %q", c, text)
		}
	}
	for _, args := range [][]string{{"ls"}, {"models"}, {"info"}} {
		t.Run(args[0], func(t *testing.T) {
			out, said, code := run(args...)
			require.Zero(t, code, said)
			harmless(t, out)
			out, said, code = run(append(args, "--json")...)
			require.Zero(t, code, said)
			harmless(t, out)
			require.True(t, json.Valid([]byte(out)), out)
			require.Contains(t, out, `\u001b[31m\u009b2J\u202eb\u2028c\u2029\udb40\udc01\u007f\r\nhint`)
		})
	}
	out, _, _ := run("ls", "--json")
	var listed []struct {
		Stored *string
		Bytes  int64
	}
	require.NoError(t, json.Unmarshal([]byte(out), &listed))
	require.Nil(t, listed[0].Stored)
	require.Nil(t, listed[1].Stored)
	require.Equal(t, "1970-01-01T00:00:01Z", *listed[2].Stored)
	require.Equal(t, int64(math.MaxInt64), listed[0].Bytes)
	out, _, _ = run("models")
	require.Contains(t, out, "DataType(255)|DataType(0)|float32")
	out, _, _ = run("info")
	require.Contains(t, out, "none codec 255 none")

	refusal := status.Error(codes.NotFound, nasty)
	r.fail.Store(&refusal)
	_, said, code := run("ls")
	require.Equal(t, fail.ExitFailure, code)
	harmless(t, said)
	require.Len(t, strings.Split(strings.TrimSpace(said), "\n"), 2, "an error and our own hint: %s", said)
}
