package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/tensorferry/tensorferry/internal/proc"
)

// daemon is a server in a process of its own.
type daemon struct {
	*proc.Child
	address, metrics string
}

// serve starts a server on a free port and waits until it listens. The caller
// stops or kills it. What it complains about in its log is a problem.
func (e *environment) serve(ctx context.Context, args ...string) (*daemon, error) {
	args = append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)
	d := &daemon{Child: proc.New(exec.CommandContext(ctx, e.command, args...))}
	d.Env = append(d.Env, "GOMEMLIMIT=off") // the server's own limits are to do
	var err error
	d.address, err = d.Listen(ctx, &d.Log, func(line string) string {
		switch level := attribute(line, "level"); {
		case level == "INFO" || level == "DEBUG":
		case e.expected != "" && strings.Contains(line, e.expected):
		default: // also what is no log, such as a panic
			e.add("log: %s", line)
		}
		if attribute(line, "msg") != "listening" {
			return ""
		}
		d.metrics = attribute(line, "metrics")
		return attribute(line, "address")
	})
	return d, err
}

// attribute returns a plain value of a line of slog's text.
func attribute(line, key string) string {
	_, rest, _ := strings.Cut(" "+line, " "+key+"=")
	value, _, _ := strings.Cut(rest, " ")
	return value
}

// figures are the metrics of a server by name; labels are summed up.
type figures map[string]float64

// String is what is open.
func (f figures) String() string {
	return fmt.Sprintf("%v sessions, %v calls, %v transfers, %v goroutines, %v descriptors, budget %s, received %s",
		f["tensorferry_sessions"], f["tensorferry_calls"], f["tensorferry_open_transfers"], f["go_goroutines"], f["process_open_fds"],
		mibs(f["tensorferry_memory_used_bytes"]), mibs(f["tensorferry_receive_used_bytes"]))
}

// scrape asks the metrics listener.
func (d *daemon) scrape(ctx context.Context) (figures, error) {
	text, err := d.get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	f := figures{}
	for name, family := range families {
		for _, m := range family.Metric {
			f[name] += m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	for _, name := range []string{"go_goroutines", "process_open_fds", "tensorferry_sessions"} {
		if _, ok := f[name]; !ok {
			err = errors.Join(err, fmt.Errorf("/metrics says nothing about %s", name))
		}
	}
	return f, err
}

// pages keeps no connection, which would show in a count of descriptors.
var pages = http.Client{Timeout: scrapeWait, Transport: &http.Transport{DisableKeepAlives: true}}

// get reads a page of the metrics listener; the caller owns what it returns.
func (d *daemon) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+d.metrics+path, nil)
	if err != nil {
		return nil, err
	}
	r, err := pages.Do(req)
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", path, r.Status)
	}
	return io.ReadAll(r.Body)
}

// until asks the server until its figures are as wanted, and returns them.
func (d *daemon) until(ctx context.Context, what string, as func(figures) bool) (figures, error) {
	end := time.Now().Add(settleWait)
	for {
		f, err := d.scrape(ctx)
		if err != nil || as(f) {
			return f, err
		}
		if time.Now().After(end) {
			return f, fmt.Errorf("after %v still not %s: %v", settleWait, what, f)
		}
		if err := pause(ctx, pollEvery); err != nil {
			return f, err
		}
	}
}
