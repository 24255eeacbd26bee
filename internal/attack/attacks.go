package attack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	compute = "/tensorferry.v1.TensorService/Compute"
	session = "/tensorferry.v1.TensorService/StreamTensors"
	push    = "/tensorferry.v1.TensorService/PushTensors"
)

// Attack is what peers do.
type Attack struct {
	Name        string
	Connections int
	streams     int  // of each at a time
	deaf        bool // nobody reads the connections
	// on does it on one RPC of a connection, and again until its error.
	on func(c *Conn) error
}

// All are the attacks.
var All = []Attack{
	{"resets", 16, 8, false, func(c *Conn) error { return c.Open(compute).unfinished().reset() }},
	{"unfinished messages on many connections", 1000, 1, false, func(c *Conn) error { return c.Open(compute).unfinished().rest() }},
	{"unfinished messages on many streams", 16, 100, false, func(c *Conn) error { return c.Open(compute).unfinished().rest() }},
	{"tiny frames", 4, 64, false, func(c *Conn) error { return c.Open(compute).Send(mib, mib-1, 1, 0).Err }},
	{"padded frames", 4, 64, false, func(c *Conn) error { return c.Open(compute).Send(mib, mib-1, 1, 255).Err }},
	{"metadata", 100, 100, false, func(c *Conn) error { return c.Open(compute, long(15*kib)).rest() }},
	{"allowances that do not come whole", 1000, 1, false, func(c *Conn) error {
		f := &pb.Frame{Hello: hello()}
		announce(f, mib, mib)
		return c.Open(session).message(f).unfinished().rest()
	}},
	// The status of an RPC that has ended waits behind data for which there is no window.
	{"data after the end", 2, 100, false, func(c *Conn) error {
		return c.Open(session).message(&pb.Frame{Hello: hello()}).message(&pb.Frame{Hello: hello()}).unfinished().rest()
	}},
	// The same, for RPCs that are told to end for want of memory.
	{"unfinished messages behind answers", 16, 100, false, func(c *Conn) error {
		return c.Open(session).message(&pb.Frame{Hello: hello()}).unfinished().rest()
	}},
	{"answers that nobody reads", 2, 30, false, func(c *Conn) error {
		r := c.Open(session).message(&pb.Frame{Hello: hello()})
		for range 10 {
			f := new(pb.Frame)
			for range 60 {
				f.Calls = append(f.Calls, &pb.Call{Id: newID(), Model: "nobody's"})
			}
			r.message(f)
		}
		return r.rest()
	}},
	{"calls without their inputs", 10, 100, false, func(c *Conn) error {
		params := make(map[string]string)
		for i := range 8 {
			params[fmt.Sprint(i)] = long(4*kib - 1)
		}
		r := c.Open(session).message(&pb.Frame{Hello: hello()})
		for range 30 {
			r.message(&pb.Frame{Calls: []*pb.Call{{Id: newID(), Model: "echo", Inputs: []*pb.Input{{Port: "x", TensorId: newID()}}, Params: params}}})
		}
		return r.rest()
	}},
	{"chunk tables of inputs that do not come", 300, 1, false, func(c *Conn) error {
		call := &pb.Call{Id: newID(), Model: "echo", Inputs: []*pb.Input{{Port: "x", TensorId: newID()}}}
		f := &pb.Frame{Calls: []*pb.Call{call}}
		for i := range 60 { // but the first one is not even announced
			x, port := newID(), fmt.Sprint(i)
			call.Inputs = append(call.Inputs, &pb.Input{Port: port, TensorId: x})
			f.Descs = append(f.Descs, &pb.TensorDesc{
				TensorId: x, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{4000}, SizeBytes: 4000, ChunkBytes: 1, CallId: call.Id, Port: port,
			})
		}
		return c.Open(session).message(&pb.Frame{Hello: hello()}).message(f).rest()
	}},
	{"small calls that nobody reads", 400, 100, false, func(c *Conn) error {
		x := &pb.NamedTensor{Port: "x", Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{1}, Data: []byte{1}}
		return c.Open(compute, long(15*kib)).message(&pb.ComputeRequest{Model: "echo", Inputs: []*pb.NamedTensor{x}}).rest()
	}},
	{"pushes of many names", 3, 85, false, func(c *Conn) error {
		r := c.Open(push).message(&pb.Frame{Hello: hello()})
		shape := []int64{kib} // the first one stays open, the others do not fit their size
		for n := range 10 {
			f := new(pb.Frame)
			for i := range 100 {
				f.Descs = append(f.Descs, &pb.TensorDesc{
					TensorId: newID(), Name: long(480) + fmt.Sprint(n, i), Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: shape, SizeBytes: kib, ChunkBytes: mib,
				})
				shape = []int64{1}
			}
			r.message(f)
		}
		return r.rest()
	}},
	{"window updates", 100, 1, false, func(c *Conn) error {
		return c.write(func() error { return c.WriteWindowUpdate(0, 1) })
	}},
	{"results that nobody reads", 20, 1, true, func(c *Conn) error {
		calls, ids := &pb.Frame{Hello: hello()}, [][]byte{}
		for range 8 {
			ids = append(ids, announce(calls, 64*kib, 64*kib))
		}
		r := c.Open(session).message(calls)
		for _, id := range ids {
			data := make([]byte, 64*kib)
			sum := codec.CRC32C.Update(codec.CRC32C.Seed(tensor.ID(id), 0), data)
			r.message(&pb.Frame{Chunk: &pb.Chunk{TensorId: id, Checksum: sum, Data: data}})
		}
		return r.rest()
	}},
}

