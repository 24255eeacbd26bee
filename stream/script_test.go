package stream

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

var rewrite = flag.Bool("rewrite", false, "write what the scripts print now into testdata/scripts")

// TestScripts runs the stories in testdata/scripts: one machine, its program and
// a peer, in text. A block is commands, a line of four hyphens, and what the
// machine told and sent. The first word of a command says who acts:
//
//	server, client     a new machine, with limits such as chunk=4 idle=30 input=3600
//	greet              both hellos, with what the peer's says: allowance=8 tensors=2
//	< PART; PART …     a frame comes; "<+" leaves its claim open until "commit"
//	open, tensor, offer, lend, finish, cancel, fail, drain, waits   the program acts
//	ended              the peer has sent its last frame
//	close              the session ends
//	wait SECONDS       time passes, then a tick
//	send [N]           what is ready to be sent, as frames; at most N
//	state              what the machine holds and counts
//
// Tensors and calls have names; a tensor's bytes follow from its name. Memory
// for a tensor on allowance is lent by itself.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/scripts/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, file, string(text))
			switch {
			case *rewrite:
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			case got != string(text):
				want, have := strings.Split(string(text), "\n"), strings.Split(got, "\n")
				n := 0
				for n < len(want) && n < len(have) && want[n] == have[n] {
					n++
				}
				t.Errorf("%s:%d: from here on it prints (accept with make scripts-rewrite):\n%s", file, n+1, strings.Join(have[n:], "\n"))
			}
		})
	}
}

// runScript returns a script with the results it has now.
func runScript(t *testing.T, file, text string) string {
	s := &stage{t: t}
	var out strings.Builder
	result := false
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		switch {
		case line == "----":
			result = true
			out.WriteString("----\n")
			out.WriteString(s.out.String())
			s.out.Reset()
		case line == "":
			if s.out.Len() > 0 {
				t.Fatalf("%s:%d: a block without ----", file, i+1)
			}
			result = false
			out.WriteString("\n")
		case result: // what it printed before
		default:
			out.WriteString(line + "\n")
			if !strings.HasPrefix(line, "#") {
				s.where = fmt.Sprintf("%s:%d", file, i+1)
				s.do(line)
			}
		}
	}
	s.leave()
	return out.String()
}

// stage is where a script plays.
type stage struct {
	t     *testing.T
	where string
	out   strings.Builder
	m     *Machine
	now   Instant
	names []string
	ins   map[tensor.ID][]*lentMem
	call  map[tensor.ID]tensor.ID // of an incoming tensor
	held  []chunker.Releaser
	chunk map[tensor.ID]int64 // bytes, as announced by the peer
	size  map[tensor.ID]int64
	claim *Claim
	data  [][]byte
	over  int // regions offered and not released
}

func (s *stage) fatalf(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf("%s: %s", s.where, fmt.Sprintf(format, args...))
}

func (s *stage) printf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	for _, n := range s.names { // errors name IDs in digits
		text = strings.ReplaceAll(text, named(n).String(), n)
	}
	s.out.WriteString(text + "\n")
}

func named(name string) (id tensor.ID) {
	copy(id[:], name)
	return id
}

func (s *stage) id(name string) tensor.ID {
	if !slices.Contains(s.names, name) {
		s.names = append(s.names, name)
	}
	return named(name)
}

func nameOf(id tensor.ID) string { return strings.TrimRight(string(id[:]), "\x00") }

// fields splits a command into words and options such as key=value.
type fields struct {
	s     *stage
	words []string
	opts  map[string]string
}

func (s *stage) fields(text string) *fields {
	f := &fields{s: s, opts: map[string]string{}}
	for w := range strings.FieldsSeq(text) {
		if k, v, ok := strings.Cut(w, "="); ok {
			f.opts[k] = v
		} else {
			f.words = append(f.words, w)
		}
	}
	return f
}

func (f *fields) word() string {
	if len(f.words) == 0 {
		return ""
	}
	w := f.words[0]
	f.words = f.words[1:]
	return w
}

func (f *fields) id() tensor.ID { return f.s.id(f.word()) }

func (f *fields) number(word string) int64 {
	n, err := strconv.ParseInt(word, 10, 64)
	if err != nil {
		f.s.fatalf("%v", err)
	}
	return n
}

func (f *fields) opt(key string, def int64) int64 {
	if v, ok := f.opts[key]; ok {
		delete(f.opts, key)
		return f.number(v)
	}
	return def
}

func (f *fields) text(key, def string) string {
	if v, ok := f.opts[key]; ok {
		delete(f.opts, key)
		return v
	}
	return def
}

