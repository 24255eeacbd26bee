package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	kpupb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
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
	o := &operated{t: t, cmd: program(t, "tensorferry", append([]string{"serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"}, args...)...)}
	o.cmd.Stderr = o
	require.NoError(t, o.cmd.Start())
	t.Cleanup(func() { _ = o.cmd.Process.Kill() }) // it has ended, unless the test failed
	m := o.says(`msg=listening address=(\S+) metrics=(\S+) models=\d+ store=(\S+)\n`)
	o.address, o.metrics = m[1], m[2]
	return o
}

// call opens a call that does not end, and returns when the server has it.
func (o *operated) call() {
	o.t.Helper()
	c := program(o.t, "tensorferry", "run", "echo", "--server", o.address, "--dtype", "int8", "--shape", "1000000",
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
	require.Regexp(t, `(?s)msg=starting version=\S+ pid=\d+ memory=.* memory_from=.*\n.*msg=listening.*msg=draining at_most_seconds=10\n.*msg=stopped drained=true\n$`, o.said())
}

func TestAServerThatHadToCancelCallsEndsWithAFailure(t *testing.T) {
	testkit.Start(t)
	o := operate(t, "--drain", "50ms")
	o.call()
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, fail.ExitFailure, o.ends(), o.said())
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
	require.Equal(t, fail.ExitInterrupted, <-ended, o.said())
	require.Contains(t, o.said(), "tensorferry: second signal: exiting immediately\n")
	require.NotContains(t, o.said(), "msg=stopped")
}

func TestASignalThatComesTwiceAtOnceDrainsAServer(t *testing.T) {
	testkit.Start(t)
	o := operate(t, "--drain", "50ms")
	o.call()
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGINT)) // of another kind: a pending one would swallow its like
	require.Equal(t, fail.ExitFailure, o.ends(), o.said())
	require.Contains(t, o.said(), "msg=stopped drained=false")
}

func TestAServerWithoutATerminalRereadsItsFilesWhenItIsHungUp(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	file := func(name string) string { return filepath.Join(dir, name) }
	write := func(text string) {
		require.NoError(t, os.WriteFile(file("tokens"), []byte(text), 0o600))
	}
	write("alice " + strings.Repeat("x", 32))
	roles := func(text string) { require.NoError(t, os.WriteFile(file("roles"), []byte(text), 0o600)) }
	roles("alice pull")
	o := operate(t, "--tls-cert", file(identity.ServerFile), "--tls-key", file(identity.ServerKeyFile), "--token-file", file("tokens"), "--roles", file("roles"))
	write("alice " + strings.Repeat("y", 32))
	roles("alice pull\nbob pull")
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGHUP))
	o.says(`msg="tokens were read again"`)
	o.says(`msg="roles were read" .*principals=2`)
	write("too short")
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGHUP))
	o.says(`the previous ones stay in force.*a token has`)
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends(), o.said())
}

func TestAServerThatIgnoresHangupsRereadsNothing(t *testing.T) {
	testkit.Start(t)
	o := &operated{t: t, cmd: program(t, "sh", "-c", `trap "" HUP; exec tensorferry serve --listen 127.0.0.1:0 --metrics off`)}
	o.cmd.Stderr = o
	require.NoError(t, o.cmd.Start())
	o.says("msg=listening")
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGHUP))
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends(), o.said())
	require.NotContains(t, o.said(), "hangup")
}

func TestWhatARestartDoesNotMendHasACodeOfItsOwn(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	for name, tc := range map[string]struct {
		args []string
		want int
	}{
		"an unknown flag":                  {[]string{"serve", "--lisen", "x"}, fail.ExitSettings},
		"a value out of range":             {[]string{"serve", "--max-calls", "-1"}, fail.ExitSettings},
		"an argument":                      {[]string{"serve", "x"}, fail.ExitSettings},
		"an unknown key of a file":         {[]string{"serve", "--config", file("c.yaml", "lisen: x\n")}, fail.ExitSettings},
		"no file":                          {[]string{"serve", "--config", filepath.Join(dir, "none")}, fail.ExitSettings},
		"no encryption":                    {[]string{"serve", "--listen", "0.0.0.0:0"}, fail.ExitSettings},
		"no certificate":                   {[]string{"serve", "--tls-cert", "none", "--tls-key", "none"}, fail.ExitSettings},
		"no model":                         {[]string{"serve", "--model", "none"}, fail.ExitSettings},
		"a model twice":                    {[]string{"serve", "--demo", "--demo", "--model", "relu=../../examples/fashion/models/bottom"}, fail.ExitSettings},
		"a store that is a file":           {[]string{"serve", "--store", file("store", "")}, fail.ExitSettings},
		"a socket in no folder":            {[]string{"serve", "--listen", "unix:" + dir + "/none/s"}, fail.ExitSettings},
		"an address that another one has":  {[]string{"serve", "--metrics", "off", "--listen", taken.Addr().String()}, fail.ExitFailure},
		"a link without a socket":          {[]string{"link", "--fd", "0"}, fail.ExitSettings},
		"a link with a bad flag":           {[]string{"link", "--lanes", "x"}, fail.ExitSettings},
		"a mistake in a command":           {[]string{"run", "--nonsense"}, fail.ExitUsage},
		"a mistake in the name of serve":   {[]string{"serv"}, fail.ExitUsage},
		"an argument of another's command": {[]string{"version", "serve"}, fail.ExitUsage},
	} {
		t.Run(name, func(t *testing.T) {
			c := program(t, "tensorferry", tc.args...)
			out, _ := c.CombinedOutput()
			require.Equal(t, tc.want, c.ProcessState.ExitCode(), "%s", out)
		})
	}
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
	o := &operated{t: t, cmd: program(t, "tensorferry", "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--log-format", "json", "-v")}
	o.cmd.Stderr = o
	require.NoError(t, o.cmd.Start())
	t.Cleanup(func() { _ = o.cmd.Process.Kill() }) // it has ended, unless the test failed
	o.says(`"msg":"listening","address":"127.0.0.1:\d+","metrics":"off","models":\d+,"store":"memory"}\n`)
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends())
}

