package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"tensorferry": main})
}

// TestCommandsDoWhatTheScriptsSay runs testdata/script/*.txt. Beside testscript's
// own commands there are
//
//	exits CODE PROGRAM [ARG...]      run a program that ends with this code
//	server [FLAG...]                 start a server until the script's end; $SERVER is its address
//	npy FILE DTYPE [DIM...]          write a .npy file whose bytes count up
//	models DIR                       write the demo's models, one folder each
func TestCommandsDoWhatTheScriptsSay(t *testing.T) {
	testkit.Start(t)
	// Not parallel, and in a test of its own, so that its goroutines end with it.
	t.Run("script", func(t *testing.T) {
		testscript.Run(t, testscript.Params{
			Dir: "testdata/script", RequireExplicitExec: true,
			Cmds: map[string]func(*testscript.TestScript, bool, []string){
				"exits": scriptExits, "server": scriptServer, "npy": scriptNPY, "models": scriptModels,
			},
		})
	})
}

func scriptExits(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	var exit *exec.ExitError
	switch err := ts.Exec(args[1], args[2:]...); {
	case errors.As(err, &exit):
		got = exit.ExitCode()
	case err != nil:
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("exit %d, want %d", got, want)
	}
}

func scriptServer(ts *testscript.TestScript, _ bool, args []string) {
	exe, err := exec.LookPath("tensorferry")
	ts.Check(err)
	for i, a := range args {
		if a == "--model" {
			name, folder, named := strings.Cut(args[i+1], "=")
			if !named {
				args[i+1] = ts.MkAbs(name)
				continue
			}
			args[i+1] = name + "=" + ts.MkAbs(folder)
		}
	}
	c, err := startServer(context.Background(), exe, args...)
	ts.Check(err)
	ts.Defer(c.stop)
	ts.Setenv("SERVER", c.address)
}

func scriptNPY(ts *testscript.TestScript, _ bool, args []string) {
	dtype, err := tensor.ParseDataType(args[1])
	ts.Check(err)
	shape, err := tensor.ParseShape(strings.Join(args[2:], ","))
	ts.Check(err)
	d := tensor.Desc{DType: dtype, Shape: shape}
	n, err := d.Bytes()
	ts.Check(err)
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i)
	}
	f, err := os.Create(ts.MkAbs(args[0]))
	ts.Check(err)
	ts.Check(tensorfile.WriteNPYHeader(f, d))
	_, err = f.Write(data)
	ts.Check(errors.Join(err, f.Close()))
}

func scriptModels(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(os.CopyFS(ts.MkAbs(args[0]), fashion.ModelFS()))
}

// started runs the command until it has printed what matches, and returns it with
// the match.
func started(t *testing.T, text string, args ...string) (*exec.Cmd, []string) {
	t.Helper()
	exe, err := exec.LookPath("tensorferry")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), exe, args...)
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stderr = c.Stdout // one pipe for both
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill() }) // it has ended, unless the test failed
	pattern, all := regexp.MustCompile(text), ""
	for lines := bufio.NewScanner(out); lines.Scan(); {
		all += lines.Text() + "\n"
		if m := pattern.FindStringSubmatch(all); m != nil {
			return c, m
		}
	}
	t.Fatalf("%q is not in what it printed:\n%s", text, all)
	return nil, nil
}

func TestAnInterruptedDemoLeavesNoServerBehind(t *testing.T) {
	for name, end := range map[string]os.Signal{"interrupted": os.Interrupt, "killed": os.Kill} {
		t.Run(name, func(t *testing.T) {
			c, m := started(t, `(?s)process (\d+).* times over`, "demo", "--times", "4000")
			pid, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Process.Signal(end); err != nil {
				t.Fatal(err)
			}
			var exit *exec.ExitError
			if err := c.Wait(); !errors.As(err, &exit) || end == os.Interrupt && exit.ExitCode() != exitInterrupted {
				t.Errorf("ended with %v", err)
			}
			testkit.Eventually(t, func() bool { return gone(pid) }, "the demo's server to end")
		})
	}
}

func TestAnInterruptedServerEndsWell(t *testing.T) {
	c, _ := started(t, `msg=listening .*models=5`, "serve", "--listen", "127.0.0.1:0", "--metrics", "off")
	if err := c.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("ended with %v", err)
	}
}

func TestAnInterruptedRunLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	exe, err := exec.LookPath("tensorferry")
	if err != nil {
		t.Fatal(err)
	}
	server, err := startServer(t.Context(), exe)
	if err != nil {
		t.Fatal(err)
	}
	defer server.stop()
	c := exec.CommandContext(t.Context(), exe, "run", "echo", "--server", server.address, "--dtype", "int8", "--shape", "1000000", "--output", filepath.Join(dir, "y"))
	stdin, err := c.StdinPipe() // never the whole tensor
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it takes more than a pipe holds only once its call is open
		if _, err := stdin.Write(make([]byte, 200_000)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := c.Wait(); !errors.As(err, &exit) || exit.ExitCode() != exitInterrupted {
		t.Errorf("ended with %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// gone reports whether a process has ended. One that nobody waits for any more
// may stay as an entry until the system's first process looks.
func gone(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(text), ") Z ")
}
