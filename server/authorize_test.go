package server_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// named is the name of a client.
type named string

func (n named) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": string(n)}, nil
}
func (named) RequireTransportSecurity() bool { return false }

func byName(_ credentials.AuthInfo, authorization []string) (string, error) {
	if len(authorization) != 1 {
		return "", errors.New("who are you?")
	}
	return authorization[0], nil
}

func dialAs(t *testing.T, f *fixture, who string) (*client.Client, pb.TensorServiceClient) {
	t.Helper()
	c, err := client.Dial(f.addr, client.Config{PerRPC: named(who)})
	require.NoError(t, err)
	conn, err := grpc.NewClient(f.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithPerRPCCredentials(named(who)))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, c.Close())
		require.NoError(t, conn.Close())
	})
	return c, pb.NewTensorServiceClient(conn)
}

// noting is a store, and notes who is in the contexts of its methods.
type noting struct {
	*memory.Store
	note func(method string, ctx context.Context)
}

type notingWriter struct {
	store.Writer
	note func(method string, ctx context.Context)
}

func (n *noting) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	n.note("Create", ctx)
	w, err := n.Store.Create(ctx, name, d, metadata)
	return &notingWriter{w, n.note}, err
}

func (n *noting) Open(ctx context.Context, name string) (store.Reader, error) {
	n.note("Open", ctx)
	return n.Store.Open(ctx, name)
}

func (n *noting) List(ctx context.Context, glob, after string, most int) ([]store.Info, error) {
	n.note("List", ctx)
	return n.Store.List(ctx, glob, after, most)
}

func (n *noting) Delete(ctx context.Context, names ...string) ([]string, error) {
	n.note("Delete", ctx)
	return n.Store.Delete(ctx, names...)
}

func (n *noting) Ready(ctx context.Context, w store.Writer) (store.Info, error) {
	n.note("Ready", ctx)
	return n.Store.Ready(ctx, w.(*notingWriter).Writer)
}

func (n *noting) CommitAll(ctx context.Context, writers []store.Writer) ([]store.Info, error) {
	n.note("CommitAll", ctx)
	var own []store.Writer
	for _, w := range writers {
		own = append(own, w.(*notingWriter).Writer)
	}
	return n.Store.CommitAll(ctx, own)
}

func (w *notingWriter) WriteViews(ctx context.Context, off int64, views [][]byte) error {
	w.note("WriteViews", ctx)
	return w.Writer.WriteViews(ctx, off, views)
}

func (w *notingWriter) Commit(ctx context.Context) (store.Info, error) {
	w.note("Commit", ctx)
	return w.Writer.Commit(ctx)
}

// notingModel notes who opens it.
type notingModel struct {
	engine.Model
	note func(method string, ctx context.Context)
}

func (m notingModel) Open(ctx context.Context, c engine.Call) (engine.Run, error) {
	m.note("Model.Open", ctx)
	return m.Model.Open(ctx, c)
}

