// Package store keeps the tensors that were pushed and gives out those that are
// pulled: from memory, from a folder that outlives the process, or from a
// function that makes them (a Source).
//
// It refuses to turn a name into a path and to show a tensor before it is whole.
// Servers use it, and so may any program without one. A store owns the bytes that
// rest in it: they are copied in, and shared read-only with whoever reads.
package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// Errors that callers decide on. Every error of this package wraps one of them, a
// tensor package's error, the context's cause, or what the operating system says.
var (
	// ErrName is wrapped when a name is empty, too long or no printable text.
	ErrName = errors.New("store: bad name")
	// ErrGlob is wrapped when a pattern of names is malformed or too long.
	ErrGlob = errors.New("store: bad pattern")
	// ErrFull is wrapped when there is no room for a tensor.
	ErrFull = errors.New("store: full")
	// ErrNotFound is wrapped when there is no tensor, or source, of a name.
	ErrNotFound = errors.New("store: not found")
	// ErrExists is wrapped when a name is taken by what can not be replaced.
	ErrExists = errors.New("store: name is taken")
	// ErrPart is wrapped when a tensor is to be deleted that is part of a file.
	ErrPart = errors.New("store: part of a file")
	// ErrRange is wrapped when bytes outside a tensor are written or read.
	ErrRange = errors.New("store: outside the tensor")
	// ErrLocked is wrapped when another process has the folder.
	ErrLocked = errors.New("store: folder is in use")
	// ErrUnavailable is wrapped when a store cannot do now what it could do later, as
	// when another machine that it needs does not answer. No store of this package
	// does. A server has its peers try again later, and keeps the text for its log.
	ErrUnavailable = errors.New("store: unavailable")
	// ErrClosed is returned when the store has been closed.
	ErrClosed = errors.New("store: closed")
)

// Info says what a store knows about a tensor without reading its bytes.
type Info struct {
	Name string
	tensor.Desc
	// Digest is zero when nobody has computed it yet: the tensor is part of a file
	// that somebody put there, and was not read whole, or a Source made it.
	Digest codec.Digest
	// Stored is when the tensor was committed, or its file last changed.
	Stored time.Time
	// Durable is whether the tensor survives a restart.
	Durable bool
	// File is the base name of the .safetensors that the tensor is part of,
	// empty for a pushed one.
	File string
}

// Store keeps tensors by name. It is safe for concurrent use.
//
// It may lie on another machine: what takes a context waits no longer than that
// lasts, and then wraps its cause; it bounds that one call, not what it returns.
// Every method may wrap ErrUnavailable. Memory never waits. Folder waits for its
// disk whatever the context, which it looks at between two steps of a long answer.
// Package storetest has the tests that every Store passes.
type Store interface {
	// Create reserves room for a tensor and returns where to write it. It fails with ErrFull, ErrName, ErrExists for the
	// name of a tensor in a file, or an error of the tensor package for the desc.
	// Nobody sees the tensor before Commit; an older one of that name stays until
	// then, and so both need room. Two Writers of one name may be open: the last
	// one to commit stays.
	Create(ctx context.Context, name string, d tensor.Desc) (Writer, error)
	// Open pins the tensor of this name until Release: it stays as it is for this
	// Reader even when it is deleted or replaced. The error wraps ErrNotFound.
	Open(ctx context.Context, name string) (Reader, error)
	// List copies what is known of the tensors whose names match glob and come
	// after the name after, sorted by name, and of no more than most. A glob is in
	// path.Match's syntax, with ErrGlob for one that is malformed or longer than
	// MaxName; the empty glob matches all.
	List(ctx context.Context, glob, after string, most int) ([]Info, error)
	// Delete forgets the tensors of these names, one after the other, and returns the
	// names of those that were there: for good, when the store is durable. It ends
	// early at a tensor that is part of a file, with ErrPart, and where ctx ends;
	// deleted then says how far it came.
	Delete(ctx context.Context, names ...string) (deleted []string, err error)
	// Close ends the store; its Writers were ended by their owners before. What
	// Readers hold stays valid until they release it. Closing twice returns
	// ErrClosed, as all other methods do after Close.
	Close() error
}

