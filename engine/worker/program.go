package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// program is the model tied to one call.
type program struct {
	run   uint64
	model int             // 0, or the number of a companion
	info  engine.Info     // of the model to such a call
	ports []engine.Port   // of the model
	life  context.Context // of the caller's session, nil without one
	// session is that; series and turn are its place in an order, if it has one.
	session *session
	series  string
	turn    uint64
	call    string // its id
	json    []byte // what a guest is told with its first block
	lead    tensor.Shape
	rows    int64        // of the call: the product of lead
	owner   *guest       // the only one that computes it, where the model is stateful
	state   *state       // of the sequence, nil of none
	before  int64        // rows of the sequence
	queue   blocks.Queue // in a line
}

// over returns why a block is not to be computed any more. A guest has heard, or hears first, that
// its session is gone.
func (p *program) over(w *blocks.Work) error {
	if p.life != nil && p.life.Err() != nil {
		return context.Canceled
	}
	return context.Cause(w.Context())
}

// callJSON is that of the first block of a run.
type callJSON struct {
	Call    string            `json:"call"`
	Params  map[string]string `json:"params"`
	Inputs  []inputJSON       `json:"inputs"`
	Session uint64            `json:"session,omitempty"`  // whose call it is, where there are companions
	MaxRows int64             `json:"max_rows,omitempty"` // of the sequence
}

type inputJSON struct {
	Port     string            `json:"port"`
	Name     string            `json:"name"`
	Metadata map[string]string `json:"metadata"`
	Shape    []int64           `json:"shape"`
}

// bound returns a model: that of the host, or a companion, by its number.
func (h *Host) bound(number int, d described) blocks.Model {
	return blocks.Model{Info: d.Info, Bind: func(c engine.Call) (blocks.Bound, error) { return h.bind(number, d, c) }}
}

// bind ties a model to a call.
func (h *Host) bind(number int, d described, c engine.Call) (blocks.Bound, error) {
	info := d.Info.Of(c.Inputs)
	p := &program{model: number, info: info, ports: d.Inputs, life: c.Lifetime, session: h.sessionOf(c.Lifetime), call: c.ID.String()}
	about := callJSON{Call: p.call, Params: c.Params, Inputs: []inputJSON{}}
	if p.session != nil {
		about.Session = p.session.number
	}
	for i, in := range c.Inputs {
		about.Inputs = append(about.Inputs, inputJSON{in.Port, in.Name, in.Metadata, in.Desc.Shape})
		if p.lead == nil && !info.Inputs[i].Whole {
			p.lead = in.Desc.Shape[:info.Axes(len(in.Desc.Shape))].Clone()
		}
	}
	p.rows = 1
	for _, n := range p.lead {
		p.rows *= n
	}
	var err error
	if text := c.Params["order"]; d.Ordered && text != "" {
		if p.series, p.turn, err = orderOf(text); err != nil {
			return blocks.Bound{}, err
		}
	}
	if c.State != nil {
		err = h.step(c.State, p)
	} else {
		p.run = h.runIDs.Add(1)
		p.json, err = json.Marshal(about)
	}
	b := blocks.Bound{Results: blocks.Given, Program: p}
	if d.Keeps {
		h.mu.Lock()
		// More than the rest is not kept: others are dropped before.
		b.Memory = []int64{min(h.kept.Most, h.left())}
		h.mu.Unlock()
	}
	return b, err
}

// message describes a block to a guest: its inputs by the memory they lie in.
func (h *Host) message(id uint64, w *blocks.Work) (*link.Run, error) {
	p := w.Program.(*program)
	info := p.info
	m := &link.Run{Head: link.Head{ID: id}, Run: p.run, Row: uint64(p.before + w.Row), Rows: uint64(w.Rows), Model: uint16(p.model), Inputs: make([]link.Tensor, len(p.ports)), JSON: p.json}
	if p.state == nil && (info.Rows == 0 || w.Rows == p.rows) {
		m.Flags = link.Only
	}
	at := 0
	for i, d := range w.Descs {
		data, shape := w.In[i], d.Shape
		switch axes := info.Axes(len(shape)); {
		case info.Inputs[i].Whole:
			data = w.Whole[i]
		case info.Rows != 0:
			shape = append(tensor.Shape{w.Rows}, shape[axes:]...)
		}
		r, ok := h.heap.RangeOf(data)
		if !ok {
			return nil, errors.New("an input does not lie in shared memory")
		}
		for p.ports[at].Name != info.Inputs[i].Name { // it was left out
			at++
		}
		m.Inputs[at] = link.Tensor{DType: uint8(d.DType), Shape: shape, Range: r}
	}
	return m, nil
}

// result is what became of a block.
type result struct {
	outs    []tensor.Tensor
	release func()
	err     error
	times   blocks.Times
}

