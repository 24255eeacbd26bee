package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/harness"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stress/known"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

var against = flag.String("against", "", "have clients and servers of a `commit` work with those of this tree")

const (
	// checkWait is how long one check may take.
	checkWait = 30 * time.Second
	// The exit codes of tensorferry that are looked for.
	exitFailure     = 1
	exitConnection  = 3
	exitInterrupted = 7
)

// build is the programs of one commit.
type build struct {
	tensorferry, minus string
}

// buildAt builds the programs of the repository in a folder. Minus is of this tree, but
// with the packages of that one.
func buildAt(t *testing.T, source, minus string) (b build) {
	t.Helper()
	to := t.TempDir()
	var err error
	b.tensorferry, err = harness.Build(t.Context(), source, "./cmd/tensorferry", to)
	require.NoError(t, err)
	b.minus, err = harness.Build(t.Context(), minus, "./minus", to)
	require.NoError(t, err)
	return b
}

// sourceOf checks a commit out, and puts minus there.
func sourceOf(t *testing.T, ref string) string {
	t.Helper()
	source := filepath.Join(t.TempDir(), "source")
	require.NoError(t, harness.Checkout(t.Context(), ref, source))
	require.NoError(t, os.CopyFS(filepath.Join(source, "minus"), os.DirFS("minus")))
	return source
}

func TestOldAndNewProgramsWorkTogether(t *testing.T) {
	if *against == "" {
		t.Skip("it builds another commit: make old-new")
	}
	testkit.Start(t)
	old := sourceOf(t, *against)
	top, err := harness.Top(t.Context())
	require.NoError(t, err)
	builds := map[string]build{"old": buildAt(t, old, old), "new": buildAt(t, top, ".")}
	for _, p := range [][2]string{{"old", "new"}, {"new", "old"}, {"new", "new"}} {
		t.Run(p[0]+" client, "+p[1]+" server", func(t *testing.T) {
			client, servers := builds[p[0]], builds[p[1]]
			d := duo{command: client.tensorferry, server: served(t, servers.tensorferry, "--metrics", "off"), minus: served(t, servers.minus)}
			for _, c := range []struct {
				name   string
				codecs []string
				run    func(d duo, t *testing.T, codec string)
			}{
				{"call", []string{"none", "lz4"}, duo.call},
				{"call with two inputs", []string{"none", "lz4"}, duo.inputs},
				{"push, ls, pull, rm", []string{"none", "lz4"}, duo.store},
				{"model file", []string{"none"}, duo.modelFile},
				{"interrupted call", []string{"none"}, duo.cancel},
				{"sequence", []string{"none"}, duo.sequence},
				{"drain", []string{"none"}, duo.drain}, // the server ends in this one
			} {
				for _, codec := range c.codecs {
					t.Run(c.name+", codec "+codec, func(t *testing.T) {
						d := d
						ctx, cancel := context.WithTimeoutCause(t.Context(), checkWait, fmt.Errorf("no end after %v", checkWait))
						defer cancel()
						d.ctx = ctx
						c.run(d, t, codec)
					})
				}
			}
		})
	}
}

// served starts a server that ends with the test, and complains about nothing.
func served(t *testing.T, command string, args ...string) *daemon {
	t.Helper()
	e := &environment{command: command}
	d, err := e.serve(t.Context(), args...)
	require.NoError(t, err)
	t.Cleanup(func() {
		d.Kill()
		require.Empty(t, e.all())
		if t.Failed() {
			t.Logf("log of %s:\n%s", command, d.Log.Tail())
		}
	})
	return d
}

// duo is the command of one commit and servers of another.
type duo struct {
	ctx           context.Context
	command       string
	server, minus *daemon
}

// run runs a command to its end; when the context ends it is interrupted.
func (d duo) run(stdin io.Reader, args ...string) ([]byte, error) {
	cmd := proc.New(exec.CommandContext(d.ctx, d.command, append(args, "--server", d.server.address)...))
	cmd.Stdin = stdin
	return cmd.Output()
}

// send runs a command with a tensor of the shape of w that comes over stdin.
func (d duo) send(w known.Window, in io.Reader, args ...string) ([]byte, error) {
	desc := w.Desc()
	return d.run(in, append(args, "--dtype", desc.DType.String(), "--shape", fmt.Sprint(desc.Shape[0]))...)
}

func (d duo) call(t *testing.T, codec string) {
	for _, n := range []int{0, 4, 30_000, 5*mib + 4} {
		w := known.Pick(1, n)
		got, err := d.send(w, bytes.NewReader(w.Data()), "run", "relu", "--codec", codec)
		require.NoError(t, err)
		require.NoError(t, known.Same("relu", got, w.ReLU()))
	}
}

// sequence is refused by a sentence where one side is older than sequences are.
func (d duo) sequence(t *testing.T, _ string) {
	w := known.Pick(8, 40_000)
	got, err := d.run(bytes.NewReader(w.Data()), "run", "relu", "--sequence", "--dtype", w.Desc().DType.String(), "--shape", "1000,40")
	if err != nil && (strings.Contains(err.Error(), "unknown flag: --sequence") || strings.Contains(err.Error(), "older than this client")) {
		return
	}
	require.NoError(t, err)
	require.NoError(t, known.Same("relu", got, w.ReLU()))
}

