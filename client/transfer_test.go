package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// storeMaker makes a store whose memory comes from a pool.
type storeMaker func(t testing.TB, pool *slab.Pool) store.Store

func inMemory(limit int64) storeMaker {
	return func(_ testing.TB, pool *slab.Pool) store.Store { return memory.New(pool, limit) }
}

func inFolder(dir string, cfg folder.Config) storeMaker {
	return func(t testing.TB, _ *slab.Pool) store.Store {
		f, err := folder.OpenWithFiles(dir, cfg)
		require.NoError(t, err)
		return f
	}
}

// storing starts a server with a store and the generator as a source.
func storing(t testing.TB, open storeMaker, cfg client.Config) *client.Client {
	t.Helper()
	h := cpu.NewHost(cpu.HostConfig{MemoryBytes: 64 * mib, Workers: 1})
	models := engine.NewRegistry()
	for _, m := range cpu.Builtins(h) {
		require.NoError(t, models.Add(m))
	}
	var sources store.Sources
	require.NoError(t, sources.Add("gen", store.Generator()))
	require.NoError(t, sources.Add("boom", func(context.Context, map[string]string) (store.Reader, error) { panic("boom") }))
	st := open(t, h.Pool())
	s, err := server.New(server.Config{Models: models, Pool: h.Pool(), Budget: h.Budget(), Store: st, Sources: &sources})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := goServe(s, l)
	c, err := client.Dial(l.Addr().String(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, c.Close())
		s.Close()
		require.NoError(t, <-done)
		require.NoError(t, st.Close())
		models.Close()
		used, _, _ := h.Budget().Used()
		require.Zero(t, used)
		testkit.Eventually(t, func() bool { n, _ := h.Pool().Live(); return n == 0 }, "every slab released")
		h.Close()
	})
	return c
}

func goServe(s *server.Server, l net.Listener) chan error {
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with Close
	return served
}

func int8s(n int64) tensor.Desc { return tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{n}} }

func noise(seed uint64, n int64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func digestOf(b []byte) codec.Digest {
	var d codec.Digester
	_, _ = d.Write(b)
	return d.Sum()
}

func TestMetadataComesBackWithItsTensor(t *testing.T) {
	testkit.Start(t)
	for name, open := range map[string]storeMaker{
		"memory": inMemory(64 * mib),
		"folder": func(t testing.TB, p *slab.Pool) store.Store { return inFolder(t.TempDir(), folder.Config{})(t, p) },
	} {
		t.Run(name, func(t *testing.T) {
			c := storing(t, open, client.Config{})
			said := map[string]string{"unit": "m/s", "of": "%"}
			_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{
				{Name: "x", Desc: int8s(2), Data: []byte{1, 2}, Metadata: said},
				{Name: "y", Desc: int8s(0), Metadata: map[string]string{"tensorferry.name": "x"}},
			}})
			require.Equal(t, codes.InvalidArgument, status.Code(err))
			require.ErrorContains(t, err, `tensor "y": `)
			require.ErrorContains(t, err, `begins with tensorferry.`)
			list, _, err := c.List(t.Context(), "")
			require.NoError(t, err)
			require.Len(t, list, 1)
			require.Equal(t, said, list[0].Metadata)
			got, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "x"}}})
			require.NoError(t, err)
			require.Equal(t, said, got[0].Metadata)
		})
	}
}

func TestAPushTellsWhatWasEvictedForIt(t *testing.T) {
	testkit.Start(t)
	c := storing(t, func(_ testing.TB, p *slab.Pool) store.Store { return memory.NewCache(p, 3*4096) }, client.Config{})
	push := func(name string, n int64) (client.Summary, error) {
		s, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{{Name: name, Desc: int8s(n), Data: make([]byte, n)}}})
		return s[0], err
	}
	for _, name := range []string{"a", "b", "c"} {
		s, err := push(name, 10)
		require.NoError(t, err)
		require.Zero(t, s.Evicted)
	}
	s, err := push("d", 2*4096)
	require.NoError(t, err)
	require.Equal(t, 2, s.Evicted)
	require.EqualValues(t, 20, s.EvictedBytes)
	of, err := c.Transfer(t.Context(), s.Transfer)
	require.NoError(t, err)
	require.Equal(t, 2, of.Tensors[0].Evicted)
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 2, info.Counters["store_evicted_total"])
	s, err = push("d", 2*4096)
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Zero(t, s.Evicted, "in vain")
}

