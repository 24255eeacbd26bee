package client

import (
	"context"
	"fmt"

	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/internal/glob"
)

// PushRequest describes a push.
type PushRequest struct {
	// Tensors are stored under their Names, which must differ; Port is ignored. They are read
	// one after another, in this order.
	Tensors []Input
	// Progress, if not nil, is called when some more of a tensor is on its way, on the
	// goroutine of Push.
	Progress func(Progress)
}

// Push stores tensors on the server and returns their summaries, in the order of the
// request. The error joins those of the summaries, or says what ended the push. A tensor
// whose summary has no error is stored. Push shares the inputs until it returns.
func (c *Client) Push(ctx context.Context, r PushRequest) ([]Summary, error) {
	return c.push(ctx, r, false)
}

// PutAll is like Push, but stores all of the tensors together, or none: nobody sees some of
// them. If it fails, every summary has an error. The server's store must support it.
func (c *Client) PutAll(ctx context.Context, r PushRequest) ([]Summary, error) {
	return c.push(ctx, r, true)
}

func (c *Client) push(ctx context.Context, r PushRequest, together bool) ([]Summary, error) {
	all := make([]*calling.Out, len(r.Tensors))
	names := make(map[string]struct{}, len(r.Tensors))
	valid := true
	for i := range r.Tensors {
		in := &r.Tensors[i]
		size, err := in.Check()
		if in.Next != nil {
			err = fmt.Errorf("%w: tensor %q: Push does not support Next; use Reader", ErrInput, in.Name)
		}
		if _, twice := names[in.Name]; err == nil && twice {
			err = fmt.Errorf("%w: two tensors are named %q", ErrInput, in.Name)
		}
		names[in.Name] = struct{}{}
		all[i], valid = calling.NewOut(in, size, err), valid && err == nil
	}
	c.tally.calls.Add(1)
	from, tries := readAgain(r.Tensors), c.tries()
	once := func() (why error) { // after which another attempt can succeed
		err := fmt.Errorf("%w: nothing was stored, because another tensor of the set is invalid", ErrInput)
		if valid || !together {
			var s *Session
			if s, err = c.storingSession(ctx); err == nil {
				err = s.on.Put(ctx, all, together, r.Progress)
			}
		}
		for _, t := range all {
			if t.End(err); why == nil && from != nil && calling.Retryable(t.Err) {
				why = t.Err
			}
		}
		return why
	}
	_ = tries.repeat(ctx, pushes, once, func() bool { return tries.rewind(ctx, all, from, together) }) // the tensors say why
	out := make([]Summary, len(all))
	for i, t := range all {
		t.Close()
		out[i] = t.Summary
	}
	return out, calling.ErrorsOf(out)
}

// rewind makes tensors that failed ready for another attempt; but those that the server turns
// out to have are stored. It reports whether any is left.
func (t *tries) rewind(ctx context.Context, all []*calling.Out, from []int64, together bool) bool {
	ctx, stop := context.WithDeadline(ctx, t.until)
	defer stop()
	var left []int
	stored := make(map[int]*Stored)
	for i, p := range all {
		if !calling.Retryable(p.Err) {
			if together { // some of the set can never be stored
				return false
			}
			continue
		}
		has, err := t.client.has(ctx, p)
		if err != nil {
			return false
		}
		if has != nil {
			stored[i] = has
		}
		left = append(left, i)
	}
	if together && len(stored) < len(left) {
		clear(stored)
	}
	for _, i := range left {
		p := all[i]
		if has := stored[i]; has != nil {
			p.Stored(has.Durable)
			continue
		}
		if !rewind([]Input{*p.In}, from[i:]) {
			return false
		}
		p.Reset()
	}
	return len(stored) < len(left)
}

// has returns what the server has stored of a tensor that was pushed, or nil if that is another
// one. It has nothing of one that was not sent as a whole.
func (c *Client) has(ctx context.Context, p *calling.Out) (*Stored, error) {
	if p.Digest.IsZero() {
		return nil, nil
	}
	list, _, err := c.List(ctx, glob.Quote(p.Name))
	if err != nil || len(list) != 1 || list[0].Digest != p.Digest || !list[0].Equal(p.Desc) {
		return nil, err
	}
	return &list[0], nil
}