func (d duo) inputs(t *testing.T, codec string) {
	const n = 3*mib + 1
	dir := t.TempDir()
	args := []string{"run", "minus", "--codec", codec, "--raw"}
	for name, w := range map[string]known.Window{"a": known.Pick(1, n), "b": known.Pick(2, n)} {
		var npy bytes.Buffer
		require.NoError(t, tensorfile.WriteNPYHeader(&npy, w.Desc()))
		npy.Write(w.Data())
		file := filepath.Join(dir, name+".npy")
		require.NoError(t, os.WriteFile(file, npy.Bytes(), 0o644))
		args = append(args, "--input", name+"="+file)
	}
	want := bytes.Clone(known.Pick(1, n).Data())
	for i, b := range known.Pick(2, n).Data() {
		want[i] -= b
	}
	d.server = d.minus
	got, err := d.run(nil, args...)
	require.NoError(t, err)
	require.NoError(t, known.Same("minus", got, want))
}

func (d duo) store(t *testing.T, codec string) {
	const name = "old-new/x"
	w := known.Pick(3, 5*mib+1)
	_, err := d.send(w, bytes.NewReader(w.Data()), "push", name+"=-", "--codec", codec)
	require.NoError(t, err)
	list, err := d.run(nil, "ls", "old-new/*")
	require.NoError(t, err)
	require.Contains(t, string(list), name)
	got, err := d.run(nil, "pull", name, "--raw", "--codec", codec)
	require.NoError(t, err)
	require.NoError(t, known.Same("pull", got, w.Data()))
	_, err = d.run(nil, "rm", name)
	require.NoError(t, err)
	_, err = d.run(nil, "pull", name, "--raw")
	requireEnd(t, err, exitFailure, name)
}

// modelFile pushes a model file and pulls it again.
func (d duo) modelFile(t *testing.T, codec string) {
	dir := t.TempDir()
	file, back := filepath.Join(dir, "model.safetensors"), filepath.Join(dir, "back.safetensors")
	var tensors []tensorfile.Named
	for i, name := range []string{"a.weight", "b.bias"} {
		x, err := tensor.Of(known.Pick(uint64(6+i), 1000).Data())
		require.NoError(t, err)
		tensors = append(tensors, tensorfile.Named{Name: name, Tensor: x})
	}
	var want bytes.Buffer
	require.NoError(t, tensorfile.WriteSafetensors(&want, tensors, map[string]string{"format": "pt"}))
	require.NoError(t, os.WriteFile(file, want.Bytes(), 0o600))
	_, err := d.run(nil, "push", file, "--codec", codec)
	require.NoError(t, err)
	_, err = d.run(nil, "pull", "model/*", "-o", back, "--codec", codec)
	require.NoError(t, err)
	got, err := os.ReadFile(back)
	require.NoError(t, err)
	require.NoError(t, known.Same("pull", got, want.Bytes()))
}

// cancel interrupts a client whose call is half sent.
func (d duo) cancel(t *testing.T, codec string) {
	calling := d
	var interrupt context.CancelFunc
	calling.ctx, interrupt = context.WithCancel(d.ctx)
	defer interrupt()
	w := known.Pick(4, 5*mib+1)
	in, half, err := os.Pipe() // not a reader, for which run would wait
	require.NoError(t, err)
	defer half.Close()
	defer in.Close()
	go func() { _, _ = half.Write(w.Data()[:3*mib]) }() // ends with the pipe
	ended := make(chan error, 1)
	go func() { // ends with the client
		_, err := calling.send(w, in, "run", "echo", "--codec", codec)
		ended <- err
	}()
	d.until(t, 1)
	interrupt()
	requireEnd(t, <-ended, exitInterrupted, "interrupted")
	d.until(t, 0)
	d.call(t, codec)
}

// drain tells the server to stop while a call is half sent: the next is refused.
func (d duo) drain(t *testing.T, codec string) {
	w := known.Pick(5, 5*mib+1)
	let, ended := make(chan struct{}), make(chan error, 1)
	go func() { // ends with the client
		got, err := d.send(w, known.Held(w.Data(), let), "run", "echo", "--codec", codec)
		if err == nil {
			err = known.Same("echo", got, w.Data())
		}
		ended <- err
	}()
	d.until(t, 1)
	require.NoError(t, d.server.Process.Signal(syscall.SIGTERM))
	testkit.Eventually(t, func() bool { return strings.Contains(d.server.Log.Tail(), "msg=draining") }, "the server to drain")
	late := known.Pick(6, 4)
	_, err := d.send(late, bytes.NewReader(late.Data()), "run", "relu")
	requireEnd(t, err, exitConnection, "server is draining")
	close(let)
	require.NoError(t, <-ended)
	require.NoError(t, d.server.Stopped())
}

// until waits until the server's info counts n open calls.
func (d duo) until(t *testing.T, n int) {
	t.Helper()
	testkit.Eventually(t, func() bool {
		text, err := d.run(nil, "info", "--json")
		require.NoError(t, err)
		var info struct{ Counters struct{ Calls *int } }
		require.NoError(t, json.Unmarshal(text, &info))
		require.NotNil(t, info.Counters.Calls, "info says %s", text)
		return *info.Counters.Calls == n
	}, fmt.Sprintf("%d open calls", n))
}

// requireEnd wants the error of a program that ended with a code and said a text.
func requireEnd(t *testing.T, err error, code int, text string) {
	t.Helper()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, code, exit.ExitCode(), "%v", err)
	require.ErrorContains(t, err, text)
}
