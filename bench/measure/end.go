package measure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/proc"
)

// EndArgument alone makes a program one end of one kind: it calls BeEnd.
const EndArgument = "bench-end"

// Role says what an End is.
type Role struct {
	Kind    string
	Size    int    // of the tensor, in bytes
	Network string // "tcp" or "unix"
	// Address is the server's. An end without one is the server.
	Address string
	Host    string // that a server listens on; empty is the loopback interface's
	Dir     string // for files, and sockets
}

// End is the server or the client of one kind, with memory that it has written
// before. Its methods are called in JSON-RPC 1.0 over the standard input and output
// of a process, one at a time; it ends when its input does.
type End struct {
	ctx    context.Context
	kinds  []bench.Kind
	kind   bench.Kind
	place  bench.Place
	served chan error // of a server, when it has ended
	client bench.Client
	cpu    time.Duration // of this process when a transfer began
}

// pipes are the two directions of a connection. end is called at the end of its input.
type pipes struct {
	io.Reader
	io.WriteCloser
	end func()
}

func (p pipes) Read(b []byte) (int, error) {
	n, err := p.Reader.Read(b)
	if err != nil {
		p.end()
	}
	return n, err
}

// ServeEnd is an end's whole life.
func ServeEnd(ctx context.Context, in io.Reader, out io.WriteCloser, kinds []bench.Kind) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	e := &End{ctx: ctx, kinds: kinds}
	s := rpc.NewServer()
	if err := s.Register(e); err != nil {
		return err
	}
	s.ServeCodec(jsonrpc.NewServerCodec(pipes{in, out, cancel}))
	switch { // an end is one of the two
	case e.client.Close != nil:
		return e.client.Close()
	case e.served != nil:
		return <-e.served
	}
	return nil
}