// accept takes the results of a block that are in an answer. An error ends the link; what
// the model does wrong is the result's.
func (h *Host) accept(g *guest, w *blocks.Work, a *link.Answer) (r result, err error) {
	inside, narrow, widest := false, false, 0
	for i := range w.In {
		widest = max(widest, len(w.In[i]))
	}
	var taken []*link.Block
	r.release = func() {
		for _, b := range taken {
			g.giveBack(b)
		}
	}
	r.times.Compute = time.Duration(min(a.Nanos, uint64(h.cfg.block)))
	p := w.Program.(*program)
	if a.Code != 0 {
		r.err = failure(a)
	} else if p.state != nil && len(a.JSON) > 0 {
		r.err = p.state.grew(a.JSON)
	}
	for _, out := range a.Outputs {
		data, b, err := h.find(g, w, out.Range)
		if b != nil {
			taken = append(taken, b)
		}
		if err != nil {
			r.release()
			return r, err
		}
		t, err := p.tensor(w.Rows, out, data)
		if err != nil && r.err == nil {
			r.err = err
		}
		r.outs = append(r.outs, t)
		inside = inside || b == nil && out.Range.Len > 0
		narrow = narrow || len(t.Data) > 0 && len(t.Data) < widest
	}
	if inside && narrow && p.info.Rows != 0 {
		// The slots of a run hold a chunk of results that are as wide as its input: what
		// lies in a slot keeps it until every result of the block is released.
		r.release()
		return r, fmt.Errorf("%w: a result lies in the input, and one is narrower than that", link.ErrMessage)
	}
	return r, nil
}

// find returns the memory of a result: part of the block's input, or of b, handed over.
func (h *Host) find(g *guest, w *blocks.Work, at link.Range) (data []byte, b *link.Block, err error) {
	if at.Len == 0 {
		return nil, nil, nil
	}
	for _, side := range [][][]byte{w.In, w.Whole} {
		for _, in := range side {
			r, ok := h.heap.RangeOf(in)
			if !ok || r.Len == 0 || r.Memory != at.Memory || at.Off < r.Off || at.Off-r.Off > r.Len || at.Len > r.Len-(at.Off-r.Off) {
				continue
			}
			off := at.Off - r.Off
			return in[off : off+at.Len : off+at.Len], nil, nil
		}
	}
	if b, err = g.conn.Taken(at); err != nil {
		return nil, nil, err
	}
	return b.Bytes()[:at.Len], b, nil
}

// tensor is a result of a block: the desc of all of it, the data of the block.
func (p *program) tensor(rows int64, out link.Tensor, data []byte) (tensor.Tensor, error) {
	d := tensor.Desc{DType: tensor.DataType(out.DType), Shape: out.Shape}
	n, err := d.Bytes()
	if err != nil {
		return tensor.Tensor{}, err
	}
	if n > int64(len(data)) {
		return tensor.Tensor{}, fmt.Errorf("a result of %d bytes lies in %d", n, len(data))
	}
	if p.info.Rows != 0 {
		if len(out.Shape) == 0 || out.Shape[0] != rows {
			return tensor.Tensor{}, fmt.Errorf("a result is %v; the first dimension of a block of %d rows is to be that", d, rows)
		}
		d.Shape = append(p.lead.Clone(), out.Shape[1:]...)
	}
	if data == nil {
		data = []byte{}
	}
	return tensor.Tensor{Desc: d, Data: data[:n:n]}, nil
}

// refusals are the codes of an answer that do not stand for a failure of the model.
var refusals = map[uint16]error{link.Exhausted: slab.ErrMemory, link.Invalid: engine.ErrParam, link.Precondition: engine.ErrPrecondition}

// failure is why a block failed: what the guest makes public, its caller reads.
func failure(a *link.Answer) error {
	var f struct {
		Message string `json:"message"`
		Public  bool   `json:"public"`
		Trace   string `json:"trace"`
	}
	if err := json.Unmarshal(a.JSON, &f); err != nil {
		return errors.New("it failed, and says why in what is no json")
	}
	message := cut(clean(f.Message), textBytes)
	if known := refusals[a.Code]; known != nil {
		return fmt.Errorf("%w: %s", known, message)
	}
	told := errors.New(message)
	if f.Public {
		told = engine.Publicf("%s", message)
	}
	if f.Trace != "" {
		return &raisedError{told, tail(strings.ToValidUTF8(f.Trace, "?"), traceBytes)}
	}
	return told
}

// raisedError is an exception of a model's own code.
type raisedError struct {
	told  error
	trace string
}

// Unwrap returns what the guest says beside the trace, perhaps an engine.PublicError.
func (e *raisedError) Unwrap() error { return e.told }

// Error returns the last line of the trace: the exception.
func (e *raisedError) Error() string {
	trace := strings.TrimSpace(e.trace)
	return trace[strings.LastIndexByte(trace, '\n')+1:]
}

// Trace returns the file and line where it was raised, and the trace.
func (e *raisedError) Trace() (place, trace string) {
	for line := range strings.Lines(e.trace) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "File ") {
			place = line
		}
	}
	return place, e.trace
}