func (f *fields) has(word string) bool {
	i := slices.Index(f.words, word)
	if i >= 0 {
		f.words = slices.Delete(f.words, i, i+1)
	}
	return i >= 0
}

// bindings are the options that are left, port=tensor.
func (f *fields) bindings() (all []frame.Binding) {
	for port, id := range f.opts {
		all = append(all, frame.Binding{Port: port, Tensor: f.s.id(id)})
	}
	slices.SortFunc(all, func(a, b frame.Binding) int { return strings.Compare(a.Port, b.Port) })
	return all
}

// desc reads NAME TYPE[SHAPE] call=C chunk=N …; call=- is none.
func (f *fields) desc() frame.Desc {
	d := frame.Desc{Tensor: f.id()}
	kind, dims, _ := strings.Cut(strings.TrimSuffix(f.word(), "]"), "[")
	switch dtype, err := tensor.ParseDataType(kind); {
	case err == nil:
		d.DType = dtype
	case kind == "none":
	default:
		f.s.fatalf("%v", err)
	}
	for dim := range strings.SplitSeq(dims, ",") {
		if dim != "" {
			d.Shape = append(d.Shape, f.number(dim))
		}
	}
	if n, err := d.Bytes(); err == nil {
		d.SizeBytes = uint64(n)
	}
	d.SizeBytes = uint64(f.opt("size", int64(d.SizeBytes)))
	d.ChunkBytes = uint32(f.opt("chunk", 4))
	if call := f.text("call", "c"); call != "-" {
		d.Call = f.s.id(call)
	}
	d.Port = f.text("port", "x")
	d.RetainChunks = uint32(f.opt("retain", 0))
	d.OnAllowance = f.has("allowance")
	if n := f.opt("rank", -1); n >= 0 {
		d.Shape = slices.Repeat(tensor.Shape{1}, int(n))
		d.SizeBytes = 1
	}
	return d
}

// parts reads a frame.
func (s *stage) parts(text string) *frame.Frame {
	x := new(frame.Frame)
	for part := range strings.SplitSeq(text, ";") {
		f := s.fields(part)
		switch kind := f.word(); kind {
		case "hello":
			x.Hello = &frame.Hello{
				Version: uint32(f.opt("version", frame.Version)), Session: s.id(f.text("session", "s")), Checksum: uint8(f.opt("checksum", 1)),
				MaxChunkBytes: uint32(f.opt("chunk", 4)), AllowanceBytes: uint32(f.opt("allowance", 0)), MaxOpenTensors: uint32(f.opt("tensors", 4)),
			}
		case "call":
			c := frame.Call{ID: f.id(), Model: f.text("model", "m"), TimeoutMillis: uint64(f.opt("timeout", 0))}
			if c.Model == "-" {
				c.Model = ""
			}
			if id := f.text("sequence", ""); id != "" {
				c.Sequence = &frame.Sequence{ID: s.id(id), MaxRows: uint64(f.opt("rows", 0)), End: f.has("end")}
			}
			c.Inputs = f.bindings()
			x.Calls = append(x.Calls, c)
		case "desc":
			d := f.desc()
			if _, known := s.chunk[d.Tensor]; !known {
				s.chunk[d.Tensor], s.size[d.Tensor] = int64(d.ChunkBytes), int64(d.SizeBytes)
			}
			x.Descs = append(x.Descs, d)
		case "chunk":
			x.Chunk = s.piece(f)
		case "credit":
			x.Credits = append(x.Credits, frame.Credit{Tensor: f.id(), Limit: uint32(f.number(f.word()))})
		case "ack":
			a := frame.Ack{Tensor: f.id(), Below: uint32(f.number(f.word()))}
			if again := f.text("again", ""); again != "" {
				for i := range strings.SplitSeq(again, ",") {
					a.Resend = append(a.Resend, uint32(f.number(i)))
				}
			}
			x.Acks = append(x.Acks, a)
		case "cancel":
			x.Cancels = append(x.Cancels, f.id())
		case "failure":
			x.Failures = append(x.Failures, frame.Failure{Tensor: f.id(), Code: frame.Code(f.opt("code", 13)), Message: strings.Join(f.words, " ")})
		case "done":
			d := frame.Done{Call: f.id(), Code: frame.Code(f.opt("code", 0))}
			d.Message, f.words = strings.Join(f.words, " "), nil
			d.Outputs = f.bindings()
			x.Dones = append(x.Dones, d)
		case "drain":
			x.Drain = &frame.Drain{Reason: strings.Join(f.words, " ")}
		case "nothing":
		default:
			s.fatalf("no part %q", kind)
		}
	}
	return x
}

