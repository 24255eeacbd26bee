// Package fault reads memory that may be gone: that of a mapped file which somebody
// has shortened, or whose disk fails. It refuses everything else; it owns no bytes.
// Safe for concurrent use.
package fault

import (
	"errors"
	"runtime"
	"runtime/debug"
)

// ErrVanished is wrapped when the memory of a tensor could not be read.
var ErrVanished = errors.New("fault: the tensor's bytes can not be read any more; somebody shortened its file, or its disk fails")

// Guard runs f, which reads memory that may be a mapped file's, and returns
// ErrVanished where the memory is gone: without it SIGBUS would end the process.
// f may not start to read on another goroutine, and what it leaves half done is
// its caller's to forget.
func Guard(f func()) (err error) {
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
