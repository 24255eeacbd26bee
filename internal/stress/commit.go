package main

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"

	"github.com/tensorferry/tensorferry/internal/proc"
)

const module = "github.com/tensorferry/tensorferry"

// minusProgram is where minus is in the source. earlyMinus is the same for commits
// that do not have it, written for the engine package of their time.
const minusProgram = "internal/stress/minus"

//go:embed testdata/minus/main.go
var earlyMinus []byte

// build builds the command, unless a flag named one.
func (e *environment) build(ctx context.Context) (err error) {
	if e.command == "" {
		e.command, err = e.compile(ctx, ".", module+"/cmd/tensorferry")
	}
	return err
}

// compile builds a program, in the folder of its Go module below the source, and
// returns the binary.
func (e *environment) compile(ctx context.Context, dir, program string) (string, error) {
	file := filepath.Join(e.dir, path.Base(program))
	cmd := proc.New(exec.CommandContext(ctx, "go", "build", "-o", file, program))
	cmd.Dir = filepath.Join(e.source, dir)
	_, err := cmd.Output()
	return file, err
}

// commit returns the environment of another commit: its source in a folder of its
// own, and its command.
func (e *environment) commit(ctx context.Context, ref string) (*environment, error) {
	o := &environment{problems: e.problems, out: e.out, name: "old", dir: filepath.Join(e.dir, "old"), source: filepath.Join(e.dir, "old", "source")}
	if err := os.MkdirAll(o.source, 0o755); err != nil {
		return nil, err
	}
	// An index of its own: neither the tree nor the repository is written to.
	for _, args := range [][]string{{"read-tree", ref}, {"checkout-index", "--all", "--prefix=" + o.source + "/"}} {
		cmd := proc.New(exec.CommandContext(ctx, "git", args...))
		cmd.Env = append(cmd.Env, "GIT_INDEX_FILE="+filepath.Join(o.dir, "index"))
		if _, err := cmd.Output(); err != nil {
			return nil, fmt.Errorf("%w\nstress: commit %q is not in this repository; a shallow clone gets it with: git fetch --unshallow --tags", err, ref)
		}
	}
	minus := filepath.Join(o.source, minusProgram)
	if err := os.Mkdir(minus, 0o755); err == nil { // it was not there
		if err := os.WriteFile(filepath.Join(minus, "main.go"), earlyMinus, 0o644); err != nil {
			return nil, err
		}
	}
	return o, o.build(ctx)
}
