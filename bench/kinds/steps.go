package kinds

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/server"
)

func init() { newer = append(newer, steps) }

// steps is tensorferry with one sequence, each of whose results has memory of its own.
var steps = bench.Kind{
	Name: Steps, OwnMemory: true,
	Serve: func(ctx context.Context, l net.Listener, p bench.Place) error {
		return serve(ctx, l, p, server.Config{}, nil)
	},
	Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
		c, err := client.Dial(bench.Address(p), client.Config{})
		if err != nil {
			return bench.Client{}, err
		}
		q, err := c.Sequence(ctx, client.SequenceRequest{Model: "echo", MaxRows: 1 << 62})
		if err != nil {
			return bench.Client{}, errors.Join(err, c.Close())
		}
		return bench.Client{
			Run: func(ctx context.Context, _ bench.Op, _ *time.Time) error {
				y, err := q.Step(ctx, bench.Floats(p.Source))
				if err == nil && copy(p.To, y.Data) != len(p.Source) {
					err = fmt.Errorf("bench: a result of %d bytes", len(y.Data))
				}
				return err
			},
			Close: func() error { return errors.Join(q.Close(), c.Close()) },
		}, nil
	},
}