func TestWhatIsPushedIsPulledBitByBit(t *testing.T) {
	testkit.Start(t)
	const chunk = 16 << 10
	sizes := []int64{0, 1, 1023, 1024, 1025, chunk - 1, chunk, chunk + 1, 2 * chunk, 2*chunk + 1, 5*chunk + 7}
	for name, open := range map[string]storeMaker{
		"memory": inMemory(64 * mib),
		"folder": func(t testing.TB, p *slab.Pool) store.Store { return inFolder(t.TempDir(), folder.Config{})(t, p) },
	} {
		for _, k := range []codec.Codec{codec.None, codec.LZ4} {
			t.Run(fmt.Sprintf("%s/codec=%v", name, k), func(t *testing.T) {
				testkit.Start(t)
				c := storing(t, open, client.Config{ChunkBytes: chunk, Codec: k})
				var tensors []client.Input
				want := map[string][]byte{}
				for i, n := range sizes {
					data := noise(uint64(i), n)
					if i%2 == 0 {
						clear(data) // compressible
					}
					in := client.Input{Name: fmt.Sprintf("t/%d", n), Desc: int8s(n), Data: data}
					if i%3 == 0 {
						in.Data, in.Reader = nil, bytes.NewReader(data)
					}
					tensors = append(tensors, in)
					want[in.Name] = data
				}
				pushed, err := c.Push(t.Context(), client.PushRequest{Tensors: tensors})
				require.NoError(t, err)
				for _, s := range pushed {
					require.Equal(t, digestOf(want[s.Name]), s.Digest, s.Name)
					require.Equal(t, name == "folder", s.Durable)
				}
				list, sources, err := c.List(t.Context(), "t/*")
				require.NoError(t, err)
				require.Len(t, list, len(sizes))
				require.Equal(t, []string{"boom", "gen"}, sources)

				pulled, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "t/*"}}})
				require.NoError(t, err)
				require.Len(t, pulled, len(sizes))
				for _, s := range pulled {
					require.True(t, bytes.Equal(want[s.Name], s.Data), s.Name)
					require.Equal(t, digestOf(s.Data), s.Digest)
				}
				deleted, err := c.Delete(t.Context(), "t/*")
				require.NoError(t, err)
				require.Len(t, deleted, len(sizes))
				_, err = c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "t/0"}}})
				require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
			})
		}
	}
}

func TestAPullGoesWhereItIsTold(t *testing.T) {
	testkit.Start(t)
	c := storing(t, inMemory(64*mib), client.Config{ChunkBytes: 1000})
	data := noise(7, 10_500)
	_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{{Name: "x", Desc: int8s(10_500), Data: data}}})
	require.NoError(t, err)
	pull := func(sink client.Sink, held ...client.Range) ([]client.Summary, error) {
		return c.Pull(t.Context(), client.PullRequest{
			Select: []client.Selection{{Name: "x", Held: held}},
			To:     func(string, tensor.Desc) (client.Sink, error) { return sink, nil },
		})
	}
	into := make([]byte, len(data))
	s, err := pull(client.Into(into))
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, into))
	require.Nil(t, s[0].Data)

	var w bytes.Buffer
	_, err = pull(client.Writer(func(tensor.Desc) (io.Writer, error) { return &w, nil }))
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, w.Bytes()))

	f, err := os.Create(filepath.Join(t.TempDir(), "x"))
	require.NoError(t, err)
	defer f.Close()
	_, err = pull(client.At(f))
	require.NoError(t, err)
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))

	// Of what is held nothing is sent, and the whole is checked all the same.
	clear(into[1000:1500])
	clear(into[9999:])
	s, err = pull(client.Into(into), client.Range{Off: 0, Len: 1200}, client.Range{Off: 1500, Len: 8499})
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, into))
	tr, err := c.Transfer(t.Context(), s[0].Transfer)
	require.NoError(t, err)
	require.False(t, tr.Open)
	require.Len(t, tr.Tensors, 1)
	require.EqualValues(t, 1000+1000+500, tr.Tensors[0].Moved, "chunks 1, 9 and 10")

	into[3] ^= 1 // what is held is damaged
	s, err = pull(client.Into(into), client.Range{Off: 0, Len: 1000})
	require.Equal(t, codes.DataLoss, status.Code(errors.Unwrap(unjoin(err))), "%v", err)
	require.Error(t, s[0].Err)

	_, err = pull(client.Into(into[1:]))
	require.ErrorIs(t, err, client.ErrInput)
}

