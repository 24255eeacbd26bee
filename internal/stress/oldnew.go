package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// minusProgram is where minus is in the source.
const minusProgram = "internal/stress/minus"

//go:embed minus/main.go
var minusSource string

// early makes of minus what it was when the CPU engine was in the engine's package:
// commits of that time do not have it.
var early = strings.NewReplacer("\t\""+module+"/engine/cpu\"\n", "", "cpu.", "engine.")

// The exit codes of tensorferry that are looked for.
const (
	exitFailure     = 1
	exitConnection  = 3
	exitInterrupted = 7
)

// duo is a client of one commit and a server of another.
type duo struct {
	client *environment
	server *daemon
	minus  *daemon // serves minus, of the server's commit
}

// duoChecks are what they do together. The server ends in the last one.
var duoChecks = []struct {
	name   string
	codecs []string
	run    func(d *duo, ctx context.Context, codec string) error
}{
	{"call", []string{"none", "lz4"}, (*duo).call},
	{"call with two inputs", []string{"none", "lz4"}, (*duo).inputs},
	{"push, ls, pull, rm", []string{"none", "lz4"}, (*duo).store},
	{"interrupted call", []string{"none"}, (*duo).cancel},
	{"drain", []string{"none"}, (*duo).drain},
}

var errSlow = fmt.Errorf("no end after %v", checkWait)

func runOldNew(ctx context.Context, e *environment) error {
	old, err := e.commit(ctx, e.old)
	for _, p := range [][2]*environment{{old, e}, {e, old}, {e, e}} {
		if err == nil {
			err = runDuo(ctx, p[0], p[1])
		}
	}
	return err
}

// runDuo has a client and a server do every check.
func runDuo(ctx context.Context, client, server *environment) (err error) {
	d := &duo{client: client}
	if d.server, err = server.serve(ctx, "--metrics", "off"); err != nil {
		return err
	}
	defer d.server.Kill()
	minus := *server
	if minus.command, err = proc.Build(ctx, server.source, module+"/"+minusProgram, server.dir); err != nil {
		return err
	}
	if d.minus, err = minus.serve(ctx); err != nil {
		return err
	}
	defer d.minus.Kill()
	for _, c := range duoChecks {
		for _, codec := range c.codecs {
			ctx, cancel := context.WithTimeoutCause(ctx, checkWait, errSlow)
			err := c.run(d, ctx, codec)
			cancel()
			what, word := fmt.Sprintf("%s client, %s server: %s, codec %s", client.name, server.name, c.name, codec), "ok  "
			if err != nil {
				word = "FAIL"
				client.add("%s: %v\nlog of the server:\n%s", what, err, d.server.Log.Tail())
			}
			fmt.Fprintln(client.out, word, what)
		}
	}
	return nil
}

// run runs a command of the client to its end; when ctx ends it is interrupted.
func (d *duo) run(ctx context.Context, stdin io.Reader, args ...string) ([]byte, error) {
	cmd := proc.New(exec.CommandContext(ctx, d.client.command, append(args, "--server", d.server.address)...))
	cmd.Stdin = stdin
	out, err := cmd.Output()
	return out, errors.Join(err, context.Cause(ctx))
}

// send runs a command with a tensor that comes over stdin: w, in that reader if there
// is one.
func (d *duo) send(ctx context.Context, w window, in io.Reader, args ...string) ([]byte, error) {
	if in == nil {
		in = bytes.NewReader(w.data())
	}
	desc := w.desc()
	return d.run(ctx, in, append(args, "--dtype", desc.DType.String(), "--shape", fmt.Sprint(desc.Shape[0]))...)
}

func (d *duo) call(ctx context.Context, codec string) error {
	for _, n := range []int{0, 4, 30_000, 5*mib + 4} {
		w := pick(1, n)
		got, err := d.send(ctx, w, nil, "run", "relu", "--codec", codec)
		if err = errors.Join(err, same("relu", got, w.relu())); err != nil {
			return err
		}
	}
	return nil
}

