package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"

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
	order := []*environment{old, e}
	for n := range *rounds {
		reports := map[*environment]*bench.Report{}
		for _, p := range order {
			r := new(bench.Report)
			text, err := output(exec.CommandContext(ctx, p.command, "bench", "--net", "both", "--json", fmt.Sprintf("--quick=%t", *quick)))
			if err = errors.Join(err, json.Unmarshal(text, r)); err != nil {
				return err
			}
			reports[p] = r
		}
		turns.AddReports(reports[old], reports[e])
		slices.Reverse(order)
		fmt.Fprintf(e.out, "turn %d of %d\n", n+1, *rounds)
	}
	if err := turns.WriteText(e.out); err != nil {
		return err
	}
	return e.peers(ctx, old, *quick)
}

// peers has the programs of the module bench take turns, a server and a client process
// of each commit.
func (e *environment) peers(ctx context.Context, old *environment, quick bool) error {
	before, err := old.compile(ctx, "bench", module+"/bench")
	if err != nil {
		return err
	}
	now, err := e.compile(ctx, "bench", module+"/bench")
	if err != nil {
		return err
	}
	text, err := output(exec.CommandContext(ctx, now, "-against", before, fmt.Sprintf("-quick=%t", quick)))
	fmt.Fprintf(e.out, "\nclient and server in two processes\n%s", text)
	return err
}