func TestAServerGoesOnWhoeverReadsItsLog(t *testing.T) {
	testkit.Start(t)
	for name, reader := range map[string]func(*os.File){
		"the reader ends":       func(r *os.File) { require.NoError(t, r.Close()) },
		"the reader reads none": func(*os.File) {},
	} {
		t.Run(name, func(t *testing.T) {
			r, w, err := os.Pipe()
			require.NoError(t, err)
			defer r.Close() // it may be closed
			c := program(t, "tensorferry", "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--log-level", "debug", "--drain", "50ms")
			c.Stderr = w
			require.NoError(t, c.Start())
			require.NoError(t, w.Close())
			o := &operated{t: t, cmd: c}
			for lines := bufio.NewScanner(r); o.address == "" && lines.Scan(); {
				if m := regexp.MustCompile(`msg=listening address=(\S+) metrics=(\S+)`).FindStringSubmatch(lines.Text()); m != nil {
					o.address, o.metrics = m[1], m[2]
				}
			}
			reader(r)
			cl, err := client.Dial(o.address, client.Config{})
			require.NoError(t, err)
			defer cl.Close()
			dropped := regexp.MustCompile(`(?m)^tensorferry_log_lines_dropped_total [1-9]`)
			testkit.Eventually(t, func() bool {
				for range 200 {
					_, err := cl.Info(t.Context()) // a line of the log
					require.NoError(t, err)
				}
				return dropped.MatchString(o.get("/metrics", 200))
			}, "lines to be dropped")
			o.call() // so that it has something to say at its end
			require.NoError(t, c.Process.Signal(syscall.SIGTERM))
			require.Equal(t, fail.ExitFailure, o.ends())
		})
	}
}

func TestConnectionsFollowTheDescriptors(t *testing.T) {
	for descriptors, want := range map[int]int{64: 32, 256: 128, 1024: 768, 4096: 3072, 65536: 49152} {
		require.Equal(t, want, serve.ConnectionsOf(descriptors), "%d", descriptors)
	}
	testkit.Start(t)
	o := &operated{t: t, cmd: program(t, "sh", "-c", "ulimit -n 256; exec tensorferry serve --listen 127.0.0.1:0 --metrics 127.0.0.1:0")}
	o.cmd.Stderr = o
	require.NoError(t, o.cmd.Start())
	m := o.says(`level=WARN msg="--max-connections is more than the descriptors allow: .*" set=1024 used=128\n(?s:.*)msg=listening address=(\S+) metrics=(\S+)`)
	o.address, o.metrics = m[1], m[2]
	var idle []net.Conn
	for range 300 {
		c, err := net.Dial("tcp", o.address)
		require.NoError(t, err)
		idle = append(idle, c)
	}
	require.Equal(t, "serving\n", o.get("/healthz", 200))
	testkit.Eventually(t, func() bool { // when those before it have been refused
		cl, err := client.Dial(o.address, client.Config{})
		require.NoError(t, err)
		defer cl.Close()
		_, err = cl.Info(t.Context())
		return err != nil && strings.Contains(err.Error(), "overload: all 128 connections")
	}, "a refusal")
	for _, c := range idle {
		require.NoError(t, c.Close())
	}
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends(), o.said())
}

func TestProbesNeedNeitherTLSNorAToken(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	file := func(name string) string { return filepath.Join(dir, name) }
	o := operate(t, "--tls-cert", file(identity.ServerFile), "--tls-key", file(identity.ServerKeyFile), "--tls-client-ca", file(identity.AuthorityFile), "--health-listen", "127.0.0.1:0")
	at := o.says(`msg="listening for probes" address=(\S+)\n`)[1]
	get := func(path string) int {
		c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		r, err := c.Get("http://" + at + path)
		require.NoError(t, err)
		require.NoError(t, r.Body.Close())
		return r.StatusCode
	}
	require.Equal(t, http.StatusOK, get("/healthz"))
	require.Equal(t, http.StatusNotFound, get("/metrics"))
	conn, err := grpc.NewClient(at, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	is, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, is.GetStatus())
	_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "nobody"})
	require.Equal(t, codes.NotFound, status.Code(err))
	_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: strings.Repeat("x", 5000)})
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	_, err = pb.NewTensorServiceClient(conn).ListModels(t.Context(), &pb.ListModelsRequest{})
	require.Equal(t, codes.Unimplemented, status.Code(err), "nothing else is there")
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends())
}