func (d *duo) inputs(ctx context.Context, codec string) error {
	const n = 3*mib + 1
	args := []string{"run", "minus", "--codec", codec, "--raw"}
	for name, w := range map[string]window{"a": pick(1, n), "b": pick(2, n)} {
		var npy bytes.Buffer
		if err := tensorfile.WriteNPYHeader(&npy, w.desc()); err != nil {
			return err
		}
		npy.Write(w.data())
		file := filepath.Join(d.client.dir, name+".npy")
		if err := os.WriteFile(file, npy.Bytes(), 0o644); err != nil {
			return err
		}
		args = append(args, "--input", name+"="+file)
	}
	want := bytes.Clone(pick(1, n).data())
	for i, b := range pick(2, n).data() {
		want[i] -= b
	}
	d = &duo{client: d.client, server: d.minus}
	got, err := d.run(ctx, nil, args...)
	return errors.Join(err, same("minus", got, want))
}

func (d *duo) store(ctx context.Context, codec string) error {
	const name = "old-new/x"
	w := pick(3, 5*mib+1)
	_, err := d.send(ctx, w, nil, "push", name+"=-", "--codec", codec)
	list, e := d.run(ctx, nil, "ls", "old-new/*")
	if !bytes.Contains(list, []byte(name)) {
		e = errors.Join(e, fmt.Errorf("after a push, ls says %q", list))
	}
	got, e2 := d.run(ctx, nil, "pull", name, "--raw", "--codec", codec)
	_, e3 := d.run(ctx, nil, "rm", name)
	_, gone := d.run(ctx, nil, "pull", name, "--raw")
	return errors.Join(err, e, e2, same("pull", got, w.data()), e3, ends(gone, exitFailure, name))
}

// cancel interrupts a client whose call is half sent.
func (d *duo) cancel(ctx context.Context, codec string) error {
	calling, interrupt := context.WithCancel(ctx)
	defer interrupt()
	w := pick(4, 5*mib+1)
	in, half, err := os.Pipe() // not a reader, for which run would wait
	if err != nil {
		return err
	}
	defer half.Close()
	defer in.Close()
	go func() { _, _ = half.Write(w.data()[:3*mib]) }() // ends with the pipe
	ended := make(chan error, 1)
	go func() { // ends with the client
		_, err := d.send(calling, w, in, "run", "echo", "--codec", codec)
		ended <- err
	}()
	if err := d.calls(ctx, 1); err != nil {
		return err
	}
	interrupt()
	if err := errors.Join(ends(<-ended, exitInterrupted, "interrupted"), d.calls(ctx, 0)); err != nil {
		return err
	}
	return d.call(ctx, codec)
}

// drain tells the server to stop while a call is half sent.
func (d *duo) drain(ctx context.Context, codec string) error {
	w := pick(5, 5*mib+1)
	let, ended := make(chan struct{}), make(chan error, 1)
	go func() { // ends with the client
		got, err := d.send(ctx, w, held(w.data(), let), "run", "echo", "--codec", codec)
		ended <- errors.Join(err, same("echo", got, w.data()))
	}()
	err := d.refusal(ctx)
	close(let)
	return errors.Join(err, <-ended, d.server.Stopped())
}

// refusal tells the server to stop and wants the next call to be refused.
func (d *duo) refusal(ctx context.Context) error {
	err := d.calls(ctx, 1)
	if err == nil {
		err = d.server.Process.Signal(syscall.SIGTERM)
	}
	for err == nil && !strings.Contains(d.server.Log.Tail(), "msg=draining") {
		err = pause(ctx, pollEvery)
	}
	if err != nil {
		return fmt.Errorf("the server does not drain: %w", err)
	}
	_, err = d.send(ctx, pick(6, 4), nil, "run", "relu")
	return ends(err, exitConnection, "server is draining")
}

// calls waits until the server's info counts n open calls.
func (d *duo) calls(ctx context.Context, n int) error {
	for {
		text, err := d.run(ctx, nil, "info", "--json")
		if err != nil {
			return err
		}
		var info struct{ Counters struct{ Calls *int } }
		if err := json.Unmarshal(text, &info); err != nil || info.Counters.Calls == nil {
			return fmt.Errorf("info says %s: %w", text, err)
		}
		if *info.Counters.Calls == n {
			return nil
		}
		if err := pause(ctx, pollEvery); err != nil {
			return fmt.Errorf("info counts %d open calls, not %d: %w", *info.Counters.Calls, n, err)
		}
	}
}

// ends wants the error of a program that ended with a code and said a text.
func ends(err error, code int, text string) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == code && strings.Contains(err.Error(), text) {
		return nil
	}
	return fmt.Errorf("not ended with code %d and %q, but: %w", code, text, err)
}