// bytesOf are a tensor's bytes.
func bytesOf(id tensor.ID, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = id[0]*7 + byte(i)
	}
	return b
}

// piece reads NAME INDEX [flipped | wrongsum | other] [length=N]
func (s *stage) piece(f *fields) frame.Chunk {
	ch := frame.Chunk{Tensor: f.id(), Index: uint32(f.number(f.word()))}
	chunk, size := max(s.chunk[ch.Tensor], 1), s.size[ch.Tensor]
	off := min(int64(ch.Index)*chunk, size)
	n := min(chunk, size-off)
	data := bytesOf(ch.Tensor, size)[off : off+n]
	if length := f.opt("length", n); length != n {
		data = make([]byte, length)
	}
	other := f.has("other")
	if other {
		data[0]++
	}
	ch.Sum = s.m.cfg.Check.Update(s.m.cfg.Check.Seed(ch.Tensor, ch.Index), data)
	if f.has("flipped") {
		data[0] ^= 0x10
	}
	if f.has("wrongsum") {
		ch.Sum++
	}
	ch.Data = [][]byte{data[:len(data)/2], data[len(data)/2:]}
	return ch
}

// limits reads a machine's limits.
func (f *fields) limits() Limits {
	return Limits{
		ChunkBytes: uint32(f.opt("chunk", 4)), AllowanceBytes: uint32(f.opt("allowance", 16)), TensorBytes: f.opt("bytes", 1<<21),
		OpenTensors: int(f.opt("tensors", 4)), OpenCalls: int(f.opt("calls", 4)), ChunkIdle: Instant(f.opt("idle", 30)) * second,
		InputIdle: Instant(f.opt("input", 3600)) * second,
	}
}

// do plays one command.
func (s *stage) do(line string) {
	f := s.fields(line)
	what := f.word()
	var err error
	switch what {
	case "server", "client":
		s.leave()
		s.m = New(Config{Server: what == "server", Session: named("s"), Limits: f.limits()}, 0)
		s.id("s")
		s.now, s.ins, s.call, s.held = 0, map[tensor.ID][]*lentMem{}, map[tensor.ID]tensor.ID{}, nil
		s.chunk, s.size = map[tensor.ID]int64{}, map[tensor.ID]int64{}
	case "greet":
		err = s.receive("hello "+strings.TrimPrefix(line, "greet"), true)
		var out frame.Frame
		s.m.Next(s.now, &out)
		if out.Hello == nil {
			s.fatalf("no hello")
		}
		for _, ok := s.m.Event(); ok; _, ok = s.m.Event() { // EventOpened has scripts of its own
		}
	case "<":
		err = s.receive(strings.TrimPrefix(line, "<"), true)
	case "<+":
		err = s.receive(strings.TrimPrefix(line, "<+"), false)
	case "commit":
		s.commit()
	case "open":
		c := frame.Call{ID: f.id(), Model: f.text("model", "m")}
		c.Inputs = f.bindings()
		err = s.m.OpenCall(s.now, c)
	case "tensor":
		d := f.desc()
		d.SizeBytes, d.OnAllowance = 0, false
		if err = s.m.OpenTensor(s.now, d); err == nil {
			s.size[d.Tensor] = int64(s.m.out.tensors[d.Tensor].Geo.Size)
		}
	case "offer":
		id, off, n := f.id(), f.number(f.word()), f.number(f.word())
		data := bytesOf(id, max(s.size[id], off+n))[off : off+n]
		done := false
		if err = s.m.Offer(s.now, id, off, data, func() {
			if done {
				s.fatalf("released twice")
			}
			done = true
			s.over--
			s.printf("released %s [%d,+%d)", nameOf(id), off, n)
		}); err == nil {
			s.over++
		}
	case "lend":
		err = s.lend(f.id(), f.number(f.word()))
	case "finish":
		d := frame.Done{Call: f.id(), Code: frame.Code(f.opt("code", 0)), RetryAfterMillis: uint32(f.opt("retry", 0))}
		d.Message = strings.Join(f.words, " ")
		d.Outputs = f.bindings()
		s.m.Finish(d)
	case "cancel":
		s.m.Finish(frame.Done{Call: f.id(), Code: frame.Cancelled, Message: "cancelled by the caller"})
	case "fail":
		s.m.FailTensor(f.id(), frame.Code(f.opt("code", 8)), strings.Join(f.words, " "))
	case "drain":
		s.m.Drain(strings.Join(f.words, " "))
	case "waits":
		s.m.Waits()
	case "ended":
		s.m.PeerDone(s.now)
	case "close":
		s.m.Close(frame.Unavailable, "the session has ended")
	case "wait":
		seconds, perr := strconv.ParseFloat(f.word(), 64)
		if perr != nil {
			s.fatalf("%v", perr)
		}
		s.now += Instant(seconds * float64(second))
		err = s.m.Tick(s.now)
		if at := s.m.NextTick(); err == nil && at <= s.now {
			s.fatalf("the next tick is due at %d, it is %d", at, s.now)
		}
	case "send":
		s.events()
		n := int64(1 << 20)
		if len(f.words) > 0 {
			n = f.number(f.word())
		}
		s.send(n)
	case "state":
		s.state()
	default:
		s.fatalf("no command %q", what)
	}
	if err != nil {
		s.printf("error: %v", describeError(err))
	}
	s.events()
}

