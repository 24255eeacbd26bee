package client

import (
	"cmp"
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/tensor"
)

// PullRequest describes a pull.
type PullRequest = calling.PullRequest

// Selection selects tensors of a server's store, or a source.
type Selection = calling.Selection

// Range is a range of a tensor's bytes.
type Range = frame.Range

// Pull fetches tensors and returns their summaries in the order of the selections, those of a
// glob by name. The error joins those of the summaries, or says what ended the pull. A tensor
// whose summary has no error is complete and has the server's digest. The tensors of up to 1 024
// selections are of one state of the store with regard to sets; more are pulled one part after
// the other.
func (c *Client) Pull(ctx context.Context, r PullRequest) ([]Summary, error) {
	c.tally.calls.Add(1)
	var got []Summary
	for left := r.Select; ; {
		r.Select = left[:min(len(left), requestNames)]
		some, err := c.pullPart(ctx, r)
		got = append(got, some...)
		if left = left[len(r.Select):]; err != nil || len(left) == 0 {
			return got, cmp.Or(err, calling.ErrorsOf(got))
		}
	}
}

// pullPart is Pull for as many selections as a request has. The error is what ended the pull.
func (c *Client) pullPart(ctx context.Context, r PullRequest) ([]Summary, error) {
	left := make([]int, len(r.Select)) // selections
	for i := range left {
		left[i] = i
	}
	bySelection := make([][]*calling.In, len(r.Select)+1) // the last are of none
	var err error
	once := func() (why error) { // after which another attempt can succeed
		q := r
		q.Select = make([]Selection, len(left))
		for i, s := range left {
			q.Select[i] = r.Select[s]
			bySelection[s] = nil
		}
		var list []*calling.In
		list, err = c.pull(ctx, q)
		for _, t := range list {
			of := len(r.Select)
			if t.Sel >= 0 {
				of = left[t.Sel]
			}
			bySelection[of] = append(bySelection[of], t)
		}
		left = slices.DeleteFunc(left, func(s int) bool {
			failed := err
			if len(bySelection[s]) > 0 && !r.Select[s].IsGlob() {
				failed = nil
			}
			for _, t := range bySelection[s] {
				if t.Handed() {
					return true
				}
				failed = cmp.Or(failed, t.Err)
			}
			if !calling.Retryable(failed) {
				return true
			}
			why = failed
			return false
		})
		return why
	}
	_ = c.tries().repeat(ctx, pulls, once, nil) // err and the tensors say why
	var out []Summary
	for _, list := range append(bySelection[len(r.Select):], bySelection[:len(r.Select)]...) {
		for _, t := range list {
			out = append(out, t.Summary)
		}
	}
	return out, err
}

// pull makes one attempt at a pull. Without an error, each tensor has its own.
func (c *Client) pull(ctx context.Context, r PullRequest) ([]*calling.In, error) {
	s, err := c.storingSession(ctx)
	if err != nil {
		return nil, err
	}
	list, damaged, err := s.on.Get(ctx, r)
	if damaged {
		c.heard(ctx, list[0].Transfer)
	}
	return list, err
}

// heard waits, for tellWait at most, until the server knows of a damaged tensor: nothing answers
// a failure, and the end of the session could overtake it.
func (c *Client) heard(ctx context.Context, pull tensor.ID) {
	ctx, cancel := context.WithTimeout(ctx, tellWait)
	defer cancel()
	for ctx.Err() == nil {
		t, err := c.Transfer(ctx, pull)
		if err != nil || slices.ContainsFunc(t.Tensors, func(s TensorState) bool { return calling.CodeOf(s.Err) == codes.DataLoss }) {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(tellWait / 100):
		}
	}
}
