package stream

import (
	"fmt"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// refuse (server) returns why a call, which counts already, is refused, or nil.
func (c *calls) refuse(p *frame.Call) *frame.Done {
	limits := &c.cfg.Limits
	no := func(code frame.Code, retry uint32, format string, args ...any) *frame.Done {
		return &frame.Done{Code: code, RetryAfterMillis: retry, Message: fmt.Sprintf(format, args...)}
	}
	full := c.full("call", retained.OfCall(p))
	switch problem := p.CheckContent(); {
	case c.draining:
		return no(frame.Unavailable, 1000, "server is draining; use another one, or try again later")
	case c.undecided > limits.OpenCalls:
		return no(frame.ResourceExhausted, 100, "open calls: the limit of a session is %d; wait for one to end", limits.OpenCalls)
	case len(c.open) > heldCalls*limits.OpenCalls:
		return no(frame.ResourceExhausted, 100, "results of %d calls wait; acknowledge them", len(c.open)-1)
	case len(p.Inputs) > limits.OpenTensors:
		return no(frame.ResourceExhausted, 0, "call has %d inputs; open tensors are limited to %d", len(p.Inputs), limits.OpenTensors)
	case p.Stored() && !c.cfg.Stores:
		return no(frame.FailedPrecondition, 0, "calls of this session are runs of models; use PushTensors or PullTensors")
	case problem != "":
		return no(frame.InvalidArgument, 0, "%s", problem)
	case full != "":
		return no(frame.ResourceExhausted, 100, "%s", full)
	}
	return nil
}

// admit checks a desc against shape arithmetic and limits, before anything of it is
// retained, and returns the tensor's geometry.
func (c *calls) admit(p *frame.Desc, tensorBytes int64) (tensor.Geometry, *frame.Error) {
	limits := &c.cfg.Limits
	geo, bad := p.Check(limits.ChunkBytes, tensorBytes)
	if bad != nil {
		return geo, bad
	}
	full := func(format string, args ...any) *frame.Error {
		return frame.Errorf(frame.ResourceExhausted, "tensor "+p.Tensor.String()+": "+format, args...)
	}
	left := int64(limits.AllowanceBytes) - c.in.Allowance
	switch n := geo.Count(); {
	case c.in.Open >= limits.OpenTensors:
		bad = full("open tensors: the limit of a session is %d", limits.OpenTensors)
	case p.OnAllowance && n > frame.AllowanceChunks:
		bad = full("%d chunks on allowance, the limit is %d; send larger chunks, or wait for credit instead", n, frame.AllowanceChunks)
	case p.OnAllowance && geo.Size > left:
		bad = full("%d bytes on allowance, %d are left; wait for credit instead", geo.Size, left)
	default:
		if problem := c.full("desc", retainedBy(p, geo)); problem != "" {
			bad = full("%s", problem)
		}
	}
	return geo, bad
}

// full reports why n more bytes cannot be retained, or nothing.
func (c *calls) full(what string, n int) string {
	most := c.cfg.Limits.retainedBytes()
	if n <= most-c.retained {
		return ""
	}
	return fmt.Sprintf("%s takes %d bytes with its names, entries and chunk table; the limit of a session's calls is %d, %d are left; wait for a call to end",
		what, n, most, most-c.retained)
}

// retainedBytes is how much a session retains of calls and tensors.
func (l *Limits) retainedBytes() int { return retainedBytes + l.OpenTensors*tensorBytes }

// retainedBy returns how many bytes are retained for a tensor with this geometry.
func retainedBy(p *frame.Desc, geo tensor.Geometry) int {
	n := tensorState + len(p.Port) + len(p.Name) + retained.OfEntries(p.Metadata)
	if !p.OnAllowance { // otherwise, and beyond that number, the budget is charged
		n += int(min(geo.Count(), frame.AllowanceChunks)) * assembler.ChunkOverhead
	}
	return n
}
