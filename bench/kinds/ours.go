package kinds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
)

// The names of tensorferry with a store, and encrypted.
const (
	Folder   = "tensorferry, folder"
	InMemory = "tensorferry, store in memory"
	TLS      = bench.Tensorferry + OverTLS
	Copying  = "cp and fsync"
)

// NoLanes goes after a name of bench.OursWith, or after bench.Tensorferry, for what travels in gRPC alone.
const NoLanes = ", no lanes"

// ourKinds are tensorferry: a server with the built-in models on the CPU engine, and a
// client with one open session. Tensors are float32.
func ourKinds() []bench.Kind {
	all := []bench.Kind{
		ours(bench.Tensorferry, client.Config{}, Load{1, 1}, nil),
		ours(Folder, client.Config{}, Load{1, 1}, func(p bench.Place, _ *slab.Pool) (store.Store, error) {
			return folder.Open(filepath.Join(p.Dir, "store"), folder.Config{})
		}),
		ours(InMemory, client.Config{}, Load{1, 1}, func(p bench.Place, pool *slab.Pool) (store.Store, error) {
			// Room for a tensor and the older one that it replaces, and for many small ones. Older
			// commits keep them as SizeOf says; now they take no more than that.
			return memory.New(pool, 2*(slab.SizeOf(int64(len(p.To)))+measure.Many*slab.SizeOf(1))), nil
		}),
		ours(bench.Tensorferry+NoLanes, client.Config{Lanes: -1}, Load{1, 1}, nil),
		secured(TLS, func(ctx context.Context, p bench.Place, cfg client.Config) (bench.Client, error) {
			cfg.Checksum = codec.CRC32C
			return ours(TLS, cfg, Load{1, 1}, nil).Dial(ctx, p)
		}),
		secured(Compute+OverTLS, computing),
		{Name: Compute, OwnMemory: true, Serve: inClear, Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
			return computing(ctx, p, client.Config{})
		}},
	}
	for _, sum := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
		all = append(all, ours(bench.OursWith(sum), client.Config{Checksum: sum}, Load{1, 1}, nil),
			ours(bench.OursWith(sum)+NoLanes, client.Config{Checksum: sum, Lanes: -1}, Load{1, 1}, nil))
	}
	for _, l := range Loads {
		all = append(all, ours(l.Name(), client.Config{}, l, nil))
	}
	return all
}

// Load is how a tensor is spread: over connections, with a session each, and as how
// many calls at a time.
type Load struct{ Connections, Calls int }

// Loads are those that are measured.
var Loads = []Load{{1, 1}, {1, 4}, {1, 16}, {1, 64}, {4, 4}, {4, 16}, {4, 64}, {16, 16}, {16, 64}}

// Name names tensorferry with a load.
func (l Load) Name() string {
	return fmt.Sprintf("%s, connections %d, calls %d", bench.Tensorferry, l.Connections, l.Calls)
}

// keeper opens the store of a server, if it has one.
type keeper func(bench.Place, *slab.Pool) (store.Store, error)

// secured is tensorferry over TLS, with certificates in the folder of both ends.
func secured(name string, dial func(context.Context, bench.Place, client.Config) (bench.Client, error)) bench.Kind {
	return bench.Kind{
		Name: name, OwnMemory: true, Serve: overTLS,
		Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
			creds, err := clientCredentials(p)
			if err != nil {
				return bench.Client{}, err
			}
			return dial(ctx, p, client.Config{Credentials: creds})
		},
	}
}

// inClear and overTLS serve the built-in models.
func inClear(ctx context.Context, l net.Listener, p bench.Place) error {
	return serve(ctx, l, p, server.Config{}, nil)
}

func overTLS(ctx context.Context, l net.Listener, p bench.Place) error {
	creds, err := serverCredentials(p)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	return serve(ctx, l, p, server.Config{Credentials: creds}, nil)
}