// receive hands a frame to the machine.
func (s *stage) receive(text string, commit bool) error {
	frame := s.parts(text)
	if err := s.m.Control(s.now, frame); err != nil {
		return err
	}
	s.events()
	if !frame.HasChunk() {
		return nil
	}
	c := new(Claim)
	ok, err := s.m.Claim(s.now, &frame.Chunk, c)
	if err != nil {
		return err
	}
	if ok {
		s.claim, s.data = c, frame.Chunk.Data
		if commit {
			s.commit()
		}
	}
	return nil
}

func describeError(err error) error {
	if e, ok := errors.AsType[*frame.Error](err); ok {
		return fmt.Errorf("the session ends with code %d: %s", e.Code, e.Text)
	}
	return err
}

func (s *stage) commit() {
	if s.claim == nil {
		s.fatalf("no claim is open")
	}
	c := s.claim
	s.claim = nil
	got, failed := c.Copy(s.data)
	s.m.Commit(s.now, c, got, failed)
}

func (s *stage) lend(id tensor.ID, n int64) error {
	l := &lentMem{mem: make([]byte, n)}
	for _, before := range s.ins[id] {
		l.off += int64(len(before.mem))
	}
	number, where := len(s.ins[id]), s.where
	err := s.m.Lend(s.now, id, l.mem, func(filled bool) {
		if l.back {
			s.fatalf("memory %d of %s came back twice; it was lent at %s", number, nameOf(id), where)
		}
		l.back = true
		if !filled {
			return
		}
		if !bytes.Equal(l.mem, bytesOf(id, s.size[id])[l.off:l.off+int64(len(l.mem))]) {
			s.fatalf("region %d of %s is not right", number, nameOf(id))
		}
		s.printf("region %d of %s is full", number, nameOf(id))
	})
	if err == nil {
		s.ins[id] = append(s.ins[id], l)
	}
	return err
}

// events prints what the machine told.
func (s *stage) events() {
	for e, ok := s.m.Event(); ok; e, ok = s.m.Event() {
		call, id := nameOf(e.Call), nameOf(e.Tensor)
		switch e.Kind {
		case EventOpened:
			s.printf("opened session %s, chunks to %d", nameOf(s.m.Status().Session), s.m.Status().PeerChunkBytes)
		case EventReady:
			s.printf("call %s is ready: model %q", call, e.Part.Model)
		case EventTensor:
			s.call[e.Tensor] = e.Call
			s.printf("tensor %s of %s: port %q, %v in chunks of %d", id, call, e.Desc.Port, e.Desc.Desc, e.Desc.ChunkBytes)
			if e.Desc.OnAllowance {
				if err := s.lend(e.Tensor, int64(e.Desc.SizeBytes)); err != nil && !errors.Is(err, ErrClosed) {
					s.fatalf("%v", err)
				}
			}
		case EventChunk:
			s.printf("%s has [%d,+%d)", id, e.Off, e.N)
		case EventWhole:
			s.printf("%s is whole", id)
		case EventStop:
			s.printf("call %s stops: code %d: %s", call, e.Code, e.Text)
		case EventClosed:
			for id, c := range s.call {
				if c == e.Call {
					for i, l := range s.ins[id] {
						if !l.back {
							s.fatalf("call %s is closed, region %d of %s did not come back", call, i, nameOf(id))
						}
					}
				}
			}
			switch {
			case e.Done != nil && e.Code == frame.OK:
				s.printf("call %s is closed: ok, outputs %s", call, printBindings(e.Done.Outputs))
			case e.Code == frame.OK:
				s.printf("call %s is closed: ok", call)
			default:
				s.printf("call %s is closed: code %d: %s", call, e.Code, e.Text)
			}
		}
	}
}

