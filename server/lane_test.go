package server_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"hash/crc32"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
)

// laneBytes are a lane's, by hand: docs/wire.md says what they mean.
var laneBytes = struct {
	magic, answer   string
	header, answer0 int
}{"TFLANE/1", "tflane:", 40, 8}

// openLaned opens a session that asks for lanes.
func openLaned(t *testing.T, addr string) *raw {
	t.Helper()
	r := dialRaw(t, addr)
	r.greetLaned()
	return r
}

func (r *raw) greetLaned() {
	r.t.Helper()
	hello := r.greeting()
	hello.Lanes = 1
	r.send(&pb.Frame{Hello: hello})
	r.until(func() bool { return r.hello != nil })
	require.Len(r.t, r.hello.LaneToken, 32)
	require.EqualValues(r.t, 256, r.hello.Lanes)
}

// greetLane connects and greets, and returns the answer's last byte; -1 when the server
// has closed the connection without an answer.
func greetLane(t *testing.T, addr string, token []byte, n uint64) (net.Conn, int) {
	t.Helper()
	c, err := connect(t.Context(), addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(rawLife)))
	return c, sayLane(t, c, token, n)
}

// sayLane greets on a connection that is there.
func sayLane(t *testing.T, c net.Conn, token []byte, n uint64) int {
	t.Helper()
	_, err := c.Write(binary.LittleEndian.AppendUint64(append([]byte(laneBytes.magic), token...), n))
	require.NoError(t, err)
	answer := make([]byte, laneBytes.answer0)
	if _, err := io.ReadFull(c, answer); err != nil {
		return -1
	}
	require.Equal(t, laneBytes.answer, string(answer[:len(laneBytes.answer)]))
	return int(answer[len(laneBytes.answer)])
}

// lane opens the session's lane.
func (r *raw) lane(addr string, n uint64) net.Conn {
	r.t.Helper()
	c, how := greetLane(r.t.(*testing.T), addr, r.hello.LaneToken, n)
	require.Zero(r.t, how)
	return c
}

// laneHeader is the header of a chunk of n bytes.
func laneHeader(c *pb.Chunk, n int) []byte {
	h := slices.Clone(c.TensorId)
	for _, word := range []uint32{c.Index, uint32(n), 0, c.Checksum} {
		h = binary.LittleEndian.AppendUint32(h, word)
	}
	h = binary.LittleEndian.AppendUint32(h, crc32.Checksum(h, crc32.MakeTable(crc32.Castagnoli)))
	return append(h, 0, 0, 0, 0)
}

func write(t *testing.T, c net.Conn, parts ...[]byte) {
	t.Helper()
	_, err := c.Write(bytes.Join(parts, nil))
	require.NoError(t, err)
}

// ends waits until the server has closed a connection.
func ends(t *testing.T, c net.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, c)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
}

func TestALaneCarriesChunksBothWaysByHand(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openLaned(t, f.addr)
	c := r.lane(f.addr, 3)
	o := offering("echo", testkit.Bytes(5*mib+1, 1), mib) // more than goes on allowance
	r.hold = true
	r.open(o)
	for i := range o.count() {
		r.credit(o.desc.TensorId, i+1)
		p := r.chunk(o, i)
		write(t, c, laneHeader(p, len(p.Data)), p.Data)
	}
	r.until(func() bool { return len(r.results) == 1 })
	var y *incoming
	for _, y = range r.results {
	}
	r.send(&pb.Frame{Credits: []*pb.Credit{{TensorId: y.desc.TensorId, ChunkLimit: uint32(len(y.held))}}})
	for i := range y.held {
		h := make([]byte, laneBytes.header)
		_, err := io.ReadFull(c, h)
		require.NoError(t, err)
		data := make([]byte, binary.LittleEndian.Uint32(h[20:]))
		_, err = io.ReadFull(c, data)
		require.NoError(t, err)
		p := &pb.Chunk{TensorId: h[:16], Index: binary.LittleEndian.Uint32(h[16:]), Checksum: r.sum(h[:16], binary.LittleEndian.Uint32(h[16:]), data)}
		require.Equal(t, laneHeader(p, len(data)), h)
		copy(y.data[p.Index*y.desc.ChunkBytes:], data)
		r.send(&pb.Frame{Acks: []*pb.Ack{{TensorId: y.desc.TensorId, ReceivedBelow: uint32(i + 1)}}})
	}
	require.Equal(t, o.data, y.data)
	require.Zero(t, r.done(o.call.Id).Code)
	require.EqualValues(t, len(o.data), f.counters(t)["lane_received_bytes_total"])
	require.EqualValues(t, len(o.data), f.counters(t)["lane_sent_bytes_total"])
	r.end()
	ends(t, c) // with the session
}

