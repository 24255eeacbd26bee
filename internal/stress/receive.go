package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	compute = "/tensorferry.v1.TensorService/Compute"
	session = "/tensorferry.v1.TensorService/StreamTensors"
	push    = "/tensorferry.v1.TensorService/PushTensors"
)

// attack is what peers do that speak HTTP/2 by hand.
type attack struct {
	name        string
	connections int
	streams     int  // of each at a time
	deaf        bool // nobody reads the connections
	// on does it on one RPC of a connection, and again until its error.
	on func(a *attacker) error
}

var attacks = []attack{
	{"resets", 16, 8, false, func(a *attacker) error { return a.open(compute).large(16*kib, 0).reset() }},
	{"unfinished messages on many connections", 1000, 1, false, func(a *attacker) error { return a.open(compute).large(16*kib, 0).rest() }},
	{"unfinished messages on many streams", 16, 100, false, func(a *attacker) error { return a.open(compute).large(16*kib, 0).rest() }},
	{"tiny frames", 4, 64, false, func(a *attacker) error { return a.open(compute).large(1, 0).err }},
	{"padded frames", 4, 64, false, func(a *attacker) error { return a.open(compute).large(1, 255).err }},
	{"metadata", 100, 100, false, func(a *attacker) error { return a.open(compute, long(15*kib)).rest() }},
	{"allowances that do not come whole", 1000, 1, false, func(a *attacker) error {
		f := &pb.Frame{Hello: hello()}
		announce(f, mib, mib)
		return a.open(session).frame(f).large(16*kib, 0).rest()
	}},
	// The status of an RPC that has ended waits behind data for which there is no window.
	{"data after the end", 2, 100, false, func(a *attacker) error {
		return a.open(session).frame(&pb.Frame{Hello: hello()}).frame(&pb.Frame{Hello: hello()}).large(16*kib, 0).rest()
	}},
	// The same, for RPCs that are told to end for want of memory.
	{"unfinished messages behind answers", 16, 100, false, func(a *attacker) error {
		return a.open(session).frame(&pb.Frame{Hello: hello()}).large(16*kib, 0).rest()
	}},
	{"answers that nobody reads", 2, 30, false, func(a *attacker) error {
		r := a.open(session).frame(&pb.Frame{Hello: hello()})
		for range 10 {
			f := new(pb.Frame)
			for range 60 {
				f.Calls = append(f.Calls, &pb.Call{Id: newID(), Model: "nobody's"})
			}
			r.frame(f)
		}
		return r.rest()
	}},
	{"calls without their inputs", 10, 100, false, func(a *attacker) error {
		params := make(map[string]string)
		for i := range 8 {
			params[fmt.Sprint(i)] = long(4*kib - 1)
		}
		r := a.open(session).frame(&pb.Frame{Hello: hello()})
		for range 30 {
			r.frame(&pb.Frame{Calls: []*pb.Call{{Id: newID(), Model: "echo", Inputs: []*pb.Input{{Port: "x", TensorId: newID()}}, Params: params}}})
		}
		return r.rest()
	}},
	{"small calls that nobody reads", 400, 100, false, func(a *attacker) error {
		x := &pb.NamedTensor{Port: "x", Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{1}, Data: []byte{1}}
		return a.open(compute, long(15*kib)).frame(&pb.ComputeRequest{Model: "echo", Inputs: []*pb.NamedTensor{x}}).rest()
	}},
	{"pushes of many names", 3, 85, false, func(a *attacker) error {
		r := a.open(push).frame(&pb.Frame{Hello: hello()})
		shape := []int64{kib} // the first one stays open, the others do not fit their size
		for n := range 10 {
			f := new(pb.Frame)
			for i := range 100 {
				f.Descs = append(f.Descs, &pb.TensorDesc{
					TensorId: newID(), Name: long(480) + fmt.Sprint(n, i), Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: shape, SizeBytes: kib, ChunkBytes: mib,
				})
				shape = []int64{1}
			}
			r.frame(f)
		}
		return r.rest()
	}},
	{"window updates", 100, 1, false, func(a *attacker) error {
		return a.write(func() error { return a.WriteWindowUpdate(0, 1) })
	}},
	{"results that nobody reads", 20, 1, true, func(a *attacker) error {
		calls, ids := &pb.Frame{Hello: hello()}, [][]byte{}
		for range 8 {
			ids = append(ids, announce(calls, 64*kib, 64*kib))
		}
		r := a.open(session).frame(calls)
		for _, id := range ids {
			data := make([]byte, 64*kib)
			sum := codec.CRC32C.Update(codec.CRC32C.Seed(tensor.ID(id), 0), data)
			r.frame(&pb.Frame{Chunk: &pb.Chunk{TensorId: id, Checksum: sum, Data: data}})
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

// attacker is one connection of an attack.
type attacker struct {
	*http2.Framer
	ctx context.Context

	mu     sync.Mutex // held while frames are written; guards all below
	last   uint32     // RPC
	fields *hpack.Encoder
	block  strings.Builder // of fields
}

// write writes something, until the attack ends.
func (a *attacker) write(do func() error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(do(), a.ctx.Err())
}

// rpc is one RPC of a connection. After an error it does nothing.
type rpc struct {
	*attacker
	id  uint32
	err error
}

func (r *rpc) do(do func() error) {
	if r.err == nil {
		r.err = r.write(do)
	}
}

// open opens an RPC, with values of metadata.
func (a *attacker) open(method string, values ...string) *rpc {
	fields := []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: method}, {Name: ":authority", Value: "x"},
		{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
	}
	for _, v := range values {
		fields = append(fields, hpack.HeaderField{Name: "x", Value: v, Sensitive: true})
	}
	r := &rpc{attacker: a}
	r.do(func() (err error) {
		r.id = a.last + 1
		a.last += 2
		a.block.Reset()
		for _, f := range fields {
			err = errors.Join(err, a.fields.WriteField(f))
		}
		return errors.Join(err, a.WriteHeaders(http2.HeadersFrameParam{StreamID: r.id, BlockFragment: []byte(a.block.String()), EndHeaders: true}))
	})
	return r
}

// send sends bytes of a message, in frames of so many bytes and padding.
func (r *rpc) send(b []byte, size, padding int) *rpc {
	for part := range slices.Chunk(b, size) {
		r.do(func() error {
			if padding > 0 {
				return r.WriteDataPadded(r.id, false, part, make([]byte, padding))
			}
			return r.WriteData(r.id, false, part)
		})
	}
	return r
}

// large sends a message of a MiB but for its last byte.
func (r *rpc) large(frame, padding int) *rpc {
	return r.send(append(binary.BigEndian.AppendUint32([]byte{0}, mib), make([]byte, mib-1)...), frame, padding)
}

// frame sends a whole message.
func (r *rpc) frame(m proto.Message) *rpc {
	b, err := proto.Marshal(m)
	r.err = errors.Join(r.err, err)
	return r.send(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...), 16*kib, 0)
}

// reset ends the RPC.
func (r *rpc) reset() error {
	r.do(func() error { return r.WriteRSTStream(r.id, http2.ErrCodeCancel) })
	return r.err
}

// rest waits until the attack ends.
func (r *rpc) rest() error {
	<-r.ctx.Done()
	return context.Cause(r.ctx)
}

// connect does what there is to do over one connection.
func (at *attack) connect(ctx context.Context, address string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var d net.Dialer
	window := uint32(0)
	if at.deaf { // it has all the window that there is, but the system shall not read for it
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
	a := &attacker{Framer: http2.NewFramer(conn, nil), ctx: ctx}
	a.fields = hpack.NewEncoder(&a.block)
	_, err = io.WriteString(conn, http2.ClientPreface)
	if err = errors.Join(err, a.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window}), a.WriteWindowUpdate(0, gib)); err != nil {
		return err
	}
	if !at.deaf {
		go func() { // ends with the connection
			_, _ = io.Copy(io.Discard, conn)
			cancel()
		}()
	}
	return each(at.streams, at.streams, func(int) error {
		for {
			if err := at.on(a); err != nil { // at the latest when ctx ends
				return err
			}
		}
	})
}

// attackAll runs an attack until ctx ends: a connection that ends is opened again.
func attackAll(ctx context.Context, e *environment) error {
	chosen, err := e.chosen()
	if err != nil {
		return err
	}
	at := &chosen[0]
	return each(at.connections, at.connections, func(int) error {
		for ctx.Err() == nil {
			_ = at.connect(ctx, e.victim) // the server may end it
			_ = pause(ctx, pollEvery)
		}
		return nil
	})
}

// chosen are the attacks that the flags say.
func (e *environment) chosen() ([]attack, error) {
	if e.only == "" {
		return attacks, nil
	}
	i := slices.IndexFunc(attacks, func(a attack) bool { return a.name == e.only })
	if i < 0 {
		return nil, fmt.Errorf("stress: there is no attack %q", e.only)
	}
	return attacks[i : i+1], nil
}

func runReceive(ctx context.Context, e *environment) error {
	chosen, err := e.chosen()
	if e.lasts == 0 {
		e.lasts = 20 * time.Second
	}
	for _, a := range chosen {
		if failed := e.withstand(ctx, &a); failed != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", a.name, failed))
		}
	}
	return err
}

