// Package shelf has what the stores of this module have in common: an index of tensors by
// name, holders that are counted, mapped files, and the checks of what a caller passes.
//
// It keeps no tensor, and knows neither folders nor memory. Packages below store call it. It
// owns no bytes but copied views.
package shelf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// OwnKeys begins the keys of the metadata that a folder keeps beside that of a push.
const OwnKeys = "tensorferry."

// CheckNew validates the name, the desc and the metadata of a new tensor, and returns its size
// in bytes.
func CheckNew(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (int64, error) {
	if err := cmp.Or(store.CheckNew(name), CheckMetadata(metadata)); err != nil {
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

// CheckMetadata validates metadata, which a folder keeps beside its own.
func CheckMetadata(metadata map[string]string) error {
	for key, value := range metadata {
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			return fmt.Errorf("%w: %q must be UTF-8", store.ErrMetadata, key)
		}
		if strings.HasPrefix(key, OwnKeys) {
			return fmt.Errorf("%w: the key %q begins with %s, as those of the store do", store.ErrMetadata, key, OwnKeys)
		}
	}
	if n := MetadataBytes(metadata); n > store.MaxMetadata {
		return fmt.Errorf("%w: %d bytes, the limit is %d", store.ErrMetadata, n, store.MaxMetadata)
	}
	return nil
}

// MetadataBytes returns the length of all keys and values.
func MetadataBytes(metadata map[string]string) (n int64) {
	for key, value := range metadata {
		n += int64(len(key) + len(value))
	}
	return n
}

// CheckViews reports whether views, which it borrows, fit at off into a tensor of size bytes.
func CheckViews(ctx context.Context, off int64, views [][]byte, size int64) error {
	var n int64
	for _, v := range views {
		n += int64(len(v)) // memory that exists: no overflow
	}
	return store.CheckRange(ctx, off, n, size)
}

// DeleteEach implements Store.Delete with a function that deletes one tensor, if it exists.
func DeleteEach(ctx context.Context, names []string, one func(name string) (existed bool, err error)) (deleted []string, err error) {
	for _, name := range names {
		if ctx.Err() != nil {
			return deleted, context.Cause(ctx)
		}
		existed, err := one(name)
		if err != nil {
			return deleted, err
		}
		if existed {
			deleted = append(deleted, name)
		}
	}
	return deleted, nil
}

// Member is a Writer that can be part of a set.
type Member interface {
	store.Writer
	// NameIn returns the tensor's name; empty if the Writer has ended or is not of s.
	NameIn(s store.Store) string
}

// Members validates the Writers of a set of s.
func Members[W Member](ctx context.Context, s store.Store, writers []store.Writer) ([]W, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(writers) > store.MaxSet {
		return nil, fmt.Errorf("%w: a set of %d tensors, the limit is %d", store.ErrFull, len(writers), store.MaxSet)
	}
	seen := make(map[string]bool, len(writers))
	set := make([]W, len(writers))
	for i, w := range writers {
		name := ""
		if m, ok := w.(W); ok {
			set[i], name = m, m.NameIn(s)
		}
		if name == "" {
			return nil, errors.New("store: a Writer of a set has ended, or is of another store")
		}
		if seen[name] {
			return nil, fmt.Errorf("%w: %q is in the set twice", store.ErrName, name)
		}
		seen[name] = true
	}
	return set, nil
}

// AbortAll ends the Writers of a set.
func AbortAll(writers []store.Writer) {
	for _, w := range writers {
		w.Abort()
	}
}

// OutOfFiles reports whether this process cannot open files now.
func OutOfFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}
