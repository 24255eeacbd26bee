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
	computeRPC = "/tensorferry.v1.TensorService/Compute"
	sessionRPC = "/tensorferry.v1.TensorService/StreamTensors"
	pushRPC    = "/tensorferry.v1.TensorService/PushTensors"
)

// attack is what peers do that speak HTTP/2 by hand.
type attack struct {
	name        string
	connections int
	streams     int  // of each at a time
	deaf        bool // nobody reads the connections
	// on does it on one stream of a connection, and again until its error.
	on func(a *attacker) error
}

var attacks = []attack{
	{"resets", 16, 8, false, func(a *attacker) error {
		id, err := a.open(computeRPC)
		return errors.Join(err, a.data(id, 16*kib, 0), a.reset(id))
	}},
	{"unfinished messages on many connections", 1000, 1, false, func(a *attacker) error {
		id, err := a.open(computeRPC)
		return errors.Join(err, a.data(id, 16*kib, 0), a.rest())
	}},
	{"unfinished messages on many streams", 16, 100, false, func(a *attacker) error {
		id, err := a.open(computeRPC)
		return errors.Join(err, a.data(id, 16*kib, 0), a.rest())
	}},
	{"tiny frames", 4, 64, false, func(a *attacker) error {
		id, err := a.open(computeRPC)
		return errors.Join(err, a.data(id, 1, 0))
	}},
	{"padded frames", 4, 64, false, func(a *attacker) error {
		id, err := a.open(computeRPC)
		return errors.Join(err, a.data(id, 1, 255))
	}},
	{"metadata", 100, 100, false, func(a *attacker) error {
		_, err := a.open(computeRPC, strings.Repeat("x", 15*kib))
		return errors.Join(err, a.rest())
	}},
	{"allowances that do not come whole", 1000, 1, false, func(a *attacker) error {
		x, call := newID(), newID()
		n := a.allowance
		hello := &pb.Frame{
			Hello: a.hello(),
			Calls: []*pb.Call{{Id: call, Model: "echo", Inputs: []*pb.Input{{Port: "x", TensorId: x}}}},
			Descs: []*pb.TensorDesc{{
				TensorId: x, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{n}, SizeBytes: uint64(n), ChunkBytes: mib, CallId: call, Port: "x", OnAllowance: true,
			}},
		}
		b, err := proto.Marshal(hello)
		id, e := a.open(sessionRPC)
		return errors.Join(err, e, a.message(id, b), a.data(id, 16*kib, 0), a.rest())
	}},
	// The status of an RPC that has ended waits behind data for which there is no window.
	{"data after the end", 2, 100, false, func(a *attacker) error {
		id, err := a.open(sessionRPC)
		hello, e := proto.Marshal(&pb.Frame{Hello: a.hello()})
		return errors.Join(err, e, a.message(id, hello), a.message(id, hello), a.data(id, 16*kib, 0), a.rest())
	}},
	// The same, for RPCs that are told to end for want of memory.
	{"unfinished messages behind answers", 16, 100, false, func(a *attacker) error {
		id, err := a.open(sessionRPC)
		hello, e := proto.Marshal(&pb.Frame{Hello: a.hello()})
		return errors.Join(err, e, a.message(id, hello), a.data(id, 16*kib, 0), a.rest())
	}},
	{"answers that nobody reads", 2, 30, false, func(a *attacker) error {
		id, err := a.open(sessionRPC)
		f := &pb.Frame{Hello: a.hello()}
		for range 10 {
			for range 60 {
				f.Calls = append(f.Calls, &pb.Call{Id: newID(), Model: "nobody's"})
			}
			b, e := proto.Marshal(f)
			err = errors.Join(err, e, a.message(id, b))
			f = new(pb.Frame)
		}
		return errors.Join(err, a.rest())
	}},
	{"calls without their inputs", 10, 100, false, func(a *attacker) error {
		id, err := a.open(sessionRPC)
		params := make(map[string]string)
		for i := range 8 {
			params[fmt.Sprint(i)] = strings.Repeat("x", 4*kib-1)
		}
		f := &pb.Frame{Hello: a.hello()}
		for range 30 {
			f.Calls = []*pb.Call{{Id: newID(), Model: "echo", Inputs: []*pb.Input{{Port: "x", TensorId: newID()}}, Params: params}}
			b, e := proto.Marshal(f)
			err = errors.Join(err, e, a.message(id, b))
			f = new(pb.Frame)
		}
		return errors.Join(err, a.rest())
	}},
	{"small calls that nobody reads", 400, 100, false, func(a *attacker) error {
		b, err := proto.Marshal(&pb.ComputeRequest{Model: "echo", Inputs: []*pb.NamedTensor{{Port: "x", Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{1}, Data: []byte{1}}}})
		id, e := a.open(computeRPC, strings.Repeat("x", 15*kib))
		return errors.Join(err, e, a.message(id, b), a.rest())
	}},
	{"pushes of many names", 3, 85, false, func(a *attacker) error {
		id, err := a.open(pushRPC)
		f := &pb.Frame{Hello: a.hello()}
		shape := []int64{kib} // the first one stays open, the others do not fit their size
		for n := range 1000 {
			f.Descs = append(f.Descs, &pb.TensorDesc{
				TensorId: newID(), Name: strings.Repeat("x", 480) + fmt.Sprint(n), Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: shape, SizeBytes: kib, ChunkBytes: mib,
			})
			shape = []int64{1}
			if n%100 == 99 {
				b, e := proto.Marshal(f)
				err = errors.Join(err, e, a.message(id, b))
				f = new(pb.Frame)
			}
		}
		return errors.Join(err, a.rest())
	}},
	{"window updates", 100, 1, false, func(a *attacker) error {
		a.mu.Lock()
		defer a.mu.Unlock()
		return errors.Join(a.WriteWindowUpdate(0, 1), a.ctx.Err())
	}},
	{"results that nobody reads", 20, 1, true, func(a *attacker) error {
		calls := &pb.Frame{Hello: a.hello()}
		var data []*pb.Frame
		for range 8 {
			x, call := newID(), newID()
			calls.Calls = append(calls.Calls, &pb.Call{Id: call, Model: "echo", Inputs: []*pb.Input{{Port: "x", TensorId: x}}})
			calls.Descs = append(calls.Descs, &pb.TensorDesc{
				TensorId: x, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{64 * kib}, SizeBytes: 64 * kib, ChunkBytes: 64 * kib, CallId: call, Port: "x", OnAllowance: true,
			})
			data = append(data, &pb.Frame{Chunk: sealed(x, make([]byte, 64*kib))})
		}
		id, err := a.open(sessionRPC)
		for _, f := range append([]*pb.Frame{calls}, data...) {
			b, e := proto.Marshal(f)
			err = errors.Join(err, e, a.message(id, b))
		}
		return errors.Join(err, a.rest())
	}},
}

