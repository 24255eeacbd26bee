package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// terminal is a terminal that tmux draws, in which a shell runs one command line.
type terminal struct {
	t      *testing.T
	socket string
}

// newTerminal runs a command line in a terminal of some columns and 24 rows. The shell
// survives ^C, and says at the end what the command's exit code was.
func newTerminal(t *testing.T, columns int, line string) *terminal {
	t.Helper()
	dir, err := os.MkdirTemp("", "tmux") //nolint:usetesting // t.TempDir may be too long for a socket
	require.NoError(t, err)
	term := &terminal{t, filepath.Join(dir, "s")}
	term.tmux("-f", "/dev/null", "new-session", "-d", "-x", fmt.Sprint(columns), "-y", "24", "trap : INT; "+line+`; echo "exit $?"; exec cat`)
	t.Cleanup(func() {
		_ = exec.CommandContext(context.WithoutCancel(t.Context()), "tmux", "-S", term.socket, "kill-server").Run()
		_ = os.RemoveAll(dir)
	})
	return term
}

func (x *terminal) tmux(args ...string) string {
	x.t.Helper()
	out, err := program(x.t, "tmux", append([]string{"-S", x.socket}, args...)...).CombinedOutput()
	require.NoError(x.t, err, "%s", out)
	return string(out)
}

// screen is what is on the screen.
func (x *terminal) screen() string {
	return strings.TrimRight(x.tmux("capture-pane", "-p"), "\n")
}

// shows waits until each line of the screen matches a pattern.
func (x *terminal) shows(patterns ...string) {
	x.t.Helper()
	all, last := regexp.MustCompile("^"+strings.Join(patterns, " *\n")+" *$"), ""
	defer func() {
		if x.t.Failed() {
			x.t.Logf("the screen is\n%s\nand should be\n%s", last, strings.Join(patterns, "\n"))
		}
	}()
	testkit.Eventually(x.t, func() bool { last = x.screen(); return all.MatchString(last) }, "the screen")
}

// gate passes connections on to a server, and stops after some bytes in one direction
// until it is opened.
type gate struct {
	address string
	opened  chan struct{}

	mu   sync.Mutex // guards left
	left int64
}

// newGate passes on so many bytes to the server, or from it.
func newGate(t *testing.T, server string, toServer bool, left int64) *gate {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	g := &gate{address: l.Addr().String(), opened: make(chan struct{}), left: left}
	t.Cleanup(func() { _ = l.Close() })
	go func() { // ends with l
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", server)
			if err != nil {
				_ = c.Close()
				continue
			}
			go g.pass(s, c, toServer)
			go g.pass(c, s, !toServer)
		}
	}()
	return g
}

// pass copies until one side ends, and then closes both.
func (g *gate) pass(to, from net.Conn, counted bool) {
	defer to.Close()
	defer from.Close()
	if !counted {
		_, _ = io.Copy(to, from)
		return
	}
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		g.mu.Lock()
		g.left -= int64(n)
		over := g.left < 0
		g.mu.Unlock()
		if over {
			<-g.opened
		}
		if _, e := to.Write(buf[:n]); e != nil || err != nil {
			return
		}
	}
}

// servingCopies starts a server with a model of n inputs, which are its outputs.
func servingCopies(t *testing.T, n int) string {
	host := cpu.NewHost(cpu.HostConfig{})
	t.Cleanup(host.Close)
	info := engine.Info{Name: "copies"}
	for i := range n {
		shape := []int64{engine.AnyAxes}
		info.Inputs = append(info.Inputs, engine.Port{Name: fmt.Sprint("x", i), Shape: shape})
		info.Outputs = append(info.Outputs, engine.Port{Name: fmt.Sprint("y", i), Shape: shape})
	}
	model, err := cpu.Func{Info: info, Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
		return in, nil
	}}.Model(host)
	require.NoError(t, err)
	models := engine.NewRegistry()
	require.NoError(t, models.Add(model))
	s, err := server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget()})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, <-served)
	})
	return l.Addr().String()
}

// What the lines of a screen are made of, as regular expressions.
const (
	bytesShown  = `\d+(\.\d)? [KM]?i?B`
	speedShown  = bytesShown + `/s`
	movingShown = ` +` + bytesShown + ` / ` + bytesShown + ` \[=*>?-+\] +\d+ % +` + speedShown + ` \S+`
	wholeShown  = ` +(` + bytesShown + `) / ` + bytesShown + ` \[=+\] +100 % +` + speedShown
)

