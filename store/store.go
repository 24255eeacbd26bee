// Package store says what keeps pushed tensors and supplies pulled ones: a Store, or a function
// that generates them (a Source).
//
// Packages memory, folder and files have Stores. A Store never turns a name into a path, and never shows a tensor before it is complete. Any
// program may use one, also without a server. It owns its bytes: they are copied in, and shared
// read-only with readers.
package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// Errors that callers can test for. Every error of a Store wraps one of them, an error
// of package tensor, the cause of the context, or an error of the operating system.
var (
	// ErrName is wrapped when a name is empty, too long, not printable text or reserved, or
	// twice in a set.
	ErrName = errors.New("store: bad name")
	// ErrMetadata is wrapped when metadata is too long, is not UTF-8, or has a key of the store's.
	ErrMetadata = errors.New("store: bad metadata")
	// ErrGlob is wrapped when a glob is malformed or too long.
	ErrGlob = glob.ErrPattern
	// ErrFull is wrapped when there is no room for a tensor.
	ErrFull = errors.New("store: the store is full")
	// ErrTooSmall is wrapped, too, when there will never be room for it.
	ErrTooSmall error = tooSmallError{ErrFull}
	// ErrDiskFull is wrapped, too, when the disk is full.
	ErrDiskFull = errors.New("store: not enough disk space")
	// ErrNotFound is wrapped when no tensor, or no source, has a name.
	ErrNotFound = errors.New("store: not in the store")
	// ErrExists is wrapped when a name is taken by something that cannot be replaced.
	ErrExists = errors.New("store: name is taken")
	// ErrPart is wrapped when the tensor to be deleted is part of a file.
	ErrPart = errors.New("store: part of a file")
	// ErrReadOnly is wrapped when a tensor is pushed to a store that does not accept any.
	ErrReadOnly = errors.New("store: read-only")
	// ErrUnwritable is wrapped when the system refuses a change to a store's folder,
	// because of permissions, a read-only file system or a failing disk. A server tells its
	// peers so; the text goes to its log.
	ErrUnwritable = errors.New("store: cannot be written")
	// ErrRange is wrapped when bytes outside a tensor are written or read.
	ErrRange = errors.New("store: outside the tensor")
	// ErrLocked is wrapped when another process uses the folder.
	ErrLocked = errors.New("store: folder is in use")
	// ErrUnavailable is wrapped when a store fails temporarily, for example because another
	// machine does not answer. Of the stores here only those whose folder was removed or
	// replaced return it. A server tells its peers to retry; the text goes to its log.
	ErrUnavailable = errors.New("store: the store is unavailable")
	// ErrClosed is returned when the store has been closed.
	ErrClosed = errors.New("store: the store is closed")
)

// Info is what a store knows about a tensor without reading its bytes.
type Info struct {
	Name string
	tensor.Desc
	// Metadata is what was pushed with the tensor; read-only.
	Metadata map[string]string
	// Digest is zero until it is computed: for a part of a file that has not yet been read
	// completely, and for a Source's tensor.
	Digest codec.Digest
	// Stored is when the tensor was committed, or its file last changed.
	Stored time.Time
	// Durable reports whether the tensor survives a restart.
	Durable bool
	// File is the path, relative to the store's folder, of the .safetensors file or the
	// index that the tensor is part of; empty for a pushed tensor.
	File string
}

// Clone copies the Info, but shares its Metadata.
func (i Info) Clone() Info {
	i.Desc = i.Desc.Clone()
	return i
}

// tooSmallError is an ErrFull that is a tensor.ErrTooLarge, too: to try again does not help.
type tooSmallError struct{ error }

func (e tooSmallError) Unwrap() error { return e.error }

// Is reports whether target is tensor.ErrTooLarge.
func (tooSmallError) Is(target error) bool { return target == tensor.ErrTooLarge }

// Store keeps tensors by name. It is safe for concurrent use.
//
// It may be on another machine: when the context of a method ends, the method returns an
// error that wraps the context's cause; the context does not limit what was returned. Every
// method may wrap ErrUnavailable. A store in memory never waits. One in a folder waits for its
// disk, and checks the context between two steps. Package storetest has tests that every Store must pass.
type Store interface {
	// Create reserves room for a tensor with its metadata, of at most MaxMetadata bytes, and
	// returns a Writer for it. It fails with ErrFull, ErrName, ErrMetadata, ErrExists for the
	// name of a tensor in a file, or an error of package tensor for the desc. The tensor
	// becomes visible at Commit; an older one of the same name stays until then, so both need
	// room. Of two Writers of one name, the last to commit wins.
	Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (Writer, error)
	// Open pins a tensor until Release: its Reader is not affected by deletion or
	// replacement. The error wraps ErrNotFound.
	Open(ctx context.Context, name string) (Reader, error)
	// List copies the Infos of up to most tensors whose names match glob and come after the
	// name after, sorted by name. A glob has the syntax of path.Match, plus ** for
	// anything, including slashes; one that is malformed or longer than MaxName is an
	// ErrGlob. An empty glob matches all.
	List(ctx context.Context, glob, after string, most int) ([]Info, error)
	// Delete deletes the tensors of these names, in order, and returns the names of those
	// that existed; durably, if the store is durable. It stops at a part of a file, with
	// ErrPart, and when ctx ends; deleted then lists those already deleted.
	Delete(ctx context.Context, names ...string) (deleted []string, err error)
	// Close closes the store, after its Writers have ended. What Readers hold stays valid
	// until they release it. Afterwards all methods, including Close, return ErrClosed.
	Close() error
}

