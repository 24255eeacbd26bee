package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// Tensorferry is tensorferry as its users have it, with every default: a server
// with the built-in models on the CPU engine, and a client with one open session.
// Tensors are float32. An upload goes to the model that assembles it whole and
// answers with its size.
var Tensorferry = Kind{
	Name: "tensorferry", Text: "tensorferry", OwnMemory: true,
	Serve: func(l net.Listener, remote []byte) (Server, error) { return serveOurs(l, len(remote), nil) },
	Dial: func(ctx context.Context, network, address string, source, back []byte) (Client, error) {
		return dialOurs(ctx, network, address, source, back)
	},
}

// Ours is both ends of Tensorferry in this process. The server's memory is out of
// reach: what an upload left there is compared by the checksums alone. Move and
// Ping may run beside each other, each in one goroutine.
type Ours struct {
	*pair
	*oursClient
}

var _ Baseline = (*Ours)(nil)

// NewOurs connects over "tcp" or "unix" and starts goroutines that serve until
// Close. It is lent mem, whose length is a multiple of 4, until then.
func NewOurs(ctx context.Context, network string, mem Memory) (*Ours, error) {
	p, err := Tensorferry.open(ctx, network, mem)
	if err != nil {
		return nil, err
	}
	return &Ours{p, p.client.(*oursClient)}, nil
}

// FirstResult does a relu call and returns when its first result was there, and
// when the call was done.
func (o *Ours) FirstResult(ctx context.Context) (first, total time.Duration, err error) {
	s, err := o.measured(ReLU, func() error { return o.run(ctx, ReLU, &first) })
	return first, s.Time, err
}

// Close ends the session, the server and every goroutine behind them.
func (o *Ours) Close() error { return o.pair.Close() }

type oursServer struct {
	host   *cpu.Host
	server *server.Server
	served chan error
	idle   chan struct{} // closed: nobody looks at the server's memory
}

// serveOurs has memory for tensors of size bytes and, unless it is nil, the store
// that keep makes, perhaps of that memory; its caller closes it. It is handed l.
func serveOurs(l net.Listener, size int, keep func(*slab.Pool) store.Store) (_ *oursServer, err error) {
	o := &oursServer{served: make(chan error, 1), idle: make(chan struct{})}
	close(o.idle)
	o.host = cpu.NewHost(cpu.HostConfig{MemoryBytes: hostTensors*int64(size) + hostSpare})
	defer func() {
		if err != nil {
			o.host.Close()
			_ = l.Close()
		}
	}()
	models := engine.NewRegistry()
	for _, m := range cpu.Builtins(o.host) {
		if err := models.Add(m); err != nil {
			return nil, err
		}
	}
	cfg := server.Config{Models: models, Pool: o.host.Pool(), Budget: o.host.Budget()}
	if keep != nil {
		cfg.Store = keep(o.host.Pool())
	}
	if o.server, err = server.New(cfg); err != nil {
		return nil, err
	}
	go func() { o.served <- o.server.Serve(l) }()
	return o, nil
}

// Idle always is.
func (o *oursServer) Idle() <-chan struct{} { return o.idle }

// Close ends the server and every goroutine behind it.
func (o *oursServer) Close() error {
	o.server.Close()
	err := <-o.served
	o.host.Close()
	return err
}

// dial returns a client of ours.
func dial(network, address string) (*client.Client, error) {
	if network == "unix" {
		address = "unix:" + address
	}
	return client.Dial(address, client.Config{ChunkBytes: ChunkBytes})
}

// floats returns a tensor of one dimension that shares data.
func floats(data []byte) (tensor.Tensor, error) {
	return tensor.New(tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(len(data) / 4)}}, data)
}

type oursClient struct {
	source  tensor.Tensor
	back    []byte
	small   tensor.Tensor
	smalls  []byte // small, back again
	client  *client.Client
	session *client.Session
}

func dialOurs(ctx context.Context, network, address string, source, back []byte) (_ *oursClient, err error) {
	o := &oursClient{back: back, smalls: make([]byte, SmallBytes)}
	if o.source, err = floats(source); err != nil {
		return nil, err
	}
	small := make([]byte, SmallBytes)
	FillFloats(small)
	if o.small, err = floats(small); err != nil {
		return nil, err
	}
	if o.client, err = dial(network, address); err != nil {
		return nil, err
	}
	if o.session, err = o.client.Session(ctx); err != nil {
		return nil, errors.Join(err, o.client.Close())
	}
	return o, nil
}

// Run does op once.
func (o *oursClient) Run(ctx context.Context, op Op) error { return o.run(ctx, op, nil) }

// Close ends the session.
func (o *oursClient) Close() error { return o.client.Close() }

// run does op once and, if asked, says when the first result was there.
func (o *oursClient) run(ctx context.Context, op Op, first *time.Duration) error {
	r := client.Request{Model: ops[op].model, Inputs: []client.Input{client.From("", o.source)}}
	if op.Back() {
		r.Results = map[string]client.Sink{"y": client.Into(o.back)}
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
	if err != nil || op.Back() {
		return err
	}
	if got := results["bytes"].Data; len(got) != 8 || binary.LittleEndian.Uint64(got) != uint64(len(o.source.Data)) {
		return fmt.Errorf("bench: %d bytes were sent, the server says %x", len(o.source.Data), got)
	}
	return nil
}

// Ping makes one small echo call and returns its time. The bytes that came back
// are compared outside it.
func (o *oursClient) Ping(ctx context.Context) (time.Duration, error) {
	clear(o.smalls)
	begin := time.Now()
	call, err := o.session.Call(ctx, client.Request{
		Model:   "echo",
		Inputs:  []client.Input{client.From("", o.small)},
		Results: map[string]client.Sink{"y": client.Into(o.smalls)},
	})
	if err != nil {
		return 0, err
	}
	_, err = call.Wait()
	elapsed := time.Since(begin)
	if err == nil && !bytes.Equal(o.smalls, o.small.Data) {
		err = errors.New("bench: the echo is not what was sent")
	}
	return elapsed, err
}

// PingBeside makes small calls for as long as an upload runs on the same session,
// and repeats that until there are n of them, or enough uploads have passed. It
// returns how many calls it made.
func (o *Ours) PingBeside(ctx context.Context, n int) (Sample, int, error) {
	var all []time.Duration
	for range uploadsBeside {
		if len(all) >= n {
			break
		}
		uploaded := make(chan error, 1)
		go func() { // ends with the upload
			_, err := o.Move(ctx, Upload)
			uploaded <- err
		}()
		for running := true; running; {
			d, err := o.Ping(ctx)
			select {
			case e := <-uploaded: // the last call had no upload beside it for all of its time
				running = false
				if err = errors.Join(err, e); err != nil {
					return Sample{}, 0, err
				}
			default:
				if err != nil {
					return Sample{}, 0, errors.Join(err, <-uploaded)
				}
				all = append(all, d)
			}
		}
	}
	if len(all) == 0 {
		return Sample{}, 0, errors.New("bench: no small call ended while an upload ran; measure larger tensors")
	}
	return Sample{Time: quantile(all, 0.5), P99: quantile(all, 0.99)}, len(all), nil
}
