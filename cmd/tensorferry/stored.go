package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
)

func lsCommand() *cobra.Command {
	var server string
	var asJSON bool
	c := &cobra.Command{
		Use:   "ls [NAME]",
		Short: "list the tensors and sources of a server",
		Long: `Ls lists what the store of a server holds, and the sources that pull --source may
name. NAME may be a glob, as for pull. A digest is there once somebody has computed
it: for what was pushed, not for the tensors of a file that was put into the folder.`,
		Example: `  tensorferry ls
  tensorferry ls 'model/*' --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return ls(c.Context(), server, args, asJSON, c.OutOrStdout())
		},
	}
	c.Flags().StringVar(&server, "server", defaultListen, "`address` of the server: host:port or unix:/path")
	jsonFlag(c, &asJSON)
	return c
}

// storedJSON is a tensor at rest as ls --json prints it.
type storedJSON struct {
	Name    string    `json:"name"`
	DType   string    `json:"dtype"`
	Shape   []int64   `json:"shape"`
	Bytes   int64     `json:"bytes"`
	Digest  string    `json:"digest,omitempty"`
	Stored  time.Time `json:"stored"`
	Durable bool      `json:"durable"`
	File    string    `json:"file,omitempty"`
}

func ls(ctx context.Context, server string, names []string, asJSON bool, stdout io.Writer) error {
	cl, err := client.Dial(server, client.Config{})
	if err != nil {
		return usageError{err}
	}
	defer cl.Close()
	var list []client.Stored
	var sources []string
	if len(names) > 0 {
		list, err = storedOf(ctx, cl, names)
	} else {
		list, sources, err = cl.List(ctx, "")
	}
	if err != nil {
		return err
	}
	if asJSON {
		out := struct {
			Tensors []storedJSON `json:"tensors"`
			Sources []string     `json:"sources,omitempty"`
		}{Tensors: make([]storedJSON, 0, len(list)), Sources: sources}
		for _, s := range list {
			out.Tensors = append(out.Tensors, storedJSON{
				s.Name, s.DType.String(), append([]int64{}, s.Shape...), s.Bytes, s.Digest.String(), s.Stored.UTC(), s.Durable, s.File,
			})
		}
		return writeJSON(stdout, out)
	}
	w := tabwriter.NewWriter(stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tTENSOR\tSIZE\tSTORED\tWHERE")
	for _, s := range list {
		where := "memory"
		switch {
		case s.File != "":
			where = s.File
		case s.Durable:
			where = "disk"
		}
		fmt.Fprintf(w, "%s\t%v\t%s\t%s\t%s\n", s.Name, s.Desc, sizeText(s.Bytes), s.Stored.Local().Format(time.DateTime), where)
	}
	for _, s := range sources {
		fmt.Fprintf(w, "%s\t\t\t\tsource\n", s)
	}
	return w.Flush()
}

func rmCommand() *cobra.Command {
	var server string
	var asJSON bool
	c := &cobra.Command{
		Use:   "rm NAME...",
		Short: "remove tensors from a server",
		Long: `Rm removes tensors from the store of a server and prints their names. NAME may be
a glob, as for pull; one that picks nothing is an error, and then nothing is removed.
The tensors of a file that was put into the server's folder go with the file.`,
		Example: `  tensorferry rm x
  tensorferry rm 'experiments/7/*'`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := client.Dial(server, client.Config{})
			if err != nil {
				return usageError{err}
			}
			defer cl.Close()
			removed, err := cl.Delete(c.Context(), args...)
			if err != nil {
				return err
			}
			if asJSON {
				return writeJSON(c.OutOrStdout(), append([]string{}, removed...))
			}
			for _, name := range removed {
				fmt.Fprintln(c.OutOrStdout(), name)
			}
			return nil
		},
	}
	c.Flags().StringVar(&server, "server", defaultListen, "`address` of the server: host:port or unix:/path")
	jsonFlag(c, &asJSON)
	return c
}