// Writer writes one tensor. It belongs to one goroutine, and ends with Commit or Abort.
type Writer interface {
	// WriteViews copies views, in order, to byte off of the tensor. Calls may come in any
	// order of offsets but must not overlap; the caller tracks them. For the digest, Commit
	// reads again what was written after a gap.
	WriteViews(ctx context.Context, off int64, views [][]byte) error
	// Commit replaces an older tensor of the same name by this one, atomically, and durably
	// if the store is durable. The caller has written every byte. If it fails, the tensor
	// is discarded and the older one stays; if a connection to another machine failed,
	// either may be there.
	Commit(ctx context.Context) (Info, error)
	// Abort discards what was written and frees the room. After Commit or Abort it is a
	// no-op.
	Abort()
}

// Evicter is an optional interface of a Writer whose Create may have evicted tensors.
type Evicter interface {
	// Evicted returns the tensors that Create evicted to make room, which are gone.
	Evicted() []Info
}

// InPlace is an optional interface of a Writer whose tensor lies in memory, so that bytes
// can be received where they stay.
type InPlace interface {
	// Memory lends the tensor's memory until Commit or Abort, by when nobody may write to it
	// any more. The caller writes bytes there and then passes views of them, at their
	// offsets, to WriteViews, which copies nothing but computes the digest.
	Memory() []byte
}

// Reader is a tensor that does not change until Release. It is safe for concurrent use,
// except that Release must come last.
type Reader interface {
	// Info copies what is known about the tensor.
	Info() Info
	// View shares bytes [off, off+n) of the tensor, at most a few MiB, read-only until
	// held.Release, which may be called on any goroutine, also after the Reader's own
	// Release. The error wraps ErrRange, the cause of ctx, or fault.ErrVanished if the file
	// was truncated.
	View(ctx context.Context, off, n int64) (data []byte, held Releaser, err error)
	// Release releases the Reader. It must be called once.
	Release()
}

// Releaser ends the sharing of a view. Release must be called once.
type Releaser interface{ Release() }

// DigestKeeper is an optional interface of a Reader whose Info may have no digest: a caller
// that has hashed the whole tensor reports the digest. Safe for concurrent use, before
// Release.
type DigestKeeper interface {
	// Digested records the digest of the tensor. It never waits, and may forget the digest.
	Digested(d codec.Digest)
}

// Meter is an optional interface of a Store, for a server's metrics. Safe for
// concurrent use, also after Close.
type Meter interface {
	// Used returns, without waiting, the bytes taken by tensors, by open Writers, and by
	// what was replaced or deleted but is still being read; and their limit, which is
	// math.MaxInt64 if it is not known.
	Used() (used, limit int64)
}

// Sets is an optional interface of a Store that can make several tensors visible together,
// as a set. It is safe for concurrent use.
type Sets interface {
	// Ready prepares w, a Writer of this store, for CommitAll: it computes the digest and,
	// in a folder, waits for the disk and closes the file. The caller has written every
	// byte. The Info is that of the tensor if the set is committed. Ready does not end w;
	// after an error w can only be aborted.
	Ready(ctx context.Context, w Writer) (Info, error)
	// CommitAll commits Writers of this store, at most MaxSet and of different names: all of
	// their tensors replace older ones of the same names together, as by Commit, or none
	// does. Until then old and new ones both need room. It ends every Writer, even if it
	// fails.
	CommitAll(ctx context.Context, writers []Writer) ([]Info, error)
	// Changed returns the names of the tensors of the sets that were committed, one after the
	// other, without the first after of all names since the store was opened, and how many
	// names there have been: after math.MaxInt64 it returns only that. It is not known if some
	// of the names are forgotten; those of the last MaxSet tensors are not. What was opened
	// between two calls of which the second returns no names belongs to one state of the
	// store, apart from single Commits and Deletes; if there are names, those are to be opened
	// again. It never waits.
	Changed(after int64) (names []string, now int64, known bool)
}

// CheckName reports, with an error that wraps ErrName, whether a name is valid for a
// tensor: 1 to MaxName bytes of UTF-8 without control characters. Slashes and dots are
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

// CheckNew is CheckName for a new tensor. It refuses what CheckName took once, too: a name that
// ends in a slash, which selects all below it, and those that a .safetensors file cannot hold, or
// a pull of everything could not be written to one.
func CheckNew(name string) error {
	if err := CheckName(name); err != nil {
		return err
	}
	switch {
	case strings.HasSuffix(name, "/"):
		return fmt.Errorf("%w: %q ends in a slash, which selects all names that begin with it", ErrName, name)
	case name == tensorfile.MetadataName:
		return fmt.Errorf("%w: %q is where a .safetensors file has its metadata", ErrName, name)
	case strings.ContainsRune(name, utf8.RuneError):
		return fmt.Errorf("%w: %q has the character U+FFFD, which stands for broken text", ErrName, name)
	}
	return nil
}

// CheckRange reports, with an error that wraps ErrRange or the cause of ctx, whether bytes
// [off, off+n) lie within a tensor of size bytes, and whether somebody waits for them. Views and
// writes of a Store or a Source begin with it.
func CheckRange(ctx context.Context, off, n, size int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if off < 0 || n < 0 || n > size || off > size-n { // no sum, so no overflow
		return fmt.Errorf("%w: [%d,+%d) of %d bytes", ErrRange, off, n, size)
	}
	return nil
}

// Each yields the Infos of the tensors whose names match glob, sorted by name. It lists
// them in pages: tensors added or deleted meanwhile may be missing. After an error it
// yields nothing more.
func Each(ctx context.Context, s Store, glob string) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		for after := ""; ; {
			page, err := s.List(ctx, glob, after, PageNames)
			if err != nil {
				yield(Info{}, err)
				return
			}
			for _, info := range page {
				if !yield(info, nil) {
					return
				}
			}
			if len(page) < PageNames {
				return
			}
			after = page[len(page)-1].Name
		}
	}
}
