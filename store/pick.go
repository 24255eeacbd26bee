package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
)

// Pick yields what a name picks, wherever it is given: what literal finds, the tensor
// that is called so letter by letter, or, when literal's error wraps ErrNotFound and
// the name may be a glob, all that matching finds. That is one at least, or the last
// it yields is an error: one of theirs, or ErrNotFound.
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

// Each yields what a store knows of the tensors whose names match glob, in the order
// of their names. It asks for some at a time: what comes or goes meanwhile may be
// among them or not. An error is the last it yields.
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