// attacker is one connection of an attack.
type attacker struct {
	*http2.Framer
	ctx       context.Context
	allowance int64

	mu     sync.Mutex // held while frames are written; guards all below
	last   uint32     // RPC
	fields *hpack.Encoder
	block  *strings.Builder // of fields
}

// hello opens a session.
func (*attacker) hello() *pb.Hello {
	return &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: mib, AllowanceBytes: mib, Checksum: pb.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64}
}

// open opens an RPC, with values of metadata.
func (a *attacker) open(method string, values ...string) (id uint32, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	id = a.last + 1
	a.last += 2
	a.block.Reset()
	for _, f := range []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: method}, {Name: ":authority", Value: "x"},
		{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
	} {
		if err := a.fields.WriteField(f); err != nil {
			return id, err
		}
	}
	for _, v := range values {
		if err := a.fields.WriteField(hpack.HeaderField{Name: "x", Value: v, Sensitive: true}); err != nil {
			return id, err
		}
	}
	return id, a.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: []byte(a.block.String()), EndHeaders: true})
}

// data sends a message of a MiB but for its last byte, in frames of frame bytes and
// padding.
func (a *attacker) data(id uint32, frame, padding int) error {
	b := append(binary.BigEndian.AppendUint32([]byte{0}, mib), make([]byte, mib-1)...)
	pad := make([]byte, padding)
	for len(b) > 0 {
		n := min(len(b), frame)
		a.mu.Lock()
		var err error
		if padding > 0 {
			err = a.WriteDataPadded(id, false, b[:n], pad)
		} else {
			err = a.WriteData(id, false, b[:n])
		}
		a.mu.Unlock()
		if err = errors.Join(err, a.ctx.Err()); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// reset ends an RPC.
func (a *attacker) reset(id uint32) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.WriteRSTStream(id, http2.ErrCodeCancel)
}

// message sends a whole message.
func (a *attacker) message(id uint32, m []byte) error {
	b := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m))), m...)
	for len(b) > 0 {
		n := min(len(b), 16*kib)
		a.mu.Lock()
		err := a.WriteData(id, false, b[:n])
		a.mu.Unlock()
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// rest waits until the attack ends.
func (a *attacker) rest() error {
	<-a.ctx.Done()
	return context.Cause(a.ctx)
}

// run runs the attack until ctx ends: a connection that ends is opened again.
func (at *attack) run(ctx context.Context, address string) {
	var all sync.WaitGroup
	for range at.connections {
		all.Go(func() { // ends with ctx
			for ctx.Err() == nil {
				_ = at.connect(ctx, address) // the server may end it
				_ = pause(ctx, pollEvery)
			}
		})
	}
	all.Wait()
}

// start runs the attack in a process of its own.
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

// connect does what there is to do over one connection.
func (at *attack) connect(ctx context.Context, address string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var d net.Dialer
	if at.deaf { // or the system would read for it
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
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		return err
	}
	block := new(strings.Builder)
	a := &attacker{Framer: http2.NewFramer(conn, nil), ctx: ctx, allowance: mib, block: block, fields: hpack.NewEncoder(block)}
	// A deaf peer has all the window that there is, another none.
	window := uint32(0)
	if at.deaf {
		window = gib
	}
	if err := errors.Join(a.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window}), a.WriteWindowUpdate(0, gib)); err != nil {
		return err
	}
	if !at.deaf {
		go func() { // ends with the connection
			_, _ = io.Copy(io.Discard, conn)
			cancel()
		}()
	}
	var all sync.WaitGroup
	for range at.streams {
		all.Go(func() { // ends with ctx, or the connection
			for ctx.Err() == nil {
				if at.on(a) != nil {
					return
				}
			}
		})
	}
	all.Wait()
	return ctx.Err()
}