func TestTheServerLearnsOfATensorThatRotted(t *testing.T) {
	testkit.Start(t)
	for name, n := range map[string]int64{"one chunk": 100, "several": 2*mib + 7, "by lanes": 9 * mib} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c := storing(t, inFolder(dir, folder.Config{}), client.Config{})
			_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{
				{Name: "x", Desc: int8s(n), Data: noise(7, n)}, {Name: "y", Desc: int8s(n), Data: noise(8, n)},
			}})
			require.NoError(t, err)
			damaged := func() int64 {
				info, err := c.Info(t.Context())
				require.NoError(t, err)
				return info.Counters["store_damaged_total"]
			}
			rot(t, dir, noise(7, n))
			list, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "*"}}})
			require.Equal(t, codes.DataLoss, status.Code(list[0].Err), "%v", err)
			require.NoError(t, list[1].Err)
			testkit.Eventually(t, func() bool { return damaged() == 1 }, "counted")
			failures, err := c.Failures(t.Context())
			require.NoError(t, err)
			require.Len(t, failures, 1)
			require.Equal(t, list[0].Transfer, failures[0].Call)
			require.Equal(t, codes.DataLoss, failures[0].Code)
			require.Contains(t, failures[0].Cause, `tensor "x" is damaged`)
			tr, err := c.Transfer(t.Context(), list[0].Transfer)
			require.NoError(t, err)
			require.Equal(t, codes.DataLoss, status.Code(tr.Tensors[0].Err), "%v", tr.Tensors[0].Err)

			held := make([]byte, n) // what is damaged is here
			_, err = c.Pull(t.Context(), client.PullRequest{
				Select: []client.Selection{{Name: "y", Held: []client.Range{{Off: 0, Len: n}}}},
				To:     func(string, tensor.Desc) (client.Sink, error) { return client.Into(held), nil },
			})
			require.Error(t, err)
			_, err = c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "y"}}})
			require.NoError(t, err)
			require.EqualValues(t, 1, damaged())
		})
	}
}

// rot changes a byte of the file that has data.
func rot(t testing.TB, dir string, data []byte) {
	t.Helper()
	found := 0
	require.NoError(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if i := bytes.Index(b, data); err == nil && i >= 0 {
			found++
			b[i+len(data)-1] ^= 1
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt(b[i:], int64(i)) // in place: the server maps it
			return err
		}
		return err
	}))
	require.Equal(t, 1, found)
}

// fullAt has room for so many bytes only.
type fullAt struct {
	*os.File
	room int64
}

func (w fullAt) WriteAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > w.room {
		return 0, io.ErrShortWrite
	}
	return w.File.WriteAt(p, off)
}

func TestFilesOfOnePullEachGetTheirOwnBytes(t *testing.T) {
	testkit.Start(t)
	c := storing(t, inMemory(64*mib), client.Config{})
	dir := t.TempDir()
	const piece = 256 << 10
	want := map[string][]byte{}
	var tensors []client.Input
	for i, n := range []int64{0, 1, piece - 1, piece, piece + 1, mib, mib + 1, 3*mib + 7, 2 * mib, 5} {
		name := fmt.Sprintf("%d-%d", i, n)
		want[name] = noise(uint64(i), n)
		tensors = append(tensors, client.Input{Name: name, Desc: int8s(n), Data: want[name]})
	}
	_, err := c.Push(t.Context(), client.PushRequest{Tensors: tensors})
	require.NoError(t, err)
	full := tensors[8].Name // a disk fills up in its second chunk
	files := map[string]*os.File{}
	pulled, err := c.Pull(t.Context(), client.PullRequest{
		Select: []client.Selection{{Name: "*"}},
		To: func(name string, _ tensor.Desc) (client.Sink, error) {
			f, err := os.Create(filepath.Join(dir, name))
			files[name] = f
			if name == full {
				return client.At(fullAt{f, mib + 1}), err
			}
			return client.At(f), err
		},
	})
	require.ErrorIs(t, err, io.ErrShortWrite)
	require.Len(t, pulled, len(tensors))
	for _, s := range pulled {
		require.NoError(t, files[s.Name].Close())
		if s.Name == full {
			require.ErrorIs(t, s.Err, io.ErrShortWrite)
			continue
		}
		require.NoError(t, s.Err, s.Name)
		got, err := os.ReadFile(filepath.Join(dir, s.Name))
		require.NoError(t, err)
		require.True(t, bytes.Equal(want[s.Name], got), s.Name)
	}
}