func TestAClientThatDoesNotAskGetsNoToken(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		asks  uint32
		lanes int
	}{"it does not ask": {0, 0}, "lanes are off": {1, -1}} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			f := serve(t, func(c *server.Config) { c.Lanes = tc.lanes })
			r := dialRaw(t, f.addr)
			hello := r.greeting()
			hello.Lanes = tc.asks
			r.send(&pb.Frame{Hello: hello})
			r.until(func() bool { return r.hello != nil })
			require.Zero(t, r.hello.Lanes)
			require.Empty(t, r.hello.LaneToken)
		})
	}
}

func TestALaneWithoutAValidTokenIsRefused(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r, other := openLaned(t, f.addr), openLaned(t, f.addr)
	require.NotEqual(t, r.hello.LaneToken, other.hello.LaneToken)
	first := r.lane(f.addr, 0)
	c, how := greetLane(t, f.addr, r.hello.LaneToken, 0)
	require.Equal(t, 2, how, "it is used; internal/conns has what else may be wrong")
	ends(t, c)
	lanes := func(n int64) {
		t.Helper()
		testkit.Eventually(t, func() bool { return f.counters(t)["lanes"] == n }, "a count of lanes")
	}
	lanes(1)
	require.EqualValues(t, 1, f.counters(t)["lanes_refused_total"])
	second := r.lane(f.addr, 1) // takes the place of the first
	ends(t, first)
	lanes(1)
	other.end()
	testkit.Eventually(t, func() bool { return f.counters(t)["sessions"] == 1 }, "the other session has ended")
	_, how = greetLane(t, f.addr, other.hello.LaneToken, 0)
	require.Equal(t, 1, how, "a session that has ended has no token")
	r.end()
	ends(t, second)
}

// waiting is a call whose one input has credit, and the lane of its session.
func waiting(t *testing.T, f *fixture, size, chunk int) (*raw, *offer, net.Conn) {
	t.Helper()
	r := openLaned(t, f.addr)
	c := r.lane(f.addr, 0)
	o := offering("echo", testkit.Bytes(size, 1), chunk)
	r.open(o)
	r.credit(o.desc.TensorId, 1)
	return r, o, c
}

func TestWhatALaneBringsWronglyCostsTheLaneTheTensorOrNothing(t *testing.T) {
	testkit.Start(t)
	stranger := func(c *pb.Chunk) *pb.Chunk {
		return &pb.Chunk{TensorId: newID(), Index: c.Index, Checksum: c.Checksum, Data: c.Data}
	}
	for name, tc := range map[string]struct {
		bytes func(r *raw, o *offer) []byte
		lane  bool // lives on
		code  codes.Code
	}{
		"a header that is damaged": {func(r *raw, o *offer) []byte {
			h := laneHeader(r.chunk(o, 0), 1000)
			h[3] ^= 1
			return h
		}, false, codes.OK},
		"HTTP/2 frames": {func(*raw, *offer) []byte { return bytes.Repeat([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0}, 10) }, false, codes.OK},
		"a payload that is damaged": {func(r *raw, o *offer) []byte {
			return append(laneHeader(r.chunk(o, 0), 1000), make([]byte, 1000)...)
		}, true, codes.OK},
		"a tensor that nobody knows": {func(r *raw, o *offer) []byte {
			p := stranger(r.chunk(o, 0))
			return append(laneHeader(p, 1000), p.Data...)
		}, true, codes.OK},
		"a chunk twice, the second time other bytes": {func(r *raw, o *offer) []byte {
			p := r.chunk(o, 0)
			again := &pb.Chunk{TensorId: p.TensorId, Data: make([]byte, 1000)}
			again.Checksum = r.sum(p.TensorId, 0, again.Data)
			return slices.Concat(laneHeader(p, 1000), p.Data, laneHeader(again, 1000), again.Data)
		}, true, codes.OK},
		"a chunk without credit": {func(r *raw, o *offer) []byte {
			return append(laneHeader(&pb.Chunk{TensorId: o.desc.TensorId, Index: 19_999}, 1000), make([]byte, 1000)...)
		}, true, codes.InvalidArgument},
		"a chunk that does not exist": {func(r *raw, o *offer) []byte {
			return append(laneHeader(&pb.Chunk{TensorId: o.desc.TensorId, Index: 1 << 31}, 1000), make([]byte, 1000)...)
		}, true, codes.InvalidArgument},
		"a chunk that is too short": {func(r *raw, o *offer) []byte {
			return append(laneHeader(r.chunk(o, 0), 999), make([]byte, 999)...)
		}, true, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			f := serve(t, nil)
			r, o, c := waiting(t, f, 20_000*1000, 1000)
			write(t, c, tc.bytes(r, o))
			if tc.code != codes.OK {
				require.Equal(t, tc.code, codes.Code(r.done(o.call.Id).Code))
			} else {
				r.send(&pb.Frame{Cancels: []*pb.Cancel{{CallId: o.call.Id}}})
				require.Equal(t, codes.Canceled, codes.Code(r.done(o.call.Id).Code))
			}
			if !tc.lane {
				ends(t, c)
			} else {
				next := offering("echo", testkit.Bytes(2*mib, 2), mib)
				r.open(next)
				for i := range next.count() {
					r.credit(next.desc.TensorId, i+1)
					p := r.chunk(next, i)
					write(t, c, laneHeader(p, len(p.Data)), p.Data)
				}
				go func() { _, _ = io.Copy(io.Discard, c) }() // ends with the connection; what comes by it is lost to raw
				r.until(func() bool { return len(r.results) > 0 })
			}
			small := offering("echo", []byte("the session lives"), 1000)
			small.desc.OnAllowance = true
			r.open(small)
			r.deliver(small)
			require.Zero(t, r.done(small.call.Id).Code)
			r.end()
		})
	}
}

