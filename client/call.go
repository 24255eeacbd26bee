package client

import (
	"io"

	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/tensor"
)

// Request describes a call.
type Request = calling.Request

// Results are a call's results by port. A result that went to a Writer has no Data.
type Results = calling.Results

// Region is a part of a result that has arrived. Data shares the result's memory.
type Region = calling.Region

// Timings are the durations of a call's stages as the server measured them.
type Timings = calling.Timings

// Input is a tensor to send: an input of a call, or a tensor to push. Its bytes are in
// Data, or come from Reader or Next.
type Input = calling.Input

// From returns an Input for a tensor, whose bytes it shares.
func From(port string, t tensor.Tensor) Input { return Input{Port: port, Desc: t.Desc, Data: t.Data} }

// FromReader returns an Input whose bytes come from r.
func FromReader(port string, d tensor.Desc, r io.Reader) Input {
	return Input{Port: port, Desc: d, Reader: r}
}

// Sink is the destination of one result or pulled tensor. Create one with Into, Writer or
// At.
type Sink = calling.Sink

// Into returns a Sink that stores a result in dst, whose length must be the result's size.
// The caller lends dst until the call has ended.
func Into(dst []byte) Sink { return calling.Into(dst) }

// Writer returns a Sink that writes a result in order, as it arrives, to the writer that
// open returns for its desc. A slow writer slows down the server but takes no more memory.
// open and Write run on a goroutine of the call, or on that of Pull. open is called again for
// another attempt; there is none once something is written.
func Writer(open func(tensor.Desc) (io.Writer, error)) Sink { return calling.Writer(open) }

// At returns a Sink that writes each chunk of a tensor to w, at its offset, as it arrives.
// Only Pull supports it. w is also read, for the digest, if chunks arrive out of order. All
// of this happens on the goroutine of Pull.
func At(w ReadWriterAt) Sink { return calling.At(w) }

// ReadWriterAt is implemented by *os.File, for example.
type ReadWriterAt = calling.ReadWriterAt
