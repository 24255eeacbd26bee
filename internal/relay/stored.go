package relay

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/tensor"
)

// pushed is a tensor of a push.
type pushed struct {
	Name     string            `json:"name"`
	DType    string            `json:"dtype"`
	Shape    []int64           `json:"shape"`
	Metadata map[string]string `json:"metadata"`
	Range    *extent           `json:"range"`
}

// ended is how a tensor of a push or a pull ended.
type ended struct {
	Name    string `json:"name"`
	Bytes   int64  `json:"bytes"`
	Digest  string `json:"digest,omitempty"`
	Durable bool   `json:"durable,omitempty"`
	Evicted int    `json:"evicted,omitempty"`
	Code    uint16 `json:"code,omitempty"`
	Error   string `json:"error,omitempty"`
}

// push begins a push. An error ends the link.
func (r *relay) push(m *link.Ask, q *request) (run func(), err error) {
	o, err := r.begin(m.ID)
	if err != nil {
		return nil, err
	}
	o.inputs = make([]*pieces, len(q.Tensors))
	p := client.PushRequest{Tensors: make([]client.Input, len(q.Tensors))}
	var bad error
	for i, t := range q.Tensors {
		d, err := tensor.ParseDataType(t.DType)
		if err != nil {
			bad = errors.Join(bad, err)
		}
		in := client.Input{Name: t.Name, Desc: tensor.Desc{DType: d, Shape: t.Shape}, Metadata: t.Metadata}
		if t.Range == nil {
			o.inputs[i] = o.newPieces(in.Desc)
		} else if in.Data, err = o.share(t.Range.at()); err != nil {
			return nil, err
		}
		p.Tensors[i] = in
	}
	return o.run(m.Millis, func() ([]byte, error) {
		c, err := o.client(q.Connection)
		if err = errors.Join(bad, err); err != nil {
			return nil, fmt.Errorf("%w: %w", client.ErrInput, err)
		}
		numbers := make(map[string]uint32)
		for i := range p.Tensors {
			numbers[p.Tensors[i].Name] = uint32(i)
			if from := o.inputs[i]; from != nil {
				from.ended, p.Tensors[i].Reader = o.ctx.Done(), from
			}
		}
		if m.Flags&link.Regions != 0 {
			p.Progress = o.progress(func(name string) uint32 { return numbers[name] })
		}
		push := c.Push
		if q.All {
			push = c.PutAll
		}
		all, err := push(o.ctx, p)
		return o.summaries(all, err)
	}), nil
}

// progress has the guest told of bytes that were moved.
func (o *op) progress(number func(name string) uint32) func(client.Progress) {
	before := make(map[string]int64)
	return func(p client.Progress) {
		if err := o.region(number(p.Name), before[p.Name], p.Moved-before[p.Name]); err != nil {
			o.cancel(err)
		}
		before[p.Name] = p.Moved
	}
}

// summaries is the answer to a push or a pull, with err where it is no tensor's own.
func (o *op) summaries(all []client.Summary, err error) ([]byte, error) {
	list := make([]ended, len(all))
	for i, s := range all {
		e := ended{Name: s.Name, Bytes: s.Bytes, Durable: s.Durable, Evicted: s.Evicted}
		if !s.Digest.IsZero() {
			e.Digest = s.Digest.String()
		}
		if s.Err != nil {
			f := o.cfg.Explain(s.Err)
			e.Code, e.Error = f.Code, f.Message
		}
		list[i] = e
	}
	if len(list) == 0 || o.ctx.Err() != nil {
		if err = cmp.Or(err, o.ctx.Err()); err != nil {
			return nil, err
		}
	}
	return json.Marshal(map[string]any{"tensors": list})
}

// selection is one of a pull.
type selection struct {
	Name   string            `json:"name"`
	Source bool              `json:"source"`
	Params map[string]string `json:"params"`
}

// orPieces is "pieces" or a value.
type orPieces[T any] struct {
	pieces bool
	value  T
}

// UnmarshalJSON reads both.
func (o *orPieces[T]) UnmarshalJSON(b []byte) error {
	if o.pieces = string(bytes.TrimSpace(b)) == `"pieces"`; o.pieces {
		return nil
	}
	return json.Unmarshal(b, &o.value)
}

// extent is a range in JSON: the memory, the offset and the length.
type extent [3]uint64

func (e extent) at() link.Range { return link.Range{Memory: uint32(e[0]), Off: e[1], Len: e[2]} }

// pull pulls tensors.
func (o *op) pull(q *request, flags uint8) ([]byte, error) {
	defer o.dropResults()
	c, err := o.client(q.Connection)
	if err != nil {
		return nil, err
	}
	p := client.PullRequest{}
	for _, s := range q.Select {
		p.Select = append(p.Select, client.Selection{Name: s.Name, Source: s.Source, Params: s.Params})
	}
	p.To = func(name string, d tensor.Desc) (client.Sink, error) {
		t, named := q.To.value[name]
		if !named && !q.To.pieces {
			s, whole, err := o.makeRoom(name, d)
			if whole {
				_, err = o.sendResult(name, d)
			}
			if whole || err != nil {
				return s, err
			}
		}
		if t.pieces || !named {
			w, err := o.openWriter(name, d)
			return client.At(w), err // which gathers what comes in small pieces
		}
		if _, err := o.sendResult(name, d); err != nil {
			return client.Sink{}, err
		}
		data, err := o.share(t.value.at())
		return client.Into(data), err
	}
	if flags&link.Regions != 0 {
		p.Progress = o.progress(func(name string) uint32 {
			o.mu.Lock()
			defer o.mu.Unlock()
			return o.result(name).n // To has announced it
		})
	}
	all, err := c.Pull(o.ctx, p)
	return o.summaries(all, err)
}
