package lane

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// connected returns both ends of a connection.
func connected(t *testing.T, network string) (a, b net.Conn) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(t.TempDir(), "socket")
	}
	l, err := net.Listen(network, address)
	require.NoError(t, err)
	defer l.Close()
	a, err = net.Dial(network, l.Addr().String())
	require.NoError(t, err)
	b, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = a.Close()
		_ = b.Close()
	})
	return a, b
}

// secure secures both ends of a connection.
func secure(t *testing.T, a, b net.Conn) (client, server Secured) {
	t.Helper()
	dir := t.TempDir()
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, identity.ServerFile), filepath.Join(dir, identity.ServerKeyFile))
	require.NoError(t, err)
	x, y := &Batch{Conn: a}, &Batch{Conn: b}
	c, s := tls.Client(x, &tls.Config{InsecureSkipVerify: true}), tls.Server(y, &tls.Config{Certificates: []tls.Certificate{pair}})
	done := make(chan error, 1)
	go func() { done <- s.HandshakeContext(t.Context()) }() // ends with that of the client
	require.NoError(t, c.HandshakeContext(t.Context()))
	require.NoError(t, <-done)
	return Secured{c, x}, Secured{s, y}
}

// id is 00 01 02 … 0f.
var id = tensor.ID{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}

func TestTheHeaderIsTheOneOfTheDocs(t *testing.T) {
	// docs/wire.md shows it. Its checksum was computed apart from this module.
	var h [headerBytes]byte
	put(&h, &frame.Chunk{Tensor: id, Index: 0x01020304, Sum: 0x89abcdef, Data: [][]byte{make([]byte, 300), make([]byte, 5)}})
	want := slices.Concat(id[:], []byte{
		4, 3, 2, 1, 0x31, 1, 0, 0, 0, 0, 0, 0, 0xef, 0xcd, 0xab, 0x89,
	})
	require.Equal(t, want, h[:32])
	require.Equal(t, slow(want), binary.LittleEndian.Uint32(h[32:]))
	require.Zero(t, binary.LittleEndian.Uint32(h[36:]))
}

// slow computes a CRC-32C bit by bit.
func slow(data []byte) uint32 {
	sum := ^uint32(0)
	for _, b := range data {
		sum ^= uint32(b)
		for range 8 {
			sum = sum>>1 ^ sum&1*0x82f63b78
		}
	}
	return ^sum
}

func TestChunksCrossALaneBothWays(t *testing.T) {
	for _, network := range []string{"tcp", "unix", "tcp, TLS", "unix, TLS"} {
		t.Run(network, func(t *testing.T) {
			testkit.Start(t)
			socket, _, encrypted := strings.Cut(network, ",")
			a, b := connected(t, socket)
			if encrypted {
				a, b = secure(t, a, b)
			}
			x, y := New(a, nil), New(b, nil)
			for _, ends := range [][2]*Conn{{x, y}, {y, x}} {
				for i, n := range []int{0, 1, 39, 40, 41, 16384, 1 << 20, frame.ChunkBytesCeiling} {
					data := testkit.Bytes(n, uint64(i))
					sent := frame.Chunk{Tensor: id, Index: uint32(i), Sum: uint32(n), Data: slices.Collect(slices.Chunk(data, max(1, n/3)))}
					done := make(chan error, 1)
					go func() { done <- ends[0].Send(&sent) }() // ends with what is read
					var got frame.Chunk
					length, err := ends[1].Next(&got)
					require.NoError(t, err)
					require.Equal(t, n, length)
					payload := make([]byte, n)
					_, err = io.ReadFull(ends[1], payload)
					require.NoError(t, err)
					require.NoError(t, <-done)
					require.True(t, bytes.Equal(data, payload))
					require.Equal(t, frame.Chunk{Tensor: id, Index: uint32(i), Sum: uint32(n)}, got)
				}
			}
		})
	}
}

func TestAHeaderThatIsDamagedEndsTheLane(t *testing.T) {
	var good [headerBytes]byte
	put(&good, &frame.Chunk{Tensor: id, Index: 7, Sum: 9, Data: [][]byte{make([]byte, 100)}})
	for bit := range 8 * headerBytes {
		h := good
		h[bit/8] ^= 1 << (bit % 8)
		_, err := parse(&h, new(frame.Chunk))
		require.ErrorIs(t, err, ErrHeader, "bit %d", bit)
	}
	for name, change := range map[string]func(h *[headerBytes]byte){
		"a zero is set":  func(h *[headerBytes]byte) { h[27] = 1 },
		"too many bytes": func(h *[headerBytes]byte) { binary.LittleEndian.PutUint32(h[20:], frame.ChunkBytesCeiling+1) },
		"no tensor":      func(h *[headerBytes]byte) { clear(h[:16]) },
	} {
		t.Run(name, func(t *testing.T) {
			h := good
			change(&h)
			binary.LittleEndian.PutUint32(h[32:], sum(&h))
			_, err := parse(&h, new(frame.Chunk))
			require.ErrorIs(t, err, ErrHeader)
		})
	}
}

