// Package transfer moves tensors one way over a gRPC stream, the same for a push
// and a pull: a Sender cuts and sums them, a Receiver checks their chunks and has
// them put where they rest.
//
// It refuses to resolve names and to know stores or files: whoever uses it says
// where bytes come from and go to. There is no way back for credits here. HTTP/2
// is the back-pressure: the next frame is read when the last chunk has its place,
// so that a side needs no more memory than a chunk, and gRPC's windows. It owns no
// payload bytes; what it sends is held until grpc has let go of it.
package transfer

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/tensorferry/tensorferry/stream"
)

// Conn is the gRPC stream that a transfer runs over, with wire.Codec.
type Conn interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

// ErrVanished is wrapped when the memory of a tensor could not be read: a mapped
// file was shortened, or its disk failed.
var ErrVanished = errors.New("transfer: the tensor's bytes can not be read any more; somebody shortened its file")

// guarded runs f, which reads memory that may be a mapped file's, and returns
// ErrVanished where the memory is gone, which else would end the process.
func guarded(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			err = ErrVanished
		default:
			panic(r)
		}
	}()
	f()
	return nil
}

func violation(code stream.Code, format string, args ...any) *stream.Error {
	return &stream.Error{Code: code, Text: fmt.Sprintf(format, args...)}
}