func runReceive(ctx context.Context, e *environment, args []string) error {
	f := e.flags("receive")
	memory := f.String("memory", "64MiB", "the server's `--memory`")
	lasts := f.Duration("for", 20*time.Second, "how long each attack lasts")
	only := f.String("only", "", "the `name` of the only attack")
	victim := f.String("attack", "", "be the attackers of the server at an `address`, which a program of this name starts")
	if err := f.Parse(args); err != nil {
		return err
	}
	chosen := attacks
	if *only != "" {
		i := slices.IndexFunc(attacks, func(a attack) bool { return a.name == *only })
		if i < 0 {
			return fmt.Errorf("stress: there is no attack %q", *only)
		}
		chosen = attacks[i : i+1]
	}
	if *victim != "" {
		chosen[0].run(ctx, *victim)
		return nil
	}
	if err := e.ready(ctx, f, args); err != nil {
		return err
	}
	var err error
	for _, a := range chosen {
		if failed := e.withstand(ctx, &a, *memory, *lasts); failed != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", a.name, failed))
		}
	}
	return e.verdict(ctx, "receive", err)
}

// withstand attacks a server of its own, and holds it to what it may take at every
// second, and to serving somebody else. Beside it another server is attacked first: what
// that does to the small calls is for want of the processor, not of fairness.
func (e *environment) withstand(ctx context.Context, a *attack, memory string, lasts time.Duration) (err error) {
	complaints := new(problems)
	defer func() {
		for _, line := range complaints.all() {
			if !strings.Contains(line, "its peer does not read") && !strings.HasSuffix(line, " more") {
				e.add("%s", line)
			}
		}
	}()
	serve := func() (*daemon, error) {
		return (&environment{problems: complaints, command: e.command}).serve(ctx, "--memory", memory, "--metrics", "127.0.0.1:0")
	}
	d, err := serve()
	if err != nil {
		return err
	}
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
	calls := func(until <-chan struct{}) (took []time.Duration, err error) {
		for {
			select {
			case <-until:
				slices.Sort(took)
				return took, nil
			default:
			}
			at := time.Now()
			if _, err := s.Compute(ctx, "echo", x); err != nil {
				return took, fmt.Errorf("a small call of another client: %w", err)
			}
			took = append(took, time.Since(at))
			if err := pause(ctx, time.Millisecond); err != nil {
				return took, err
			}
		}
	}
	after := func(d time.Duration) <-chan struct{} {
		over := make(chan struct{})
		time.AfterFunc(d, func() { close(over) })
		return over
	}
	before, err := calls(after(lasts / 5))
	if err != nil {
		return err
	}
	other, err := serve()
	if err != nil {
		return err
	}
	attackers, err := a.start(ctx, other.address)
	var beside []time.Duration
	if err == nil {
		beside, err = calls(after(lasts / 2))
		err = errors.Join(err, attackers.Stop())
	}
	other.Kill()
	if err != nil {
		return err
	}
	if attackers, err = a.start(ctx, d.address); err != nil {
		return err
	}
	over := after(lasts)
	var worst, peak, charged, sessions int64
	watched := make(chan error, 1)
	go func() { // ends soon after over
		watched <- func() error {
			for {
				r, err := proc.ResidentOf(d.Process.Pid)
				if err != nil {
					return err
				}
				f, err := d.scrape(ctx)
				if err != nil {
					return err
				}
				n := int64(f["tensorferry_memory_used_bytes"] + f["tensorferry_memory_kept_bytes"] + f["tensorferry_receive_used_bytes"])
				if most := f["tensorferry_memory_limit_bytes"] + f["tensorferry_receive_limit_bytes"] + float64(a.connections+1)*ownBytes; float64(n) > most {
					return fmt.Errorf("%s are charged, of %s", mibs(n), mibs(most))
				}
				if spare := r.Own - n; spare > worst {
					worst = spare
				}
				peak, charged, sessions = max(peak, r.Own), max(charged, n), max(sessions, int64(f["tensorferry_sessions"]))
				select {
				case <-over:
					return nil
				case <-time.After(time.Second):
				}
			}
		}()
	}()
	during, err := calls(over)
	err = errors.Join(err, <-watched, attackers.Stop())
	if err != nil {
		return err
	}
	_, err = d.until(ctx, "empty", func(f figures) bool {
		return f["tensorferry_sessions"] == 1 && f["tensorferry_receive_used_bytes"] < 64*kib && f["tensorferry_calls"] == 0
	})
	f, e2 := d.scrape(ctx)
	worst -= baseRSS + int64(a.connections)*connectionRSS + sessions*sessionRSS
	fmt.Fprintf(e.out, "%-40s RSS %s at most, %s charged at most, %s beyond what is charged and documented; p50 %v, %v beside, %v under attack; p99 %v, %v, %v; %v ended for memory\n", a.name,
		mibs(peak), mibs(charged), mibs(max(worst, 0)), at(before, .5), at(beside, .5), at(during, .5), at(before, .99), at(beside, .99), at(during, .99), f["tensorferry_receive_ended_total"])
	if n := f["tensorferry_runs_abandoned_total"]; n > 0 {
		err = errors.Join(err, fmt.Errorf("%v runs were lost, of models that had stopped", n))
	}
	if worst > spareReceived {
		err = errors.Join(err, fmt.Errorf("the server took %s more than what it charges and docs/limits.md says; %s are allowed", mibs(worst), mibs(spareReceived)))
	}
	return errors.Join(err, e2)
}

// newID returns an ID.
func newID() []byte { id := uuid.Must(uuid.NewV7()); return id[:] }

// sealed returns the only chunk of a tensor.
func sealed(id, data []byte) *pb.Chunk {
	sum := codec.CRC32C.Update(codec.CRC32C.Seed(tensor.ID(id), 0), data)
	return &pb.Chunk{TensorId: id, Checksum: sum, Data: data}
}

// at is a quantile.
func at(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1))].Round(10 * time.Microsecond)
}