func TestThePrincipalIsInEveryContext(t *testing.T) {
	testkit.Start(t)
	var mu sync.Mutex
	seen := make(map[string][]string) // principals, by method
	note := func(method string, ctx context.Context) {
		mu.Lock()
		defer mu.Unlock()
		who := server.Principal(ctx)
		if method == "List" && who == "" { // by the server, for the health of the store
			return
		}
		if !slices.Contains(seen[method], who) {
			seen[method] = append(seen[method], who)
		}
	}
	stored := &noting{note: note}
	f := serve(t, func(c *server.Config) {
		stored.Store = shelf(t, 8*mib)
		c.Store, c.Sources, c.Identify = stored, new(store.Sources), byName
		require.NoError(t, c.Sources.Add("made", store.Tensor(func(ctx context.Context, _ map[string]string) (tensor.Tensor, error) {
			note("Source", ctx)
			return tensor.Of([]byte{1})
		})))
		m, release, err := c.Models.Lookup("echo")
		require.NoError(t, err)
		release()
		err = c.Models.Replace(notingModel{m, note})
		require.NoError(t, err)
	})
	x, err := tensor.Of([]byte{1, 2, 3})
	require.NoError(t, err)
	in := client.Input{Name: "x", Desc: x.Desc, Data: x.Data}
	for _, oneWay := range []bool{false, true} {
		clear(seen)
		c, stub := dialAs(t, f, "alice")
		if oneWay {
			push, err := stub.PushTensors(t.Context())
			require.NoError(t, err)
			o := ten("x")
			require.NoError(t, push.Send(&pb.Frame{Hello: &pb.Hello{Version: 1, SessionId: newID(), Checksum: pb.Checksum_CHECKSUM_CRC32C}, Descs: []*pb.TensorDesc{o.desc}}))
			for i := range o.count() {
				require.NoError(t, push.Send(&pb.Frame{Chunk: o.chunk(i)}))
			}
			_, err = push.CloseAndRecv()
			require.NoError(t, err)
			for _, sel := range []*pb.Selection{{Name: "x*"}, {Name: "made", Source: true}} {
				pull, err := stub.PullTensors(t.Context(), &pb.PullTensorsRequest{
					Hello: &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: 100_000, Checksum: pb.Checksum_CHECKSUM_CRC32C}, Selections: []*pb.Selection{sel},
				})
				require.NoError(t, err)
				for err == nil {
					_, err = pull.Recv()
				}
				require.ErrorIs(t, err, io.EOF)
			}
			_, err = stub.Compute(t.Context(), &pb.ComputeRequest{Model: "echo", Inputs: []*pb.NamedTensor{{Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{3}, Data: x.Data}}})
			require.NoError(t, err)
			_, err = stub.ListTensors(t.Context(), &pb.ListTensorsRequest{})
			require.NoError(t, err)
		} else {
			_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{in}})
			require.NoError(t, err)
			_, err = c.PutAll(t.Context(), client.PushRequest{Tensors: []client.Input{in}})
			require.NoError(t, err)
			_, err = c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "x*"}, {Name: "made", Source: true}}})
			require.NoError(t, err)
			_, err = c.Compute(t.Context(), "echo", x)
			require.NoError(t, err)
		}
		_, err = c.Delete(t.Context(), "x")
		require.NoError(t, err)
		methods := []string{"Create", "Open", "List", "Delete", "WriteViews", "Commit", "Source", "Model.Open"}
		if !oneWay {
			methods = append(methods, "Ready", "CommitAll")
		}
		mu.Lock()
		for _, method := range methods {
			require.Equal(t, []string{"alice"}, seen[method], "%s, %v", method, oneWay)
		}
		require.Len(t, seen, len(methods))
		mu.Unlock()
	}
}

