// Package harness has what the modules bench and stress share: which machine this is, and
// programs built from this tree or from another commit of its repository. The product does
// not import it.
package harness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/tensorferry/tensorferry/internal/proc"
)

// Checkout writes the files of another commit of the repository in the working
// folder to a folder, which it makes. Neither tree nor repository is written to.
func Checkout(ctx context.Context, ref, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	top, err := Top(ctx)
	for _, args := range [][]string{{"read-tree", ref}, {"checkout-index", "--all", "--prefix=" + dir + "/"}} {
		if err == nil {
			cmd := proc.New(exec.CommandContext(ctx, "git", append([]string{"-C", top}, args...)...))
			cmd.Env = append(cmd.Env, "GIT_INDEX_FILE="+dir+".index") // of its own
			_, err = cmd.Output()
		}
	}
	if err != nil {
		return fmt.Errorf("%w\ncommit %q is not in this repository; a shallow clone gets it with: git fetch --unshallow --tags", err, ref)
	}
	return os.Remove(dir + ".index")
}

// Top returns the folder of the repository that the working folder is in.
func Top(ctx context.Context) (string, error) {
	out, err := proc.New(exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel")).Output()
	return strings.TrimSpace(string(out)), err
}

// Build builds a program of the Go module in a folder into another, and returns the binary.
func Build(ctx context.Context, module, program, to string, flags ...string) (string, error) {
	file := filepath.Join(to, filepath.Base(program))
	cmd := proc.New(exec.CommandContext(ctx, "go", append(append([]string{"build"}, flags...), "-o", file, program)...))
	cmd.Dir = module
	_, err := cmd.Output()
	return file, err
}

// Tensorferry builds the program of this tree into a folder, and returns the binary.
func Tensorferry(ctx context.Context, to string) (string, error) {
	top, err := Top(ctx)
	if err != nil {
		return "", err
	}
	return Build(ctx, top, "./cmd/tensorferry", to)
}
