package worker

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// sequence is one of the model `remembers`.
type sequence struct {
	t     *testing.T
	host  *Host
	state engine.State
}

// remembered is what that model says of a row.
type remembered struct{ PID, Row, Blocks, MaxRows uint32 }

func beginSequence(t *testing.T, h *Host, name string) *sequence {
	t.Helper()
	m, ok := engine.As[engine.Sequencer](h.Model())
	require.True(t, ok)
	s, err := m.Begin(t.Context(), engine.Sequence{ID: tensor.ID{7}, Principal: slab.NewPrincipal(name), Params: map[string]string{"do": name}, MaxRows: 500})
	require.NoError(t, err)
	require.NotNil(t, s)
	return &sequence{t, h, s}
}

// column is a tensor of rows of one byte, of which the first says what to do.
func column(do byte, rows int) tensor.Tensor {
	x, err := tensor.Of(append([]byte{do}, make([]byte, rows-1)...), int64(rows), 1)
	if err != nil {
		panic(err)
	}
	return x
}

// step runs a call of the sequence, and returns what is said of its first and its last row.
func (s *sequence) step(do byte, rows int) (first, last remembered, err error) {
	x := column(do, rows)
	n, err := s.state.Rows(enginetest.Call(s.host.Model(), []tensor.Tensor{x}, nil, 1<<20))
	require.NoError(s.t, err)
	require.EqualValues(s.t, rows, n)
	y, err := engine.Step(s.t.Context(), s.host.Model(), s.state, x)
	if err != nil {
		return first, last, err
	}
	all := make([]remembered, rows)
	_, err = binary.Decode(y[0].Data, binary.LittleEndian, all)
	require.NoError(s.t, err)
	require.Greater(s.t, all[0].PID, uint32(1))
	return all[0], all[rows-1], nil
}

// well is step of a call that goes well.
func (s *sequence) well(do byte, rows int) (first, last remembered) {
	s.t.Helper()
	first, last, err := s.step(do, rows)
	require.NoError(s.t, err)
	return first, last
}

// gauge returns a gauge of a host.
func gauge(h *Host, name string) float64 {
	all := h.gauges()
	return all[slices.IndexFunc(all, func(g engine.Gauge) bool { return g.Name == name })].Value
}

// heard is a log that is read.
type heard struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *heard) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *heard) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), what)
}

// closes waits until what a call has kept was closed as often as is said.
func (l *heard) closes(t *testing.T, what string, times int) {
	t.Helper()
	testkit.Eventually(t, func() bool { return l.count(`line="closed `+what+`"`) == times }, "what is kept is closed: "+what)
}

func remembers(t *testing.T, change func(*Config)) (*Host, *heard) {
	l := &heard{}
	c := python(t, "remembers")
	c.Log = slog.New(slog.NewTextHandler(l, nil))
	if change != nil {
		change(&c)
	}
	return start(t, c), l
}

func TestAStateLivesAsLongAsItsSequence(t *testing.T) {
	testkit.Start(t)
	h, log := remembers(t, nil)
	one, two := beginSequence(t, h, "one"), beginSequence(t, h, "two")
	require.EqualValues(t, 2, gauge(h, "worker_states"))
	for step := range uint32(5) { // of 7 rows in three blocks, and of one
		first, last := one.well(0, 7)
		require.Equal(t, []uint32{7 * step, 3*step + 1, 500}, []uint32{first.Row, first.Blocks, first.MaxRows})
		require.Equal(t, []uint32{7*step + 6, 3*step + 3}, []uint32{last.Row, last.Blocks})
		first, _ = two.well(0, 1)
		require.Equal(t, []uint32{step, step + 1}, []uint32{first.Row, first.Blocks})
	}
	y, err := enginetest.Compute(t.Context(), h.Model(), []tensor.Tensor{column(0, 1)}, map[string]string{"do": "call"}, 1<<20, 0)
	require.NoError(t, err)
	require.Equal(t, []byte{1, 0, 0, 0, 0, 0, 0, 0}, y[0].Data[8:], "a call has a state of its own, and no rows at most")
	log.closes(t, "call", 1)
	one.state.Close()
	one.state.Close()
	log.closes(t, "one", 1)
	two.well(0, 1)
	_, _, err = one.step(0, 1)
	require.ErrorIs(t, err, engine.ErrStateLost)
	two.state.Close()
	log.closes(t, "two", 1)
	testkit.Eventually(t, func() bool { return log.count("ZeroDivisionError: which harms nobody") == 3 }, "what close raised")
	require.Zero(t, gauge(h, "worker_states"))
	require.Zero(t, gauge(h, "worker_state_bytes"))
	testkit.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for g := range h.guests {
			return len(g.runs) == 0
		}
		return false
	}, "the process is told of each end")
}