func TestMemoryThatALaneIsFillingComesBackAtOnce(t *testing.T) {
	testkit.Start(t)
	t.Run("plain", func(t *testing.T) {
		testkit.Start(t)
		f := serve(t, nil)
		r, o, c := waiting(t, f, 8*mib, mib)
		comesBack(t, f, r, o, c)
	})
	t.Run("TLS", func(t *testing.T) {
		testkit.Start(t)
		s := serveSecured(t, nil)
		r, c := s.openLaned(t, "alice", ""), s.shake(t, "alice")
		require.Zero(t, sayLane(t, c, r.hello.LaneToken, 0))
		o := offering("echo", testkit.Bytes(8*mib, 1), mib)
		r.open(o)
		r.credit(o.desc.TensorId, 1)
		comesBack(t, s.fixture, r, o, c)
	})
}

// comesBack takes back the memory that a lane is filling.
func comesBack(t *testing.T, f *fixture, r *raw, o *offer, c net.Conn) {
	t.Helper()
	p := r.chunk(o, 0)
	write(t, c, laneHeader(p, mib), p.Data[:mib/2])
	testkit.Eventually(t, func() bool { return !f.isIdle() }, "the chunk is on its way")
	r.send(&pb.Frame{Cancels: []*pb.Cancel{{CallId: o.call.Id}}})
	require.Equal(t, codes.Canceled, codes.Code(r.done(o.call.Id).Code))
	testkit.Eventually(t, f.isIdle, "its memory has come back")
	write(t, c, p.Data[mib/2:]) // the rest is for nobody, and the lane lives
	r2 := offering("echo", o.data, mib)
	r.open(r2)
	r.credit(r2.desc.TensorId, 1)
	p = r.chunk(r2, 0)
	write(t, c, laneHeader(p, mib), p.Data)
	r.until(func() bool { return r.acks[string(r2.desc.TensorId)] != nil || len(r.results) > 0 })
	require.EqualValues(t, 1, f.counters(t)["lanes"])
	r.end()
}

func TestALaneThatStopsInMidChunkEndsAndTheCallDoesNot(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		r, o, c := waiting(t, f, 2*mib, mib)
		p := r.chunk(o, 0)
		write(t, c, laneHeader(p, mib), p.Data[:mib/2])
		ends(t, c) // after laneStall for each MiB begun
		r.deliver(o)
		require.Equal(t, o.data, r.result(o)["y"].data)
		testkit.Eventually(t, func() bool { return f.counters(t)["lanes"] == 0 }, "the lane has ended")
	})
}

func TestAServerThatIsToldToStopEndsItsLanes(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r, o, c := waiting(t, f, 4*mib, mib)
	p := r.chunk(o, 0)
	write(t, c, laneHeader(p, mib), p.Data[:1])
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, f.server.Shutdown(ctx), context.DeadlineExceeded)
	ends(t, c)
	require.NotEqual(t, codes.OK, r.status().Code())
}
