package main

import (
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// A test binary is an end, too.
func TestMain(m *testing.M) {
	measure.BeEnd(allKinds())
	os.Exit(m.Run())
}

func TestFlightMovesEveryByteBothWays(t *testing.T) {
	testkit.Start(t)
	c := measure.Smoke()
	for _, k := range flights() {
		batch := batchSizes[0]
		for _, size := range []int{8, batch - 8, batch, batch + 8, 2*batch + 8, batchSizes[len(batchSizes)-1] + 8} {
			g := measure.Group{Net: "tcp", Size: size, Ops: both, Entrants: measure.Beside(k.Name)}
			if all, err := c.Measure(t.Context(), g); err != nil || len(all) != 2 {
				t.Fatalf("%s, %d bytes: %v", k.Name, size, err)
			}
		}
		g := measure.Group{Net: "unix", Size: 8, Ops: []bench.Op{bench.ReLU}, Entrants: measure.Beside(k.Name)}
		if _, err := c.Measure(t.Context(), g); err == nil {
			t.Error("it has no relu")
		}
	}
}

// testSource is of bytes that differ.
func testSource(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i>>12) ^ byte(i*31)
	}
	return b
}

// tape records what is sent and plays it back.
type tape struct{ all []*flight.FlightData }

func (p *tape) Send(d *flight.FlightData) error {
	p.all = append(p.all, proto.Clone(d).(*flight.FlightData))
	return nil
}

func (p *tape) Recv() (*flight.FlightData, error) {
	if len(p.all) == 0 {
		return nil, io.EOF
	}
	d := p.all[0]
	p.all = p.all[1:]
	return d, nil
}

// record returns the messages of a tensor of three batches of 100 bytes and one
// of 20: a schema and four.
func record(t *testing.T, sums bool) (source []byte, p *tape) {
	t.Helper()
	source, p = testSource(320), new(tape)
	l := newFlightLink(p, nil, len(source), sums)
	for c := range slices.Chunk(source, 100) {
		require.NoError(t, l.Send(c))
	}
	if len(p.all) != 5 {
		t.Fatalf("%d messages, want 5", len(p.all))
	}
	return source, p
}

// play receives what was recorded, and returns how many batches were placed.
func play(p *tape, dst []byte, sums bool) (placed int, err error) {
	l := newFlightLink(nil, p, len(dst), sums)
	for c := range slices.Chunk(dst, 100) {
		if err := l.Receive(c); err != nil {
			return placed, err
		}
		placed++
	}
	return placed, nil
}

func TestEveryBitThatFlipsOnTheWayIsFoundByItsChecksum(t *testing.T) {
	for bit := range 8 * 100 {
		source, p := record(t, true)
		p.all[2].DataBody[bit/8] ^= 1 << (bit % 8)
		placed, err := play(p, make([]byte, len(source)), true)
		if err == nil || !strings.Contains(err.Error(), "checksum") || !strings.Contains(err.Error(), "220 bytes before") {
			t.Fatalf("bit %d: got %v", bit, err)
		}
		if placed != 1 {
			t.Fatalf("bit %d: %d batches passed for whole, want the one before", bit, placed)
		}
	}
}

func TestWithoutChecksumsAFlippedBitIsFoundByTheComparison(t *testing.T) {
	source, p := record(t, false)
	p.all[2].DataBody[7] ^= 1
	dst := make([]byte, len(source))
	if _, err := play(p, dst, false); err != nil {
		t.Fatal(err)
	}
	if err := bench.Check(bench.Upload, dst, source); err == nil {
		t.Error("the comparison passed it")
	}
}

func TestABatchThatIsNotTheTensorsIsRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*tape)
		want   string
	}{
		"its checksum is missing":      {func(p *tape) { p.all[3].AppMetadata = nil }, errNoSum.Error()},
		"its checksum is another's":    {func(p *tape) { p.all[3].AppMetadata = p.all[2].AppMetadata }, "checksum"},
		"two are turned":               {func(p *tape) { p.all[1].AppMetadata, p.all[2].AppMetadata = p.all[2].AppMetadata, p.all[1].AppMetadata }, "checksum"},
		"the last one is missing":      {func(p *tape) { p.all = p.all[:4] }, "ends 20 bytes before"},
		"one comes twice":              {func(p *tape) { p.all = append(p.all, p.all[4]) }, "after the tensor's last"},
		"nothing comes":                {func(p *tape) { p.all = nil }, io.EOF.Error()},
		"nothing comes but the schema": {func(p *tape) { p.all = p.all[:1] }, "ends 320 bytes before"},
	} {
		t.Run(name, func(t *testing.T) {
			source, p := record(t, true)
			tc.change(p)
			_, err := play(p, make([]byte, len(source)), true)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// broken fails like a connection that is gone.
type broken struct{}

func (broken) Send(*flight.FlightData) error { return errBroken }

var errBroken = errors.New("gone")

func TestSendingEndsWithTheConnection(t *testing.T) {
	if err := newFlightLink(broken{}, nil, 4, true).Send(make([]byte, 4)); !errors.Is(err, errBroken) {
		t.Fatalf("got %v", err)
	}
}
