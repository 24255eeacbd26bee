package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

func testMemory(n int) Memory {
	m := Memory{make([]byte, n), make([]byte, n), make([]byte, n)}
	for i := range m.Source {
		m.Source[i] = byte(i>>12) ^ byte(i*31)
	}
	return m
}

// everyBaseline opens each kind over each network.
func everyBaseline(t *testing.T, size int, test func(t *testing.T, b Baseline)) {
	for _, network := range []string{"tcp", "unix"} {
		for name, open := range map[string]func(Memory) (Baseline, error){
			"raw":       func(m Memory) (Baseline, error) { return NewRaw(network, m, false) },
			"raw crc":   func(m Memory) (Baseline, error) { return NewRaw(network, m, true) },
			"stockgrpc": func(m Memory) (Baseline, error) { return NewStockGRPC(network, m) },
		} {
			t.Run(fmt.Sprintf("%s %s %d bytes", network, name, size), func(t *testing.T) {
				b, err := open(testMemory(size))
				if err != nil {
					t.Fatal(err)
				}
				test(t, b)
			})
		}
	}
}

func TestBaselinesMoveEveryByteBothWays(t *testing.T) {
	testkit.Start(t)
	for _, size := range []int{1, 4 * ChunkBytes, 3*ChunkBytes + 5} {
		everyBaseline(t, size, func(t *testing.T, b Baseline) {
			for range 2 {
				for name, run := range map[string]func(context.Context) (time.Duration, error){"upload": b.Upload, "echo": b.Echo} {
					if d, err := run(t.Context()); err != nil || d <= 0 {
						t.Fatalf("%s, %s: %v, %v", b.Name(), name, d, err)
					}
				}
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestBaselinesEndWithTheirContext(t *testing.T) {
	testkit.Start(t)
	everyBaseline(t, 4*ChunkBytes, func(t *testing.T, b Baseline) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for {
			// The cancellation may come too late for a run, never for all of them.
			if _, err := b.Echo(ctx); err != nil {
				break
			}
		}
		b.Close() // with whatever error the cut connection gave the server
	})
}

func TestBytesThatDidNotArriveHaveNoTime(t *testing.T) {
	testkit.Start(t)
	m := testMemory(3 * ChunkBytes)
	idle := make(chan struct{})
	close(idle)
	copy(m.Remote, m.Source) // what an earlier run left
	for name, run := range map[string]func() error{
		"nothing was moved": func() error { return nil },
		"one page is stale": func() error {
			copy(m.Remote, m.Source[:2*ChunkBytes])
			copy(m.Remote[2*ChunkBytes+4096:], m.Source[2*ChunkBytes+4096:])
			return nil
		},
		"the transfer fails": func() error { copy(m.Remote, m.Source); return net.ErrClosed },
	} {
		t.Run(name, func(t *testing.T) {
			if d, err := m.measured(run, idle, m.Remote); err == nil || d != 0 {
				t.Fatalf("got %v, %v", d, err)
			}
		})
	}
}

func TestRawRefusesAChunkWhoseChecksumFails(t *testing.T) {
	testkit.Start(t)
	a, b := net.Pipe()
	r := &Raw{mem: testMemory(100), sums: true}
	go func() { // ends when receive has read it
		header := binary.LittleEndian.AppendUint32(nil, codec.CRC32C.Update(0, r.mem.Source)^1)
		if _, err := a.Write(append(header, r.mem.Source...)); err != nil {
			t.Error(err)
		}
	}()
	err := r.receive(b, r.mem.Remote, func([]byte) { t.Error("the chunk passed for whole") })
	if err == nil || !strings.Contains(err.Error(), "checksum") {
		t.Fatalf("got %v", err)
	}
}

func TestBaselinesRefuseMemoryOfDifferentLengths(t *testing.T) {
	testkit.Start(t)
	m := testMemory(10)
	m.Back = m.Back[:9]
	if _, err := NewRaw("tcp", m, true); err == nil {
		t.Error("raw took it")
	}
	if _, err := NewStockGRPC("tcp", m); err == nil {
		t.Error("stock gRPC took it")
	}
	if _, err := NewRaw("carrier pigeon", testMemory(1), true); err == nil {
		t.Error("an unknown network was taken")
	}
}

func TestPingsComeBackOverEveryNetwork(t *testing.T) {
	testkit.Start(t)
	for _, network := range []string{"tcp", "unix"} {
		for _, size := range []int{0, 1, 30 << 10, 1 << 20} {
			t.Run(fmt.Sprintf("%s %d bytes", network, size), func(t *testing.T) {
				p, err := NewGRPCPing(network, size)
				if err != nil {
					t.Fatal(err)
				}
				p50, p99, err := Latencies(t.Context(), p.Ping, 20)
				if err != nil || p50 <= 0 || p99 < p50 {
					t.Fatalf("p50 %v, p99 %v, %v", p50, p99, err)
				}
				if err := p.Close(); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}
