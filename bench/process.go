package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/rpc"
	"os"
	"os/exec"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/slab"
)

// End is what a child process is: the server or the client of one kind, with
// memory that it has written before. Its methods are called over the process's
// standard input and output, one at a time; it ends when its input does. Builds of
// other commits call them, too.
type End struct {
	bench.End
	slabs []*slab.Slab // what holds the memory, for as long as the process lives
}

// Role says what a process is.
type Role struct {
	Kind string
	Size int // of the tensor, in bytes
	// Address is the server's, over TCP. A process without one is the server.
	Address string
}

// pipes are the two directions of a connection.
type pipes struct {
	io.Reader
	io.WriteCloser
}

// serveEnd is a child's whole life.
func serveEnd(in io.Reader, out io.WriteCloser) error {
	e := new(End)
	s := rpc.NewServer()
	if err := s.Register(e); err != nil {
		return err
	}
	s.ServeConn(pipes{in, out})
	return e.Close()
}

// Start makes the process what role says, and answers with the address of a
// server.
func (e *End) Start(role Role, address *string) (err error) {
	var known bool
	if e.Kind, known = kinds()[role.Kind]; !known {
		return fmt.Errorf("peers: no kind %q", role.Kind)
	}
	pool := slab.NewPool(0, slab.System) // outside the Go heap, as everyone's
	for _, mem := range []*[]byte{&e.Source, &e.To} {
		s, err := pool.Get(role.Size)
		if err != nil {
			return err
		}
		e.slabs, *mem = append(e.slabs, s), s.Bytes()
	}
	bench.FillFloats(e.Source)
	if role.Address != "" || !e.Kind.OwnMemory { // or nobody would touch it
		bench.FillFloats(e.To)
	}
	if role.Address != "" {
		e.Client, err = e.Kind.Dial(context.Background(), "tcp", role.Address, e.Source, e.To)
		return err
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	*address = l.Addr().String()
	e.Server, err = e.Kind.Serve(l, e.To)
	return err
}

// process is a running child.
type process struct {
	*proc.Child
	rpc *rpc.Client
}

// startProcess starts a build of this program as an End; empty is this one.
func startProcess(ctx context.Context, program string) (_ *process, err error) {
	if program == "" {
		if program, err = os.Executable(); err != nil {
			return nil, err
		}
	}
	c := proc.New(exec.CommandContext(ctx, program, endArgument))
	out, err := c.Pipe()
	if err != nil {
		return nil, err
	}
	return &process{c, rpc.NewClient(pipes{out, c.In})}, nil
}

// call waits for the answer, or for the end of ctx.
func (p *process) call(ctx context.Context, method string, arg, reply any) error {
	call := p.rpc.Go("End."+method, arg, reply, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
		return call.Error
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// contestant is a kind whose ends are processes.
type contestant struct{ server, client *process }

// openContestant starts both processes, of the program that startProcess says, for
// tensors of size bytes. They end when ctx does.
func openContestant(ctx context.Context, program, kind string, size int) (_ *contestant, err error) {
	c := new(contestant)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", kind, err), c.Close())
		}
	}()
	begun, done := context.WithTimeoutCause(ctx, transferWait, errSlow)
	defer done()
	role := Role{Kind: kind, Size: size}
	for _, p := range []**process{&c.server, &c.client} {
		if *p, err = startProcess(ctx, program); err != nil {
			return nil, err
		}
		if err = (*p).call(begun, "Start", role, &role.Address); err != nil {
			return nil, err
		}
	}
	return c, nil
}

var errSlow = fmt.Errorf("peers: no end after %v; measure smaller tensors", transferWait)

// Move does op once. The time is the client's, the CPU time that of both processes.
func (c *contestant) Move(ctx context.Context, op bench.Op) (s bench.Sample, err error) {
	ctx, done := context.WithTimeoutCause(ctx, transferWait, errSlow)
	defer done()
	if err = c.server.call(ctx, "Prepare", op, new(bool)); err == nil {
		err = c.client.call(ctx, "Move", op, &s)
	}
	if err != nil {
		return s, err
	}
	near := s.CPU
	err = c.server.call(ctx, "Finish", op, &s.CPU)
	s.CPU += near
	return s, err
}

// Close ends the client and then its server.
func (c *contestant) Close() (err error) {
	for _, p := range []*process{c.client, c.server} {
		if p != nil {
			_ = p.rpc.Close() // and so its input
			err = errors.Join(err, p.Stop())
		}
	}
	return err
}