func TestMetricsThatOtherMachinesReachWantWhatTheServerWants(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	file := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.WriteFile(file("tokens"), []byte("alice "+strings.Repeat("x", 32)+"\n"), 0o600))
	o := operate(t, "--metrics", "0.0.0.0:0", "--tls-cert", file(identity.ServerFile), "--tls-key", file(identity.ServerKeyFile), "--token-file", file("tokens"))
	authority, err := os.ReadFile(file(identity.AuthorityFile))
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(authority))
	_, port, err := net.SplitHostPort(o.metrics)
	require.NoError(t, err)
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots}}}
	for token, want := range map[string]int{strings.Repeat("x", 32): http.StatusOK, strings.Repeat("y", 32): http.StatusUnauthorized, "": http.StatusUnauthorized} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://127.0.0.1:"+port+"/metrics", nil)
		require.NoError(t, err)
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		got, err := c.Do(r)
		require.NoError(t, err)
		require.NoError(t, got.Body.Close())
		require.Equal(t, want, got.StatusCode, token)
	}
	plain, err := http.Get("http://127.0.0.1:" + port + "/metrics")
	require.NoError(t, err)
	require.NoError(t, plain.Body.Close())
	require.Equal(t, http.StatusBadRequest, plain.StatusCode)
	require.NotContains(t, o.said(), "http: ", "a peer's mistake is not logged")
	require.NotContains(t, o.said(), "http:")
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends())
}

// TestTheUnitOfTheDocsStarts runs the command line of docs/operating.md within what its unit allows,
// as far as this machine can: the rest needs systemd.
func TestTheUnitOfTheDocsStarts(t *testing.T) {
	testkit.Start(t)
	page, err := os.ReadFile("../../docs/operating.md")
	require.NoError(t, err)
	setting := func(name string) string {
		m := regexp.MustCompile(`(?m)^` + name + `=(.+)$`).FindSubmatch(page)
		require.NotNil(t, m, name)
		return string(m[1])
	}
	exe, err := exec.LookPath("tensorferry")
	require.NoError(t, err)
	require.Equal(t, strconv.Itoa(fail.ExitSettings), setting("RestartPreventExitStatus"))
	line := strings.NewReplacer("/usr/local/bin/tensorferry", exe, "/var/lib/tensorferry", t.TempDir(), "127.0.0.1:50051", "127.0.0.1:0 --metrics off").Replace(setting("ExecStart"))
	o := &operated{t: t, cmd: program(t, "sh", "-c", "ulimit -n "+setting("LimitNOFILE")+" || echo this machine does not allow that many descriptors >&2; exec "+line)}
	o.cmd.Dir, o.cmd.Env, o.cmd.Stderr = "/", []string{"PATH=/usr/bin:/bin"}, o
	require.NoError(t, o.cmd.Start())
	t.Cleanup(func() { _ = o.cmd.Process.Kill() }) // it has ended, unless the test failed
	o.says(`"msg":"listening"`)
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends(), o.said())
	t.Log(o.said())
}

func TestAServerSpeaksToClientsOfKPUTorch(t *testing.T) {
	testkit.Start(t)
	o := operate(t, "--kpu", "127.0.0.1:0,model=relu,source=gen")
	at := o.says(`system=kpu.torch address=(\S+) model=relu\n`)[1]
	conn, err := grpc.NewClient(at, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	s, err := kpupb.NewServiceClient(conn).SendTensors(t.Context(), &kpupb.TensorRequest{Parameters: map[string]string{"shape": "2,3"}})
	require.NoError(t, err)
	c, err := s.Recv()
	require.NoError(t, err)
	require.Equal(t, "[2, 3]", c.GetMetadata()["shape"])
	up, err := kpupb.NewServiceClient(conn).ReceiveTensors(t.Context())
	require.NoError(t, err)
	require.NoError(t, up.Send(c))
	resp, err := up.CloseAndRecv()
	require.NoError(t, err)
	require.Equal(t, []string{c.GetTensorId()}, resp.GetReceivedTensorIds())
	testkit.Eventually(t, func() bool { // an RPC is counted after it has answered
		return strings.Contains(o.get("/metrics", 200), `tensorferry_ended_rpcs_total{code="OK",service="kpu.torch.Service"} 2`)
	}, "two RPCs counted")
	require.NoError(t, conn.Close())
	require.NoError(t, o.cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, o.ends())

	o = &operated{t: t, cmd: program(t, "tensorferry", "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--kpu", "0.0.0.0:0")}
	o.cmd.Stderr = o
	require.NoError(t, o.cmd.Start())
	require.Equal(t, fail.ExitSettings, o.ends())
	require.Contains(t, o.said(), "--kpu 0.0.0.0:0: other machines could connect")
}