func TestWhatATerminalShowsOfProgress(t *testing.T) {
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skip("tmux is not installed: apt-get install tmux")
	}
	const mib = 1 << 20
	t.Chdir(t.TempDir())
	run := func(args ...string) {
		out, err := program(t, "tensorferry", args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	run("gen", "--shape", "16,1024,1024", "--dtype", "uint8", "-o", "x.npy")
	run("gen", "--shape", "5,256,1024", "--dtype", "uint8", "-o", "short.npy")
	for i := range 6 {
		require.NoError(t, os.Link("x.npy", fmt.Sprintf("layer.%d.npy", i)))
	}
	var threes, calls strings.Builder // the arguments of run for 3 inputs, and for 64
	for i := range 3 {
		fmt.Fprintf(&threes, " -i x%d=layer.%d.npy -o y%d=back%d.npy", i, i, i, i)
	}
	for i := range 64 {
		require.NoError(t, os.Link("short.npy", fmt.Sprintf("%02d.npy", i)))
		fmt.Fprintf(&calls, " -i x%d=%02d.npy -o y%d=back%d.npy", i, i, i, i)
	}
	text, err := os.ReadFile("x.npy")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile("turned.npy", bytes.Replace(text, []byte("False"), []byte("True "), 1), 0o666))
	require.NoError(t, writeFilled("model.safetensors", 5000, 2048, nil))
	store, pushed := serving(t), serving(t) // what is pulled is not replaced meanwhile
	run("push", "x.npy", "model.safetensors", "layer.0.npy", "layer.1.npy", "layer.2.npy", "layer.3.npy", "layer.4.npy", "layer.5.npy", "--server", store, "--quiet")

	for name, tc := range map[string]struct {
		server, command string
		toServer        bool
		passed          int64    // bytes, before it stops
		moving, whole   []string // what is shown then, and at the end
	}{
		"push of 1":                   {pushed, "push x.npy", true, 8 * mib, []string{"x" + movingShown}, []string{"x" + wholeShown}},
		"push of 6":                   {pushed, "push layer.?.npy", true, 40 * mib, []string{"2 of 6 tensors" + movingShown}, []string{"6 of 6 tensors" + wholeShown}},
		"push of 5000":                {pushed, "push model.safetensors", true, 20 * mib, []string{`\d{4} of 5000 tensors` + movingShown}, []string{"5000 of 5000 tensors" + wholeShown}},
		"push of 1 that is converted": {pushed, "push turned.npy", true, 8 * mib, []string{"turned" + movingShown}, []string{"turned" + wholeShown}},
		"pull of 1":                   {store, "pull x -o back.npy", false, 12 * mib, []string{"x" + movingShown}, []string{"x" + wholeShown}},
		"pull of 6":                   {store, "pull 'layer*' -o back.safetensors", false, 40 * mib, []string{"2 of 6 tensors" + movingShown}, []string{"6 of 6 tensors" + wholeShown}},
		"pull of 5000":                {store, "pull 'model/*' -o back.safetensors", false, 20 * mib, []string{`\d{4} of 5000 tensors` + movingShown}, []string{"5000 of 5000 tensors" + wholeShown}},
		"run of 1 and its result": {
			servingCopies(t, 1), "run copies -i x.npy -o back.npy", true, 8 * mib, []string{`x\.npy` + movingShown}, []string{"2 of 2 tensors" + wholeShown},
		},
		"run of 3 and their results": {
			servingCopies(t, 3), "run copies" + threes.String(), true, 20 * mib,
			[]string{`\d of 3 tensors` + movingShown},
			[]string{"6 of 6 tensors" + wholeShown},
		},
		"run of 64 and their results": { // no call has more
			servingCopies(t, 64), "run copies" + calls.String(), true, 40 * mib,
			[]string{`\d+ of 64 tensors` + movingShown},
			[]string{"128 of 128 tensors" + wholeShown},
		},
	} {
		for _, columns := range []int{80, 120} {
			if columns == 120 && !strings.HasSuffix(name, " of 6") {
				continue // a wider bar differs in nothing else
			}
			t.Run(fmt.Sprintf("%s/%d columns", name, columns), func(t *testing.T) {
				t.Parallel() // most of its time is waiting
				begin := func() (*terminal, *gate) {
					g := newGate(t, tc.server, tc.toServer, tc.passed)
					x := newTerminal(t, columns, "tensorferry "+tc.command+" --server "+g.address+" >/dev/null")
					x.shows(tc.moving...)
					return x, g
				}
				x, g := begin()
				close(g.opened)
				x.shows(append(tc.whole, "exit 0")...)

				x, g = begin()
				x.tmux("send-keys", "C-c")
				left := []string{"tensorferry: interrupted", "exit 7"}
				if said := tc.moving[0]; said == tc.whole[0] { // it is no progress
					left = append([]string{said}, left...)
				}
				x.shows(left...)
				close(g.opened)
			})
		}
	}
}
