package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
)

// Pick yields what a name picks: what literal finds, the tensor of exactly this name,
// or, if literal's error wraps ErrNotFound and the name may be a glob, all that matching
// finds. An error is the last it yields: one of theirs, or ErrNotFound for no match.
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
// some at a time: what comes or goes meanwhile may be missing. An error is the last it
// yields.
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
