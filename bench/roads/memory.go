//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/proc"
)

// remembered is n clients that run relu at once, each of a tensor of 1/n of the size. It tells
// the memory that the server and the largest client take for themselves, beside what
// docs/limits.md allows the server.
func (g *gauge) remembered(n int) turn {
	return turn{fmt.Sprintf("%d clients", n), func(ctx context.Context) (r result, err error) {
		s, address, err := g.serving(ctx, append([]string{"--memory", strconv.Itoa(memoryBytes)}, g.serve...)...)
		if err != nil {
			return r, err
		}
		defer func() { err = errors.Join(err, s.Stop()) }()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel() // of clients, if one cannot be started
		end := g.road.Ends[client]
		part := g.size / n &^ 7
		args := []string{
			"run", "relu", "--server", address, "--quiet", "--dtype", "float32", "--shape", strconv.Itoa(part / 4),
			"--input", g.file + ".part", "--output", "/dev/null", "--raw",
		}
		data := make([]byte, part)
		bench.FillFloats(data)
		if err := os.WriteFile(g.file+".part", data, 0o600); err != nil {
			return r, err
		}
		var all []*proc.Child
		for range n {
			all = append(all, proc.New(end.Command(ctx, g.program, args...)))
		}
		var most [2]int64 // of a client, and of the server
		var ended time.Time
		w, err := see(ctx, g.road, func() error {
			done := make(chan error, n)
			for _, c := range all {
				if err := c.Start(); err != nil {
					return err
				}
				go func() { done <- c.Wait() }() // ends with the client
			}
			var failed error
			for left := n; left > 0; {
				select {
				case err := <-done:
					failed, left = errors.Join(failed, err), left-1
				case <-time.After(lookEvery):
					for _, c := range all {
						if m, err := proc.ResidentOf(c.Process.Pid); err == nil { // or it has ended
							most[client] = max(most[client], m.Own)
						}
					}
					if m, err := proc.ResidentOf(s.Process.Pid); err == nil {
						most[server] = max(most[server], m.Own)
					}
				}
			}
			ended = time.Now()
			return failed
		})
		if err != nil {
			return r, err
		}
		r = g.sum(w, ended.Sub(w.begin()), [2]int64{int64(part * n), int64(part * n)})
		out, err := proc.New(end.Command(ctx, g.program, "info", "--server", address, "--json")).Output()
		if err != nil {
			return r, err
		}
		var info struct {
			Limits   map[string]int64 `json:"limits"`
			Counters map[string]int64 `json:"counters"`
		}
		if err := json.Unmarshal(out, &info); err != nil {
			return r, err
		}
		connections := int64(n) + info.Counters["lanes_opened_total"]
		documented := info.Limits["memory_bytes"] + info.Limits["receive_bytes"] + 2*ownBytes + connections*connectionBytes + int64(n)*sessionBytes
		r.beside = fmt.Sprintf("server %d MiB (%d charged, %d documented), a client %d MiB, %d lanes", most[server]>>20, info.Counters["memory_peak_bytes"]>>20, documented>>20, most[client]>>20, info.Counters["lanes_opened_total"])
		if most[server] > documented {
			err = errors.New(r.beside)
		}
		return r, err
	}}
}
