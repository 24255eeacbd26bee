package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
)

// Pick yields what a name selects: the tensor of exactly this name, which literal returns,
// or, if literal's error wraps ErrNotFound and the name may be a glob, everything that
// matching yields. After an error it yields nothing more. The error is one of theirs, or
// wraps ErrNotFound if nothing matches.
func Pick[T any](name string, literal func() (T, error), matching iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		one, err := literal()
		if !errors.Is(err, ErrNotFound) || !strings.ContainsAny(name, `*?[`) {
			yield(one, err)
			return
		}
		found := false
		for one, err := range matching {
			found = true
			if !yield(one, err) || err != nil {
				return
			}
		}
		if !found {
			var none T
			yield(none, fmt.Errorf("%w: no tensor matches %q", ErrNotFound, name))
		}
	}
}

// Each yields the Infos of the tensors whose names match glob, sorted by name. It lists
// them in pages: tensors added or deleted meanwhile may be missing. After an error it
// yields nothing more.
func Each(ctx context.Context, s Store, glob string) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		for after := ""; ; {
			page, err := s.List(ctx, glob, after, pageNames)
			if err != nil {
				yield(Info{}, err)
				return
			}
			for _, info := range page {
				if !yield(info, nil) {
					return
				}
			}
			if len(page) < pageNames {
				return
			}
			after = page[len(page)-1].Name
		}
	}
}
