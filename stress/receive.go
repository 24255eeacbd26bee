package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/attack"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/stress/known"
)

func runReceive(ctx context.Context, e *environment) error {
	if e.lasts == 0 {
		e.lasts = 20 * time.Second
	}
	e.expected = "connection closed"
	var err error
	found := false
	for _, a := range attack.All {
		if e.only != "" && a.Name != e.only {
			continue
		}
		found = true
		if failed := e.withstand(ctx, &a); failed != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", a.Name, failed))
		}
	}
	if !found {
		return fmt.Errorf("there is no attack %q", e.only)
	}
	return err
}

// attackServer is the process that an attack comes from.
func attackServer(ctx context.Context, name, address string) error {
	for _, a := range attack.All {
		if a.Name == name {
			a.Run(ctx, address, 1)
		}
	}
	return nil
}

// withstand attacks a server of its own, and holds it to what it may take at every
// second, and to serving somebody else. Beside it another server is not attacked: how long
// small calls take there is for want of the processor, not of fairness.
func (e *environment) withstand(ctx context.Context, a *attack.Attack) (err error) {
	flags, to := []string{"--memory", "64MiB", "--store", "memory:32MiB", "--metrics", "127.0.0.1:0"}, new(target)
	if a.Name == attack.Handshakes {
		more, err := to.secure(filepath.Join(e.dir, "tls"))
		if err != nil {
			return err
		}
		flags = append(flags, more...)
	}
	var servers [2]*daemon
	var sessions [2]*client.Session
	for i := range servers {
		d, err := e.serve(ctx, flags...)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.Stop()) }()
		c, err := client.Dial(d.address, client.Config{Credentials: to.credentials, PerRPC: to.perRPC})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, c.Close()) }()
		servers[i] = d
		if sessions[i], err = c.Session(ctx); err != nil {
			return err
		}
		stored := client.PushRequest{Tensors: []client.Input{known.Pick(0, 4*mib).Input(attack.Stored, nil)}}
		if _, err := c.Push(ctx, stored); err != nil {
			return err
		}
	}
	before, err := smallCalls(ctx, sessions[0], e.lasts/5)
	if err != nil {
		return err
	}
	d := servers[0]
	w := &watch{daemon: d, most: float64(a.Connections+1) * ownBytes}
	took, err := w.attack(ctx, a.Name, sessions, e.lasts)
	if err != nil {
		return err
	}
	f, err := d.until(ctx, "empty", func(f figures) bool {
		// The client's own sessions: one for its calls, and that of its push.
		return f["tensorferry_sessions"] == 2 && f["tensorferry_receive_used_bytes"] < 64*kib && f["tensorferry_calls"] == 0
	})
	worst := w.worst - baseRSS - int64(a.Connections)*connectionRSS - w.sessions*sessionRSS
	fmt.Fprintf(e.out, "%-40s RSS %s at most, %s charged at most, %s beyond what is charged and documented; ", a.Name, mibs(w.peak), mibs(w.charged), mibs(max(worst, 0)))
	for _, q := range []float64{0.5, 0.99} {
		at := func(all []time.Duration) time.Duration { return bench.Quantile(all, q).Round(10 * time.Microsecond) }
		fmt.Fprintf(e.out, "p%.0f %v, %v beside, %v under attack; ", q*100, at(before), at(took[1]), at(took[0]))
	}
	fmt.Fprintf(e.out, "%v ended for memory\n", f["tensorferry_receive_ended_total"])
	if n := f["tensorferry_runs_abandoned_total"]; n > 0 {
		err = errors.Join(err, fmt.Errorf("%v runs were lost, of models that had stopped", n))
	}
	if worst > spareReceived {
		err = errors.Join(err, fmt.Errorf("the server took %s more than what it charges and docs/limits.md says; %s are allowed", mibs(worst), mibs(spareReceived)))
	}
	return err
}

// watch is what a server takes at most.
type watch struct {
	*daemon
	most                           float64 // may be charged beside the limits
	worst, peak, charged, sessions int64   // worst is RSS beyond what is charged
}

// attack has the server attacked from a process of its own, and returns how long the
// small calls on each session took meanwhile.
func (w *watch) attack(ctx context.Context, name string, sessions [2]*client.Session, lasts time.Duration) (took [2][]time.Duration, err error) {
	self, err := os.Executable()
	if err != nil {
		return took, err
	}
	attackers := proc.New(exec.CommandContext(ctx, self, "attack", name, w.address))
	if err := attackers.Start(); err != nil {
		return took, err
	}
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, attackers.Process.Pid, 15) // so that they starve nobody of the processor
	watched := make(chan error, 1)
	go func() { watched <- w.until(ctx, lasts) }()
	err = each(len(took), len(took), func(i int) (err error) {
		took[i], err = smallCalls(ctx, sessions[i], lasts)
		return err
	})
	return took, errors.Join(err, <-watched, attackers.Stop())
}

// until looks every second.
func (w *watch) until(ctx context.Context, lasts time.Duration) error {
	for over := time.Now().Add(lasts); time.Now().Before(over); {
		r, err := proc.ResidentOf(w.Process.Pid)
		if err != nil {
			return err
		}
		f, err := w.scrape(ctx)
		if err != nil {
			return err
		}
		n := int64(f["tensorferry_memory_used_bytes"] + f["tensorferry_memory_kept_bytes"] + f["tensorferry_receive_used_bytes"])
		if most := f["tensorferry_memory_limit_bytes"] + f["tensorferry_receive_limit_bytes"] + w.most; float64(n) > most {
			return fmt.Errorf("%s are charged, of %s", mibs(n), mibs(most))
		}
		w.worst, w.peak = max(w.worst, r.Own-n-int64(f["tensorferry_store_used_bytes"])), max(w.peak, r.Own)
		w.charged, w.sessions = max(w.charged, n), max(w.sessions, int64(f["tensorferry_sessions"]))
		if err := pause(ctx, min(time.Second, time.Until(over))); err != nil {
			return err
		}
	}
	return nil
}

// smallCalls makes one call after the other, and returns how long each took.
func smallCalls(ctx context.Context, s *client.Session, lasts time.Duration) (took []time.Duration, err error) {
	x := known.Pick(0, kib).Tensor()
	for over := time.Now().Add(lasts); time.Now().Before(over) || len(took) == 0; {
		at := time.Now()
		if _, err := s.Compute(ctx, "echo", x); err != nil {
			return nil, fmt.Errorf("a small call of another client: %w", err)
		}
		took = append(took, time.Since(at))
		if err := pause(ctx, time.Millisecond); err != nil {
			return nil, err
		}
	}
	return took, nil
}