func printBindings(all []frame.Binding) string {
	var b []string
	for _, o := range all {
		b = append(b, o.Port+"="+nameOf(o.Tensor))
	}
	return "[" + strings.Join(b, " ") + "]"
}

// send prints up to n frames that are ready.
func (s *stage) send(n int64) {
	for ; n > 0; n-- {
		var f frame.Frame
		held, ok := s.m.Next(s.now, &f)
		if !ok && !f.Empty() {
			s.fatalf("frame %+v, and there is none", f)
		}
		if !ok {
			return
		}
		var parts []string
		part := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
		if h := f.Hello; h != nil {
			part("hello version=%d session=%s checksum=%d chunk=%d allowance=%d tensors=%d", h.Version, nameOf(h.Session), h.Checksum,
				h.MaxChunkBytes, h.AllowanceBytes, h.MaxOpenTensors)
		}
		for _, c := range f.Calls {
			part("call %s %s", nameOf(c.ID), printBindings(c.Inputs))
		}
		for _, d := range f.Descs {
			text := fmt.Sprintf("desc %s %v call=%s chunk=%d", nameOf(d.Tensor), d.Desc, nameOf(d.Call), d.ChunkBytes)
			if d.OnAllowance {
				text += " allowance"
			}
			part("%s", text)
		}
		for _, c := range f.Credits {
			part("credit %s %d", nameOf(c.Tensor), c.Limit)
		}
		for _, a := range f.Acks {
			text := fmt.Sprintf("ack %s %d", nameOf(a.Tensor), a.Below)
			if len(a.Resend) > 0 {
				text += " again " + strings.Trim(fmt.Sprint(a.Resend), "[]")
			}
			part("%s", text)
		}
		for _, id := range f.Cancels {
			part("cancel %s", nameOf(id))
		}
		for _, x := range f.Failures {
			part("failure %s code %d: %s", nameOf(x.Tensor), x.Code, x.Message)
		}
		if c := &f.Chunk; f.HasChunk() {
			part("chunk %s %d", nameOf(c.Tensor), c.Index)
			geo := s.m.out.tensors[c.Tensor]
			got := append([]byte{}, slices.Concat(c.Data...)...)
			if geo != nil { // still open: its bytes are known
				off, n := geo.Geo.Span(c.Index)
				if !bytes.Equal(got, bytesOf(c.Tensor, geo.Geo.Size)[off:off+n]) {
					s.fatalf("chunk %s %d is not right", nameOf(c.Tensor), c.Index)
				}
			}
		}
		for _, d := range f.Dones {
			if d.Code == frame.OK {
				part("done %s ok %s", nameOf(d.Call), printBindings(d.Outputs))
			} else {
				part("done %s code %d: %s", nameOf(d.Call), d.Code, d.Message)
			}
		}
		if f.Drain != nil {
			part("drain %s", f.Drain.Reason)
		}
		if len(parts) == 0 {
			parts = []string{"nothing"} // in it
		}
		s.printf("> %s", strings.Join(parts, "; "))
		if held != nil {
			held.Release()
		}
		s.events()
	}
}

// state prints what the machine holds.
func (s *stage) state() {
	m := s.m
	if problem := miscounted(m); problem != "" {
		s.fatalf("the machine %s", problem)
	}
	announced := 0
	for _, t := range m.out.tensors {
		if t.Announced {
			announced++
		}
	}
	s.printf("%d calls, %d in, %d out; allowance in %d, out %d; open: incoming %d, announced %d", len(m.calls.open), len(m.in.tensors), len(m.out.tensors),
		m.in.Allowance, m.out.Allowance, m.in.Open, announced)
}

// leave closes a machine and checks that it holds nothing.
func (s *stage) leave() {
	if s.m == nil {
		return
	}
	s.m.Close(frame.Unavailable, "the script has ended")
	if s.claim != nil {
		s.commit()
	}
	s.events()
	if n := len(s.m.calls.open) + len(s.m.in.tensors) + len(s.m.out.tensors); n > 0 || s.over > 0 {
		s.fatalf("%d things and %d offers are left in the end", n, s.over)
	}
	for id, all := range s.ins {
		for i, l := range all {
			if !l.back {
				s.fatalf("region %d of %s never came back", i, nameOf(id))
			}
		}
	}
	s.out.Reset()
}
