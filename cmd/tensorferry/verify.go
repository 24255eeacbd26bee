package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
)

func verifyCommand() *cobra.Command {
	var bytesPerSecond int
	c := asking(&cobra.Command{
		Use:   "verify [NAME...]",
		Short: "check the tensors of a server against their digests",
		Long: `Verify pulls the tensors in a server's store, at most --rate bytes a second, and checks
them against the digests that the server has kept since they were pushed. It prints the
names of those that are damaged, and then fails; the server counts and logs them, too.
NAME may be a glob, as for pull; without one, all tensors are checked.

A tensor of a file in the server's folder has no digest until it is first pulled, by
verify or by anybody.`,
		Example: `  tensorferry verify
  tensorferry verify 'model/**' --rate 20MiB`,
		Args: cobra.ArbitraryArgs,
	}, func(ctx context.Context, cl *client.Client, names []string, out printer) error {
		return verify(ctx, cl, names, rate.NewLimiter(rate.Limit(bytesPerSecond), bytesPerSecond), out)
	})
	sizeVar(c.Flags(), &bytesPerSecond, "rate", 100<<20, 1<<10, math.MaxInt32, "most `bytes` to read in a second")
	return c
}

func verify(ctx context.Context, cl *client.Client, names []string, pace *rate.Limiter, out printer) error {
	list, _, err := cl.List(ctx, "")
	if len(names) > 0 {
		list, err = storedOf(ctx, cl, names)
	}
	if err != nil {
		return err
	}
	discard := client.Writer(func(tensor.Desc) (io.Writer, error) {
		return writerFunc(func(p []byte) (int, error) {
			for part := range slices.Chunk(p, pace.Burst()) {
				if err := pace.WaitN(ctx, len(part)); err != nil {
					return 0, err
				}
			}
			return len(p), nil
		}), nil
	})
	var damaged []client.Summary
	for some := range slices.Chunk(list, selectionsAtATime) {
		got, err := cl.Pull(ctx, client.PullRequest{Select: selectionsOf(some), To: func(string, tensor.Desc) (client.Sink, error) { return discard, nil }})
		damaged = append(damaged, slices.DeleteFunc(got, func(s client.Summary) bool { return s.Err == nil })...)
		if err != nil && len(damaged) == 0 || ctx.Err() != nil {
			return err
		}
	}
	err = out.print(each(damaged, func(s client.Summary) storedJSON {
		return storedJSON{Name: s.Name, Bytes: s.Bytes, Error: s.Err.Error()}
	}), func(w io.Writer) {
		for _, s := range damaged {
			fmt.Fprintf(w, "%s\t%s\n", plain(s.Name), said(s.Err))
		}
	})
	if err == nil && len(damaged) > 0 {
		err = fmt.Errorf("%d of %d tensors are not as they were pushed: %w", len(damaged), len(list), damaged[0].Err)
	}
	return err
}