// start runs an attack in a process of its own.
func (at *attack) start(ctx context.Context, address string) (*proc.Child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := proc.New(exec.CommandContext(ctx, self, "receive", "-attack", address, "-only", at.name))
	if err := p.Start(); err != nil {
		return nil, err
	}
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, p.Process.Pid, 15) // so that it starves nobody of the processor
	return p, nil
}

// withstand attacks a server of its own, and holds it to what it may take at every
// second, and to serving somebody else. Beside it another server is attacked first: what
// that does to the small calls is for want of the processor, not of fairness.
func (e *environment) withstand(ctx context.Context, a *attack) (err error) {
	complaints := new(problems)
	defer func() {
		for _, line := range complaints.all() {
			if !strings.Contains(line, "its peer does not read") && !strings.HasSuffix(line, " more") {
				e.add("%s", line)
			}
		}
	}()
	var d, other *daemon
	for _, to := range []**daemon{&d, &other} {
		if *to, err = (&environment{problems: complaints, command: e.command}).serve(ctx, "--memory", e.memory, "--metrics", "127.0.0.1:0"); err != nil {
			return err // and what listens already ends with this process
		}
	}
	defer other.Kill()
	defer func() { err = errors.Join(err, d.Stop()) }()
	c, err := client.Dial(d.address, client.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	s, err := c.Session(ctx)
	if err != nil {
		return err
	}
	x, err := tensor.Of(make([]byte, kib))
	if err != nil {
		return err
	}
	small := func() error {
		_, err := s.Compute(ctx, "echo", x)
		return err
	}
	before, err := timesOf(ctx, e.lasts/5, small)
	if err != nil {
		return err
	}
	attackers, err := a.start(ctx, other.address)
	if err != nil {
		return err
	}
	beside, err := timesOf(ctx, e.lasts/2, small)
	if err = errors.Join(err, attackers.Stop()); err != nil {
		return err
	}
	other.Kill()
	if attackers, err = a.start(ctx, d.address); err != nil {
		return err
	}
	w := watch{daemon: d, most: float64(a.connections+1) * ownBytes}
	watched := make(chan error, 1)
	go func() { watched <- w.until(ctx, e.lasts) }()
	during, err := timesOf(ctx, e.lasts, small)
	if err = errors.Join(err, <-watched, attackers.Stop()); err != nil {
		return err
	}
	f, err := d.until(ctx, "empty", func(f figures) bool {
		return f["tensorferry_sessions"] == 1 && f["tensorferry_receive_used_bytes"] < 64*kib && f["tensorferry_calls"] == 0
	})
	worst := w.worst - baseRSS - int64(a.connections)*connectionRSS - w.sessions*sessionRSS
	fmt.Fprintf(e.out, "%-40s RSS %s at most, %s charged at most, %s beyond what is charged and documented; p50 %v, %v beside, %v under attack; p99 %v, %v, %v; %v ended for memory\n", a.name,
		mibs(w.peak), mibs(w.charged), mibs(max(worst, 0)), before(.5), beside(.5), during(.5), before(.99), beside(.99), during(.99), f["tensorferry_receive_ended_total"])
	if n := f["tensorferry_runs_abandoned_total"]; n > 0 {
		err = errors.Join(err, fmt.Errorf("%v runs were lost, of models that had stopped", n))
	}
	if worst > spareReceived {
		err = errors.Join(err, fmt.Errorf("the server took %s more than what it charges and docs/limits.md says; %s are allowed", mibs(worst), mibs(spareReceived)))
	}
	return err
}

// watch is what a server takes at most.
type watch struct {
	*daemon
	most                           float64 // may be charged beside the limits
	worst, peak, charged, sessions int64   // worst is RSS beyond what is charged
}

// until looks every second.
func (w *watch) until(ctx context.Context, lasts time.Duration) error {
	for over := time.Now().Add(lasts); time.Now().Before(over); {
		r, err := proc.ResidentOf(w.Process.Pid)
		if err != nil {
			return err
		}
		f, err := w.scrape(ctx)
		if err != nil {
			return err
		}
		n := int64(f["tensorferry_memory_used_bytes"] + f["tensorferry_memory_kept_bytes"] + f["tensorferry_receive_used_bytes"])
		if most := f["tensorferry_memory_limit_bytes"] + f["tensorferry_receive_limit_bytes"] + w.most; float64(n) > most {
			return fmt.Errorf("%s are charged, of %s", mibs(n), mibs(most))
		}
		w.worst, w.peak = max(w.worst, r.Own-n), max(w.peak, r.Own)
		w.charged, w.sessions = max(w.charged, n), max(w.sessions, int64(f["tensorferry_sessions"]))
		if err := pause(ctx, min(time.Second, time.Until(over))); err != nil {
			return err
		}
	}
	return nil
}

// timesOf does something again and again, and returns the quantiles of its times.
func timesOf(ctx context.Context, lasts time.Duration, do func() error) (func(q float64) time.Duration, error) {
	var took []time.Duration
	for over := time.Now().Add(lasts); time.Now().Before(over) || len(took) == 0; {
		at := time.Now()
		if err := do(); err != nil {
			return nil, fmt.Errorf("a small call of another client: %w", err)
		}
		took = append(took, time.Since(at))
		if err := pause(ctx, time.Millisecond); err != nil {
			return nil, err
		}
	}
	slices.Sort(took)
	return func(q float64) time.Duration {
		return took[int(q*float64(len(took)-1))].Round(10 * time.Microsecond)
	}, nil
}