// BeEnd has a process that was started as an end be one, and exit.
func BeEnd(kinds []bench.Kind) {
	switch {
	case len(os.Args) == 2 && os.Args[1] == busyArgument:
		beBusy()
	case len(os.Args) != 2 || os.Args[1] != EndArgument:
		return
	}
	if err := ServeEnd(context.Background(), os.Stdin, os.Stdout, kinds); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Start makes the end what role says, and answers with the address of a server.
func (e *End) Start(role Role, address *string) (err error) {
	at := slices.IndexFunc(e.kinds, func(k bench.Kind) bool { return k.Name == role.Kind })
	if at < 0 {
		return fmt.Errorf("bench: no kind %q", role.Kind)
	}
	e.kind = e.kinds[at]
	e.place = bench.Place{Network: role.Network, Address: role.Address, Dir: role.Dir}
	for _, mem := range []*[]byte{&e.place.Source, &e.place.To} {
		if role.Address == "" && e.kind.OwnMemory { // nobody touches it
			*mem = make([]byte, role.Size)
		} else if *mem, _, err = bench.Memory(role.Size); err != nil { // for the life of the process
			return err
		}
	}
	if role.Address != "" {
		e.client, err = e.kind.Dial(e.ctx, e.place)
		return err
	}
	listen := map[string]string{"tcp": cmp.Or(role.Host, "127.0.0.1") + ":0", "unix": filepath.Join(role.Dir, "s")}[role.Network]
	l, err := new(net.ListenConfig).Listen(e.ctx, role.Network, listen)
	if err != nil {
		return err
	}
	*address = l.Addr().String()
	e.served = make(chan error, 1)
	go func() { e.served <- e.kind.Serve(e.ctx, l, e.place) }()
	return nil
}

// Prepare readies either end for a job.
func (e *End) Prepare(job Job, ready *bool) error {
	*ready = true
	if move, is := movesOf[job.Op]; is && e.client.Prepare != nil {
		return e.client.Prepare(e.ctx, move)
	}
	if e.served != nil && !e.kind.OwnMemory {
		bench.Spoil(e.place.To, e.place.Source)
	}
	e.cpu = proc.CPUTime()
	return nil
}

// movesOf are the jobs that a client's Run does, and how.
var movesOf = map[bench.Op]bench.Op{bench.Upload: bench.Upload, bench.Echo: bench.Echo, bench.ReLU: bench.ReLU, bench.Call: bench.Echo, FirstResult: bench.ReLU}

// Move does a job at the client and answers with the time, and the time its process
// ran for. A caller that waits too long ends the process.
func (e *End) Move(job Job, s *bench.Sample) (err error) {
	to, source := e.place.To, e.place.Source
	switch measure := e.client.Measure[job.Op]; {
	case measure != nil:
		*s, err = measure(e.ctx, job.Count)
	case e.client.Run != nil && job.Op == FirstResult:
		var begin, first time.Time
		*s, err = bench.Transfer(bench.ReLU, to, source, func() error {
			begin = time.Now()
			return e.client.Run(e.ctx, bench.ReLU, &first)
		})
		s.Total, s.Time = s.Time, first.Sub(begin)
	case e.client.Run != nil && movesOf[job.Op] != "":
		*s, err = e.client.Do(e.ctx, job.Op, e.place, job.Count)
	default:
		err = fmt.Errorf("bench: %s has no %s", e.kind.Name, job.Op)
	}
	s.Client = max(peak()-int64(len(to)+len(source)), 0)
	return err
}

// peak is the most memory that this process has had; 0 where the system does not tell.
func peak() int64 {
	r, _ := proc.ResidentOf(os.Getpid())
	return r.Peak
}

// Finish compares what arrived at the server and answers with the time that its
// process ran for since Prepare, and its memory.
func (e *End) Finish(job Job, s *bench.Sample) error {
	s.CPU, s.Server = proc.CPUTime()-e.cpu, peak()
	if e.kind.OwnMemory {
		return nil
	}
	if job.Op == FirstResult {
		job.Op = bench.ReLU
	}
	return bench.Check(job.Op, e.place.To, e.place.Source)
}

// Entrant is a kind that takes part.
type Entrant struct {
	Kind string
	// Program is the command of its ends, which speak as ServeEnd does; none is this
	// program.
	Program []string
	Prefix  string // of its name in reports
}

// Name is the entrant's in reports.
func (e Entrant) Name() string { return e.Prefix + e.Kind }

// Beside are the first kind and those that it is compared with.
func Beside(kinds ...string) (all []Entrant) {
	for _, k := range kinds {
		all = append(all, Entrant{Kind: k})
	}
	return all
}

// Contestant is an entrant with both its ends. It belongs to one goroutine.
type Contestant struct {
	dir  string
	ends []far         // the server, and the client
	wait time.Duration // for a job
}

// far is an end that is called.
type far struct {
	*rpc.Client
	stop func() error
}

// call waits for the answer, or for the end of ctx.
func (f far) call(ctx context.Context, method string, arg, reply any) error {
	call := f.Go("End."+method, arg, reply, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
		return call.Error
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// startProcess starts an end in a process of its own, which ends when ctx does.
func startProcess(ctx context.Context, command Command, program []string) (far, error) {
	if program == nil {
		self, err := os.Executable()
		if err != nil {
			return far{}, err
		}
		program = []string{self, EndArgument}
	}
	if command == nil {
		command = exec.CommandContext
	}
	c := proc.New(command(ctx, program[0], program[1:]...))
	out, err := c.Pipe()
	if err != nil {
		return far{}, err
	}
	return far{jsonrpc.NewClient(pipes{out, c.In, func() {}}), c.Stop}, nil
}

// Open starts both ends of an entrant of g. They end when ctx does.
func Open(ctx context.Context, g Group, e Entrant) (_ *Contestant, err error) {
	t := &Contestant{wait: cmp.Or(g.Wait, jobWait)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", e.Name(), err), t.Close())
		}
	}()
	if t.dir, err = os.MkdirTemp("", "tensorferry-bench-"); err != nil {
		return nil, err
	}
	if _, err := identity.WriteCertificates(t.dir, nil, "bench"); err != nil { // for kinds that encrypt
		return nil, err
	}
	begun, done := context.WithTimeoutCause(ctx, t.wait, errSlow)
	defer done()
	role := Role{Kind: e.Kind, Size: g.Size, Network: g.Net, Host: g.Host, Dir: t.dir}
	for i := range g.Commands {
		f, err := startProcess(ctx, g.Commands[i], e.Program)
		if err != nil {
			return nil, err
		}
		t.ends = append(t.ends, f)
		if err = f.call(begun, "Start", role, &role.Address); err != nil {
			return nil, err
		}
	}
	return t, nil
}

var errSlow = errors.New("bench: no end in time; measure smaller tensors")

// Do does a job once. The time is the client's, the CPU time that of both ends.
func (t *Contestant) Do(ctx context.Context, job Job) (s bench.Sample, err error) {
	ctx, done := context.WithTimeoutCause(ctx, t.wait, errSlow)
	defer done()
	server, client := t.ends[0], t.ends[1]
	for _, end := range t.ends {
		if err = end.call(ctx, "Prepare", job, new(bool)); err != nil {
			return s, err
		}
	}
	if err = client.call(ctx, "Move", job, &s); err != nil {
		return bench.Sample{}, err
	}
	var its bench.Sample
	if err = server.call(ctx, "Finish", job, &its); err != nil {
		return bench.Sample{}, err
	}
	if s.CPU > 0 {
		s.CPU += its.CPU
	}
	s.Server = its.Server
	s.CPU /= time.Duration(max(job.Count, 1))
	return s, nil
}

// Close ends the client and then its server.
func (t *Contestant) Close() (err error) {
	for _, f := range slices.Backward(t.ends) {
		_ = f.Client.Close() // and so its input
		err = errors.Join(err, f.stop())
	}
	if t.dir != "" {
		err = errors.Join(err, os.RemoveAll(t.dir))
	}
	return err
}
