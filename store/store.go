// Package store keeps the tensors that were pushed and gives out those that are
// pulled: from memory, from a folder that outlives the process, or from a
// function that makes them (a Source).
//
// It refuses to turn a name into a path and to show a tensor before it is whole. Any
// program may use it, without a server too. A store owns its bytes: they are copied in,
// and shared read-only with readers.
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
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/tensor"
)

// Errors that callers decide on. Every error of this package wraps one of them, a
// tensor package's error, the context's cause, or what the operating system says.
var (
	// ErrName is wrapped when a name is empty, too long or no printable text.
	ErrName = errors.New("store: bad name")
	// ErrGlob is wrapped when a pattern of names is malformed or too long.
	ErrGlob = glob.ErrPattern
	// ErrFull is wrapped when there is no room for a tensor.
	ErrFull = errors.New("store: full")
	// ErrNotFound is wrapped when there is no tensor, or source, of a name.
	ErrNotFound = errors.New("store: not found")
	// ErrExists is wrapped when a name is taken by what can not be replaced.
	ErrExists = errors.New("store: name is taken")
	// ErrPart is wrapped when a tensor is to be deleted that is part of a file.
	ErrPart = errors.New("store: part of a file")
	// ErrReadOnly is wrapped when a store that takes no tensors is to take one.
	ErrReadOnly = errors.New("store: read-only")
	// ErrUnwritable is wrapped when the system refuses to change the folder of a store: its
	// permissions, a file system that is read-only, or a disk that fails. A server's peers
	// are told so; the text goes to its log.
	ErrUnwritable = errors.New("store: cannot be written")
	// ErrRange is wrapped when bytes outside a tensor are written or read.
	ErrRange = errors.New("store: outside the tensor")
	// ErrLocked is wrapped when another process has the folder.
	ErrLocked = errors.New("store: folder is in use")
	// ErrUnavailable is wrapped when a store fails for a while, such as when another machine
	// does not answer. In this package only a Folder whose folder was removed or replaced
	// returns it. A server's peers are told to retry; the text goes to its log.
	ErrUnavailable = errors.New("store: unavailable")
	// ErrClosed is returned when the store has been closed.
	ErrClosed = errors.New("store: closed")
)

// Info says what a store knows about a tensor without reading its bytes.
type Info struct {
	Name string
	tensor.Desc
	// Digest is zero until it is computed: for a part of a file that was not yet read
	// whole, and a Source's tensor.
	Digest codec.Digest
	// Stored is when the tensor was committed, or its file last changed.
	Stored time.Time
	// Durable is whether the tensor survives a restart.
	Durable bool
	// File is the path, below the store's folder, of the .safetensors or the index that the
	// tensor is part of, empty for a pushed one.
	File string
}

func (i Info) clone() Info {
	i.Desc = i.Desc.Clone()
	return i
}

// Store keeps tensors by name. It is safe for concurrent use.
//
// It may be on another machine: a method waits no longer than its context lasts, and
// then wraps its cause; the context does not bound what is returned. Every method may
// wrap ErrUnavailable. Memory never waits. Folder waits for its disk, and looks at the
// context between two steps. Package storetest has the tests that every Store passes.
type Store interface {
	// Create reserves room for a tensor and returns where to write it. It fails with
	// ErrFull, ErrName, ErrExists for the name of a tensor in a file, or a tensor error
	// for the desc. The tensor shows at Commit; an older one of the name stays until
	// then, so both need room. Of two Writers of one name the last to commit wins.
	Create(ctx context.Context, name string, d tensor.Desc) (Writer, error)
	// Open pins a tensor until Release: its Reader does not see deletion or replacement.
	// The error wraps ErrNotFound.
	Open(ctx context.Context, name string) (Reader, error)
	// List copies the Infos of up to most tensors whose names match glob and come after
	// the name after, sorted by name. A glob has path.Match's syntax, and ** for anything,
	// slashes too, with ErrGlob for one that is malformed or longer than MaxName; the empty
	// glob matches all.
	List(ctx context.Context, glob, after string, most int) ([]Info, error)
	// Delete deletes the tensors of these names in order and returns the names of those
	// that were there; durably, when the store is durable. It stops at a part of a file,
	// with ErrPart, and when ctx ends; deleted then says how far it came.
	Delete(ctx context.Context, names ...string) (deleted []string, err error)
	// Close ends the store, after its Writers. What Readers hold stays valid until they
	// release it. All methods return ErrClosed after it, Close too.
	Close() error
}

// Writer takes one tensor. It belongs to one goroutine, and ends with Commit or
// Abort.
type Writer interface {
	// WriteViews copies views, in order, to byte off of the tensor. Calls may come in
	// any order of offsets but not overlap; the caller counts them. Commit reads what
	// came after a gap again, for the digest.
	WriteViews(ctx context.Context, off int64, views [][]byte) error
	// Commit replaces an older tensor of the name by this one, atomically, and durably
	// when the store is durable. The caller has written every byte. When it fails, the
	// tensor is discarded and the older one stays; when a connection to another machine
	// failed, either may be there.
	Commit(ctx context.Context) (Info, error)
	// Abort discards what was written and frees the room. After Commit or Abort it is a
	// no-op.
	Abort()
}

// Reader is a tensor that stays as it is until Release. It is safe for concurrent
// use, except that Release comes last.
type Reader interface {
	// Info copies what is known of the tensor.
	Info() Info
	// View shares bytes [off, off+n) of the tensor, at most a few MiB, read-only until
	// held.Release, which may run on any goroutine and after the Reader's own. The error
	// wraps ErrRange, the cause of ctx, or fault.ErrVanished when the file was shortened.
	View(ctx context.Context, off, n int64) (data []byte, held Releaser, err error)
	// Release ends the reading, once.
	Release()
}

// Releaser ends the sharing of a view, once.
type Releaser interface{ Release() }

// DigestKeeper is an optional interface of a Reader whose Info may have no digest:
// whoever has hashed the whole tensor tells it. Safe for concurrent use, before Release.
type DigestKeeper interface {
	// Digested notes the digest of the bytes read. It never waits, and may forget it.
	Digested(d codec.Digest)
}

// Meter is an optional interface of a Store, for a server's metrics. Safe for
// concurrent use, also after Close.
type Meter interface {
	// Used returns, without waiting, the bytes taken by tensors, open Writers, and what
	// was replaced or deleted but is still read; and the most of these, math.MaxInt64
	// where only a disk sets the limit.
	Used() (used, limit int64)
}

var (
	_ DigestKeeper = (*fileReader)(nil)
	_ Store        = (*Files)(nil)
	_ Meter        = (*Memory)(nil)
	_ Meter        = (*Folder)(nil)
)

// CheckName reports, with an error that wraps ErrName, whether a tensor may have this
// name: 1 to MaxName bytes of UTF-8 without control characters. Slashes and dots are
// allowed: a name is never a path.
func CheckName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: it is empty", ErrName)
	case len(name) > MaxName:
		return fmt.Errorf("%w: %d bytes, the limit is %d", ErrName, len(name), MaxName)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("%w: %q must be UTF-8 without control characters", ErrName, name)
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

// checkView checks a view before it is made.
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
