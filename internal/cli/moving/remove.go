package moving

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"

	"golang.org/x/time/rate"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/tensor"
)

// sureMost is how many tensors rm removes without --yes: as many as fit in one look.
const sureMost = 100

// Remove removes the tensors that names match, and prints their names.
func Remove(ctx context.Context, cl *client.Client, names []string, yes bool, out display.Printer) error {
	list, err := StoredOf(ctx, cl, names)
	if err != nil {
		return err
	}
	for _, s := range list {
		if s.File != "" {
			return fmt.Errorf("%q belongs to the file %q in the server's folder; delete the file on the server", s.Name, s.File)
		}
	}
	if len(list) > sureMost && !yes {
		return fail.Hinted(fail.Usage("these are %d tensors, and nothing was removed", len(list)), "--yes removes more than 100")
	}
	removed, err := cl.Delete(ctx, display.Each(list, func(s client.Stored) string { return s.Name })...)
	if out.Json && err != nil {
		return err
	}
	return cmp.Or(err, out.Print(append([]string{}, removed...), func(w io.Writer) {
		for _, name := range removed {
			fmt.Fprintln(w, display.Plain(name))
		}
	}))
}

// Verify pulls tensors, and prints those that are not as they were pushed.
func Verify(ctx context.Context, cl *client.Client, names []string, pace *rate.Limiter, out display.Printer) error {
	list, _, err := cl.List(ctx, "")
	if len(names) > 0 {
		list, err = StoredOf(ctx, cl, names)
	}
	if err != nil {
		return err
	}
	discard := WriterFunc(func(p []byte) (int, error) {
		for part := range slices.Chunk(p, pace.Burst()) {
			if err := pace.WaitN(ctx, len(part)); err != nil {
				return 0, err
			}
		}
		return len(p), nil
	})
	got, err := pullTo(ctx, cl, SelectionsOf(list), func(string, tensor.Desc) (io.Writer, error) { return discard, nil })
	damaged := slices.DeleteFunc(got, func(s client.Summary) bool { return s.Err == nil })
	if err != nil && len(damaged) == 0 || ctx.Err() != nil {
		return err
	}
	err = out.Print(display.Each(damaged, func(s client.Summary) StoredJSON {
		return StoredJSON{Name: s.Name, Bytes: s.Bytes, Error: s.Err.Error()}
	}), func(w io.Writer) {
		for _, s := range damaged {
			fmt.Fprintf(w, "%s\t%s\n", display.Plain(s.Name), fail.Text(s.Err))
		}
	})
	if err == nil && len(damaged) > 0 {
		err = fmt.Errorf("%d of %d tensors are not as they were pushed: %w", len(damaged), len(list), damaged[0].Err)
	}
	return err
}