// Writer takes one tensor. It belongs to one goroutine, and ends with Commit or
// Abort.
type Writer interface {
	// WriteViews copies views, in order, to byte off of the tensor. Calls may come
	// in any order of offsets but never overlap; the caller counts what has come.
	// Bytes in the order of their offsets are hashed as they come; those after the
	// first gap are read again by Commit.
	WriteViews(ctx context.Context, off int64, views [][]byte) error
	// Commit makes the whole tensor visible under its name, in place of an older
	// one, at once and for good: durably, when the store is durable. The caller has
	// written every byte. When it fails, the tensor is discarded as by Abort, and
	// the older one stays; except that nobody may know which of the two is there
	// when what failed is a connection to another machine.
	Commit(ctx context.Context) (Info, error)
	// Abort discards what was written and gives the room back. After Commit, or
	// once more, it does nothing.
	Abort()
}

// Reader is a tensor that stays as it is until Release. It is safe for concurrent
// use, except that Release comes last.
type Reader interface {
	// Info copies what is known of the tensor.
	Info() Info
	// View shares bytes [off, off+n) of the tensor, at most a few MiB at a time,
	// read-only until held.Release, which may run on any goroutine and after the
	// Reader's own. ErrRange when the tensor has fewer bytes, and the cause of a ctx that
	// has ended; an error holds nothing.
	// It wraps fault.ErrVanished when the bytes are those of a file that somebody has
	// shortened.
	View(ctx context.Context, off, n int64) (data []byte, held Releaser, err error)
	// Release ends the reading, once.
	Release()
}

// Releaser ends the sharing of a view, once.
type Releaser interface{ Release() }

// DigestKeeper is what a Reader may be besides, when its Info has no digest: who has
// hashed all of the tensor tells it, and it need not be hashed again. Safe for
// concurrent use, before Release.
type DigestKeeper interface {
	// Digested notes the digest of the bytes that the Reader gave. It never fails
	// and never waits: a store that has no place for it forgets it.
	Digested(d codec.Digest)
}

// Meter is what a Store may be besides: it says how full it is, which a server
// shows as metrics. Safe for concurrent use, also after Close.
type Meter interface {
	// Used returns, without waiting, the bytes that are taken now by tensors, by
	// open Writers, and by what was replaced or deleted but is still read; and how
	// many that may be, math.MaxInt64 where only a disk sets the limit.
	Used() (used, limit int64)
}

var (
	_ DigestKeeper = (*folderReader)(nil)
	_ Meter        = (*Memory)(nil)
	_ Meter        = (*Folder)(nil)
)

// CheckName reports, with an error that wraps ErrName, whether a tensor may have
// this name: 1 to MaxName bytes of UTF-8 without control characters. Slashes and
// dots are letters like all others: no name is a path here.
func CheckName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: it is empty", ErrName)
	case len(name) > MaxName:
		return fmt.Errorf("%w: %d bytes, the limit is %d", ErrName, len(name), MaxName)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("%w: %q is not UTF-8 without control characters", ErrName, name)
	}
	return nil
}

// checkNew checks what a tensor is to be called and to be, and returns its bytes.
func checkNew(ctx context.Context, name string, d tensor.Desc) (int64, error) {
	if err := CheckName(name); err != nil {
		return 0, err
	}
	size, err := d.Bytes()
	if err != nil {
		return 0, err
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	return size, nil
}

// checkRange reports whether bytes [off, off+n) lie within a tensor of size bytes.
func checkRange(off, n, size int64) error {
	if off < 0 || n < 0 || n > size || off > size-n { // no sum, so no overflow
		return fmt.Errorf("%w: [%d,+%d) of %d bytes", ErrRange, off, n, size)
	}
	return nil
}

// checkView checks a view before it is made: whoever has gone needs none.
func checkView(ctx context.Context, off, n, size int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return checkRange(off, n, size)
}

// checkViews reports whether views fit at off into a tensor of size bytes.
func checkViews(off int64, views [][]byte, size int64) error {
	var n int64
	for _, v := range views {
		n += int64(len(v)) // memory that exists: no overflow
	}
	return checkRange(off, n, size)
}
