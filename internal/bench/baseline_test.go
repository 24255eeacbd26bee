package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"strings"
	"testing"

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
		for _, k := range []Kind{Raw, RawCRC, StockGRPC} {
			t.Run(fmt.Sprintf("%s %s %d bytes", network, k.Name, size), func(t *testing.T) {
				b, err := k.Open(t.Context(), network, testMemory(size))
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
	for _, size := range []int{1, 2 * ChunkBytes, ChunkBytes + 5} {
		everyBaseline(t, size, func(t *testing.T, b Baseline) {
			for _, op := range []Op{Upload, Echo, ReLU, Upload} {
				if s, err := b.Move(t.Context(), op); err != nil || s.Time <= 0 || s.CPU < 0 {
					t.Fatalf("%s: %v, %v", op, s, err)
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
			if _, err := b.Move(ctx, Echo); err != nil {
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
			for _, op := range []Op{Upload, ReLU} {
				if s, err := m.measured(op, run, idle, m.Remote); err == nil || s != (Sample{}) {
					t.Fatalf("%s: got %v, %v", op, s, err)
				}
			}
		})
	}
}

func TestRawRefusesAChunkWhoseChecksumFails(t *testing.T) {
	testkit.Start(t)
	a, b := net.Pipe()
	m := testMemory(100)
	go func() { // ends when receive has read it
		header := binary.LittleEndian.AppendUint32(nil, codec.CRC32C.Update(0, m.Source)^1)
		if _, err := a.Write(append(header, m.Source...)); err != nil {
			t.Error(err)
		}
	}()
	err := receiveRaw(b, m.Remote, true, func([]byte) { t.Error("the chunk passed for whole") })
	if err == nil || !strings.Contains(err.Error(), "checksum") {
		t.Fatalf("got %v", err)
	}
}

func TestBaselinesRefuseMemoryOfDifferentLengths(t *testing.T) {
	testkit.Start(t)
	m := testMemory(10)
	m.Back = m.Back[:9]
	for _, k := range []Kind{Raw, RawCRC, StockGRPC, Tensorferry} {
		if _, err := k.Open(t.Context(), "tcp", m); err == nil {
			t.Errorf("%s took it", k.Name)
		}
	}
	if _, err := Raw.Open(t.Context(), "carrier pigeon", testMemory(1)); err == nil {
		t.Error("an unknown network was taken")
	}
}

func TestPingsComeBackOverEveryNetwork(t *testing.T) {
	testkit.Start(t)
	for _, network := range []string{"tcp", "unix"} {
		for kind, open := range map[string]func(string, int) (*GRPCPing, error){"stock codec": NewStockPing, "bytes passed through": NewRawPing} {
			for _, size := range []int{0, 1, SmallBytes, 1 << 20} {
				t.Run(fmt.Sprintf("%s %s %d bytes", network, kind, size), func(t *testing.T) {
					p, err := open(network, size)
					if err != nil {
						t.Fatal(err)
					}
					s, err := Batch(t.Context(), p.Ping, 20)
					if err != nil || s.Time <= 0 || s.P99 < s.Time {
						t.Fatalf("%v, %v", s, err)
					}
					if err := p.Close(); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	}
}

func TestReLUOfTwoFloatsAtATimeIsThatOfEach(t *testing.T) {
	negativeZero := math.Copysign(0, -1)
	values := []float32{1, -1, 0, float32(negativeZero), float32(math.Inf(1)), float32(math.Inf(-1)),
		math.MaxFloat32, -math.MaxFloat32, math.SmallestNonzeroFloat32, -math.SmallestNonzeroFloat32}
	for _, a := range values {
		for _, b := range values {
			var data [8]byte
			binary.LittleEndian.PutUint32(data[:], math.Float32bits(a))
			binary.LittleEndian.PutUint32(data[4:], math.Float32bits(b))
			relu(data[:])
			for i, x := range []float32{a, b} {
				got := binary.LittleEndian.Uint32(data[4*i:])
				if want := math.Float32bits(max(x, 0)); got != want {
					t.Errorf("relu of %v beside %v has the bits %08x, want %08x", x, []float32{a, b}[1-i], got, want)
				}
			}
		}
	}
}

func TestNoTwoOperationsBeginAlike(t *testing.T) {
	first := map[byte]Op{}
	for op := range ops {
		if other, taken := first[op[0]]; taken {
			t.Errorf("%s and %s", op, other)
		}
		first[op[0]] = op
		if got, err := opOf(op[0]); got != op || err != nil {
			t.Errorf("%s is found as %q, %v", op, got, err)
		}
	}
	if _, err := opOf(0); err == nil {
		t.Error("a byte of no operation was taken")
	}
}

func TestCheckFindsEveryByteThatDiffers(t *testing.T) {
	m := tensorMemory(2*ChunkBytes + 8)
	for op := range ops {
		copy(m.Back, m.Source)
		for i := range chunks(m.Back) {
			ops[op].compute(chunk(m.Back, i))
		}
		if err := Check(op, m.Back, m.Source); err != nil {
			t.Fatal(err)
		}
		for _, i := range []int{0, ChunkBytes - 1, ChunkBytes, len(m.Back) - 1} {
			m.Back[i] ^= 1
			if err := Check(op, m.Back, m.Source); err == nil {
				t.Errorf("%s: byte %d differs", op, i)
			}
			m.Back[i] ^= 1
		}
		Spoil(m.Back, m.Source)
		if err := Check(op, m.Back, m.Source); err == nil {
			t.Errorf("%s: all pages are spoiled", op)
		}
	}
}
