package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
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
func everyBaseline(t *testing.T, size int, test func(t *testing.T, b *Ends)) {
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
		everyBaseline(t, size, func(t *testing.T, b *Ends) {
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
	everyBaseline(t, 4*ChunkBytes, func(t *testing.T, b *Ends) {
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
	for name, run := range map[string]func(to []byte) error{
		"nothing was moved": func([]byte) error { return nil },
		"one page is stale": func(to []byte) error {
			copy(to, m.Source[:2*ChunkBytes])
			copy(to[2*ChunkBytes+4096:], m.Source[2*ChunkBytes+4096:])
			return nil
		},
		"the transfer fails": func(to []byte) error { copy(to, m.Source); return net.ErrClosed },
	} {
		t.Run(name, func(t *testing.T) {
			copy(m.Remote, m.Source) // what an earlier run left
			copy(m.Back, m.Source)
			p := Ends{far: End{Source: m.Source, To: m.Remote, Server: Server{Idle: always}}, near: End{Source: m.Source, To: m.Back}}
			for op, to := range map[Op][]byte{Upload: m.Remote, ReLU: m.Back} {
				if s, err := p.move(op, func() error { return run(to) }); err == nil || s != (Sample{}) {
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
	go func() { // ends when Receive has read it
		header := binary.LittleEndian.AppendUint32(nil, codec.CRC32C.Update(0, m.Source)^1)
		if _, err := a.Write(append(header, m.Source...)); err != nil {
			t.Error(err)
		}
	}()
	err := (&sumLink{rawLink: rawLink{b}}).Receive(m.Remote)
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
		for _, k := range pings {
			for _, size := range []int{1, SmallBytes, 1 << 20} {
				t.Run(fmt.Sprintf("%s %s %d bytes", network, k.Name, size), func(t *testing.T) {
					p, err := k.Open(t.Context(), network, testMemory(size))
					if err != nil {
						t.Fatal(err)
					}
					s, err := batch(20, func() (time.Duration, error) { return p.ping(t.Context()) })
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
			Rectify(data[:])
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
		if compute := ops[op].compute; compute != nil {
			compute(m.Back)
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
		spoil(m.Back, m.Source)
		if err := Check(op, m.Back, m.Source); err == nil {
			t.Errorf("%s: all pages are spoiled", op)
		}
	}
}