func TestAHeaderMayComeInPiecesAndLate(t *testing.T) {
	testkit.Start(t)
	a, b := connected(t, "tcp")
	l := New(b, nil)
	var h [headerBytes]byte
	put(&h, &frame.Chunk{Tensor: id, Index: 7})
	var got frame.Chunk
	for i := range headerBytes {
		_, err := a.Write(h[i : i+1])
		require.NoError(t, err)
		if i == headerBytes-1 {
			break
		}
		require.NoError(t, l.SetReadDeadline(time.Now().Add(time.Millisecond)))
		_, err = l.Next(&got)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	require.NoError(t, l.SetReadDeadline(time.Time{}))
	n, err := l.Next(&got)
	require.NoError(t, err)
	require.Zero(t, n)
	require.EqualValues(t, 7, got.Index)

	_, err = a.Write(h[:10])
	require.NoError(t, err)
	require.NoError(t, a.Close())
	_, err = l.Next(&got)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

// hoarder is a connection that keeps what is written.
type hoarder struct {
	net.Conn
	on   bool
	kept []byte
}

func (h *hoarder) Write(p []byte) (int, error) {
	if !h.on {
		return h.Conn.Write(p)
	}
	h.kept = append(h.kept, p...)
	return len(p), nil
}

func TestAReaderThatIsInterruptedInMidRecordGoesOn(t *testing.T) {
	testkit.Start(t)
	a, b := connected(t, "tcp")
	h := &hoarder{Conn: a}
	x, y := secure(t, h, b)
	from, to := New(x, nil), New(y, nil)
	h.on = true
	data := testkit.Bytes(40_000, 1)
	require.NoError(t, from.Send(&frame.Chunk{Tensor: id, Index: 7, Data: [][]byte{data}}))
	var got frame.Chunk
	payload, begun := make([]byte, 0, len(data)), false
	for sent := h.kept; len(sent) > 0 || len(payload) < len(data); { // 16 pieces of a record
		n := min(1000, len(sent))
		_, err := a.Write(sent[:n])
		require.NoError(t, err)
		sent = sent[n:]
		until := time.Now().Add(time.Millisecond)
		for err == nil {
			require.NoError(t, to.SetReadDeadline(until))
			if !begun {
				_, err = to.Next(&got)
				begun = err == nil
				continue
			}
			n, err = to.Read(payload[len(payload):cap(payload)])
			if payload = payload[:len(payload)+n]; len(payload) == len(data) {
				break
			}
		}
		require.True(t, err == nil || errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
		require.NoError(t, to.SetReadDeadline(time.Unix(1, 0))) // as a session does
		_, err = to.Read(payload[len(payload):cap(payload)])
		require.True(t, len(payload) == len(data) || errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
	}
	require.EqualValues(t, 7, got.Index)
	require.True(t, bytes.Equal(data, payload))
}

func TestAWriteThatTakesTooLongEndsTheLane(t *testing.T) {
	testkit.Start(t)
	a, b := connected(t, "tcp")
	x, y := secure(t, a, b)
	from := New(x, nil)
	require.NoError(t, from.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
	ch, err := frame.Chunk{Tensor: id, Data: [][]byte{make([]byte, frame.ChunkBytesCeiling)}}, error(nil)
	for err == nil { // until the system takes no more
		err = from.Send(&ch)
	}
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, from.SetWriteDeadline(time.Time{}))
	go func() { _, _ = io.Copy(io.Discard, y) }() // ends with the connection
	require.Error(t, from.Send(&ch), "TLS does not know what has been written")
	began := time.Now()
	require.NoError(t, from.Close())
	require.Less(t, time.Since(began), time.Second, "nobody waits for an alert")
}

func TestAChunkIsWrittenInFewPieces(t *testing.T) {
	testkit.Start(t)
	a, b := connected(t, "tcp")
	counted := &counter{Conn: a}
	x, y := secure(t, counted, b)
	from := New(x, nil)
	go func() { _, _ = io.Copy(io.Discard, y) }() // ends with the connection
	for _, n := range []int{0, 1000, 1 << 20} {
		counted.writes = 0
		require.NoError(t, from.Send(&frame.Chunk{Tensor: id, Data: [][]byte{make([]byte, n)}}))
		require.Equal(t, 1+n/batchBytes, counted.writes, "a chunk of %d bytes", n)
	}
}

// counter counts writes.
type counter struct {
	net.Conn
	writes int
}

func (c *counter) Write(p []byte) (int, error) {
	c.writes++
	return c.Conn.Write(p)
}

func TestSendingAllocatesNothing(t *testing.T) {
	a, b := connected(t, "tcp")
	go func() { _, _ = io.Copy(io.Discard, b) }() // ends with the connection
	l, ch := New(a, nil), frame.Chunk{Tensor: id, Data: [][]byte{make([]byte, 1000), make([]byte, 1000)}}
	require.Zero(t, testing.AllocsPerRun(100, func() { require.NoError(t, l.Send(&ch)) }))
}

// greet has a server accept what a client greets with, and returns what both say.
func greet(t *testing.T, o *Offers, token frame.LaneToken, n int) (client, server error) {
	t.Helper()
	a, b := connected(t, "tcp")
	accepted := make(chan error, 1)
	go func() { // ends with the greeting
		first := make([]byte, len(Magic))
		if _, err := io.ReadFull(b, first); err != nil || string(first) != Magic {
			accepted <- errors.New("no magic")
			return
		}
		accepted <- o.Accept(b)
	}()
	client = Greet(a, token, n)
	return client, <-accepted
}

// owner permits and admits everybody, and counts its lanes.
func owner(lanes *int) Owner {
	yes := func(net.Conn) bool { return true }
	return Owner{Permits: yes, Admit: yes, Attach: func(net.Conn) { *lanes++ }}
}

func TestATokenOpensLanesOfItsSessionOnceEachUse(t *testing.T) {
	testkit.Start(t)
	o := new(Offers)
	var mine, others int
	token, withdraw := o.Offer(owner(&mine))
	other, _ := o.Offer(owner(&others))
	require.NotEqual(t, token, other)
	refused := func(text string, token frame.LaneToken, n int) {
		t.Helper()
		c, s := greet(t, o, token, n)
		require.ErrorIs(t, c, ErrRefused)
		require.ErrorContains(t, c, text)
		require.ErrorIs(t, s, ErrRefused)
	}
	for n := range Uses {
		c, s := greet(t, o, token, n)
		require.NoError(t, c)
		require.NoError(t, s)
		refused("used", token, n)
	}
	refused("used", token, Uses)
	refused("used", token, 1<<31-1)
	wrong := token
	wrong[31] ^= 1
	refused("balancer", wrong, 0)
	refused("balancer", frame.LaneToken{}, 0)
	withdraw()
	refused("balancer", token, 0)
	require.Equal(t, Uses, mine)
	require.Zero(t, others)
}

func TestAnAnswerThatIsNoneOfALaneSaysSo(t *testing.T) {
	for name, answer := range map[string]string{
		"nothing": "", "half": "tfla", "HTTP/2 settings": "\x00\x00\x06\x04\x00\x00\x00\x00\x00", "the greeting": Magic,
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			a, b := connected(t, "tcp")
			_, err := b.Write([]byte(answer))
			require.NoError(t, err)
			require.NoError(t, b.(*net.TCPConn).CloseWrite())
			require.ErrorIs(t, Greet(a, frame.LaneToken{1}, 0), ErrNoLane)
		})
	}
	t.Run("of the future", func(t *testing.T) {
		testkit.Start(t)
		a, b := connected(t, "tcp")
		_, err := b.Write([]byte(answerMagic + "\x63"))
		require.NoError(t, err)
		require.ErrorContains(t, Greet(a, frame.LaneToken{1}, 0), "answer 99")
	})
}

// FuzzHeader reads any header: one that is taken says the same when it is written.
func FuzzHeader(f *testing.F) {
	for _, n := range []int{0, 1, frame.ChunkBytesCeiling} {
		var h [headerBytes]byte
		put(&h, &frame.Chunk{Tensor: id, Index: 1, Sum: 2, Data: [][]byte{make([]byte, n)}})
		f.Add(h[:], true)
	}
	f.Fuzz(func(t *testing.T, data []byte, summed bool) {
		var h [headerBytes]byte
		copy(h[:], data)
		if summed { // or hardly one would be taken
			binary.LittleEndian.PutUint32(h[32:], sum(&h))
		}
		var ch frame.Chunk
		n, err := parse(&h, &ch)
		if err != nil {
			if !errors.Is(err, ErrHeader) || n != 0 {
				t.Fatalf("%d, %v", n, err)
			}
			return
		}
		if n < 0 || n > frame.ChunkBytesCeiling || ch.Tensor.IsZero() {
			t.Fatalf("%d bytes of %v were taken", n, ch)
		}
		ch.Data = [][]byte{zeros[:n]}
		var again [headerBytes]byte
		if put(&again, &ch); again != h {
			t.Fatalf("% x was read, and is written % x", h, again)
		}
	})
}

var zeros [frame.ChunkBytesCeiling]byte
