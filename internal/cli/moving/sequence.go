package moving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/tensor"
)

// stepBytes is the most that is read for a step: a chunk.
const stepBytes = 1 << 20

// sequence runs a model over the rows of stdin, as many at a time as have come, and writes theirs of the
// result before it reads on.
func (o *RunOptions) sequence(ctx context.Context, model string, params map[string]string, std files.Streams) (err error) {
	if !o.Input.Given() || len(o.Inputs)+len(o.Outputs) > 0 || o.AsJSON || o.Timings {
		return fail.Usage("--sequence takes raw rows from stdin and writes those of the result to stdout: give --dtype and --shape, whose first axis, or the second behind a 1, is the most rows, and neither --input, --output, --json nor --timings")
	}
	d, _, err := files.ParseDesc(o.Input.DType, o.Input.Shape)
	if err != nil {
		return err
	}
	axis := 0 // of the rows
	if len(d.Shape) > 1 && d.Shape[0] == 1 {
		axis = 1 // positions of one item
	}
	_, row, err := d.Rows(min(axis+1, len(d.Shape)))
	if err == nil && (len(d.Shape) == 0 || row == 0) {
		err = fmt.Errorf("%v has no rows of bytes", d)
	}
	if err != nil {
		return fail.AsUsage(err)
	}
	cl, waiting, err := o.dialPipes(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	q, err := cl.Sequence(ctx, client.SequenceRequest{Model: model, MaxRows: d.Shape[axis], Params: params})
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, q.Close()) }()
	buf, have := make([]byte, max(stepBytes/row, 1)*row), int64(0)
	for {
		n, read := files.Interruptible(waiting, func() (int, error) { return std.In.Read(buf[have:]) })
		have += int64(n)
		if rows := have / row; rows > 0 {
			x := tensor.Tensor{Desc: d.Clone(), Data: buf[:rows*row]}
			x.Shape[axis] = rows
			y, err := o.step(ctx, q, x)
			if err != nil {
				return err
			}
			if _, err := std.Out.Write(y.Data); err != nil {
				return err
			}
			have = int64(copy(buf, buf[rows*row:have]))
		}
		switch {
		case errors.Is(read, io.EOF) && have > 0:
			return fmt.Errorf("stdin ends with %d bytes of a row, which has %d", have, row)
		case errors.Is(read, io.EOF):
			return nil
		case read != nil:
			return read
		}
	}
}

// step does a step within the time limit of a call.
func (o *RunOptions) step(ctx context.Context, q *client.Sequence, x tensor.Tensor) (y tensor.Tensor, err error) {
	c, err := q.Call(ctx, client.Request{Inputs: []client.Input{client.From("", x)}, Timeout: o.Timeout})
	if err != nil {
		return y, err
	}
	results, err := c.Wait()
	if err == nil && len(results) != 1 {
		err = fmt.Errorf("the model has %d results; --sequence takes one", len(results))
	}
	for _, y = range results {
	}
	return y, err
}