// unjoin wraps the only error of a joined one, for errors.Unwrap.
func unjoin(err error) error {
	if j, ok := err.(interface{ Unwrap() []error }); ok && len(j.Unwrap()) == 1 {
		return fmt.Errorf("%w", j.Unwrap()[0])
	}
	return err
}

func TestOneTensorsFailureIsNotTheOthers(t *testing.T) {
	testkit.Start(t)
	c := storing(t, inMemory(1*mib), client.Config{ChunkBytes: 4096})
	var released atomic.Int32
	in := func(name string, n int64) client.Input {
		return client.Input{Name: name, Desc: int8s(n), Data: make([]byte, n), Release: func() { released.Add(1) }}
	}
	list := []client.Input{in("a", 5000), in("too large", 2*mib), in("b", 5000), in("", 10), {Name: "short", Desc: int8s(9000), Reader: bytes.NewReader(make([]byte, 8500))}, in("c", 0)}
	s, err := c.Push(t.Context(), client.PushRequest{Tensors: list})
	require.Error(t, err)
	require.EqualValues(t, 5, released.Load())
	for i, code := range []codes.Code{codes.OK, codes.ResourceExhausted, codes.OK, codes.InvalidArgument, codes.Unknown, codes.OK} {
		require.Equal(t, code, status.Code(s[i].Err), "%q: %v", s[i].Name, s[i].Err)
	}
	require.ErrorIs(t, s[4].Err, client.ErrInput)
	have, _, err := c.List(t.Context(), "")
	require.NoError(t, err)
	require.Len(t, have, 3)
	require.Equal(t, `["a" int8[5000] "b" int8[5000] "c" int8[0]]`, fmt.Sprint(have))
	require.Equal(t, `"a" int8[5000]`, fmt.Sprint(s[0]))
	require.Regexp(t, `^"too large" int8\[2097152\]: client: ResourceExhausted: `, fmt.Sprintf("%v", s[1]))

	s, err = c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{
		{Name: "a"}, {Name: "none"}, {Name: "gen", Source: true, Params: map[string]string{"dtype": "float32", "shape": "1000", "seed": "3"}},
		{Name: "gen", Source: true, Params: map[string]string{"dtype": "float31"}}, {Name: "boom", Source: true}, {Name: "nobody", Source: true}, {Name: "x*"}, {Name: "b"},
	}})
	require.Error(t, err)
	for i, code := range []codes.Code{codes.OK, codes.NotFound, codes.OK, codes.InvalidArgument, codes.Internal, codes.NotFound, codes.NotFound, codes.OK} {
		require.Equal(t, code, status.Code(s[i].Err), "%q: %v", s[i].Name, s[i].Err)
	}
	require.Len(t, s[2].Data, 4000)
}

func TestAMappedFileThatShrunkIsNotServedAnyMore(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	const n = 8 * mib
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, tensorfile.WriteSafetensors(f, []tensorfile.Named{{Name: "w", Tensor: tensor.Tensor{Desc: int8s(n), Data: noise(1, n)}}}, nil))
	require.NoError(t, f.Close())
	c := storing(t, inFolder(dir, folder.Config{}), client.Config{})
	_, err = c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "model/w"}}})
	require.NoError(t, err)
	require.NoError(t, os.Truncate(path, 4096))
	s, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "model/w"}}})
	require.Error(t, err)
	require.Equal(t, codes.NotFound, status.Code(s[0].Err), "the file is looked at again: it is none of tensors now: %v", err)
}

// pausing shortens the file when the first of its tensor has come, while the
// server has sent more than the client has read.
type pausing struct {
	path string
	t    testing.TB
	done bool
}

