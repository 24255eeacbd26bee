package kinds

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// Compute names tensorferry as README shows it: Client.Compute, with every default.
const Compute = bench.Tensorferry + ", Compute"

// caller makes one call after another. Each result has memory of its own.
type caller func(ctx context.Context, data []byte) ([]byte, error)

// calling is a client whose callers share a connection: open makes one more, end ends all.
func calling(p bench.Place, open func() (caller, error), end func() error) (bench.Client, error) {
	one, err := open()
	if err != nil {
		return bench.Client{}, errors.Join(err, end())
	}
	call := func(ctx context.Context, one caller, to []byte) error {
		y, err := one(ctx, p.Source)
		if err == nil && copy(to, y) != len(p.Source) {
			err = fmt.Errorf("bench: a result of %d bytes", len(y))
		}
		return err
	}
	callers := []caller{one}
	at := func(ctx context.Context, n int) (s bench.Sample, err error) {
		for len(callers) < atOnce {
			more, err := open()
			if err != nil {
				return s, err
			}
			callers = append(callers, more)
		}
		each, failed := max(n/atOnce, 1), make([]error, atOnce)
		results := make([]byte, atOnce*len(p.Source))
		s, err = bench.Timed(func() error {
			var all sync.WaitGroup
			for i, one := range callers {
				all.Go(func() {
					for range each {
						failed[i] = errors.Join(failed[i], call(ctx, one, results[i*len(p.Source):][:len(p.Source)]))
					}
				})
			}
			all.Wait()
			return errors.Join(failed...)
		})
		for i := 0; i < len(results) && err == nil; i += len(p.Source) {
			err = bench.Check(bench.Echo, results[i:][:len(p.Source)], p.Source)
		}
		s.Time /= time.Duration(each * atOnce)
		return s, err
	}
	return bench.Client{
		Run:     func(ctx context.Context, _ bench.Op, _ *time.Time) error { return call(ctx, one, p.To) },
		Measure: map[bench.Op]func(context.Context, int) (bench.Sample, error){measure.AtOnce: at},
		Close:   end,
	}, nil
}

// computing is a client whose callers compute with the model that echoes.
func computing(_ context.Context, p bench.Place, cfg client.Config) (bench.Client, error) {
	c, err := client.Dial(bench.Address(p), cfg)
	if err != nil {
		return bench.Client{}, err
	}
	return calling(p, func() (caller, error) {
		return func(ctx context.Context, data []byte) ([]byte, error) {
			y, err := c.Compute(ctx, "echo", bench.Floats(data))
			return y.Data, err
		}, nil
	}, c.Close)
}
