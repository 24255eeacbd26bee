// Package proc runs programs as children, and reads what the system says of a
// process. It knows nothing of what they do. The methods of a Child are for one
// goroutine; a Log is safe for concurrent use.
package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"
)

// Child is a program in a process of its own.
type Child struct {
	*exec.Cmd
	Log  Log            // what it says on stderr
	In   io.WriteCloser // its stdin, if anybody has it: the program ends with its input
	Wait func() error   // waits for the end; the error of a child that failed has what it said
}

// New returns a child that has not been started, of a command made with a context:
// the end of that interrupts it. No variable that configures tensorferry reaches it.
func New(cmd *exec.Cmd) *Child {
	c := &Child{Cmd: cmd}
	c.Stderr = &c.Log
	c.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "TENSORFERRY_") })
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = StopWait
	c.Wait = sync.OnceValue(func() error {
		err := c.Cmd.Wait()
		if err != nil {
			err = fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, c.Log.Tail())
		}
		return err
	})
	return c
}

// Pipe starts the child, and returns its stdout, to be read before Wait; In is its stdin.
func (c *Child) Pipe() (out io.ReadCloser, err error) {
	if c.In, err = c.StdinPipe(); err == nil {
		out, err = c.StdoutPipe()
	}
	if err == nil {
		err = c.Start()
	}
	return out, err
}

// Listen starts a server and waits until find has its address in a line of log, one
// that the child writes to. A goroutine waits for the end of the process. After an
// error there is none.
func (c *Child) Listen(ctx context.Context, log *Log, find func(line string) string) (address string, err error) {
	found := make(chan string, 1)
	log.Each = func(line string) {
		if a := find(line); a != "" {
			select {
			case found <- a:
			default: // it says so once
			}
		}
	}
	if err := c.Start(); err != nil {
		return "", err
	}
	go func() {
		_ = c.Wait() // which remembers
		close(found) // the log has been written to its end
	}()
	defer time.AfterFunc(StartWait, func() { _ = c.Process.Kill() }).Stop()
	if address, ok := <-found; ok {
		return address, nil
	}
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	return "", errors.Join(errors.New("a server does not say where it listens"), c.Wait())
}

// Serve starts tensorferry, which args of cmd follow, as a server on a free port of
// the loopback interface, or where they say. It ends with this process.
func Serve(ctx context.Context, cmd *exec.Cmd) (c *Child, address string, err error) {
	c = New(cmd)
	var out Log
	c.Stdout = &out
	if c.In, err = c.StdinPipe(); err != nil {
		return nil, "", err
	}
	address, err = c.Listen(ctx, &out, func(line string) string { return line })
	return c, address, err
}

// Kill ends the child as a crash does.
func (c *Child) Kill() {
	_ = c.Process.Kill() // it may have ended
	_ = c.Wait()
}

// Stop tells the child to end and waits for that.
func (c *Child) Stop() error {
	if c.In != nil {
		_ = c.In.Close() // it may be closed
	} else {
		_ = c.Process.Signal(os.Interrupt) // it may have ended
	}
	return c.Stopped()
}

// Stopped waits for a child that was told to end.
func (c *Child) Stopped() error {
	defer time.AfterFunc(StopWait, func() { _ = c.Process.Kill() }).Stop()
	return c.Wait()
}

// Output runs the child to its end and returns a copy of what it printed.
func (c *Child) Output() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout = &out
	err := c.Start()
	if err == nil {
		err = c.Wait()
	}
	return out.Bytes(), err
}

// Log takes what a program says, line by line, of each line the beginning.
type Log struct {
	Each func(line string) // if set, before the first line, is called with each

	mu   sync.Mutex // guards all below
	rest []byte     // of an unfinished line
	last []string
}

// Write copies p.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for rest := p; len(rest) > 0; {
		line, behind, whole := bytes.Cut(rest, []byte("\n"))
		l.rest = append(l.rest, line[:min(len(line), lineBytes-len(l.rest))]...)
		if rest = behind; whole {
			l.end()
		}
	}
	return len(p), nil
}

// Close ends a line that is unfinished.
func (l *Log) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.rest) > 0 {
		l.end()
	}
}

// end ends a line; mu is held.
func (l *Log) end() {
	line := string(l.rest)
	l.rest = l.rest[:0]
	l.last = append(l.last[max(0, len(l.last)-logLines+1):], line)
	if l.Each != nil {
		l.Each(line)
	}
}

// Tail returns the last lines.
func (l *Log) Tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(append(slices.Clone(l.last), string(l.rest)), "\n")
}
