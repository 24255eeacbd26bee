package bench

import (
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
// answers with its size; what it left there is compared by the checksums alone.
var Tensorferry = ours(nil, noStore)

func noStore(*slab.Pool) store.Store { return nil }

// ours is Tensorferry with a store that keep makes, perhaps of the engine's memory,
// and its caller closes. It tells who its client is.
func ours(tell *oursClient, keep func(*slab.Pool) store.Store) Kind {
	return Kind{
		Name: "tensorferry", OwnMemory: true,
		Serve: func(l net.Listener, remote []byte) (Server, error) {
			host := cpu.NewHost(cpu.HostConfig{MemoryBytes: hostTensors*int64(len(remote)) + hostSpare})
			models := engine.NewRegistry()
			var err error
			for _, m := range cpu.Builtins(host) {
				err = errors.Join(err, models.Add(m))
			}
			s, e := server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget(), Store: keep(host.Pool())})
			if err = errors.Join(err, e); err != nil {
				host.Close()
				return Server{}, errors.Join(err, l.Close())
			}
			running := Go(func() error { return s.Serve(l) }, s.Close, always)
			return Server{always, func() error {
				defer host.Close()
				return running.Close()
			}}, nil
		},
		Dial: func(ctx context.Context, network, address string, source, back []byte) (Client, error) {
			if network == "unix" {
				address = "unix:" + address
			}
			c, err := client.Dial(address, client.Config{ChunkBytes: ChunkBytes})
			if err != nil {
				return Client{}, err
			}
			s, err := c.Session(ctx)
			if err != nil {
				return Client{}, errors.Join(err, c.Close())
			}
			o := oursClient{c, s, source, back}
			if tell != nil {
				*tell = o
			}
			return Client{func(ctx context.Context, op Op) error { return o.run(ctx, op, nil) }, c.Close}, nil
		},
	}
}

// floats returns a tensor of one dimension that shares data.
func floats(data []byte) tensor.Tensor {
	return tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(len(data) / 4)}}, Data: data}
}

type oursClient struct {
	client       *client.Client
	session      *client.Session
	source, back []byte
}

// run does op once and, if asked, says when the first result was there.
func (o oursClient) run(ctx context.Context, op Op, first *time.Duration) error {
	r := client.Request{Model: ops[op].model, Inputs: []client.Input{client.From("", floats(o.source))}}
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
	if got := results["bytes"].Data; len(got) != 8 || binary.LittleEndian.Uint64(got) != uint64(len(o.source)) {
		return fmt.Errorf("bench: %d bytes were sent, the server says %x", len(o.source), got)
	}
	return nil
}

// firstResult does a relu call and returns when its first result was there, and
// when the call was done.
func (o oursClient) firstResult(ctx context.Context, p *Ends) (first, total time.Duration, err error) {
	s, err := p.move(ReLU, func() error { return o.run(ctx, ReLU, &first) })
	return first, s.Time, err
}

// beside makes small calls for as long as an upload of p runs on the same session, and
// repeats that until it has n samples, or enough uploads have passed. It returns how
// many there are.
func (o oursClient) beside(ctx context.Context, p *Ends, n int, mem Memory) (Sample, int, error) {
	o.source, o.back = mem.Source, mem.Back
	small := End{Source: mem.Source, To: mem.Back}
	var all []time.Duration
	for range uploadsBeside {
		if len(all) >= n {
			break
		}
		uploaded := make(chan error, 1)
		go func() { // ends with the upload
			_, err := p.Move(ctx, Upload)
			uploaded <- err
		}()
		for running := true; running; {
			s, err := small.move(Echo, func() error { return o.run(ctx, Echo, nil) })
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
				all = append(all, s.Time)
			}
		}
	}
	if len(all) == 0 {
		return Sample{}, 0, errors.New("bench: no small call ended while an upload ran; measure larger tensors")
	}
	return Sample{Time: quantile(all, 0.5), P99: quantile(all, 0.99)}, len(all), nil
}
