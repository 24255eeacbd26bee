//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/internal/roads"
)

// The ends of a road.
const (
	client = 0
	server = 1
)

// line is a link that is measured.
type line struct {
	rtt   time.Duration
	mtu   int
	mbit  int64
	loss  float64
	queue time.Duration // what waits for the line at most, as time at its rate; 0 is a round trip
}

func (l line) String() string {
	return fmt.Sprintf("%v, %d Mbit/s, loss %g %%", l.rtt, l.mbit, l.loss*100)
}

func (l line) bits() int64 { return l.mbit * 1e6 }

// queueBytes is the queue.
func (l line) queueBytes() int {
	wait := l.rtt
	if l.queue > 0 {
		wait = l.queue
	}
	return int(float64(l.bits()) / 8 * wait.Seconds())
}

// parseLine reads such as 50ms:9000:1000:0.001: round trip, MTU, Mbit/s and loss.
func parseLine(text string) (l line, err error) {
	parts := strings.Split(text, ":")
	if len(parts) != 4 {
		return l, fmt.Errorf("a link %q; give round trip, MTU, Mbit/s and loss as in 50ms:9000:1000:0.001", text)
	}
	var errs [4]error
	l.rtt, errs[0] = time.ParseDuration(parts[0])
	l.mtu, errs[1] = strconv.Atoi(parts[1])
	l.mbit, errs[2] = strconv.ParseInt(parts[2], 10, 64)
	l.loss, errs[3] = strconv.ParseFloat(parts[3], 64)
	return l, errors.Join(errs[:]...)
}

// gauge measures on one road.
type gauge struct {
	line
	road    *roads.Road
	size    int
	program string   // tensorferry
	serve   []string // more flags of its server
	file    string   // of float32, with size bytes
	python  string   // with pyarrow, if any
	script  string   // ends.py
	certs   string   // a folder with the certificates of TLS
	quick   bool
}

// result is what one turn gave.
type result struct {
	rates      [2]float64 // bits per second of payload that each end sent
	took       time.Duration
	p99        time.Duration
	beside     string // what else was seen
	congestion string
	late       time.Duration
}

// turn is somebody who does a work.
type turn struct {
	who string
	do  func(context.Context) (result, error)
}

// ours is a command of tensorferry, with flags of the client.
func (g *gauge) ours(work string, flags ...string) turn {
	who := strings.Join(append([]string{"tensorferry"}, flags...), " ")
	return turn{who, func(ctx context.Context) (result, error) { return g.runOurs(ctx, work, g.serve, flags) }}
}

// secured is the same over TLS.
func (g *gauge) secured(work string, flags ...string) turn {
	t := g.ours(work, flags...)
	file := func(name string) string { return filepath.Join(g.certs, name) }
	serve := append([]string{"--tls-cert", file(identity.ServerFile), "--tls-key", file(identity.ServerKeyFile)}, g.serve...)
	flags = append([]string{"--ca", file(identity.AuthorityFile)}, flags...)
	return turn{t.who + ", TLS", func(ctx context.Context) (result, error) { return g.runOurs(ctx, work, serve, flags) }}
}

// serving starts a server of ours at its end of the road.
func (g *gauge) serving(ctx context.Context, flags ...string) (s *proc.Child, address string, err error) {
	end := g.road.Ends[server]
	args := append([]string{"serve", "--child", "--listen", end.Addr.String() + ":50051", "--metrics", "off", "--insecure"}, flags...)
	return proc.Serve(ctx, end.Command(ctx, g.program, args...))
}

func (g *gauge) runOurs(ctx context.Context, work string, serve, flags []string) (r result, err error) {
	e := g.road.Ends
	s, address, err := g.serving(ctx, append([]string{"--store", fmt.Sprintf("memory:%d", g.size+storeSpare)}, serve...)...)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	shape := []string{"--server", address, "--quiet"}
	raw := append([]string{"--dtype", "float32", "--shape", strconv.Itoa(g.size / 4)}, shape...)
	put := append([]string{"push", "x=" + g.file}, raw...)
	var command []string
	sizes := [2]int64{}
	switch work {
	case push:
		command, sizes[client] = put, int64(g.size)
	case pull:
		command, sizes[server] = append([]string{"pull", "x", "--raw", "--output", "/dev/null"}, shape...), int64(g.size)
		if _, err := proc.New(e[server].Command(ctx, g.program, append(put, flags...)...)).Output(); err != nil { // not over the road
			return r, err
		}
	case upload:
		command, sizes[client] = append([]string{"run", "sink", "--input", g.file, "--output", "/dev/null", "--raw"}, raw...), int64(g.size)
	case relu:
		command = append([]string{"run", "relu", "--input", g.file, "--output", "/dev/null", "--raw"}, raw...)
		sizes = [2]int64{int64(g.size), int64(g.size)}
	}
	var end time.Time
	w, err := see(ctx, g.road, func() error {
		_, err := proc.New(e[client].Command(ctx, g.program, append(command, flags...)...)).Output()
		end = time.Now()
		return err
	})
	if err != nil {
		return r, err
	}
	return g.sum(w, end.Sub(w.begin()), sizes), nil
}