func (p *pausing) Write(b []byte) (int, error) {
	if !p.done {
		p.done = true
		require.NoError(p.t, os.Truncate(p.path, 4096))
	}
	return len(b), nil
}

func TestAFileThatShrinksWhileItIsPulledEndsOneTensor(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	const n = 32 * mib
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, tensorfile.WriteSafetensors(f, []tensorfile.Named{{Name: "w", Tensor: tensor.Tensor{Desc: int8s(n), Data: noise(1, n)}}}, nil))
	require.NoError(t, f.Close())
	c := storing(t, inFolder(dir, folder.Config{}), client.Config{})
	sink := client.Writer(func(tensor.Desc) (io.Writer, error) { return &pausing{path: path, t: t}, nil })
	s, err := c.Pull(t.Context(), client.PullRequest{
		Select: []client.Selection{{Name: "model/w"}, {Name: "gen", Source: true, Params: map[string]string{"shape": "10"}}},
		To: func(name string, _ tensor.Desc) (client.Sink, error) {
			if name == "gen" {
				return client.Sink{}, nil
			}
			return sink, nil
		},
	})
	require.Error(t, err)
	require.Equal(t, codes.DataLoss, status.Code(s[0].Err), "%v", err)
	require.NoError(t, s[1].Err)
}

func TestAReaderThatFailsAtOnceFailsItsTensorAlone(t *testing.T) {
	testkit.Start(t)
	c := storing(t, inMemory(64*mib), client.Config{ChunkBytes: 4096})
	for _, has := range []int{0, 100, 5000} {
		s, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{
			{Name: "a", Desc: int8s(10), Data: make([]byte, 10)},
			{Name: "short", Desc: int8s(9000), Reader: bytes.NewReader(make([]byte, has))},
			{Name: "b", Desc: int8s(10), Data: make([]byte, 10)},
		}})
		require.ErrorIs(t, err, client.ErrInput)
		require.NoError(t, s[0].Err)
		require.ErrorIs(t, s[1].Err, client.ErrInput)
		require.NoError(t, s[2].Err)
	}
}

func TestAWriterThatWaitsHoldsUpNobodyElse(t *testing.T) {
	testkit.Start(t)
	c := storing(t, inMemory(64*mib), client.Config{Codec: codec.LZ4})
	_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{{Name: "zeros", Desc: int8s(8 * mib), Data: make([]byte, 8*mib)}}})
	require.NoError(t, err)
	proceed, waiting, ended := make(chan struct{}), make(chan struct{}, 40), make(chan error, 40)
	pull := func(sink client.Sink) error {
		_, err := c.Pull(t.Context(), client.PullRequest{
			Select: []client.Selection{{Name: "zeros"}},
			To:     func(string, tensor.Desc) (client.Sink, error) { return sink, nil },
		})
		return err
	}
	const many = 20 // more than decode at a time
	for range many {
		go func() { // ends when it may proceed
			ended <- pull(client.Writer(func(tensor.Desc) (io.Writer, error) {
				return writer(func(b []byte) (int, error) { waiting <- struct{}{}; <-proceed; return len(b), nil }), nil
			}))
		}()
	}
	for range many {
		<-waiting
	}
	require.NoError(t, pull(client.Sink{}))
	go func() { // the rest of what is written
		for range waiting {
		}
	}()
	close(proceed)
	for range many {
		require.NoError(t, <-ended)
	}
	close(waiting)
}

func TestAPullGoesOnBehindWhatIsHeldInWholePieces(t *testing.T) {
	testkit.Start(t)
	const size, chunk = 10_000_000, 100_000
	c := storing(t, inMemory(64*mib), client.Config{ChunkBytes: chunk})
	data := noise(7, size)
	_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{{Name: "x", Desc: int8s(size), Data: data}}})
	require.NoError(t, err)
	f, err := os.Create(filepath.Join(t.TempDir(), "x"))
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt(data[2*chunk:3*chunk], 2*chunk)
	require.NoError(t, err)
	_, err = c.Pull(t.Context(), client.PullRequest{
		Select: []client.Selection{{Name: "x", Held: []client.Range{{Off: 2 * chunk, Len: chunk}}}},
		To:     func(string, tensor.Desc) (client.Sink, error) { return client.At(f), nil },
	})
	require.NoError(t, err)
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
}
