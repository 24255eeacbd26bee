//go:build linux

// Command roads measures tensorferry between two machines: both are network namespaces of
// this one, joined by a link of internal/roads, in which TCP runs from end to end.
// Beside it, in turns, run iperf3, raw sockets, stock gRPC and Arrow Flight in C++. It
// prints what was measured with the congestion controls that were read back. Where the
// system has no namespaces it says why and measures nothing. Given two commands, it runs these.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/bench/kinds"
	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/harness"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/internal/roads"
)

// Works of tensorferry.
const (
	push   = "push"
	pull   = "pull"
	upload = "run sink"
	relu   = "run relu"
)

// Parts that are measured.
const (
	shares = "shares"
	times  = "times"
	calls  = "calls"
	memory = "memory"
)

// links are those of docs/distance.md.
const links = "50ms:9000:1000:0,100ms:9000:1000:0,50ms:9000:1000:0.001,50ms:1500:200:0,50ms:1500:200:0.001"

// quickLink is one that a tensor of a few MiB takes a second on.
const quickLink = "10ms:1500:100:0"

func allKinds() []bench.Kind {
	all := kinds.All()
	for n := range 65 {
		all = append(all, socketsKind(n))
	}
	return all
}

func main() {
	measure.BeEnd(allKinds())
	harness.Main("roads", run)
}

// options are what to measure.
type options struct {
	lines      []line
	parts      []string
	works      []string
	streams    []int
	with       [][]string // flags of the client: a turn each
	rounds     int
	congestion string
	peers, tls bool
	failed     int // turns
	gauge
}

