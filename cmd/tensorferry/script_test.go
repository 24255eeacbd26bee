package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/internal/cli/demo"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// raceOptions is what the programs of tests run with: under the race detector, a program
// otherwise sleeps for a second before it exits, and the scripts run more than a thousand.
// A race is reported, and the exit code is 66, as ever. What GORACE says already wins.
var raceOptions = "atexit_sleep_ms=0 " + os.Getenv("GORACE")

// scriptsAtOnce is how many scripts run at a time, unless -parallel says it: some only wait.
const scriptsAtOnce = "4"

func TestMain(m *testing.M) {
	_ = os.Setenv("GORACE", raceOptions)
	_ = flag.Set("test.parallel", scriptsAtOnce)
	testscript.Main(heeding{m}, map[string]func(){"tensorferry": main, "halting": halting})
}

// heeding runs tests whose programs heed the signals that this process was started to ignore,
// as under nohup or in the background of a script: what catches a signal does not pass it on as
// ignored.
type heeding struct{ *testing.M }

func (h heeding) Run() int {
	for _, s := range []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT} {
		if signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	return h.M.Run()
}

// programWait is how long a program of a test may run. Under load none takes a tenth of it.
const programWait = 3 * time.Minute

// program is one that has not been started. It is killed when the test ends, or all tests do,
// however that is, and after programWait.
func program(t testing.TB, name string, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(t.Context(), programWait)
	t.Cleanup(cancel)
	c := exec.CommandContext(ctx, name, args...)
	c.WaitDelay = time.Second // a child of it may hold its output open
	diesWithTest(c)
	return c
}

// halting is a program of the scripts: halting SERVER DURATION [FILE]. It writes half of
// FILE, or nothing, waits until the server is so much older, and writes the rest of it, or
// what comes on stdin.
func halting() {
	exit := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "halting:", err)
			os.Exit(1)
		}
	}
	rest, err := time.ParseDuration(os.Args[2])
	exit(err)
	var data []byte
	if len(os.Args) > 3 {
		data, err = os.ReadFile(os.Args[3])
		exit(err)
	}
	_, err = os.Stdout.Write(data[:len(data)/2])
	exit(err)
	c, err := client.Dial(os.Args[1], client.Config{})
	exit(err)
	age := func() int64 {
		info, err := c.Info(context.Background())
		exit(err)
		return info.Uptime.Milliseconds()
	}
	tick := time.NewTicker(50 * time.Millisecond)
	for until := age() + rest.Milliseconds(); age() < until; <-tick.C {
	}
	_, err = os.Stdout.Write(data[len(data)/2:])
	exit(err)
	if data == nil {
		_, err = io.Copy(os.Stdout, os.Stdin)
		exit(err)
	}
}

