package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// The names of tensorferry as its users have it, with every default, and with a store.
// OursWith has it with a checksum of the client's choice.
const (
	Tensorferry = "tensorferry"
	Folder      = "tensorferry, folder"
	InMemory    = "tensorferry, store in memory"
	Copying     = "cp and fsync"
)

// OursWith names tensorferry with a checksum.
func OursWith(sum codec.Checksum) string { return Tensorferry + ", " + SumText(sum) }

// ourKinds are tensorferry: a server with the built-in models on the CPU engine, and a
// client with one open session. Tensors are float32. An upload goes to the model that
// assembles it whole and answers with its size; what it left there is compared by the
// checksums alone.
func ourKinds() []Kind {
	none := func(Place, *slab.Pool) (store.Store, error) { return nil, nil }
	return []Kind{
		ours(Tensorferry, client.Config{}, none),
		ours(OursWith(codec.CRC32C), client.Config{Checksum: codec.CRC32C}, none),
		ours(OursWith(codec.CRC32), client.Config{Checksum: codec.CRC32}, none),
		ours(Folder, client.Config{}, func(p Place, _ *slab.Pool) (store.Store, error) {
			return store.OpenFolder(filepath.Dir(weightsFile(p)), store.FolderConfig{})
		}),
		ours(InMemory, client.Config{}, func(p Place, pool *slab.Pool) (store.Store, error) {
			return store.NewMemory(pool, slab.SizeOf(int64(len(p.To)))), nil // room for one
		}),
	}
}

func ours(name string, cfg client.Config, keep func(Place, *slab.Pool) (store.Store, error)) Kind {
	return Kind{
		Name: name, OwnMemory: true,
		Serve: func(l net.Listener, p Place) (Server, error) {
			if name == Folder {
				if err := writeWeights(p); err != nil {
					return Server{}, errors.Join(err, l.Close())
				}
			}
			host := cpu.NewHost(cpu.HostConfig{MemoryBytes: hostTensors*int64(len(p.To)) + hostSpare})
			models := engine.NewRegistry()
			kept, err := keep(p, host.Pool())
			for _, m := range cpu.Builtins(host) {
				err = errors.Join(err, models.Add(m))
			}
			s, e := server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget(), Store: kept})
			if err = errors.Join(err, e); err != nil {
				host.Close()
				return Server{}, errors.Join(err, l.Close())
			}
			running := Go(func() error { return s.Serve(l) }, s.Close, always)
			return Server{always, func() error {
				defer host.Close()
				err := running.Close()
				if kept != nil {
					err = errors.Join(err, kept.Close())
				}
				return err
			}}, nil
		},
		Dial: func(ctx context.Context, p Place) (Client, error) {
			address := p.Address
			if p.Network == "unix" {
				address = "unix:" + address
			}
			c, err := client.Dial(address, cfg)
			if err != nil {
				return Client{}, err
			}
			s, err := c.Session(ctx)
			if err != nil {
				return Client{}, errors.Join(err, c.Close())
			}
			o := &oursClient{Place: p, client: c, session: s}
			return Client{
				Run: func(ctx context.Context, op Op) error { return o.run(ctx, op, nil) },
				Measure: map[Op]func(context.Context, int) (Sample, error){
					FirstResult: o.firstResult, CallBeside: o.beside, Pull: o.pull, PullToFile: o.pullToFile, Push: o.push,
				},
				Close: func() error { return errors.Join(o.file.close(), c.Close()) },
			}, nil
		},
	}
}

// floats returns a tensor of one dimension that shares data.
func floats(data []byte) tensor.Tensor {
	return tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(len(data) / 4)}}, Data: data}
}

type oursClient struct {
	Place
	client  *client.Client
	session *client.Session
	file    weights
	pushed  int // so far: each has another name
}