func TestAuthorizeIsAskedAboutWhatIsDoneAndWhoCannotSeeANameCannotTell(t *testing.T) {
	testkit.Start(t)
	var mu sync.Mutex
	var asked []server.Action
	answers := make(map[server.Action]error)
	f := serve(t, func(c *server.Config) {
		c.Store, c.Identify = shelf(t, 8*mib), byName
		c.Authorize = func(ctx context.Context, a server.Action) error {
			mu.Lock()
			defer mu.Unlock()
			if server.Principal(ctx) != "alice" {
				return errors.New("only alice")
			}
			if a.Verb != server.VerbEnter && a.Verb != server.VerbDescribe {
				asked = append(asked, a)
			}
			if err := answers[a]; err == nil || err.Error() != "panic" {
				return err
			}
			panic("boom")
		}
	})
	was := func() (list []server.Action) {
		mu.Lock()
		defer mu.Unlock()
		list, asked = asked, nil
		return list
	}
	says := func(a server.Action, err error) {
		mu.Lock()
		defer mu.Unlock()
		answers[a] = err
	}
	type action = server.Action
	c, _ := dialAs(t, f, "alice")
	push := func(names ...string) error {
		var r client.PushRequest
		for _, name := range names {
			r.Tensors = append(r.Tensors, client.Input{Name: name, Desc: bytesDesc(3), Data: make([]byte, 3)})
		}
		_, err := c.Push(t.Context(), r)
		return err
	}
	pull := func(name string) error {
		_, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: name}}})
		return err
	}
	require.NoError(t, push("x", "y"))
	require.ElementsMatch(t, []action{{server.VerbPut, "x", 3}, {server.VerbPut, "y", 3}}, was())
	require.NoError(t, pull("x"))
	require.Equal(t, []action{{server.VerbGet, "x", 0}}, was())
	says(action{Verb: server.VerbGet, Name: "x"}, store.ErrNotFound)
	says(action{Verb: server.VerbList, Name: "x"}, store.ErrNotFound)
	require.NoError(t, pull("*"))
	hidden, absent := pull("x"), pull("z")
	require.Equal(t, codes.NotFound, status.Code(hidden))
	require.Equal(t, absent.Error(), strings.ReplaceAll(hidden.Error(), `"x"`, `"z"`))
	list, _, err := c.List(t.Context(), "")
	require.NoError(t, err)
	require.Len(t, list, 1)
	was()
	says(action{Verb: server.VerbDelete, Name: "y"}, store.ErrNotFound)
	deleted, err := c.Delete(t.Context(), "*")
	require.NoError(t, err)
	require.Equal(t, []string{"x"}, deleted)
	for _, a := range was() {
		require.Equal(t, server.VerbDelete, a.Verb)
	}
	says(action{server.VerbPut, "x", 3}, store.ErrNotFound)
	require.Equal(t, codes.PermissionDenied, status.Code(push("x")))
	says(action{server.VerbPut, "x", 3}, &terms.RefusedError{Code: frame.Aborted, Text: "not on Sundays"})
	err = push("x")
	require.Equal(t, codes.Aborted, status.Code(err))
	require.ErrorContains(t, err, "not on Sundays")
	for _, a := range []action{{server.VerbPut, "x", 3}, {server.VerbCompute, "echo", 0}, {server.VerbGet, "y", 0}} {
		says(a, errors.New("panic"))
	}
	x, err := tensor.Of([]byte{1})
	require.NoError(t, err)
	_, err = c.Compute(t.Context(), "echo", x)
	for _, err := range []error{err, push("x"), pull("y")} {
		require.Equal(t, codes.Internal, status.Code(err), "%v", err)
	}
	_, stub := dialAs(t, f, "bob")
	_, err = stub.GetServiceInfo(t.Context(), &pb.GetServiceInfoRequest{})
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	require.ErrorContains(t, err, "only alice")
}

func TestAuthorizeIsAskedAboutEveryRPCOfWhomNobodyIdentifies(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) {
		c.Authorize = func(_ context.Context, a server.Action) error {
			if a.Verb == server.VerbEnter {
				return errors.New("closed")
			}
			return nil
		}
	})
	conn := f.dial(t)
	_, err := pb.NewTensorServiceClient(conn).GetServiceInfo(t.Context(), &pb.GetServiceInfoRequest{})
	require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
	_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
}

// A page may hold few names, and most of those that there are may be hidden.
func TestAListThatHidesMostOfItsNamesHasAllOthers(t *testing.T) {
	testkit.Start(t)
	kept := shelf(t, 64*mib)
	f := serve(t, func(c *server.Config) {
		c.Store, c.Identify = kept, byName
		c.Authorize = func(_ context.Context, a server.Action) error {
			if a.Verb == server.VerbList && a.Name[len(a.Name)-2:] != "77" {
				return store.ErrNotFound
			}
			return nil
		}
	})
	for i := range 2500 {
		w, err := kept.Create(t.Context(), string(rune('a'+i/1000))+"/"+string([]byte{'0' + byte(i/100%10), '0' + byte(i/10%10), '0' + byte(i%10)}), bytesDesc(1), nil)
		require.NoError(t, err)
		require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{{1}}))
		_, err = w.Commit(t.Context())
		require.NoError(t, err)
	}
	_, stub := dialAs(t, f, "alice")
	for _, size := range []uint32{0, 1, 7, 25, 26} {
		var got []string
		for token := ""; ; {
			page, err := stub.ListTensors(t.Context(), &pb.ListTensorsRequest{PageToken: token, PageSize: size})
			require.NoError(t, err)
			for _, s := range page.GetTensors() {
				got = append(got, s.GetName())
			}
			if token = page.GetNextPageToken(); token == "" {
				break
			}
		}
		require.Len(t, got, 25, "pages of %d", size)
		require.True(t, slices.IsSorted(got))
	}
}