// serve serves the built-in models until ctx ends. It is handed l.
func serve(ctx context.Context, l net.Listener, p bench.Place, cfg server.Config, keep keeper) error {
	host := cpu.NewHost(cpu.HostConfig{MemoryBytes: hostTensors*int64(len(p.To)) + hostSpare})
	defer host.Close()
	models := engine.NewRegistry()
	var kept store.Store
	var err error
	if keep != nil {
		kept, err = keep(p, host.Pool())
	}
	for _, m := range cpu.Builtins(host) {
		err = errors.Join(err, models.Add(m))
	}
	cfg.Models, cfg.Pool, cfg.Budget, cfg.Store = models, host.Pool(), host.Budget(), kept
	s, e := server.New(cfg)
	if err = errors.Join(err, e); err != nil {
		return errors.Join(err, l.Close())
	}
	closed := make(chan struct{})
	context.AfterFunc(ctx, func() {
		s.Close()
		close(closed)
	})
	err = s.Serve(l)
	<-closed
	if kept != nil {
		err = errors.Join(err, kept.Close())
	}
	return err
}

func ours(name string, cfg client.Config, load Load, keep keeper) bench.Kind {
	return bench.Kind{
		Name: name, OwnMemory: true,
		Serve: func(ctx context.Context, l net.Listener, p bench.Place) error {
			return serve(ctx, l, p, server.Config{}, keep)
		},
		Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
			o := &oursClient{Place: p, calls: load.Calls}
			for range load.Connections {
				c, err := client.Dial(bench.Address(p), cfg)
				if err != nil {
					return bench.Client{}, errors.Join(err, o.close())
				}
				o.clients = append(o.clients, c)
				s, err := c.Session(ctx)
				if err != nil {
					return bench.Client{}, errors.Join(err, o.close())
				}
				o.sessions = append(o.sessions, s)
			}
			return bench.Client{
				Run: o.run,
				Measure: map[bench.Op]func(context.Context, int) (bench.Sample, error){
					measure.CallBeside: o.beside, measure.Pull: o.pull, measure.PullToFile: o.pullToFile, measure.Push: o.push,
					measure.PushMany: o.pushMany(false), measure.PushSet: o.pushMany(true), measure.PullMany: o.pullMany,
				},
				Close: o.close,
			}, nil
		},
	}
}

type oursClient struct {
	bench.Place
	clients  []*client.Client
	sessions []*client.Session // one of each
	calls    int               // at a time
	pushed   int               // tensors so far: each has another name
	pulled   string            // the name of the one that is pulled
}

func (o *oursClient) close() (err error) {
	for _, c := range o.clients {
		err = errors.Join(err, c.Close())
	}
	return err
}

// run does op once, over all sessions.
func (o *oursClient) run(ctx context.Context, op bench.Op, first *time.Time) error {
	if o.calls <= 1 {
		return bench.Move(ctx, o.sessions[0], op, o.Source, o.To, first)
	}
	var all sync.WaitGroup
	part := max(len(o.Source)/o.calls&^7, 8)
	failed := make([]error, len(o.Source)/part+1)
	for i := range failed {
		if from, to := i*part, min((i+1)*part, len(o.Source)); from < to {
			all.Go(func() {
				failed[i] = bench.Move(ctx, o.sessions[i%len(o.sessions)], op, o.Source[from:to], o.To[from:to], nil)
			})
		}
	}
	all.Wait()
	return errors.Join(failed...)
}

// beside makes small calls for as long as an upload runs on the same session, and
// repeats that until it has n samples, or enough uploads have passed.
func (o *oursClient) beside(ctx context.Context, n int) (bench.Sample, error) {
	small := &oursClient{Place: bench.Place{Source: make([]byte, bench.SmallBytes), To: make([]byte, bench.SmallBytes)}, sessions: o.sessions}
	bench.FillFloats(small.Source)
	var all []time.Duration
	for range uploadsBeside {
		if len(all) >= n {
			break
		}
		uploaded := make(chan error, 1)
		go func() { uploaded <- o.run(ctx, bench.Upload, nil) }() // ends with the upload
		for running := true; running; {
			s, err := bench.Transfer(bench.Echo, small.To, small.Source, func() error { return small.run(ctx, bench.Echo, nil) })
			select {
			case e := <-uploaded: // the last call had no upload beside it for all of its time
				running = false
				if err = errors.Join(err, e); err != nil {
					return bench.Sample{}, err
				}
			default:
				if err != nil {
					return bench.Sample{}, errors.Join(err, <-uploaded)
				}
				all = append(all, s.Time)
			}
		}
	}
	if len(all) == 0 {
		return bench.Sample{}, errors.New("bench: no small call ended while an upload ran; measure larger tensors")
	}
	return bench.Sample{Time: bench.Quantile(all, 0.5), P99: bench.Quantile(all, 0.99)}, nil
}

