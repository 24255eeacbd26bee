package verbs

import (
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/moving"
)

func cpCommand() *cobra.Command {
	var o moving.CopyOptions
	c := &cobra.Command{
		Use:   "cp NAME... TO",
		Short: "copy tensors within a server or to another server",
		Long: `Cp copies tensors in a server's store to other names or, with --to, to another
server. The bytes pass through this machine a few chunks at a time. They are checked
on the way in and on the way out, and a copy is stored only if it is complete and
correct. Cp stops at the first tensor that fails, and prints the copies it has made.

NAME may be a glob, as for pull. If TO ends in a slash, as it must for several
tensors, the last part of each name is appended to it. If NAME ends in a slash, too,
everything after that slash is appended: cp model/ copy/ copies model/a/b to
copy/a/b.

The flags that identify you to the server are for both, unless one of --to-ca,
--to-cert, --to-key, --to-token and --to-server-name is given: then only those are
for the server of --to.`,
		Example: `  tensorferry cp x backup/x
  tensorferry cp model/ model-2/
  tensorferry cp x y --to 127.0.0.1:50055`,
		Args: Takes(many, "NAME", "TO"),
		RunE: func(c *cobra.Command, args []string) error {
			last := len(args) - 1
			return o.Copy(c.Context(), args[:last], args[last], streamsOf(c))
		},
	}
	remoteFlags(c, &o.Remote)
	c.Flags().StringVar(&o.To, "to", "", "`address` of the server to copy to (default the same server)")
	for _, s := range moving.FileFlags(&o.ToFiles) {
		c.Flags().StringVar(s.Value, "to-"+s.Flag, "", "for --to: "+s.Text)
	}
	return c
}
