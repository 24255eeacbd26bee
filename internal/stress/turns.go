package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// runTurns compares the speed of two commits with what each measures of itself.
func runTurns(ctx context.Context, e *environment, args []string) error {
	f := e.flags("turns")
	against := f.String("against", "HEAD", "`commit` of the old program")
	rounds := f.Int("rounds", turnsLeast, "how many `times` each program measures")
	quick := f.Bool("quick", false, "run every part briefly, to see that it works: the figures mean nothing")
	if err := e.ready(ctx, f, args); err != nil {
		return err
	}
	old, err := e.commit(ctx, *against)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.out, "%v · against %s\n", bench.ThisMachine(), *against)
	if *quick {
		fmt.Fprintln(e.out, "SMOKE RUN: sizes and repetitions are too small for the figures to mean anything")
	}
	var turns bench.Turns
	for n := range *rounds {
		reports := map[*environment]*bench.Report{}
		order := []*environment{old, e}
		for i := range order {
			p := order[(i+n)%2]
			if reports[p], err = p.measure(ctx, *quick); err != nil {
				return err
			}
		}
		turns.AddReports(reports[old], reports[e])
		fmt.Fprintf(e.out, "round %d of %d\n", n+1, *rounds)
	}
	if err := turns.WriteText(e.out); err != nil {
		return err
	}
	return e.peers(ctx, old, *quick)
}

// measure returns what the command measures.
func (e *environment) measure(ctx context.Context, quick bool) (*bench.Report, error) {
	text, err := output(exec.CommandContext(ctx, e.command, "bench", "--net", "both", "--json", fmt.Sprintf("--quick=%t", quick)))
	if err != nil {
		return nil, err
	}
	r := new(bench.Report)
	return r, json.Unmarshal(text, r)
}

// peers has the programs of the module bench take turns, a server and a client process
// of each commit.
func (e *environment) peers(ctx context.Context, old *environment, quick bool) error {
	var programs []string
	for _, p := range []*environment{old, e} {
		program, err := p.compile(ctx, "bench", module+"/bench")
		if err != nil {
			return err
		}
		if program, err = filepath.Abs(program); err != nil {
			return err
		}
		programs = append(programs, program)
	}
	cmd := exec.CommandContext(ctx, programs[1], "-against", programs[0], fmt.Sprintf("-quick=%t", quick))
	text, err := output(cmd)
	fmt.Fprintf(e.out, "\nclient and server in two processes\n%s", text)
	return err
}