func TestASequenceStaysWithItsProcess(t *testing.T) {
	testkit.Start(t)
	h, _ := remembers(t, func(c *Config) { c.Processes = 2 })
	all, pids, of := make([]*sequence, 6), make([]uint32, 6), map[uint32]int{}
	for i := range all {
		all[i] = beginSequence(t, h, "many")
	}
	for i, s := range all {
		first, _ := s.well(0, 1)
		pids[i] = first.PID
		of[first.PID]++
	}
	for pid, n := range of {
		require.Equal(t, 3, n, "of process %d", pid)
	}
	var steps sync.WaitGroup
	for i, s := range all {
		steps.Go(func() {
			for n := range uint32(20) {
				first, _, err := s.step(0, 1)
				if err != nil || first.PID != pids[i] || first.Row != n+1 || first.Blocks != n+2 {
					t.Error(first, err)
					return
				}
			}
		})
	}
	steps.Wait()

	lost := all[0]
	require.NoError(t, syscall.Kill(int(pids[0]), syscall.SIGKILL))
	testkit.Eventually(t, func() bool { return h.restarts.Load() == 1 && gauge(h, "worker_processes") == 2 }, "another process")
	for i, s := range all {
		_, _, err := s.step(0, 1)
		if pids[i] != pids[0] {
			require.NoError(t, err)
			continue
		}
		require.ErrorIs(t, err, engine.ErrStateLost)
		require.ErrorContains(t, err, `the worker of model "remembers" ended (signal: killed)`)
	}
	require.EqualValues(t, 3, gauge(h, "worker_states"))
	lost.state.Close()
	anew := beginSequence(t, h, "anew") // by the process that has none
	first, _ := anew.well(0, 1)
	require.NotContains(t, pids, first.PID)
	anew.state.Close()
	for _, s := range all {
		s.state.Close()
	}
	require.Zero(t, gauge(h, "worker_states"))
}

func TestAStateIsLostWithItsProcess(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		do   byte
		why  string
		more int // processes
	}{
		"it dies in a step":                {1, "signal: killed", 0},
		"it dies in a step, and was alone": {1, "signal: killed", -1},
		"it hangs":                         {3, "a block took more than 500ms", 0},
	} {
		t.Run(name, func(t *testing.T) {
			h, _ := remembers(t, func(c *Config) { c.Processes, c.block = 2+tc.more, 500*time.Millisecond })
			s := beginSequence(t, h, "one")
			s.well(0, 1)
			_, _, err := s.step(tc.do, 7)
			for range 3 { // its process has ended, there is none, there is another
				require.ErrorIs(t, err, engine.ErrStateLost)
				require.ErrorContains(t, err, tc.why)
				testkit.Eventually(t, func() bool { return int(gauge(h, "worker_processes")) == 2+tc.more }, "the processes")
				_, _, err = s.step(0, 1)
			}
			require.Zero(t, gauge(h, "worker_states"))
			s.state.Close()
			s = beginSequence(t, h, "two")
			s.well(0, 1)
			h.Close()
			_, _, err = s.step(0, 1)
			require.ErrorIs(t, err, engine.ErrStateLost)
			s.state.Close()
		})
	}
}

func TestAStepThatHasGivenNoRowsIsLostWithItsProcess(t *testing.T) {
	testkit.Start(t)
	h, _ := remembers(t, nil)
	s := beginSequence(t, h, "one")
	first, _ := s.well(0, 1)
	call := enginetest.Call(h.Model(), []tensor.Tensor{column(0, 1)}, nil, 1)
	call.State = s.state
	r, err := h.Model().Open(t.Context(), call)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(int(first.PID), syscall.SIGKILL))
	_, err = r.Next(t.Context())
	require.ErrorIs(t, err, engine.ErrStateLost)
	require.NoError(t, r.Close())
	s.state.Close()
}

func TestAStateOfAnotherModelIsRefused(t *testing.T) {
	testkit.Start(t)
	h, _ := remembers(t, nil)
	other, _ := remembers(t, nil)
	s := beginSequence(t, h, "one")
	s.host = other
	_, _, err := s.step(0, 1)
	require.ErrorIs(t, err, engine.ErrStateLost)
	s.state.Close()
}

