package main

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/tensorferry/tensorferry/internal/cli/verbs"
)

func TestACommandThatWaitsForAHeaderCanBeInterrupted(t *testing.T) {
	for _, args := range [][]string{{"run", "echo", "-i", "-"}, {"push", "x=-"}, {"show", "-"}} {
		t.Run(args[0], func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			r, w := io.Pipe()
			defer w.Close() // it stays open until then
			ended := make(chan error, 1)
			root := verbs.Command()
			root.SetArgs(args)
			root.SetIn(r)
			go func() { ended <- root.ExecuteContext(ctx) }() // the server is not asked
			if _, err := w.Write([]byte{0x93}); err != nil {  // once it is written, the command reads
				t.Fatal(err)
			}
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("ended with %v", err)
			}
		})
	}
}
