package terms

import (
	"fmt"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// RefusedError says why a request is refused, in words for the caller. Whoever refuses one, a
// handler of a service or Config.Authorize of a server, may return it.
type RefusedError struct {
	Code        frame.Code
	Reason      reason.Reason // empty if the code says it all
	Text        string
	RetryMillis uint32 // when to try again; 0 if that does not help
	Secret      bool   // the text omits a cause that belongs in the log
}

// Error returns the text.
func (r *RefusedError) Error() string { return "server: " + r.Text }

// Done returns how a call ends that is refused so.
func (r *RefusedError) Done() frame.Done {
	return frame.Done{Code: r.Code, Message: r.Text, RetryAfterMillis: r.RetryMillis, Reason: r.Reason}
}

// RefusedBy returns the refusal with which a call ended.
func RefusedBy(d *frame.Done) *RefusedError {
	return &RefusedError{Code: d.Code, Reason: d.Reason, Text: d.Message, RetryMillis: d.RetryAfterMillis}
}

// Load is what a session has open when its peer asks for more.
type Load struct {
	Draining  bool  // this side opens nothing new
	Undecided int   // open calls whose end is undecided, the new one included
	Calls     int   // all open calls, the new one included
	Tensors   int   // open incoming tensors
	Allowance int64 // bytes of the allowance in use
	Retained  int   // bytes retained of calls and tensors
}

// Refuse (server) returns why a call is refused, or nil.
func (c *Config) Refuse(p *frame.Call, l Load) *frame.Done {
	no := func(r reason.Reason, retry uint32, format string, args ...any) *frame.Done {
		why := frame.Because(r, format, args...)
		return &frame.Done{Code: why.Code, RetryAfterMillis: retry, Message: why.Text, Refused: true, Reason: why.Reason}
	}
	full := c.Limits.Retain("call", Retained.OfCall(p), l.Retained)
	switch problem := p.CheckContent(); {
	case l.Draining:
		return no(reason.Draining, 1000, "server is draining; use another one, or try again later")
	case l.Undecided > c.Limits.OpenCalls:
		return no(reason.Open, 100, "open calls: the limit of a session is %d; wait for one to end", c.Limits.OpenCalls)
	case l.Calls > HeldCalls*c.Limits.OpenCalls:
		return no(reason.Open, 100, "results of %d calls wait; acknowledge them", l.Calls-1)
	case len(p.Inputs) > c.Limits.OpenTensors:
		return no("RESOURCE_EXHAUSTED", 0, "call has %d inputs; open tensors are limited to %d", len(p.Inputs), c.Limits.OpenTensors)
	case p.Stored() && !c.Stores:
		return no("FAILED_PRECONDITION", 0, "calls of this session are runs of models; use PushTensors or PullTensors")
	case problem != "":
		return no("INVALID_ARGUMENT", 0, "%s", problem)
	case full != "":
		return no(reason.Open, 100, "%s", full)
	}
	return nil
}

// Admit checks a desc against shape arithmetic and limits, before anything of it is
// retained, and returns the tensor's geometry.
func (c *Config) Admit(p *frame.Desc, tensorBytes int64, l Load) (tensor.Geometry, *frame.Error) {
	geo, bad := p.Check(c.Limits.ChunkBytes, tensorBytes)
	if bad != nil {
		return geo, bad
	}
	full := func(format string, args ...any) *frame.Error {
		return frame.Because(reason.Open, "tensor "+p.Tensor.String()+": "+format, args...)
	}
	left := int64(c.Limits.AllowanceBytes) - l.Allowance
	switch n := geo.Count(); {
	case l.Tensors >= c.Limits.OpenTensors:
		bad = full("open tensors: the limit of a session is %d", c.Limits.OpenTensors)
	case p.OnAllowance && n > frame.AllowanceChunks:
		bad = full("%d chunks on allowance, the limit is %d; send larger chunks, or wait for credit instead", n, frame.AllowanceChunks)
	case p.OnAllowance && geo.Size > left:
		bad = full("%d bytes on allowance, %d are left; wait for credit instead", geo.Size, left)
	default:
		if problem := c.Limits.Retain("desc", RetainedByDesc(p, geo), l.Retained); problem != "" {
			bad = full("%s", problem)
		}
	}
	return geo, bad
}

// Retain reports why n more bytes cannot be retained, or nothing.
func (l Limits) Retain(what string, n, retained int) string {
	room := l.RetainedBytes() - retained
	if n <= room {
		return ""
	}
	return fmt.Sprintf("%s takes %d bytes with its names, entries and chunk table; the limit of a session's calls is %d, %d are left; wait for a call to end",
		what, n, l.RetainedBytes(), room)
}