// sum makes a result of what was seen while each end sent so many bytes.
func (g *gauge) sum(w *watch, took time.Duration, sizes [2]int64) result {
	r := result{took: took, congestion: w.congestion(), late: w.late}
	for i, n := range sizes {
		if n > 0 {
			r.rates[i] = w.rate(i, n, took)
		}
	}
	return r
}

// ends are a kind of internal/bench, both ends started anew.
func (g *gauge) ends(kind string, size int, op bench.Op, program ...string) turn {
	return turn{kind, func(ctx context.Context) (r result, err error) {
		group := measure.Group{
			Net: "tcp", Size: size, Host: g.road.Ends[server].Addr.String(), Wait: jobWait,
			Commands: [2]measure.Command{g.road.Ends[server].Command, g.road.Ends[client].Command},
		}
		ends, err := measure.Open(ctx, group, measure.Entrant{Kind: kind, Program: program})
		if err != nil {
			return r, err
		}
		defer func() { err = errors.Join(err, ends.Close()) }()
		job := measure.Job{Op: op}
		if op == measure.CallBeside {
			job.Count = bench.CallBatch
		}
		var s bench.Sample
		w, err := see(ctx, g.road, func() error { s, err = ends.Do(ctx, job); return err })
		if err != nil {
			return r, err
		}
		sizes := [2]int64{int64(size), 0}
		if op.Back() {
			sizes[server] = int64(size)
		}
		r = g.sum(w, s.Time, sizes)
		if r.p99 = s.P99; s.Total > 0 {
			r.beside = fmt.Sprintf("of a call of %v", s.Total.Round(time.Millisecond))
		}
		return r, nil
	}}
}

// flight is Arrow Flight in C++, with batches of so many bytes and no checksums, as it comes.
func (g *gauge) flight(size int, op bench.Op, batch int) turn {
	t := g.ends("", size, op, g.python, g.script, measure.EndArgument, "none", strconv.Itoa(batch))
	t.who = "Arrow Flight (C++)"
	return t
}

// iperf is iperf3 with n streams: up, down with -R or both with --bidir.
func (g *gauge) iperf(n int, way ...string) turn {
	return turn{fmt.Sprintf("iperf3 -P %d", n), func(ctx context.Context) (r result, err error) {
		e := g.road.Ends
		s := proc.New(e[server].Command(ctx, "iperf3", "-s", "-1", "--forceflush"))
		var log proc.Log
		s.Stdout = &log
		if _, err = s.Listen(ctx, &log, func(line string) string {
			if strings.HasPrefix(line, "Server listening") {
				return line
			}
			return ""
		}); err != nil {
			return r, err
		}
		defer s.Kill() // it ends with the one client
		seconds := max(1, math.Round(float64(g.size)*8/float64(g.bits())))
		omit := warmUp.Seconds()
		if g.quick {
			omit = 0
		}
		args := []string{"-c", e[server].Addr.String(), "-J", "-P", strconv.Itoa(n), "-t", fmt.Sprint(seconds), "-O", fmt.Sprint(omit)}
		var out []byte
		w, err := see(ctx, g.road, func() error {
			out, err = proc.New(e[client].Command(ctx, "iperf3", append(args, way...)...)).Output()
			return err
		})
		if err != nil {
			return r, err
		}
		type sum struct {
			Bits float64 `json:"bits_per_second"`
		}
		var said struct {
			End struct {
				Received sum `json:"sum_received"`
				Reverse  sum `json:"sum_received_bidir_reverse"`
			} `json:"end"`
		}
		if err := json.Unmarshal(out, &said); err != nil {
			return r, err
		}
		r = result{congestion: w.congestion(), late: w.late, rates: [2]float64{said.End.Received.Bits, said.End.Reverse.Bits}}
		if slices.Contains(way, "-R") {
			slices.Reverse(r.rates[:])
		}
		return r, nil
	}}
}

// pinged adds what pings see meanwhile.
func (g *gauge) pinged(t turn) turn {
	do := t.do
	t.do = func(ctx context.Context) (result, error) {
		pinging, stop := context.WithCancel(ctx)
		defer stop()
		e := g.road.Ends
		var times []time.Duration
		seen := proc.Log{Each: func(line string) {
			if _, rest, is := strings.Cut(line, "time="); is {
				if t, err := time.ParseDuration(strings.ReplaceAll(rest, " ", "")); err == nil {
					times = append(times, t)
				}
			}
		}}
		p := proc.New(e[client].Command(pinging, "ping", "-i", fmt.Sprint(pingEvery.Seconds()), e[server].Addr.String()))
		p.Stdout = &seen
		if err := p.Start(); err != nil {
			return result{}, err
		}
		r, err := do(ctx)
		stop()
		_ = p.Wait() // it was interrupted
		if len(times) > 0 {
			p50, p99 := bench.Quantile(times, 0.5), bench.Quantile(times, 0.99)
			r.beside = fmt.Sprintf("ping %s p50, %s p99", millis(p50), millis(p99))
		}
		return r, err
	}
	return t
}

func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1e3) }
