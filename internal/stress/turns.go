package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/proc"
)

// runTurns compares the speed of two commits with what each measures of itself, and
// then has the programs of the module bench take turns, a server and a client process
// of each commit.
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
	fmt.Fprintf(e.out, "against %s\n", *against)
	if *quick {
		fmt.Fprintln(e.out, "SMOKE RUN: sizes and repetitions are too small for the figures to mean anything")
	}
	brief := fmt.Sprintf("--quick=%t", *quick)
	var turns bench.Turns
	var before, now *bench.Report
	measure := func(command string, to **bench.Report) func() error {
		return func() error {
			*to = new(bench.Report)
			text, err := proc.New(exec.CommandContext(ctx, command, "bench", "--net", "both", "--json", brief)).Output()
			return errors.Join(err, json.Unmarshal(text, *to))
		}
	}
	err = bench.InTurns(func(round int) bool {
		if round > 0 {
			turns.AddReports(before, now)
			fmt.Fprintf(e.out, "turn %d of %d\n", round, *rounds)
		}
		return round < *rounds
	}, measure(old.command, &before), measure(e.command, &now))
	if err = errors.Join(err, turns.WriteText(e.out)); err != nil {
		return err
	}
	var peers [2]string
	for i, c := range []*environment{old, e} {
		if peers[i], err = c.compile(ctx, "bench", module+"/bench"); err != nil {
			return err
		}
	}
	text, err := proc.New(exec.CommandContext(ctx, peers[1], "-against", peers[0], brief)).Output()
	fmt.Fprintf(e.out, "\nclient and server in two processes\n%s", text)
	return err
}
