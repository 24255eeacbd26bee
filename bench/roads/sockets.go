//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// sockets names n plain TCP connections, each of which carries a part of the tensor, without
// checksums.
func sockets(n int) string { return fmt.Sprintf("%d raw sockets", n) }

// socketsKind is that kind.
func socketsKind(n int) bench.Kind {
	k := bench.Raw(0, bench.ChunkBytes)
	return bench.Kind{Name: sockets(n), Serve: k.Serve, Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
		all := make([]bench.Client, n)
		for i := range all {
			part := p
			part.From = len(p.Source) * i / n
			end := len(p.Source) * (i + 1) / n
			part.Source, part.To = p.Source[part.From:end], p.To[part.From:end]
			var err error
			if all[i], err = k.Dial(ctx, part); err != nil {
				return bench.Client{}, err
			}
		}
		each := func(do func(bench.Client) error) error {
			var done sync.WaitGroup
			failed := make([]error, n)
			for i, c := range all {
				done.Go(func() { failed[i] = do(c) })
			}
			done.Wait()
			return errors.Join(failed...)
		}
		return bench.Client{
			Prepare: func(ctx context.Context, op bench.Op) error {
				return each(func(c bench.Client) error { return c.Prepare(ctx, op) })
			},
			Run: func(ctx context.Context, op bench.Op, _ *time.Time) error {
				return each(func(c bench.Client) error { return c.Run(ctx, op, nil) })
			},
			Close: func() error { return each(func(c bench.Client) error { return c.Close() }) },
		}, nil
	}}
}
