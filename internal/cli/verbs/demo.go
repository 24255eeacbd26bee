package verbs

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/demo"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
)

func demoCommand() *cobra.Command {
	var at moving.Access
	var where, driver string
	c := &cobra.Command{
		Use:   "demo",
		Short: "write a text with a network that is split over a socket",
		Long: `Demo writes a text, character by character, with a small transformer that is split in
three: the bottom and the top run in this process, the trunk on a server, each with
what it keeps of the text. Beside it the same network writes unsplit, in this process.
Then it classifies 1000 images of clothes (Fashion-MNIST) with another split network.
The texts must be equal, and the classes those that torch predicted with the same
weights; otherwise the exit code is 1.

Demo starts a server of its own and stops it at the end. With --server, it uses a
server that was started with tensorferry serve --demo, on this machine or another.`,
		Example: `  tensorferry demo
  tensorferry demo --server 10.0.0.7:50051`,
		Args: Takes(0),
		RunE: func(c *cobra.Command, _ []string) error {
			if at.Server != "" && where != serve.AutoEngine {
				return fail.Usage("--engine is for the demo's own server; omit it with --server")
			}
			if err := serve.Available(where, driver); err != nil {
				return err
			}
			return demo.Run(c.Context(), at, []string{"--engine", where, "--cuda-driver", driver}, c.OutOrStdout())
		},
	}
	c.Flags().StringVar(&at.Server, "server", "", "`address` of a server that runs with --demo (default: start one)")
	identityFlags(c, &at)
	c.Flags().StringVar(&where, "engine", serve.AutoEngine, "`where` the demo's own server runs the trunk for images:\nauto, cpu or a device such as cuda:0")
	c.Flags().StringVar(&driver, "cuda-driver", os.Getenv("TENSORFERRY_CUDA_DRIVER"), "NVIDIA driver library `file`, as for serve")
	c.Flag("cuda-driver").DefValue = ""
	complete(c, "engine", []string{serve.AutoEngine, serve.CPUEngine})
	return c
}
