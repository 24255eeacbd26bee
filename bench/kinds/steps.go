package kinds

import (
	"context"
	"errors"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
)

func init() { newer = append(newer, steps) }

// steps is tensorferry with a sequence for each caller.
var steps = bench.Kind{
	Name: Steps, OwnMemory: true, Serve: inClear,
	Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
		c, err := client.Dial(bench.Address(p), client.Config{})
		if err != nil {
			return bench.Client{}, err
		}
		var all []*client.Sequence
		return calling(p, func() (caller, error) {
			q, err := c.Sequence(ctx, client.SequenceRequest{Model: "echo", MaxRows: 1 << 62})
			if err != nil {
				return nil, err
			}
			all = append(all, q)
			return func(ctx context.Context, data []byte) ([]byte, error) {
				y, err := q.Step(ctx, bench.Floats(data))
				return y.Data, err
			}, nil
		}, func() (err error) {
			for _, q := range all {
				err = errors.Join(err, q.Close())
			}
			return errors.Join(err, c.Close())
		})
	},
}
