package main

import (
	"bytes"
	"context"
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
	name, codec string
	run         func(d *duo, ctx context.Context, codec string) error
}{
	{"call", "none", (*duo).call},
	{"call", "lz4", (*duo).call},
	{"call with two inputs", "none", (*duo).inputs},
	{"call with two inputs", "lz4", (*duo).inputs},
	{"push, ls, pull, rm", "none", (*duo).store},
	{"push, ls, pull, rm", "lz4", (*duo).store},
	{"interrupted call", "none", (*duo).cancel},
	{"drain", "none", (*duo).drain},
}

func runOldNew(ctx context.Context, e *environment, args []string) error {
	f := e.flags("old-new")
	against := f.String("against", "HEAD", "`commit` of the old program")
	if err := e.ready(ctx, f, args); err != nil {
		return err
	}
	old, err := e.commit(ctx, *against)
	for _, p := range []struct{ client, server *environment }{{old, e}, {e, old}, {e, e}} {
		if err == nil {
			err = runDuo(ctx, p.client, p.server)
		}
	}
	return e.verdict(ctx, "old-new", err)
}

var errSlow = fmt.Errorf("no end after %v", checkWait)

// runDuo has a client and a server do every check.
func runDuo(ctx context.Context, client, server *environment) (err error) {
	d := &duo{client: client}
	if d.server, err = server.serve(ctx, "--metrics", "off"); err != nil {
		return err
	}
	defer d.server.Kill()
	minus := *server
	if minus.command, err = server.compile(ctx, ".", module+"/"+minusProgram); err != nil {
		return err
	}
	if d.minus, err = minus.serve(ctx); err != nil {
		return err
	}
	defer d.minus.Kill()
	for _, c := range duoChecks {
		ctx, cancel := context.WithTimeoutCause(ctx, checkWait, errSlow)
		err := c.run(d, ctx, c.codec)
		cancel()
		what, word := fmt.Sprintf("%s client, %s server: %s, codec %s", client.name, server.name, c.name, c.codec), "ok  "
		if err != nil {
			word = "FAIL"
			client.add("%s: %v\nlog of the server:\n%s", what, err, d.server.Log.Tail())
		}
		fmt.Fprintln(client.out, word, what)
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

// send runs a command with a tensor that comes over stdin.
func (d *duo) send(ctx context.Context, w window, args ...string) ([]byte, error) {
	return d.run(ctx, bytes.NewReader(w.data()), append(args, raw(w)...)...)
}

// raw are the flags for a tensor that comes over stdin.
func raw(w window) []string {
	d := w.desc()
	return []string{"--dtype", d.DType.String(), "--shape", fmt.Sprint(d.Shape[0])}
}

func (d *duo) call(ctx context.Context, codec string) error {
	for _, n := range []int{0, 4, 30_000, 5*mib + 4} {
		w := pick(1, n)
		got, err := d.send(ctx, w, "run", "relu", "--codec", codec)
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
	if _, err := d.send(ctx, w, "push", name+"=-", "--codec", codec); err != nil {
		return err
	}
	list, err := d.run(ctx, nil, "ls", "old-new/*")
	if err != nil {
		return err
	}
	if !bytes.Contains(list, []byte(name)) {
		return fmt.Errorf("after a push, ls says %q", list)
	}
	got, err := d.run(ctx, nil, "pull", name, "--raw", "--codec", codec)
	if err = errors.Join(err, same("pull", got, w.data())); err != nil {
		return err
	}
	if _, err := d.run(ctx, nil, "rm", name); err != nil {
		return err
	}
	_, err = d.run(ctx, nil, "pull", name, "--raw") // it is gone
	return ends(err, exitFailure, name)
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
		_, err := d.run(calling, in, append([]string{"run", "echo", "--codec", codec}, raw(w)...)...)
		ended <- err
	}()
	if err := d.calls(ctx, 1); err != nil {
		return err
	}
	interrupt()
	if err := ends(<-ended, exitInterrupted, "interrupted"); err != nil {
		return err
	}
	if err := d.calls(ctx, 0); err != nil {
		return err
	}
	return d.call(ctx, codec)
}

// drain tells the server to stop while a call is half sent.
func (d *duo) drain(ctx context.Context, codec string) error {
	w := pick(5, 5*mib+1)
	let := make(chan struct{})
	var got []byte
	ended := make(chan error, 1)
	go func() { // ends with the client
		var err error
		got, err = d.run(ctx, held(w.data(), let), append([]string{"run", "echo", "--codec", codec}, raw(w)...)...)
		ended <- err
	}()
	err := d.refusal(ctx)
	close(let)
	if err = errors.Join(err, <-ended); err != nil {
		return err
	}
	return errors.Join(same("echo", got, w.data()), d.server.Stopped())
}

// refusal tells the server to stop and wants the next call to be refused.
func (d *duo) refusal(ctx context.Context) error {
	if err := d.calls(ctx, 1); err != nil {
		return err
	}
	if err := d.server.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	for !strings.Contains(d.server.Log.Tail(), "msg=draining") {
		if err := pause(ctx, pollEvery); err != nil {
			return fmt.Errorf("the server does not drain: %w", err)
		}
	}
	_, err := d.send(ctx, pick(6, 4), "run", "relu")
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
	if err == nil {
		return fmt.Errorf("ended well, not with code %d and %q", code, text)
	}
	if errors.As(err, &exit) && exit.ExitCode() == code && strings.Contains(err.Error(), text) {
		return nil
	}
	return fmt.Errorf("not ended with code %d and %q: %w", code, text, err)
}