func TestWhatASequenceKeepsIsClosedHoweverItEnds(t *testing.T) {
	testkit.Start(t)
	h, log := remembers(t, nil)
	failed := beginSequence(t, h, "failed")
	_, _, err := failed.step(2, 1)
	require.ErrorIs(t, err, engine.ErrModel)
	require.Zero(t, log.count("closed"))
	failed.state.Close()
	log.closes(t, "failed", 1)

	cancelled := beginSequence(t, h, "cancelled")
	cancelled.well(0, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { // ends with the call
		_, err := engine.Step(ctx, h.Model(), cancelled.state, column(4, 7))
		done <- err
	}()
	testkit.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for g := range h.guests {
			return len(g.flight) == 1 && g.flight[0].sent && h.lines[0].len() == 2
		}
		return false
	}, "a step under way")
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	cancelled.state.Close()
	log.closes(t, "cancelled", 1)

	_, err = do(t.Context(), h, "")
	require.ErrorIs(t, err, engine.ErrInput, "four columns")
	call := map[string]string{"do": "a failed call"}
	_, err = enginetest.Compute(t.Context(), h.Model(), []tensor.Tensor{column(2, 1)}, call, 1<<20, 0)
	require.Error(t, err)
	log.closes(t, "a failed call", 1)

	open := beginSequence(t, h, "open")
	open.well(0, 1)
	require.Zero(t, h.restarts.Load())
	h.Close()
	log.closes(t, "open", 1)
	open.state.Close()
}

func TestTheBytesOfAStateAreBounded(t *testing.T) {
	testkit.Start(t)
	h, log := remembers(t, nil) // of 64 MiB
	one, two := beginSequence(t, h, "one"), beginSequence(t, h, "two")
	grow := func(s *sequence, mib byte) (err error) {
		s.well(0, 1)
		testkit.Eventually(t, func() bool { // it is not counted in each step
			_, _, err = s.step(mib, 1)
			return err != nil || s.state.Bytes() == int64(mib)<<20
		}, "the state grows")
		return err
	}
	require.NoError(t, grow(one, 10))
	require.NoError(t, grow(two, 12))
	require.EqualValues(t, 22<<20, gauge(h, "worker_state_bytes"))
	used, _, _ := h.budget.Used()
	require.EqualValues(t, 22<<20, used)
	err := grow(one, 21) // 20 are left
	require.ErrorIs(t, err, slab.ErrMemory)
	require.ErrorContains(t, err, "the state of the sequence has 22020096 bytes; with what else model \"remembers\" keeps it may have 20971520")
	one.state.Close()
	log.closes(t, "one", 1)
	require.NoError(t, grow(two, 32))
	require.NoError(t, grow(two, 11), "it may shrink")
	err = grow(two, 33)
	require.ErrorIs(t, err, slab.ErrBudget)
	require.NotErrorIs(t, err, slab.ErrMemory)
	require.EqualValues(t, 11<<20, gauge(h, "worker_state_bytes"))
	two.state.Close()
	require.Zero(t, two.state.Bytes())
	require.Zero(t, gauge(h, "worker_state_bytes"))

	kill := beginSequence(t, h, "kill")
	require.NoError(t, grow(kill, 10))
	_, _, err = kill.step(1, 1)
	require.ErrorIs(t, err, engine.ErrStateLost)
	require.Zero(t, kill.state.Bytes())
	require.NoError(t, h.idle())
}

// A sequence whose step has many blocks leaves each other a turn behind each of them.
func TestSequencesTakeTurns(t *testing.T) {
	one, two := &guest{}, &guest{}
	var l line
	push := func(run uint64, owner *guest, blocksOfIt int) *program {
		p := &program{run: run, owner: owner}
		for range blocksOfIt {
			l.push(&blocks.Work{Program: p})
		}
		return p
	}
	long := push(1, one, 4)
	push(2, nil, 2)
	push(3, two, 1)
	push(4, one, 1)
	next := func(g *guest) uint64 {
		if w := l.pop(g); w != nil {
			return w.Program.(*program).run
		}
		return 0
	}
	require.Equal(t, []uint64{1, 2, 4, 1, 3}, []uint64{next(one), next(one), next(one), next(one), next(two)})
	require.Equal(t, 3, l.len())
	var over blocks.Queue
	l.take(func(p *program) bool { return p == long }, &over)
	require.Equal(t, 2, over.Len())
	require.Equal(t, []uint64{2, 0, 0}, []uint64{next(two), next(two), next(one)})
}
