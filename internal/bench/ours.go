package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// Ours is tensorferry as its users have it, with every default: a server with the
// built-in models on the CPU engine, and a client with one open session. It is
// measured as the baselines are, but that Remote is the engine's own memory.
// Move and Ping may run beside each other, each in one goroutine.
type Ours struct {
	mem     Memory
	source  tensor.Tensor
	small   tensor.Tensor
	back    []byte // of small
	host    *engine.Host
	server  *server.Server
	served  chan error
	release func()
	client  *client.Client
	session *client.Session
}

var _ Baseline = (*Ours)(nil)

// NewOurs connects over "tcp" or "unix" and starts goroutines that serve until
// Close. It is lent mem, whose length is a multiple of 4, until then.
func NewOurs(ctx context.Context, network string, mem Memory) (_ *Ours, err error) {
	if err := mem.check(); err != nil {
		return nil, err
	}
	o := &Ours{mem: mem, back: make([]byte, SmallBytes), served: make(chan error, 1)}
	floats := func(data []byte) (tensor.Tensor, error) {
		return tensor.New(tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(len(data) / 4)}}, data)
	}
	if o.source, err = floats(mem.Source); err != nil {
		return nil, err
	}
	small := make([]byte, SmallBytes)
	fillFloats(small)
	if o.small, err = floats(small); err != nil {
		return nil, err
	}
	o.host = engine.NewHost(engine.HostConfig{MemoryBytes: hostTensors*int64(len(mem.Source)) + hostSpare})
	models := engine.NewRegistry()
	for _, m := range cpu.Builtins(o.host) {
		if err := models.Add(m); err != nil {
			o.host.Close()
			return nil, err
		}
	}
	o.server, err = server.New(server.Config{Models: models, Pool: o.host.Pool(), Budget: o.host.Budget()})
	if err != nil {
		o.host.Close()
		return nil, err
	}
	l, release, err := listen(network)
	if err != nil {
		o.host.Close()
		return nil, err
	}
	o.release = release
	go func() { o.served <- o.server.Serve(l) }()
	address := l.Addr().String()
	if network == "unix" {
		address = "unix:" + address
	}
	if o.client, err = client.Dial(address, client.Config{ChunkBytes: ChunkBytes}); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	if o.session, err = o.client.Session(ctx); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return o, nil
}

// Move does op once. An upload goes to the model that assembles it whole and
// answers with its size: the server's memory is out of reach, so what arrived is
// compared by the checksums alone.
func (o *Ours) Move(ctx context.Context, op Op) (Sample, error) {
	return o.move(ctx, op, nil)
}

// FirstResult does a relu call and returns when its first result was there, and
// when the call was done.
func (o *Ours) FirstResult(ctx context.Context) (first, total time.Duration, err error) {
	s, err := o.move(ctx, ReLU, &first)
	return first, s.Time, err
}

// move does op once and, if asked, says when the first result was there.
func (o *Ours) move(ctx context.Context, op Op, first *time.Duration) (Sample, error) {
	r := client.Request{Model: string(op), Inputs: []client.Input{client.From("", o.source)}}
	var to [][]byte
	if op == Upload {
		r.Model = "sink"
	} else {
		to = [][]byte{o.mem.Back}
		r.Results = map[string]client.Sink{"y": client.Into(o.mem.Back)}
	}
	idle := make(chan struct{})
	close(idle) // the server's memory is not looked at
	return o.mem.measured(op, func() error {
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
		if err != nil || op != Upload {
			return err
		}
		if got := results["bytes"].Data; len(got) != 8 || binary.LittleEndian.Uint64(got) != uint64(len(o.mem.Source)) {
			return fmt.Errorf("bench: %d bytes were sent, the server says %x", len(o.mem.Source), got)
		}
		return nil
	}, idle, to...)
}

// Ping makes one small echo call and returns its time. The bytes that came back
// are compared outside it.
func (o *Ours) Ping(ctx context.Context) (time.Duration, error) {
	clear(o.back)
	begin := time.Now()
	call, err := o.session.Call(ctx, client.Request{
		Model:   "echo",
		Inputs:  []client.Input{client.From("", o.small)},
		Results: map[string]client.Sink{"y": client.Into(o.back)},
	})
	if err != nil {
		return 0, err
	}
	_, err = call.Wait()
	elapsed := time.Since(begin)
	if err == nil && !bytes.Equal(o.back, o.small.Data) {
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

// Close ends the session, the server and every goroutine behind them.
func (o *Ours) Close() error {
	var err error
	if o.client != nil {
		err = o.client.Close()
	}
	o.server.Close()
	err = errors.Join(err, <-o.served)
	o.host.Close()
	o.release()
	return err
}
