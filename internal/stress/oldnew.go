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
	dir    string  // for files
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
	if err != nil {
		return err
	}
	count := map[bool]int{}
	for _, p := range []struct{ client, server *environment }{{old, e}, {e, old}, {e, e}} {
		if err := runDuo(ctx, p.client, p.server, count); err != nil {
			return err
		}
	}
	fmt.Fprintf(e.out, "%d passed, %d failed\n", count[true], count[false])
	if count[false] > 0 {
		return errFailed
	}
	return nil
}

var errSlow = fmt.Errorf("no end after %v", checkWait)

// runDuo has a client and a server do every check and counts those that passed, and
// those that did not.
func runDuo(ctx context.Context, client, server *environment, count map[bool]int) error {
	d := &duo{client: client, dir: client.dir}
	var err error
	if d.server, err = server.serve(ctx, "--metrics", "off"); err != nil {
		return err
	}
	defer d.server.kill()
	if d.minus, err = server.serveMinus(ctx); err != nil {
		return err
	}
	defer d.minus.kill()
	for _, c := range duoChecks {
		ctx, cancel := context.WithTimeoutCause(ctx, checkWait, errSlow)
		err := c.run(d, ctx, c.codec)
		cancel()
		count[err == nil]++
		what := fmt.Sprintf("%s client, %s server: %s, codec %s", client.name, server.name, c.name, c.codec)
		if err == nil {
			fmt.Fprintln(client.out, "ok  ", what)
		} else {
			fmt.Fprintf(client.out, "FAIL %s\n%v\nlog of the server:\n%s\n", what, err, d.server.log.tail())
		}
	}
	return nil
}

// serveMinus starts minus.
func (e *environment) serveMinus(ctx context.Context) (*daemon, error) {
	m := *e
	var err error
	if m.command, err = e.compile(ctx, ".", module+"/"+minusProgram); err != nil {
		return nil, err
	}
	return m.serve(ctx)
}

// run runs a command of the client to its end. When ctx ends it is interrupted, and
// killed if that does not end it.
func (d *duo) run(ctx context.Context, stdin io.Reader, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, d.client.command, append(args, "--server", d.server.address)...)
	cmd.Env = clean(os.Environ())
	cmd.Stdin = stdin
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = stopWait
	out, err := output(cmd)
	return out, errors.Join(err, context.Cause(ctx))
}

// raw are the flags for a tensor that comes over stdin.
func raw(w window, args ...string) []string {
	d := w.desc()
	return append(args, "--dtype", d.DType.String(), "--shape", fmt.Sprint(d.Shape[0]))
}

func (d *duo) call(ctx context.Context, codec string) error {
	for _, n := range []int{0, 4, 30_000, 5*mib + 4} {
		w := pick(1, n)
		got, err := d.run(ctx, bytes.NewReader(w.data()), raw(w, "run", "relu", "--codec", codec)...)
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
		file := filepath.Join(d.dir, name+".npy")
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
	if _, err := d.run(ctx, bytes.NewReader(w.data()), raw(w, "push", name+"=-", "--codec", codec)...); err != nil {
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

// cancel interrupts a client whose call is being computed.
func (d *duo) cancel(ctx context.Context, codec string) error {
	calling, interrupt := context.WithCancel(ctx)
	defer interrupt()
	ended := make(chan error, 1)
	go func() { // ends with the client
		w := pick(4, mib+1)
		_, err := d.run(calling, bytes.NewReader(w.data()), raw(w, "run", "slow", "--param", "delay=1m", "--codec", codec)...)
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
		out, err := d.run(ctx, &held{data: w.data(), let: let}, raw(w, "run", "echo", "--codec", codec)...)
		got = out
		ended <- err
	}()
	err := d.refusal(ctx)
	close(let)
	if err = errors.Join(err, <-ended); err != nil {
		return err
	}
	err = errors.Join(same("echo", got, w.data()), d.server.wait())
	if complaints, n := d.server.log.complained(); n > 0 {
		err = errors.Join(err, fmt.Errorf("the server's log has %d complaints: %q", n, complaints))
	}
	return err
}

// refusal tells the server to stop and wants the next call to be refused.
func (d *duo) refusal(ctx context.Context) error {
	if err := d.calls(ctx, 1); err != nil {
		return err
	}
	if err := d.server.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	for !strings.Contains(d.server.log.tail(), "msg=draining") {
		if err := pause(ctx, pollEvery); err != nil {
			return fmt.Errorf("the server does not drain: %w", err)
		}
	}
	w := pick(6, 4)
	_, err := d.run(ctx, bytes.NewReader(w.data()), raw(w, "run", "relu")...)
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
