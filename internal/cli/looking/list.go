package looking

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
)

// List prints the tensors of a server that names match; without names, all, and its sources.
func List(ctx context.Context, cl *client.Client, names []string, out display.Printer) (err error) {
	var list []client.Stored
	var sources []string
	if len(names) > 0 {
		list, err = moving.StoredOf(ctx, cl, names)
	} else {
		list, sources, err = cl.List(ctx, "")
	}
	if err != nil {
		return err
	}
	listed := display.Each(moving.StoredJSONs(list), func(j moving.StoredJSON) any { return j })
	for _, s := range sources {
		listed = append(listed, map[string]any{"name": s, "source": true})
	}
	return out.Print(listed, func(w io.Writer) {
		fmt.Fprintln(w, "NAME\tTENSOR\tSIZE\tSTORED\tWHERE")
		for _, s := range list {
			where := cmp.Or(display.Plain(s.File), map[bool]string{true: "disk"}[s.Durable], "memory")
			fmt.Fprintf(w, "%s\t%v\t%s\t%s\t%s\n", display.Plain(s.Name), s.Desc, display.Size(s.Bytes), s.Stored.Local().Format(time.DateTime), where)
		}
		for _, s := range sources {
			fmt.Fprintf(w, "%s\t\t\t\tsource\n", display.Plain(s))
		}
	})
}