// TestCommandsDoWhatTheScriptsSay runs testdata/script/*.txt. Beside testscript's
// own commands and $GOLDEN, a folder of files that NumPy wrote, there are
//
//	exits CODE PROGRAM [ARG...]      run a program that ends with this code
//	server [FLAG...]                 start a server until the script's end; $SERVER is its address
//	npy FILE DTYPE [DIM...]          write a .npy file whose bytes count up
//	silent                           listen at $SERVER, and take no connection
//	models DIR                       write the demo's models, one folder each
//	safetensors FILE COUNT DIM [KEY=VALUE...]  write COUNT float32 tensors t0, t1, …, each filled with its number, and metadata
//	header FILE JSON BYTES           write a .safetensors file of this header and so many bytes that count up
//	halting SERVER DURATION [FILE]   a program: a pipe that rests
//	json                             the last stdout is one JSON value
func TestCommandsDoWhatTheScriptsSay(t *testing.T) {
	testkit.Start(t)
	deadline, _ := t.Deadline() // by then their programs are killed
	// Not parallel, and in a test of its own, so that its goroutines end with it.
	t.Run("script", func(t *testing.T) {
		testscript.Run(t, testscript.Params{
			Dir: "testdata/script", RequireExplicitExec: true, Deadline: deadline,
			Setup: func(e *testscript.Env) error {
				golden, err := filepath.Abs("../../tensorfile/testdata")
				e.Setenv("GOLDEN", golden)
				e.Setenv("GORACE", raceOptions)
				return err
			},
			Cmds: map[string]func(*testscript.TestScript, bool, []string){
				"exits": scriptExits, "server": scriptServer, "silent": scriptSilent, "npy": scriptNPY, "models": scriptModels,
				"safetensors": scriptSafetensors, "header": scriptHeader, "json": scriptJSON,
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
		switch a {
		case "--tls-cert", "--tls-key", "--tls-client-ca", "--token-file":
			args[i+1] = ts.MkAbs(args[i+1])
		case "--model":
			name, folder, named := strings.Cut(args[i+1], "=")
			if !named {
				args[i+1] = ts.MkAbs(name)
				continue
			}
			args[i+1] = name + "=" + ts.MkAbs(folder)
		}
	}
	c, address, err := demo.Start(context.Background(), exe, args...)
	ts.Check(err)
	ts.Defer(func() { _ = c.Stop() })
	ts.Setenv("SERVER", address)
}

func scriptSilent(ts *testscript.TestScript, _ bool, _ []string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	ts.Defer(func() { _ = l.Close() })
	ts.Setenv("SERVER", l.Addr().String())
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

func scriptSafetensors(ts *testscript.TestScript, _ bool, args []string) {
	count, err := strconv.Atoi(args[1])
	ts.Check(err)
	dim, err := strconv.Atoi(args[2])
	ts.Check(err)
	metadata := map[string]string{}
	for _, text := range args[3:] {
		k, v, _ := strings.Cut(text, "=")
		metadata[k] = v
	}
	ts.Check(writeFilled(ts.MkAbs(args[0]), count, dim, metadata))
}

// writeFilled writes a .safetensors file of count float32 tensors t0, t1, …, each filled
// with its number, and metadata.
func writeFilled(path string, count, dim int, metadata map[string]string) error {
	entries := make([]tensorfile.Entry, count)
	var data []byte
	for i := range entries {
		entries[i] = tensorfile.Entry{
			Name: fmt.Sprint("t", i), Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(dim)}},
		}
		for range dim {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(i)))
		}
	}
	header, err := tensorfile.SafetensorsHeader(entries, metadata)
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(header, data...), 0o666)
}

func scriptHeader(ts *testscript.TestScript, _ bool, args []string) {
	n, err := strconv.Atoi(args[2])
	ts.Check(err)
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(args[1])))
	file = append(file, args[1]...)
	for i := range n {
		file = append(file, byte(i))
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), file, 0o666))
}

func scriptJSON(ts *testscript.TestScript, _ bool, _ []string) {
	var v any
	ts.Check(json.Unmarshal([]byte(ts.ReadFile("stdout")), &v))
}

// startWait is how long a command may take to print what a test waits for.
const startWait = 30 * time.Second

// started runs the command until it has printed what matches, and returns it with
// the match.
func started(t *testing.T, text string, args ...string) (*exec.Cmd, []string) {
	t.Helper()
	c := program(t, "tensorferry", args...)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	c.Stderr = c.Stdout // one pipe for both
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill() })                         // it has ended, unless the test failed
	late := time.AfterFunc(startWait, func() { _ = c.Process.Kill() }) // which ends its output
	defer late.Stop()
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
			c, m := started(t, `process (\d+)`, "demo")
			pid, err := strconv.Atoi(m[1])
			require.NoError(t, err)
			require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP)) // so that the demo cannot end by itself
			require.NoError(t, c.Process.Signal(end))
			time.AfterFunc(time.Second, func() { _ = syscall.Kill(pid, syscall.SIGCONT) }) // when the signal has arrived, on a busy machine too
			var exit *exec.ExitError
			if err := c.Wait(); !errors.As(err, &exit) || end == os.Interrupt && exit.ExitCode() != fail.ExitInterrupted {
				t.Errorf("ended with %v", err)
			}
			testkit.Eventually(t, func() bool { return gone(pid) }, "the demo's server to end")
		})
	}
}

func TestAnInterruptedServerEndsWell(t *testing.T) {
	c, _ := started(t, `msg=listening .*models=\d+`, "serve", "--listen", "127.0.0.1:0", "--metrics", "off")
	require.NoError(t, c.Process.Signal(os.Interrupt))
	require.NoError(t, c.Wait())
}

func TestACommandWhoseTerminalIsClosedLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	c := fed(t, "run", "echo", "--server", serving(t), "--dtype", "int8", "--shape", "1000000", "--output", filepath.Join(dir, "y"))
	require.NoError(t, c.Process.Signal(syscall.SIGHUP))
	var exit *exec.ExitError
	require.ErrorAs(t, c.Wait(), &exit)
	require.Equal(t, fail.ExitInterrupted, exit.ExitCode())
	require.Empty(t, leftIn(t, dir))
}

func TestUnderNohupAClosedTerminalIsIgnored(t *testing.T) {
	file := filepath.Join(t.TempDir(), "y")
	c := program(t, "sh", "-c", `trap "" HUP; exec tensorferry run echo --dtype int8 --shape 1000000 --server "$0" --output "$1"`, serving(t), file)
	stdin, err := c.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	_, err = stdin.Write(make([]byte, 500_000)) // more than a pipe holds, so it is under way
	require.NoError(t, err)
	require.NoError(t, c.Process.Signal(syscall.SIGHUP))
	_, err = stdin.Write(make([]byte, 500_000))
	require.NoError(t, err)
	require.NoError(t, stdin.Close())
	require.NoError(t, c.Wait())
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.EqualValues(t, 1_000_000, info.Size())
}

// serving starts a server that ends with the test, and returns its address.
func serving(t *testing.T, flags ...string) string {
	t.Helper()
	exe, err := exec.LookPath("tensorferry")
	require.NoError(t, err)
	server, address, err := demo.Start(context.Background(), exe, flags...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	return address
}

// fed starts the command and gives it so much on stdin that it must be under way: a
// pipe holds less.
func fed(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	c := program(t, "tensorferry", args...)
	stdin, err := c.StdinPipe() // never all
	require.NoError(t, err)
	t.Cleanup(func() { _ = stdin.Close() }) // the command has ended
	require.NoError(t, c.Start())
	for range 2 {
		_, err = stdin.Write(make([]byte, 200_000))
		require.NoError(t, err)
	}
	return c
}

// interrupted interrupts a command, which then ends with the code for that.
func interrupted(t *testing.T, c *exec.Cmd) {
	t.Helper()
	require.NoError(t, c.Process.Signal(os.Interrupt))
	var exit *exec.ExitError
	require.ErrorAs(t, c.Wait(), &exit)
	require.Equal(t, fail.ExitInterrupted, exit.ExitCode())
}

// leftIn lists what is in a folder.
func leftIn(t *testing.T, dir string) []os.DirEntry {
	t.Helper()
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	return left
}

func TestAnInterruptedRunLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	interrupted(t, fed(t, "run", "echo", "--server", serving(t), "--dtype", "int8", "--shape", "1000000", "--output", filepath.Join(dir, "y")))
	if left := leftIn(t, dir); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestARunIsRepeatedWhenItsServerComesBack(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	at := "unix:" + filepath.Join(dir, "socket")
	serve := []string{"serve", "--listen", at, "--slow", "--metrics", "off"}
	server, _ := started(t, "msg=listening", serve...)
	in, out := filepath.Join(dir, "x.npy"), filepath.Join(dir, "y.npy")
	require.NoError(t, program(t, "tensorferry", "gen", "--shape", "100", "-o", in).Run())
	run := program(t, "tensorferry", "run", "slow", "-p", "delay=1s", "-i", in, "-o", out, "--server", at, "--retry", "exponential")
	var said bytes.Buffer
	run.Stderr = &said
	require.NoError(t, run.Start())
	cl, err := client.Dial(at, client.Config{})
	require.NoError(t, err)
	defer cl.Close()
	testkit.Eventually(t, func() bool {
		info, err := cl.Info(t.Context())
		return err == nil && info.Counters["calls"] == 1
	}, "the call")
	require.NoError(t, server.Process.Kill())
	_ = server.Wait()
	server, _ = started(t, "msg=listening", serve...)
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	require.NoError(t, run.Wait(), said.String())
	require.Contains(t, said.String(), "again in")
	x, err := os.ReadFile(in)
	require.NoError(t, err)
	y, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Equal(t, x, y)
}

func TestAnInterruptedPushStoresNothing(t *testing.T) {
	server := serving(t)
	interrupted(t, fed(t, "push", "x=-", "--server", server, "--dtype", "int8", "--shape", "1000000"))
	out, err := program(t, "tensorferry", "ls", "--server", server).CombinedOutput()
	if err != nil || strings.Contains(string(out), "int8") {
		t.Errorf("%v: it lists %s", err, out)
	}
}

func TestAnInterruptedPushSaysWhatIsStored(t *testing.T) {
	testkit.Start(t)
	server, dir := serving(t), t.TempDir()
	args := []string{"push", "--server", server, "--dtype", "int8", "--shape", "1000000"}
	for i := range 400 { // half a second
		file := filepath.Join(dir, strconv.Itoa(i))
		require.NoError(t, errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 1_000_000)))
		args = append(args, file)
	}
	cl, err := client.Dial(server, client.Config{})
	require.NoError(t, err)
	defer cl.Close()
	stored := func() (names []string) {
		list, _, err := cl.List(t.Context(), "")
		require.NoError(t, err)
		for _, s := range list {
			names = append(names, s.Name)
		}
		return names
	}
	var out bytes.Buffer
	c := program(t, "tensorferry", args...)
	c.Stdout = &out
	require.NoError(t, c.Start())
	testkit.Eventually(t, func() bool { return len(stored()) > 32 }, "the first tensors: as many may be on their way")
	interrupted(t, c)
	there := stored()
	for line := range strings.Lines(out.String()) { // perhaps none: a busy program has not heard of them
		if name, _, _ := strings.Cut(line, " "); !slices.Contains(there, name) {
			t.Errorf("it says %q", line)
		}
	}
	if len(there) == 400 {
		t.Error("it was not interrupted")
	}
}

func TestAnInterruptedPullLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	c := program(t, "tensorferry", "pull", "--source", "gen", "-p", "shape=1000000000", "--server", serving(t), "-o", filepath.Join(dir, "x.npy"))
	require.NoError(t, c.Start())
	testkit.Eventually(t, func() bool {
		left := leftIn(t, dir)
		if len(left) == 0 {
			return false
		}
		info, err := left[0].Info()
		return err == nil && info.Size() > 1<<20
	}, "the first bytes to be written")
	interrupted(t, c)
	if left := leftIn(t, dir); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestAPullIntoAPipeThatNobodyReadsCanBeInterrupted(t *testing.T) {
	c := program(t, "tensorferry", "pull", "--source", "gen", "-p", "shape=1000000000", "--server", serving(t))
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	interrupted(t, c)
}

func TestACopyToAServerThatSaysNothingCanBeInterrupted(t *testing.T) {
	server := serving(t)
	if out, err := program(t, "sh", "-c", "tensorferry gen --shape 10 | tensorferry push x=- --server "+server).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer mute.Close()
	c := program(t, "tensorferry", "cp", "x", "y", "--server", server, "--to", mute.Addr().String())
	require.NoError(t, c.Start())
	conn, err := mute.Accept()
	require.NoError(t, err)
	defer conn.Close()
	interrupted(t, c)
}

func TestACommandOfAnotherKindOfServerSaysSo(t *testing.T) {
	testkit.Start(t)
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) })
	plain, secure := httptest.NewServer(page), httptest.NewUnstartedServer(page)
	defer plain.Close()
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS()
	defer secure.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	other := grpc.NewServer()
	go func() { _ = other.Serve(l) }()
	defer other.Stop()
	file := filepath.Join(t.TempDir(), "x.npy")
	require.NoError(t, program(t, "tensorferry", "gen", "--shape", "2", "-o", file).Run())
	for at, says := range map[net.Addr]string{plain.Listener.Addr(): "not a tensorferry server: ", secure.Listener.Addr(): "ends connections at once", l.Addr(): "not a tensorferry server: "} {
		for _, args := range [][]string{{"ls"}, {"push", file}, {"pull", "x"}, {"run", "relu", "-i", file}} {
			out, err := program(t, "tensorferry", append(args, "--server", at.String())...).CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != fail.ExitConnection {
				t.Errorf("%v: %v", args, err)
			}
			require.Contains(t, string(out), says, args)
			require.Equal(t, says != "ends connections at once", strings.Contains(string(out), "\nhint: "+reason.Find(reason.NotServer, "").Do+"\n"), "%s", out)
		}
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
