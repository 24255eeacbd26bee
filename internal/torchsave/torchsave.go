// Package torchsave reads and writes what torch.save makes of a tensor, and of a flat dict
// of them.
//
// It is closed: a fixed list of records, opcodes and globals, and everything else is
// refused by name. Nothing is ever executed, and nothing is allocated before what asks for
// it is bounded. Anyone inside of the module may call it. A Reader borrows the bytes that
// it is fed; the tensors of an open File are lent until it is closed.
//
// Every error about a file's content wraps tensorfile.ErrFormat or
// tensorfile.ErrUnsupported; beside it tensor.ErrTooLarge where a limit is the cause.
package torchsave

import (
	"fmt"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func malformed(text string, args ...any) error {
	return fmt.Errorf("%w: torch: "+text, append([]any{tensorfile.ErrFormat}, args...)...)
}

func unsupported(text string, args ...any) error {
	return fmt.Errorf("%w: torch: "+text, append([]any{tensorfile.ErrUnsupported}, args...)...)
}

// limited is the error of what is over a limit of this package.
func limited(text string, args ...any) error {
	return malformed("%w: "+text, append([]any{tensor.ErrTooLarge}, args...)...)
}
