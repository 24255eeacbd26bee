package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// daemon is a server in a process of its own.
type daemon struct {
	cmd              *exec.Cmd
	address, metrics string
	log              *record
	ended            chan struct{}
	err              error // valid once ended is closed
}

// serve starts a server on a free port and waits until it listens. The caller
// stops or kills it.
func (e *environment) serve(ctx context.Context, args ...string) (*daemon, error) {
	args = append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)
	d := &daemon{cmd: exec.Command(e.command, args...), log: newRecord(), ended: make(chan struct{})}
	d.cmd.Stderr = d.log
	d.cmd.Env = clean(os.Environ())
	if err := d.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { // ends with the process
		d.err = d.cmd.Wait()
		close(d.ended)
	}()
	late := time.NewTimer(startWait)
	defer late.Stop()
	var err error
	select {
	case line := <-d.log.listening:
		d.address, d.metrics = attribute(line, "address"), attribute(line, "metrics")
		return d, nil
	case <-d.ended:
		err = d.err
	case <-late.C:
		err = fmt.Errorf("it does not listen after %v", startWait)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	d.kill()
	return nil, fmt.Errorf("stress: tensorferry %s: %w\n%s", strings.Join(args, " "), err, d.log.tail())
}

// clean leaves out what would configure a server from outside.
func clean(environ []string) []string {
	var out []string
	for _, e := range environ {
		if !strings.HasPrefix(e, "TENSORFERRY_") {
			out = append(out, e)
		}
	}
	return out
}

// kill ends the server as a crash does, and waits until it is gone.
func (d *daemon) kill() {
	_ = d.cmd.Process.Kill() // it may have ended
	<-d.ended
}

// stop ends the server in order and returns what was wrong with its end.
func (d *daemon) stop() error {
	_ = d.cmd.Process.Signal(os.Interrupt) // it may have ended
	return d.wait()
}

// wait waits for a server that was told to stop and returns what was wrong with its
// end.
func (d *daemon) wait() error {
	late := time.AfterFunc(stopWait, func() { _ = d.cmd.Process.Kill() })
	defer late.Stop()
	<-d.ended
	if d.err != nil {
		return fmt.Errorf("the server ended with %w: %s", d.err, d.log.tail())
	}
	return nil
}

// record reads a server's log: where it listens, and what it complains about.
type record struct {
	listening chan string // the line that tells; capacity 1

	mu         sync.Mutex // guards all below
	rest       []byte     // of an unfinished line
	last       []string
	complaints []string
	count      int // of complaints
}

func newRecord() *record { return &record{listening: make(chan string, 1)} }

// Write copies p.
func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rest = append(r.rest, p...)
	for {
		i := bytes.IndexByte(r.rest, '\n')
		if i < 0 {
			return len(p), nil
		}
		r.line(string(r.rest[:i]))
		r.rest = r.rest[i+1:]
	}
}

func (r *record) line(text string) {
	if len(r.last) == complaintsKept {
		r.last = r.last[1:]
	}
	r.last = append(r.last, text)
	if strings.Contains(text, "msg=listening ") {
		select {
		case r.listening <- text:
		default: // it says so once
		}
	}
	level := attribute(text, "level")
	if level == "INFO" || level == "DEBUG" {
		return
	}
	if r.count++; r.count <= complaintsKept { // also what is no log, such as a panic
		r.complaints = append(r.complaints, text)
	}
}

// complained returns the lines of the log that an operator would have to look at.
func (r *record) complained() ([]string, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.complaints...), r.count
}

func (r *record) tail() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.last, "\n")
}

// attribute returns a plain value of a line of slog's text.
func attribute(line, key string) string {
	_, rest, _ := strings.Cut(" "+line, " "+key+"=")
	value, _, _ := strings.Cut(rest, " ")
	return value
}