// run does op once and, if asked, says when the first result was there.
func (o *oursClient) run(ctx context.Context, op Op, first *time.Duration) error {
	model := string(op)
	if op == Upload {
		model = "sink"
	}
	r := client.Request{Model: model, Inputs: []client.Input{client.From("", floats(o.Source))}}
	if op.back() {
		r.Results = map[string]client.Sink{"y": client.Into(o.To)}
	}
	begin := time.Now()
	call, err := o.session.Call(ctx, r)
	if err != nil {
		return err
	}
	if first != nil {
		for _, err := range call.Regions() {
			if err != nil {
				return err
			}
			*first = time.Since(begin)
			break
		}
	}
	results, err := call.Wait()
	if err != nil || op.back() {
		return err
	}
	if got := results["bytes"].Data; len(got) != 8 || binary.LittleEndian.Uint64(got) != uint64(len(o.Source)) {
		return fmt.Errorf("bench: %d bytes were sent, the server says %x", len(o.Source), got)
	}
	return nil
}

func (o *oursClient) firstResult(ctx context.Context, _ int) (Sample, error) {
	var first time.Duration
	s, err := transfer(ReLU, o.To, o.Source, func() error { return o.run(ctx, ReLU, &first) })
	s.Total, s.Time = s.Time, first
	return s, err
}

// beside makes small calls for as long as an upload runs on the same session, and
// repeats that until it has n samples, or enough uploads have passed.
func (o *oursClient) beside(ctx context.Context, n int) (Sample, error) {
	small := &oursClient{Place: Place{Source: make([]byte, SmallBytes), To: make([]byte, SmallBytes)}, session: o.session}
	FillFloats(small.Source)
	var all []time.Duration
	for range uploadsBeside {
		if len(all) >= n {
			break
		}
		uploaded := make(chan error, 1)
		go func() { uploaded <- o.run(ctx, Upload, nil) }() // ends with the upload
		for running := true; running; {
			s, err := transfer(Echo, small.To, small.Source, func() error { return small.run(ctx, Echo, nil) })
			select {
			case e := <-uploaded: // the last call had no upload beside it for all of its time
				running = false
				if err = errors.Join(err, e); err != nil {
					return Sample{}, err
				}
			default:
				if err != nil {
					return Sample{}, errors.Join(err, <-uploaded)
				}
				all = append(all, s.Time)
			}
		}
	}
	if len(all) == 0 {
		return Sample{}, errors.New("bench: no small call ended while an upload ran; measure larger tensors")
	}
	return Sample{Time: quantile(all, 0.5), P99: quantile(all, 0.99)}, nil
}

// fetch pulls a tensor.
func (o *oursClient) fetch(ctx context.Context, name string, to client.Sink) error {
	_, err := o.client.Pull(ctx, client.PullRequest{
		Select: []client.Selection{{Name: name}},
		To:     func(string, tensor.Desc) (client.Sink, error) { return to, nil },
	})
	return err
}

func (o *oursClient) pull(ctx context.Context, _ int) (Sample, error) {
	return o.fetched(ctx, weightsName)
}

func (o *oursClient) fetched(ctx context.Context, name string) (Sample, error) {
	return transfer(Echo, o.To, o.Source, func() error { return o.fetch(ctx, name, client.Into(o.To)) })
}

func (o *oursClient) pullToFile(ctx context.Context, _ int) (Sample, error) {
	return toFile(o.Place, func(f *os.File) error { return o.fetch(ctx, weightsName, client.At(f)) })
}

// push stores the weights under a new name, fetches and compares them after the time,
// and deletes them.
func (o *oursClient) push(ctx context.Context, _ int) (Sample, error) {
	x, err := o.file.open(o.Place)
	if err != nil {
		return Sample{}, err
	}
	in := client.From("", x)
	o.pushed++
	in.Name = "pushed/" + strconv.Itoa(o.pushed)
	s, err := timed(func() error {
		_, err := o.client.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
		return err
	})
	if err == nil {
		_, err = o.fetched(ctx, in.Name)
		_, e := o.client.Delete(ctx, in.Name)
		err = errors.Join(err, e)
	}
	if err != nil {
		return Sample{}, err
	}
	return s, nil
}