func run(ctx context.Context) error {
	var o options
	all := flag.String("links", links, "`links` as round trip:MTU:Mbit/s:loss, with commas between")
	parts := flag.String("parts", shares+","+times+","+calls+","+memory, "`parts` with commas between: shares of the line, times, small calls, memory")
	works := flag.String("works", strings.Join([]string{push, pull, upload, relu}, ","), "`works` of which the share is measured")
	streams := flag.String("streams", "1,4,8", "`numbers` of streams of iperf3 and of raw sockets")
	serve := flag.String("serve", "", "more `flags` of tensorferry serve")
	flag.Func("with", "more `flags` of the client, as in '--lanes 4', for a turn beside those without; repeatable", func(text string) error {
		o.with = append(o.with, strings.Fields(text))
		return nil
	})
	flag.IntVar(&o.size, "size", tensorBytes, "`bytes` of the tensor, a multiple of 8")
	flag.IntVar(&o.rounds, "rounds", rounds, "`rounds` of turns")
	flag.StringVar(&o.congestion, "congestion", roads.DefaultCongestion, "congestion `control` of both ends")
	flag.StringVar(&o.program, "program", "", "the `tensorferry` to measure, instead of this tree's")
	flag.StringVar(&o.python, "python", "", "a `Python` with pyarrow and isal, for Arrow Flight in C++")
	flag.BoolVar(&o.peers, "peers", true, "measure raw sockets, stock gRPC and Arrow Flight, too")
	flag.BoolVar(&o.tls, "tls", true, "measure shares over TLS, too")
	flag.BoolVar(&o.quick, "quick", false, "run every part briefly, to see that it works: the figures mean nothing")
	flag.Parse()
	if o.quick {
		o.size, o.rounds, *all, *streams = quickBytes, 1, quickLink, "2"
	}
	if o.size < 8 || o.size%8 != 0 || o.rounds < 1 {
		return errors.New("give a size of 8 or more, a multiple of 8, and a round or more")
	}
	for text := range strings.SplitSeq(*all, ",") {
		l, err := parseLine(text)
		if err != nil {
			return err
		}
		o.lines = append(o.lines, l)
	}
	if flag.NArg() > 0 {
		return o.between(ctx, flag.Args())
	}
	for text := range strings.SplitSeq(*streams, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 64 {
			return fmt.Errorf("%q streams; give 1 to 64", text)
		}
		o.streams = append(o.streams, n)
	}
	o.parts, o.works, o.serve = strings.Split(*parts, ","), strings.Split(*works, ","), strings.Fields(*serve)
	dir, err := os.MkdirTemp("", "tensorferry-roads-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	return o.measure(ctx, dir)
}

// measure prints a table for each line.
func (o *options) measure(ctx context.Context, dir string) error {
	r, err := roads.New(ctx, roads.Link{Congestion: o.congestion}) // or all that follows would be in vain
	if no := new(roads.UnavailableError); errors.As(err, &no) {
		fmt.Printf("%v\nNothing was measured.\n", err)
		return nil
	}
	if err != nil {
		return err
	}
	if err := r.Close(); err != nil {
		return err
	}
	top, err := harness.Top(ctx)
	if err != nil {
		return err
	}
	o.script = filepath.Join(top, "bench", "python", "ends.py")
	if o.program == "" {
		progress("building tensorferry")
		if o.program, err = harness.Tensorferry(ctx, dir); err != nil {
			return err
		}
	}
	o.file = filepath.Join(dir, "x.bin")
	o.certs = dir
	if _, err := identity.WriteCertificates(dir, []string{r.Ends[server].Addr.String()}, "bench"); err != nil {
		return err
	}
	data := make([]byte, o.size)
	bench.FillFloats(data)
	if err := os.WriteFile(o.file, data, 0o600); err != nil {
		return err
	}
	fmt.Printf("%s · %s\n", harness.ThisMachine(), time.Now().Format(time.DateOnly))
	if o.quick {
		fmt.Println("SMOKE RUN: sizes and repetitions are too small for the figures to mean anything")
	}
	if err := roads.Hurry(); err != nil {
		fmt.Printf("The link is carried beside other work, which makes packets late: %v\n", err)
	}
	for _, tool := range []string{"iperf3", "ping"} {
		if _, err := exec.LookPath(tool); err != nil {
			fmt.Printf("There is no %s: what needs it is left out.\n", tool)
		}
	}
	for _, l := range o.lines {
		for _, part := range o.parts {
			queues := []time.Duration{0}
			if part == calls {
				queues = append(queues, smallQueue)
			}
			for _, q := range queues {
				l.queue = q
				if err := o.on(ctx, l, part); err != nil {
					return err
				}
			}
		}
	}
	if o.failed > 0 {
		return fmt.Errorf("%d turns failed", o.failed)
	}
	return nil
}

// open builds a line.
func (o *options) open(ctx context.Context, l line) (*roads.Road, error) {
	way := roads.Way{Delay: l.rtt / 2, Rate: l.bits(), Queue: l.queueBytes(), Loss: l.loss}
	return roads.New(ctx, roads.Link{Way: way, MTU: l.mtu, Congestion: o.congestion, Seed: 1})
}

// between runs a server of tensorferry and a client, whose last argument is the server's
// address, at the two ends of the first line.
func (o *options) between(ctx context.Context, args []string) (err error) {
	at := slices.Index(args, "--")
	if at < 1 || at == len(args)-1 {
		return fmt.Errorf("%q; give no arguments, or two commands with -- between them", args)
	}
	serve, use := slices.Clip(args[:at]), slices.Clip(args[at+1:])
	r, err := o.open(ctx, o.lines[0])
	if no := new(roads.UnavailableError); errors.As(err, &no) {
		fmt.Println(err)
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := roads.Hurry(); err != nil {
		progress("the link is carried beside other work, which makes packets late: %v", err)
	}
	there := r.Ends[server]
	s, address, err := proc.Serve(ctx, there.Command(ctx, serve[0], append(serve[1:], "--listen", there.Addr.String()+":50051")...))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	c := r.Ends[client].Command(ctx, use[0], append(use[1:], address)...)
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	return c.Run()
}

// on measures a part on a line.
func (o *options) on(ctx context.Context, l line, part string) (err error) {
	r, err := o.open(ctx, l)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	g := o.gauge
	g.line, g.road = l, r
	short := min(o.size, shortBytes)
	t := &table{line: l, rounds: o.rounds}
	t.head(part)
	switch part {
	case shares:
		for _, work := range o.works {
			if err := t.measure(ctx, work, sharing, o.sharing(&g, work)); err != nil {
				return err
			}
		}
	case times:
		for _, x := range []struct {
			work       string
			ours, grpc string
			size       int
			op         bench.Op
			peers      bench.Op
			batch      int
			more       []turn
		}{
			{"upload of " + bench.ByteText(short), bench.Tensorferry, bench.StockGRPC, short, bench.Upload, bench.Upload, bench.ChunkBytes, nil},
			{
				fmt.Sprintf("push of %d × 1 KiB", measure.Many), kinds.InMemory, kinds.StockSmall, measure.Many << 10, measure.PushMany, bench.Upload, 1 << 10,
				[]turn{g.ends(kinds.Tar, measure.Many<<10, measure.PushMany)},
			},
			{"first result of " + bench.ByteText(short), bench.Tensorferry, bench.StockGRPC, short, measure.FirstResult, measure.FirstResult, bench.ChunkBytes, nil},
		} {
			turns := append([]turn{g.ends(x.ours, x.size, x.op)}, x.more...)
			if o.peers {
				turns = append(turns, g.ends(x.grpc, x.size, x.peers))
				if o.python != "" {
					turns = append(turns, g.flight(x.size, x.peers, x.batch))
				}
			}
			if err := t.measure(ctx, x.work, timing, turns); err != nil {
				return err
			}
		}
	case calls:
		beside := g.ends(bench.Tensorferry, o.size, measure.CallBeside)
		if _, err := exec.LookPath("ping"); err == nil {
			beside = g.pinged(beside)
		}
		if err := t.measure(ctx, bench.ByteText(bench.SmallBytes)+" call beside upload", calling, []turn{beside}); err != nil {
			return err
		}
	case memory:
		turns := []turn{g.remembered(1), g.remembered(16)}
		if err := t.measure(ctx, relu+" of "+bench.ByteText(o.size), sharing, turns); err != nil {
			return err
		}
	default:
		return fmt.Errorf("a part %q; give %s, %s, %s or %s", part, shares, times, calls, memory)
	}
	t.foot(r)
	o.failed += t.failed
	return nil
}

// sharing is who has a share of the line with a work.
func (o *options) sharing(g *gauge, work string) []turn {
	all := []turn{g.ours(work)}
	if o.tls {
		all = append(all, g.secured(work))
	}
	for _, flags := range o.with {
		all = append(all, g.ours(work, flags...))
		if o.tls {
			all = append(all, g.secured(work, flags...))
		}
	}
	way, op := []string(nil), bench.Upload
	switch work {
	case pull:
		way, op = []string{"-R"}, ""
	case relu:
		way, op = []string{"--bidir"}, bench.Echo
	}
	if _, err := exec.LookPath("iperf3"); err == nil {
		for _, n := range o.streams {
			all = append(all, g.iperf(n, way...))
		}
	}
	if !o.peers || op == "" || work == upload { // push has them
		return all
	}
	for _, n := range o.streams {
		all = append(all, g.ends(sockets(n), o.size, op))
	}
	all = append(all, g.ends(bench.StockGRPC, o.size, op))
	if o.python != "" {
		all = append(all, g.flight(o.size, op, bench.ChunkBytes))
	}
	return all
}

func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "roads: %s\n", fmt.Sprintf(format, args...))
}
