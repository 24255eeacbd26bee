package attack

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/net/http2"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30

	compute = "/tensorferry.v1.TensorService/Compute"
	session = "/tensorferry.v1.TensorService/StreamTensors"
	push    = "/tensorferry.v1.TensorService/PushTensors"
	pull    = "/tensorferry.v1.TensorService/PullTensors"
)

// Attack is what peers do.
type Attack struct {
	Name        string
	Connections int
	streams     int  // of each at a time; 0 does not speak HTTP/2
	deaf        bool // nobody reads the connections
	// on does it on one RPC of a connection, and again until its error.
	on func(c *Conn) error
}

// Handshakes is the attack on a server with TLS, and Stored the tensor that others pull.
const (
	Handshakes = "handshakes that fail"
	Stored     = "large"
)

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
		return c.greeted().message(&pb.Frame{Hello: hello()}).unfinished().rest()
	}},
	// The same, for RPCs that are told to end for want of memory.
	{"unfinished messages behind answers", 16, 100, false, func(c *Conn) error {
		return c.greeted().unfinished().rest()
	}},
	{"answers that nobody reads", 2, 30, false, func(c *Conn) error {
		r := c.greeted()
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
		r := c.greeted()
		for range 30 {
			call := echo()
			call.Params = params
			r.message(&pb.Frame{Calls: []*pb.Call{call}})
		}
		return r.rest()
	}},
	{"chunk tables of inputs that do not come", 300, 1, false, func(c *Conn) error {
		call := echo()
		f := &pb.Frame{Calls: []*pb.Call{call}}
		for i := range 60 { // but the first one is not even announced
			x := parcel("", 4000, 1)
			x.CallId, x.Port = call.Id, fmt.Sprint(i)
			call.Inputs = append(call.Inputs, &pb.Input{Port: x.Port, TensorId: x.TensorId})
			f.Descs = append(f.Descs, x)
		}
		return c.greeted().message(f).rest()
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
				x := parcel(long(480)+fmt.Sprint(n, i), kib, mib)
				x.Shape, shape = shape, []int64{1}
				f.Descs = append(f.Descs, x)
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
			r.chunk(id, 0, make([]byte, 64*kib))
		}
		return r.rest()
	}},
	{"sessions that say nothing", 8, 100, false, func(c *Conn) error { return c.Open(session).pause(time.Second) }},
	{"pushes that say nothing", 8, 32, false, func(c *Conn) error { return c.Open(push).pause(time.Second) }},
	{"sessions that announce and never send", 4, 50, false, func(c *Conn) error {
		r := c.greeted()
		for i := range 64 {
			f := new(pb.Frame)
			announce(f, kib, kib)
			f.Descs[0].OnAllowance = i%2 == 0
			r.message(f)
		}
		return r.pause(time.Second)
	}},
	{"pushes that announce and never send", 4, 16, false, func(c *Conn) error {
		f := &pb.Frame{Hello: hello()}
		for i := range 16 {
			f.Descs = append(f.Descs, parcel(fmt.Sprint("flood", i), kib, kib))
		}
		return c.Open(push).message(f).pause(time.Second)
	}},
	{"one-byte chunks of a push", 4, 4, false, func(c *Conn) error {
		x := parcel(fmt.Sprintf("flood %x", newID()), 16*kib, 1)
		r := c.Open(push).message(&pb.Frame{Hello: hello(), Descs: []*pb.TensorDesc{x}})
		for i := range uint32(16 * kib) {
			r.chunk(x.TensorId, i, make([]byte, 1))
		}
		return r.reset()
	}},
	{"one-byte chunks of a session", 4, 4, false, func(c *Conn) error {
		r := c.greeted()
		for range 4 {
			f := new(pb.Frame)
			x := announce(f, 4*kib, 1)
			r.message(f)
			for i := range uint32(4 * kib) {
				r.chunk(x, i, make([]byte, 1))
			}
		}
		return r.reset()
	}},
	{"pulls that nobody reads", 8, 30, false, func(c *Conn) error {
		return c.Open(pull).message(&pb.PullTensorsRequest{Hello: hello(), Selections: []*pb.Selection{{Name: Stored}}}).asked().pause(time.Second)
	}},
	{"large requests", 4, 4, false, func(c *Conn) error {
		m := &pb.PullTensorsRequest{Hello: hello()}
		for range 250_000 {
			m.Selections = append(m.Selections, new(pb.Selection))
		}
		return c.Open(pull).message(m).asked().pause(100 * time.Millisecond)
	}},
	{"connections that are reset", 16, 0, false, func(c *Conn) error {
		return c.strike([]byte(http2.ClientPreface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
	}},
	{Handshakes, 100, 0, false, func(c *Conn) error { return c.strike(clientHello()) }},
}

// clientHello is the first message of a handshake. Whoever repeats it computes nothing,
// while the server agrees on a key and signs.
var clientHello = sync.OnceValue(func() []byte {
	near, far := net.Pipe()
	go func() { // ends with the pipe
		_ = tls.Client(near, &tls.Config{ServerName: "localhost", MinVersion: tls.VersionTLS13}).Handshake()
	}()
	hello := make([]byte, 16*kib)
	n, _ := far.Read(hello)
	_ = far.Close()
	return hello[:n]
})

func newID() []byte { id := uuid.Must(uuid.NewV7()); return id[:] }

func long(n int) string { return strings.Repeat("x", n) }

// hello opens a session.
func hello() *pb.Hello {
	return &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: mib, AllowanceBytes: mib, Checksum: pb.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64}
}

// parcel is a tensor that is pushed.
func parcel(name string, size int64, chunk uint32) *pb.TensorDesc {
	return &pb.TensorDesc{TensorId: newID(), Name: name, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{size}, SizeBytes: uint64(size), ChunkBytes: chunk}
}

// echo is a call with one input.
func echo() *pb.Call {
	return &pb.Call{Id: newID(), Model: "echo", Inputs: []*pb.Input{{Port: "x", TensorId: newID()}}}
}

// announce adds a call to f whose input comes on allowance, and returns that one's ID.
func announce(f *pb.Frame, size int64, chunk uint32) []byte {
	call, d := echo(), parcel("", size, chunk)
	d.TensorId, d.CallId, d.Port, d.OnAllowance = call.Inputs[0].TensorId, call.Id, "x", true
	f.Calls, f.Descs = append(f.Calls, call), append(f.Descs, d)
	return d.TensorId
}

// Run runs the attack over one of so many of its connections, until ctx ends: one that ends is
// opened again.
func (a *Attack) Run(ctx context.Context, address string, of int) {
	var all sync.WaitGroup
	for range max(1, a.Connections/of) {
		all.Go(func() {
			for ctx.Err() == nil {
				_ = a.connect(ctx, address) // the server may end it
				select {
				case <-time.After(50 * time.Millisecond):
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
				err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4*kib)
			}), err)
		}
	}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if a.streams == 0 {
		return a.on(&Conn{conn: conn})
	}
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
