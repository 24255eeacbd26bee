package worker

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"time"

	"golang.org/x/time/rate"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/proc"
)

// process is one of a host's, in all its lives.
type process struct {
	host  *Host
	log   *slog.Logger
	first chan<- error // nil or what went wrong, when the first life is ready or over; then nil

	lines   *rate.Limiter // of the log
	dropped int64         // lines that were not logged since that was said last

	// Guarded by the host's mu, as first is.
	guest *guest // the life it is in
	last  string // line that it said
}

// endedError says that a process has ended.
type endedError struct{ model, how string }

func (e *endedError) Error() string {
	return fmt.Sprintf("the worker of model %q ended (%s)", e.model, e.how)
}

func (e *endedError) Unwrap() error { return engine.ErrUnavailable }

// supervise starts the process, again and again, until the host is closed.
func (p *process) supervise() {
	// The system kills the process when this thread ends (Pdeathsig): so it does not
	// outlive the program. Never unlocked, the thread ends with this goroutine.
	runtime.LockOSThread()
	h := p.host
	pause := h.cfg.first
	for {
		began := time.Now()
		cause := p.live()
		if p.reportStart(cause) || h.ctx.Err() != nil {
			return
		}
		if time.Since(began) >= helloWait {
			pause = h.cfg.first
		}
		p.log.Error("worker ended", slog.Any("cause", cause), slog.Float64("next_try_seconds", pause.Seconds()))
		select {
		case <-time.After(pause):
		case <-h.ctx.Done():
			return
		}
		pause = min(2*pause, pauseMost)
		h.restarts.Add(1)
	}
}

// reportStart tells Start how the first life began, once, and reports whether it failed.
func (p *process) reportStart(err error) bool {
	p.host.mu.Lock()
	defer p.host.mu.Unlock()
	if p.first == nil {
		return false
	}
	p.first <- err
	p.first = nil
	return err != nil
}

// live starts the process and returns when it is gone, with why.
func (p *process) live() error {
	h := p.host
	socket, theirs, err := link.Pair()
	if err != nil {
		return err
	}
	said := &proc.Log{Each: p.logLine}
	cmd := exec.Command(h.cfg.Command[0], h.cfg.Command[1:]...)
	cmd.Env = append(append(os.Environ(), h.cfg.threads(os.LookupEnv)...), h.cfg.Env...)
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = []*os.File{theirs}, said, said, drainWait
	detach(cmd)
	err = cmd.Start()
	_ = theirs.Close() // the process has a copy
	if err != nil {
		_ = socket.Close()
		return err
	}
	g := newGuest(p, socket, cmd.Process.Pid, func() { kill(cmd.Process.Pid) })
	talked := make(chan error, 1)
	go func() { // ends when the link is closed, below
		err := g.talk()
		switch {
		case err != nil:
			g.stop(nil)
		case h.ctx.Err() == nil: // it exits, if it is not only deaf
			time.AfterFunc(drainWait, func() { g.stop(nil) })
		}
		talked <- err
	}()
	defer context.AfterFunc(h.ctx, g.endWithHost)()
	await(cmd.Process.Pid)
	g.killGroup()
	failed := cmd.Wait()
	said.Close()
	// Its children may have the socket, and so the memory, for a moment.
	time.AfterFunc(drainWait, g.conn.Close)
	broke := <-talked
	g.conn.Close()
	cause := p.cause(g, broke, failed)
	h.leave(g, cause)
	return cause
}

// cause says why a process has ended.
func (p *process) cause(g *guest, broke, failed error) error {
	h := p.host
	g.stopping.Lock()
	why := g.why
	g.stopping.Unlock()
	h.mu.Lock()
	last := p.last
	h.mu.Unlock()
	how := "it exited"
	if failed != nil {
		how = failed.Error()
	}
	switch {
	case h.ctx.Err() != nil:
		return engine.ErrClosed
	case why == nil:
		why = broke
	}
	switch {
	case g.info == nil && why != nil:
		return why
	case g.info == nil: // what it said last may tell
		return fmt.Errorf("it ended while loading (%s): %s", how, last)
	case why != nil:
		return &endedError{h.cfg.Name, why.Error()}
	}
	return &endedError{h.cfg.Name, how}
}

// attached serves the guest that runs already, until it is gone.
func (p *process) attached() {
	h := p.host
	defer close(h.ended)
	g := newGuest(p, h.cfg.Socket, os.Getppid(), nil)
	defer context.AfterFunc(h.ctx, g.endWithHost)()
	err := p.cause(g, g.talk(), nil)
	g.conn.Close()
	h.leave(g, err)
	p.reportStart(err)
}