// weightsName is what the store calls the one tensor of the file that somebody put
// into its folder.
const weightsName = "weights/x"

func weightsFile(p Place) string { return filepath.Join(p.Dir, "store", "weights.safetensors") }

// writeWeights writes the source, which nobody has filled, to the file. Its pages stay
// in memory; what the disk still has to do would be in somebody's time.
func writeWeights(p Place) error {
	FillFloats(p.Source)
	if err := os.MkdirAll(filepath.Dir(weightsFile(p)), 0o755); err != nil {
		return err
	}
	return create(weightsFile(p), func(f *os.File) error {
		return errors.Join(tensorfile.WriteSafetensors(f, []tensorfile.Named{{Name: "x", Tensor: floats(p.Source)}}, nil), f.Sync())
	})
}

// weights is the file, mapped by a client that pushes it. The zero value is none.
type weights struct{ *tensorfile.Safetensors }

// open maps the file, which it makes if there is none, and returns its tensor, which
// it shares until close.
func (w *weights) open(p Place) (tensor.Tensor, error) {
	if w.Safetensors == nil {
		if _, err := os.Stat(weightsFile(p)); err != nil {
			if err := writeWeights(p); err != nil {
				return tensor.Tensor{}, err
			}
		}
		f, err := tensorfile.OpenSafetensors(weightsFile(p))
		if err != nil {
			return tensor.Tensor{}, err
		}
		w.Safetensors = f
	}
	return w.Tensor("x")
}

func (w *weights) close() error {
	if w.Safetensors == nil {
		return nil
	}
	return w.Close()
}

// copying is a push's peer: it copies the weights to a new file, a piece at a time, and
// waits for the disk. To ask the system for a copy would be no faster where it makes
// one, and no peer where it lets two files share their bytes.
var copying = Kind{
	Name: Copying, OwnMemory: true,
	Serve: func(l net.Listener, p Place) (Server, error) {
		return Server{always, l.Close}, writeWeights(p)
	},
	Dial: func(_ context.Context, p Place) (Client, error) {
		push := func(context.Context, int) (Sample, error) {
			return toFile(p, func(f *os.File) error {
				src, err := os.Open(weightsFile(p))
				if err != nil {
					return err
				}
				defer src.Close()
				_, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{src}, make([]byte, copyBytes))
				return errors.Join(err, f.Sync())
			})
		}
		return Client{Measure: map[Op]func(context.Context, int) (Sample, error){Push: push}, Close: func() error { return nil }}, nil
	},
}

func create(path string, fill func(*os.File) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(fill(f), f.Close())
}

// toFile times what fills a new file beside the store with the source, at its end,
// and compares it. It waits until the disk has taken note that the file is removed:
// that would be in the next one's time.
func toFile(p Place, fill func(*os.File) error) (s Sample, err error) {
	dir, err := os.Open(p.Dir)
	if err != nil {
		return s, err
	}
	defer dir.Close()
	path := filepath.Join(p.Dir, "copy")
	s, err = timed(func() error { return create(path, fill) })
	if err == nil {
		err = checkFile(path, p.Source)
	}
	if err = errors.Join(err, os.Remove(path), dir.Sync()); err != nil {
		return Sample{}, err
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
	if _, err := f.Seek(-int64(len(source)), io.SeekEnd); err != nil {
		return err
	}
	piece := make([]byte, ChunkBytes)
	for len(source) > 0 {
		piece = piece[:min(len(piece), len(source))]
		if _, err := io.ReadFull(f, piece); err != nil {
			return err
		}
		if err := Check(Echo, piece, source[:len(piece)]); err != nil {
			return fmt.Errorf("%w, in a file", err)
		}
		source = source[len(piece):]
	}
	return nil
}
