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
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/slab"
)

// End is what a child process is: the server or the client of one kind, with
// memory that it has written before. Its methods are called over the process's
// standard input and output, one at a time; it ends when its input does.
type End struct {
	kinds  map[string]bench.Kind
	kind   bench.Kind
	slabs  []*slab.Slab // what holds the memory, for as long as the process lives
	source []byte
	dst    []byte // remote of a server, back of a client
	server bench.Server
	client bench.Client
	cpu    time.Duration // of this process when a transfer began
}

// Role says what a process is.
type Role struct {
	Kind string
	Size int // of the tensor, in bytes
	// Address is the server's, over TCP. A process without one is the server.
	Address string
}

// serveEnd is a child's whole life.
func serveEnd(in io.Reader, out io.WriteCloser, kinds map[string]bench.Kind) error {
	e := &End{kinds: kinds}
	s := rpc.NewServer()
	if err := s.Register(e); err != nil {
		return err
	}
	s.ServeConn(pipes{in, out})
	var err error
	if e.client != nil {
		err = e.client.Close()
	}
	if e.server != nil {
		err = errors.Join(err, e.server.Close())
	}
	return err
}

// pipes are the two directions of a connection.
type pipes struct {
	io.Reader
	io.WriteCloser
}

// Start makes the process what role says, and answers with the address of a
// server.
func (e *End) Start(role Role, address *string) error {
	var ok bool
	if e.kind, ok = e.kinds[role.Kind]; !ok {
		return fmt.Errorf("peers: no kind %q", role.Kind)
	}
	pool := slab.NewPool(0, slab.System) // outside the Go heap, as everyone's
	var err error
	if e.source, err = e.memory(pool, role.Size); err != nil {
		return err
	}
	if e.dst, err = e.memory(pool, role.Size); err != nil {
		return err
	}
	bench.FillFloats(e.source)
	if role.Address != "" {
		bench.FillFloats(e.dst)
		e.client, err = e.kind.Dial(context.Background(), "tcp", role.Address, e.source, e.dst)
		return err
	}
	if !e.kind.OwnMemory { // or nobody would touch it
		bench.FillFloats(e.dst)
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	*address = l.Addr().String()
	e.server, err = e.kind.Serve(l, e.dst)
	return err
}

func (e *End) memory(pool *slab.Pool, n int) ([]byte, error) {
	s, err := pool.Get(n)
	if err != nil {
		return nil, err
	}
	e.slabs = append(e.slabs, s)
	return s.Bytes(), nil
}

// Prepare readies the server for a transfer.
//
//nolint:unparam // a method without an error can not be called from another process
func (e *End) Prepare(_ bench.Op, ready *bool) error {
	*ready = true
	if !e.kind.OwnMemory {
		bench.Spoil(e.dst, e.source)
	}
	e.cpu = bench.CPUTime()
	return nil
}

// Move does op at the client and answers with the time, and the time its process
// ran for.
func (e *End) Move(op bench.Op, sample *bench.Sample) error {
	if op.Back() {
		bench.Spoil(e.dst, e.source)
	}
	cpu, begin := bench.CPUTime(), time.Now()
	err := e.client.Run(context.Background(), op) // whoever waits too long ends the process
	*sample = bench.Sample{Time: time.Since(begin), CPU: bench.CPUTime() - cpu}
	if err == nil && op.Back() {
		err = bench.Check(op, e.dst, e.source)
	}
	return err
}

// Finish compares what arrived at the server and answers with the time that its
// process ran for since Prepare.
func (e *End) Finish(op bench.Op, cpu *time.Duration) error {
	<-e.server.Idle()
	*cpu = bench.CPUTime() - e.cpu
	if e.kind.OwnMemory {
		return nil
	}
	return bench.Check(op, e.dst, e.source)
}

// process is a running child.
type process struct {
	rpc  *rpc.Client
	wait func() error
}

// startProcess starts a build of this program as an End; empty is this one. It is
// killed when ctx ends.
func startProcess(ctx context.Context, program string) (*process, error) {
	if program == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		program = self
	}
	cmd := exec.CommandContext(ctx, program, endArgument)
	cmd.WaitDelay = childWait
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &process{rpc.NewClient(pipes{out, in}), cmd.Wait}, nil
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

// close ends the process's input and waits for it to end.
func (p *process) close() error {
	return errors.Join(p.rpc.Close(), p.wait())
}

// contestant is a kind whose ends are processes.
type contestant struct {
	kind           bench.Kind
	server, client *process
	cancel         context.CancelFunc
}

var _ bench.Baseline = (*contestant)(nil)

// openContestant starts both processes, of the program that startProcess says, for
// tensors of size bytes. They are killed when ctx ends.
func openContestant(ctx context.Context, program string, kind bench.Kind, size int) (_ *contestant, err error) {
	ctx, cancel := context.WithCancel(ctx)
	c := &contestant{kind: kind, cancel: cancel}
	defer func() {
		if err != nil {
			cancel()
			err = errors.Join(fmt.Errorf("%s: %w", kind.Name, err), c.Close())
		}
	}()
	begun, done := context.WithTimeoutCause(ctx, transferWait, errSlow)
	defer done()
	if c.server, err = startProcess(ctx, program); err != nil {
		return nil, err
	}
	role := Role{Kind: kind.Name, Size: size}
	if err = c.server.call(begun, "Start", role, &role.Address); err != nil {
		return nil, err
	}
	if c.client, err = startProcess(ctx, program); err != nil {
		return nil, err
	}
	return c, c.client.call(begun, "Start", role, new(string))
}

var errSlow = fmt.Errorf("peers: no end after %v; measure smaller tensors", transferWait)

// Move does op once. The time is the client's, the CPU time that of both processes.
func (c *contestant) Move(ctx context.Context, op bench.Op) (s bench.Sample, err error) {
	ctx, done := context.WithTimeoutCause(ctx, transferWait, errSlow)
	defer done()
	var cpu time.Duration
	if err = c.server.call(ctx, "Prepare", op, new(bool)); err != nil {
		return s, err
	}
	if err = c.client.call(ctx, "Move", op, &s); err != nil {
		return s, err
	}
	err = c.server.call(ctx, "Finish", op, &cpu)
	s.CPU += cpu
	return s, err
}

// Close ends the client and then its server.
func (c *contestant) Close() error {
	defer c.cancel()
	defer time.AfterFunc(childWait, c.cancel).Stop()
	var err error
	if c.client != nil {
		err = c.client.close()
	}
	if c.server != nil {
		err = errors.Join(err, c.server.close())
	}
	return err
}