// put stores the source under a new name.
func (o *oursClient) put(ctx context.Context) (name string, err error) {
	o.pushed++
	in := client.From("", bench.Floats(o.Source))
	in.Name = strconv.Itoa(o.pushed)
	_, err = o.clients[0].Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
	return in.Name, err
}

// fetch pulls a tensor.
func (o *oursClient) fetch(ctx context.Context, name string, to client.Sink) error {
	_, err := o.clients[0].Pull(ctx, client.PullRequest{
		Select: []client.Selection{{Name: name}},
		To:     func(string, tensor.Desc) (client.Sink, error) { return to, nil },
	})
	return err
}

// stored pushes what is pulled, once.
func (o *oursClient) stored(ctx context.Context) (err error) {
	if o.pulled == "" {
		o.pulled, err = o.put(ctx)
	}
	return err
}

func (o *oursClient) pull(ctx context.Context, _ int) (bench.Sample, error) {
	if err := o.stored(ctx); err != nil {
		return bench.Sample{}, err
	}
	return bench.Transfer(bench.Echo, o.To, o.Source, func() error { return o.fetch(ctx, o.pulled, client.Into(o.To)) })
}

func (o *oursClient) pullToFile(ctx context.Context, _ int) (bench.Sample, error) {
	if err := o.stored(ctx); err != nil {
		return bench.Sample{}, err
	}
	return toFile(o.Place, func(f *os.File) error { return o.fetch(ctx, o.pulled, client.At(f)) })
}

// push stores the source, fetches and compares it after the time, and deletes it.
func (o *oursClient) push(ctx context.Context, _ int) (s bench.Sample, err error) {
	var name string
	s, err = bench.Timed(func() error { name, err = o.put(ctx); return err })
	if err == nil {
		_, err = bench.Transfer(bench.Echo, o.To, o.Source, func() error { return o.fetch(ctx, name, client.Into(o.To)) })
		_, e := o.clients[0].Delete(ctx, name)
		err = errors.Join(err, e)
	}
	if err != nil {
		return bench.Sample{}, err
	}
	return s, nil
}

// copying is a push's peer: it copies the source, a file in memory, to a new one, a piece at a time, and
// waits for the disk. To ask the system for a copy would be no faster where it makes
// one, and no peer where it lets two files share their bytes.
var copying = bench.Kind{
	Name: Copying, OwnMemory: true,
	Serve: func(ctx context.Context, l net.Listener, _ bench.Place) error {
		<-ctx.Done()
		return l.Close()
	},
	Dial: func(_ context.Context, p bench.Place) (bench.Client, error) {
		source := filepath.Join(p.Dir, "source")
		if err := os.WriteFile(source, p.Source, 0o600); err != nil {
			return bench.Client{}, err
		}
		push := func(context.Context, int) (bench.Sample, error) {
			return toFile(p, func(f *os.File) error {
				src, err := os.Open(source)
				if err != nil {
					return err
				}
				defer src.Close()
				_, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{src}, make([]byte, copyBytes))
				return errors.Join(err, f.Sync())
			})
		}
		return bench.Client{Measure: map[bench.Op]func(context.Context, int) (bench.Sample, error){measure.Push: push}, Close: func() error { return nil }}, nil
	},
}

// toFile times what fills a new file beside the store with the source, at its end,
// and compares it. It waits until the disk has taken note that the file is removed:
// that would be in the next one's time.
func toFile(p bench.Place, fill func(*os.File) error) (s bench.Sample, err error) {
	dir, err := os.Open(p.Dir)
	if err != nil {
		return s, err
	}
	defer dir.Close()
	path := filepath.Join(p.Dir, "copy")
	s, err = bench.Timed(func() error {
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		return errors.Join(fill(f), f.Close())
	})
	if err == nil {
		err = checkFile(path, p.Source)
	}
	if err = errors.Join(err, os.Remove(path), dir.Sync()); err != nil {
		return bench.Sample{}, err
	}
	return s, nil
}

// checkFile returns an error if a file does not end with the source, which it borrows.
func checkFile(path string, source []byte) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Seek(-int64(len(source)), io.SeekEnd)
	piece := make([]byte, bench.ChunkBytes)
	for want := range slices.Chunk(source, bench.ChunkBytes) {
		if err == nil {
			_, err = io.ReadFull(f, piece[:len(want)])
		}
		if err == nil {
			err = bench.Check(bench.Echo, piece[:len(want)], want)
		}
	}
	return err
}