func newID() []byte { id := uuid.Must(uuid.NewV7()); return id[:] }

func long(n int) string { return strings.Repeat("x", n) }

// hello opens a session.
func hello() *pb.Hello {
	return &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: mib, AllowanceBytes: mib, Checksum: pb.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64}
}

// announce adds a call to f whose input comes on allowance, and returns that one's ID.
func announce(f *pb.Frame, size int64, chunk uint32) []byte {
	x, call := newID(), newID()
	f.Calls = append(f.Calls, &pb.Call{Id: call, Model: "echo", Inputs: []*pb.Input{{Port: "x", TensorId: x}}})
	f.Descs = append(f.Descs, &pb.TensorDesc{
		TensorId: x, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{size}, SizeBytes: uint64(size), ChunkBytes: chunk, CallId: call, Port: "x", OnAllowance: true,
	})
	return x
}

// Run runs the attack until ctx ends: a connection that ends is opened again.
func (a *Attack) Run(ctx context.Context, address string) {
	var all sync.WaitGroup
	for range a.Connections {
		all.Go(func() {
			for ctx.Err() == nil {
				_ = a.connect(ctx, address) // the server may end it
				select {
				case <-time.After(againAfter):
				case <-ctx.Done():
				}
			}
		})
	}
	all.Wait()
}

// connect does what there is to do over one connection.
func (a *Attack) connect(ctx context.Context, address string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var d net.Dialer
	window := uint32(0)
	if a.deaf { // it has all the window that there is, but the system shall not read for it
		window = gib
		d.Control = func(_, _ string, c syscall.RawConn) (err error) {
			return errors.Join(c.Control(func(fd uintptr) {
				err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, deafBytes)
			}), err)
		}
	}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	c, err := NewConn(ctx, conn, window)
	if err != nil {
		return err
	}
	if !a.deaf {
		go func() { // ends with the connection
			_, _ = io.Copy(io.Discard, conn)
			cancel()
		}()
	}
	var all sync.WaitGroup
	for range a.streams {
		all.Go(func() {
			for a.on(c) == nil {
				continue // it fails at the latest when ctx ends
			}
		})
	}
	all.Wait()
	return nil
}