// rss returns the memory that the process has now, and the most it ever had.
func (d *daemon) rss() (now, peak float64, err error) {
	most, err := bench.PeakOf(d.cmd.Process.Pid)
	if err != nil {
		return 0, 0, err
	}
	r, err := residentOf(strconv.Itoa(d.cmd.Process.Pid))
	return r.own + r.mapped, float64(most), err
}

// resident is the memory of a process that is present.
type resident struct {
	own    float64 // nobody else's
	mapped float64 // pages of files, which the system may take back, and programs share
	gone   float64 // files that it has mapped and that nobody can open any more
}

// residentOf returns that of a process, or of "self".
func residentOf(pid string) (r resident, err error) {
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		return r, err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		to, wanted := map[string]*float64{"RssAnon": &r.own, "RssShmem": &r.own, "RssFile": &r.mapped}[name]
		if !wanted {
			continue
		}
		var kib float64
		if _, err := fmt.Sscanf(value, "%f kB", &kib); err != nil {
			return r, fmt.Errorf("stress: /proc/%s/status says %q", pid, line)
		}
		*to += kib * 1024
	}
	maps, err := os.ReadFile("/proc/" + pid + "/maps")
	r.gone = float64(bytes.Count(maps, []byte(".safetensors (deleted)\n")))
	return r, err
}

// figures are the metrics of a server by name; labels are summed up.
type figures map[string]float64

// scrape asks the metrics listener.
func (d *daemon) scrape(ctx context.Context) (figures, error) {
	text, err := d.get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	f := figures{}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		line := lines.Text()
		end := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || end < 0 {
			continue
		}
		name, _, _ := strings.Cut(line[:end], "{")
		v, err := strconv.ParseFloat(line[end+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("stress: /metrics says %q", line)
		}
		f[name] += v
	}
	for _, name := range []string{"go_goroutines", "process_open_fds", "tensorferry_sessions"} {
		if _, ok := f[name]; !ok {
			return nil, fmt.Errorf("stress: /metrics says nothing about %s", name)
		}
	}
	return f, nil
}

// get reads a page of the metrics listener; the caller owns what it returns.
func (d *daemon) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeWait)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+d.metrics+path, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true // so that it shows in no count of descriptors
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(r.Body)
	err = errors.Join(err, r.Body.Close())
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("stress: %s: %s", path, r.Status)
	}
	return text, err
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
			return f, fmt.Errorf("after %v still not %s: %v sessions, %v calls, %v transfers, %v of the memory budget",
				settleWait, what, f["tensorferry_sessions"], f["tensorferry_calls"], f["tensorferry_open_transfers"], mibs(f["tensorferry_memory_used_bytes"]))
		}
		if err := pause(ctx, pollEvery); err != nil {
			return f, err
		}
	}
}

// collect has the server's garbage collector run.
func (d *daemon) collect(ctx context.Context) error {
	_, err := d.get(ctx, "/debug/pprof/heap?gc=1")
	return err
}

// profile writes a profile of the server to a file.
func (d *daemon) profile(ctx context.Context, query, file string) error {
	data, err := d.get(ctx, "/debug/pprof/"+query)
	if err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o644)
}

// pause waits, at most until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// problems collects what went wrong. Safe for concurrent use.
type problems struct {
	mu    sync.Mutex
	list  []string // guarded by mu
	count int      // guarded by mu
}

func (p *problems) add(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.count++; p.count <= problemsKept {
		p.list = append(p.list, fmt.Sprintf(format, args...))
	}
}

// log adds what a server complained about.
func (p *problems) log(r *record) {
	lines, n := r.complained()
	for _, line := range lines {
		p.add("log: %s", line)
	}
	if n > len(lines) {
		p.add("log: %d more lines", n-len(lines))
	}
}

func (p *problems) all() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := append([]string(nil), p.list...)
	if p.count > len(list) {
		list = append(list, fmt.Sprintf("%d more", p.count-len(list)))
	}
	return list
}
