package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// operated is a server in a process of its own, and all that it says.
type operated struct {
	t                *testing.T
	cmd              *exec.Cmd
	address, metrics string

	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

// Write copies p.
func (o *operated) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *operated) said() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// says waits until a pattern matches what the server has said.
func (o *operated) says(pattern string) []string {
	o.t.Helper()
	var m []string
	testkit.Eventually(o.t, func() bool {
		m = regexp.MustCompile(pattern).FindStringSubmatch(o.said())
		return m != nil
	}, pattern)
	return m
}

// operate starts a server and waits until it listens.
func operate(t *testing.T, args ...string) *operated {
	t.Helper()
	exe, err := exec.LookPath("tensorferry")
	require.NoError(t, err)
	o := &operated{t: t, cmd: exec.CommandContext(t.Context(), exe, append([]string{"serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"}, args...)...)}
	o.cmd.Stderr = o
	require.NoError(t, o.cmd.Start())
	t.Cleanup(func() { _ = o.cmd.Process.Kill() }) // it has ended, unless the test failed
	m := o.says(`msg=listening address=(\S+) metrics=(\S+) models=4 store=(\S+)\n`)
	o.address, o.metrics = m[1], m[2]
	return o
}

// call opens a call that does not end, and returns when the server has it.
func (o *operated) call() {
	o.t.Helper()
	exe, err := exec.LookPath("tensorferry")
	require.NoError(o.t, err)
	c := exec.CommandContext(o.t.Context(), exe, "run", "echo", "--server", o.address, "--dtype", "int8", "--shape", "1000000",
		"--output", filepath.Join(o.t.TempDir(), "y"))
	stdin, err := c.StdinPipe() // never the whole tensor
	require.NoError(o.t, err)
	require.NoError(o.t, c.Start())
	o.t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	_, err = stdin.Write(make([]byte, 1000))
	require.NoError(o.t, err)
	testkit.Eventually(o.t, func() bool { return strings.Contains(o.get("/metrics", 200), "\ntensorferry_calls 1\n") }, "the call")
}

func (o *operated) get(path string, want int) string {
	o.t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := c.Get("http://" + o.metrics + path)
	require.NoError(o.t, err)
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	require.NoError(o.t, err)
	require.Equal(o.t, want, r.StatusCode, path)
	return string(text)
}

// ends waits for the end and returns the exit code.
func (o *operated) ends() int {
	o.t.Helper()
	var exit *exec.ExitError
	if err := o.cmd.Wait(); err != nil && !errors.As(err, &exit) {
		o.t.Fatal(err)
	}
	return o.cmd.ProcessState.ExitCode()
}

func TestAServerThatIsToldToStopDrainsAndSaysSo(t *testing.T) {
	testkit.Start(t)
	o := operate(t, "--log-format", "text")
	require.Contains(t, o.get("/metrics", 200), `tensorferry_build_info{go_version="`)
	require.Equal(t, "serving\n", o.get("/healthz", 200))
	o.get("/debug/pprof/", 404)
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends(), o.said())
	require.Regexp(t, `(?s)msg=starting version=\S+ pid=\d+\n.*msg=listening.*msg=draining at_most_seconds=10\n.*msg=stopped drained=true\n$`, o.said())
}

func TestAServerThatHadToCancelCallsEndsWithAFailure(t *testing.T) {
	testkit.Start(t)
	o := operate(t, "--drain", "50ms")
	o.call()
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, exitFailure, o.ends(), o.said())
	require.Contains(t, o.said(), "tensorferry: calls that were still open were cancelled after 50ms\n")
	require.Contains(t, o.said(), "msg=stopped drained=false")
}

func TestASecondSignalEndsAServerAtOnce(t *testing.T) {
	testkit.Start(t)
	o := operate(t, "--drain", "1h", "--pprof")
	o.call()
	o.get("/debug/pprof/", 200)
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	o.says("msg=draining at_most_seconds=3600")
	o.get("/healthz", 503)
	ended := make(chan int, 1)
	go func() { ended <- o.ends() }()
	testkit.Eventually(t, func() bool { // until the second is no repeat of the first
		_ = o.cmd.Process.Signal(syscall.SIGTERM) // it fails when the process has ended
		return len(ended) > 0
	}, "the end")
	require.Equal(t, exitInterrupted, <-ended, o.said())
	require.Contains(t, o.said(), "tensorferry: second signal: exiting immediately\n")
	require.NotContains(t, o.said(), "msg=stopped")
}

func TestASignalThatComesTwiceAtOnceDrainsAServer(t *testing.T) {
	testkit.Start(t)
	o := operate(t, "--drain", "50ms")
	o.call()
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGINT)) // of another kind: a pending one would swallow its like
	require.Equal(t, exitFailure, o.ends(), o.said())
	require.Contains(t, o.said(), "msg=stopped drained=false")
}

func TestAServerTakesTheSocketOfOneThatWasKilled(t *testing.T) {
	testkit.Start(t)
	listen := fmt.Sprintf("unix:%s/s", t.TempDir())
	first := operate(t, "--listen", listen)
	require.NoError(t, first.cmd.Process.Kill())
	first.ends()
	second := operate(t, "--listen", listen)
	require.Equal(t, listen, second.address)
	require.NotContains(t, second.said(), "level=WARN")
	require.NoError(t, second.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, second.ends())
}

func TestAServerThatOtherMachinesReachWarnsOfIt(t *testing.T) {
	testkit.Start(t)
	o := operate(t, "--listen", "0.0.0.0:0", "--insecure")
	m := o.says(`level=WARN msg="other machines can connect without authentication" address=(\S+) encrypted=false\n`)
	require.Equal(t, "0.0.0.0:0", m[1])
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends())
	require.Equal(t, 1, strings.Count(o.said(), "level=WARN"), "not of the metrics")
}

func TestAServersLogIsJSONWhenAskedFor(t *testing.T) {
	testkit.Start(t)
	exe, err := exec.LookPath("tensorferry")
	require.NoError(t, err)
	o := &operated{t: t, cmd: exec.CommandContext(t.Context(), exe, "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--log-format", "json", "-v")}
	o.cmd.Stderr = o
	require.NoError(t, o.cmd.Start())
	t.Cleanup(func() { _ = o.cmd.Process.Kill() }) // it has ended, unless the test failed
	o.says(`"msg":"listening","address":"127.0.0.1:\d+","metrics":"off","models":4,"store":"memory"}\n`)
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends())
}
