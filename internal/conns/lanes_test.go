package conns

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// offered is a session that is offered lanes.
type offered struct {
	token  frame.LaneToken
	times  uint32
	atOnce uint32
	waits  time.Duration // for the first chunk of a lane
	lanes  chan session.Lane
}

func (o *offered) OfferLanes(token frame.LaneToken, times, atOnce uint32) {
	o.token, o.times, o.atOnce = token, times, atOnce
}

func (o *offered) AddLane(l session.Lane) {
	if o.waits > 0 {
		_ = l.SetReadDeadline(time.Now().Add(o.waits))
	}
	o.lanes <- l
}

// anybody permits every peer.
func anybody(credentials.AuthInfo) bool { return true }

// session returns a session whose lanes the test's end closes.
func (f *fixture) session(t *testing.T) (o *offered, withdraw func()) {
	t.Helper()
	return f.sessionOf(t, "", anybody)
}

// sessionOf returns a session of a principal.
func (f *fixture) sessionOf(t *testing.T, principal string, permits func(credentials.AuthInfo) bool) (o *offered, withdraw func()) {
	t.Helper()
	o = &offered{lanes: make(chan session.Lane, 10)}
	withdraw = f.OfferLanes(o, principal, permits)
	t.Cleanup(func() {
		withdraw()
		synctest.Wait() // a lane is handed over after its answer
		for len(o.lanes) > 0 {
			require.NoError(t, (<-o.lanes).Close())
		}
	})
	return o, withdraw
}

// greet connects and greets, and returns the answer's last byte; -1 when the server has
// closed the connection without an answer.
func (f *fixture) greet(t *testing.T, token []byte, n uint64) (net.Conn, int) {
	t.Helper()
	c := f.dial(t)
	_, err := c.Write(binary.LittleEndian.AppendUint64(append([]byte("TFLANE/1"), token...), n))
	if err != nil { // it was closed at once
		return c, -1
	}
	var answer [8]byte
	if _, err := io.ReadFull(c, answer[:]); err != nil {
		return c, -1
	}
	require.Equal(t, "tflane:", string(answer[:7]))
	return c, int(answer[7])
}

func TestALaneWithoutAValidTokenIsRefused(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		mine, _ := f.session(t)
		other, withdraw := f.session(t)
		require.EqualValues(t, 256, mine.times)
		require.NotEqual(t, mine.token, other.token)
		_, how := f.greet(t, mine.token[:], 0)
		require.Zero(t, how)
		wrong := slices.Clone(mine.token[:])
		wrong[0] ^= 1
		for _, tc := range []struct {
			name  string
			token []byte
			n     uint64
			how   int
		}{
			{"wrong", wrong, 0, 1},
			{"zeros", make([]byte, 32), 0, 1},
			{"used", mine.token[:], 0, 2},
			{"used too often", mine.token[:], 256, 2},
			{"a use of 2⁶⁴ −1", mine.token[:], 1<<64 - 1, 2},
			{"cut short", mine.token[:31], 1, -1},
		} {
			c, how := f.greet(t, tc.token, tc.n)
			require.Equal(t, tc.how, how, tc.name)
			require.Empty(t, ends(t, c), tc.name)
		}
		f.accepts(t, 1)
		require.EqualValues(t, 6, f.LanesRefused.Load())
		require.Equal(t, 3, f.lines("lane refused"), "the first, the second and the fourth")
		_, how = f.greet(t, mine.token[:], 255)
		require.Zero(t, how, "the last use")
		synctest.Wait() // a lane is handed over after its answer
		require.Len(t, mine.lanes, 2)
		withdraw()
		_, how = f.greet(t, other.token[:], 0)
		require.Equal(t, 1, how, "a session that has ended has no token")
		require.Empty(t, other.lanes)
	})
}

func TestALaneCountsAsAConnectionAndKeepsNobodyOut(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config, _ *fixture) { c.Connections = 4 })
		s, _ := f.session(t)
		require.EqualValues(t, 4, s.atOnce)
		require.NoError(t, echo(t, f.client(t), []byte("a")))
		_, how := f.greet(t, s.token[:], 0)
		require.Zero(t, how)
		f.accepts(t, 2)
		refused, how := f.greet(t, s.token[:], 1)
		require.Equal(t, 3, how, "more than half of the connections are open")
		ends(t, refused) // only then is it counted out
		f.accepts(t, 2)
		require.EqualValues(t, 1, f.LanesRefused.Load())
		for range 2 {
			require.NoError(t, echo(t, f.client(t), []byte("a")))
		}
		require.Empty(t, ends(t, f.dial(t)), "now there are as many as may be")
		l := <-s.lanes
		require.NoError(t, l.Close())
		_ = l.Close() // again
		f.accepts(t, 3)
		require.NoError(t, echo(t, f.client(t), []byte("a")))
	})
}

func TestTheLanesOfOnePrincipalAreAQuarterOfTheConnectionsAndAllAreHalf(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config, f *fixture) {
			c.Connections = 16
			secure(t, f)
		})
		type client struct {
			*offered
			uses uint64
		}
		of := func(principal string) *client {
			s, _ := f.sessionOf(t, principal, anybody)
			return &client{offered: s}
		}
		lane := func(c *client) int {
			conn, how := f.greet(t, c.token[:], c.uses)
			if how != 0 {
				require.Empty(t, ends(t, conn)) // only then is it counted out
				return how
			}
			c.uses++
			return how
		}
		const full = 3
		alice, again, nobody, other := of("alice"), of("alice"), of(""), of("")
		for _, c := range []*client{alice, again, alice, again} {
			require.Zero(t, lane(c))
		}
		require.Equal(t, full, lane(alice), "of 16 connections, 4 are alice's lanes")
		require.Equal(t, full, lane(again), "in all of her sessions")
		require.Zero(t, lane(nobody))
		require.NoError(t, (<-again.lanes).Close())
		f.accepts(t, 4)
		require.Zero(t, lane(alice), "one has ended")
		require.Equal(t, full, lane(again))
		for range 3 {
			require.Zero(t, lane(nobody))
		}
		f.accepts(t, 8)
		require.Equal(t, full, lane(other), "half of the connections are open")
		for range 4 {
			require.NoError(t, (<-nobody.lanes).Close())
		}
		f.accepts(t, 4)
		for range 4 {
			require.Zero(t, lane(other))
		}
		synctest.Wait()
		for _, c := range []*client{alice, again, other} {
			for len(c.lanes) > 0 {
				require.NoError(t, (<-c.lanes).Close())
			}
		}
		f.accepts(t, 0)
		f.Set.mu.Lock()
		require.Empty(t, f.laned)
		f.Set.mu.Unlock()
		for range 4 {
			require.Zero(t, lane(again))
		}
		require.Equal(t, full, lane(alice))
	})
}

func TestALaneOfAnotherPeerIsRefusedAndSpendsNothing(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, secureOr(t, true))
		permitted := false
		s, _ := f.sessionOf(t, "alice", func(info credentials.AuthInfo) bool {
			require.Equal(t, "tls", info.AuthType())
			return permitted
		})
		c, how := f.greet(t, s.token[:], 0)
		require.Equal(t, 4, how)
		require.Empty(t, ends(t, c))
		require.EqualValues(t, 1, f.LanesRefused.Load())
		require.Equal(t, 1, f.lines("not one of the session's principal"))
		permitted = true
		_, how = f.greet(t, s.token[:], 0)
		require.Zero(t, how)
		f.accepts(t, 1)
	})
}

func TestWithoutLanesThereIsNoToken(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config, _ *fixture) { c.Lanes = 0 })
		s, withdraw := f.session(t)
		withdraw()
		require.True(t, s.token.IsZero())
		require.Zero(t, s.times, "it was not asked to offer any")
		c := f.dial(t)
		_, err := c.Write(append([]byte("TFLANE/1"), make([]byte, 40)...))
		require.NoError(t, err)
		require.NotContains(t, ends(t, c), "tflane:", "gRPC does not know what it is asked")
		require.Zero(t, f.LanesRefused.Load())
	})
}

// chunkOf sends chunks of n bytes of a lane.
func chunkOf(n int) *frame.Chunk {
	return &frame.Chunk{Tensor: tensor.ID{1}, Data: [][]byte{make([]byte, n)}}
}

func TestThinChunksOfALanePayTheirPrice(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		bytes int
		each  time.Duration
	}{
		"of nothing":    {0, 3 * time.Millisecond},
		"of 1000 bytes": {1000, 3 * time.Millisecond},
		"of 1 KiB":      {1 << 10, 2 * time.Millisecond},
		"of 2 KiB":      {2 << 10, time.Millisecond},
		"of 3 KiB":      {3 << 10, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, func(c *Config, _ *fixture) { c.ThinFrames = 1000 })
				s, _ := f.session(t)
				conn, how := f.greet(t, s.token[:], 0)
				require.Zero(t, how)
				server := <-s.lanes
				defer server.Close()
				const chunks = 5000
				sent := make(chan error, 1)
				go func() { // ends with the last chunk
					peer := lane.New(conn, nil)
					var err error
					for range chunks {
						if err = peer.Send(chunkOf(tc.bytes)); err != nil {
							break
						}
					}
					sent <- err
				}()
				began := time.Now()
				for range chunks {
					var c frame.Chunk
					n, err := server.Next(&c)
					require.NoError(t, err)
					require.Equal(t, tc.bytes, n)
					_, err = io.CopyN(io.Discard, server, int64(n))
					require.NoError(t, err)
				}
				require.NoError(t, <-sent)
				// Beside what may come at once, and what is owed until it is worth waiting.
				require.InDelta(t, chunks*tc.each, time.Since(began), float64(100*time.Millisecond+2*inbound.Debt))
			})
		})
	}
}

func TestALaneOutlivesTheTimeOfItsHandshake(t *testing.T) {
	testkit.Start(t)
	for _, secure := range []bool{false, true} {
		bubble(t, func(t *testing.T) { outlives(t, serve(t, secureOr(t, secure))) })
	}
}

func outlives(t *testing.T, f *fixture) {
	s, _ := f.session(t)
	conn, how := f.greet(t, s.token[:], 0)
	require.Zero(t, how)
	server := <-s.lanes
	defer server.Close()
	time.Sleep(10 * handshake)
	synctest.Wait()
	peer := lane.New(conn, nil)
	go func() { _ = peer.Send(chunkOf(10)) }() // ends with the chunk
	var c frame.Chunk
	n, err := server.Next(&c)
	require.NoError(t, err)
	require.Equal(t, 10, n)
	require.Equal(t, tensor.ID{1}, c.Tensor)
	_, err = io.CopyN(io.Discard, server, 10)
	require.NoError(t, err)
	require.NoError(t, server.Close())
	require.Empty(t, ends(t, conn))
}

// TestTheDeadlinesOfALaneAreItsOwn has the session set one before gRPC, which has read the
// connection's first bytes, clears its own.
func TestTheDeadlinesOfALaneAreItsOwn(t *testing.T) {
	testkit.Start(t)
	for _, secure := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			f := serve(t, secureOr(t, secure))
			s, _ := f.session(t)
			s.waits = 3 * handshake
			began := time.Now()
			_, how := f.greet(t, s.token[:], 0)
			require.Zero(t, how)
			server := <-s.lanes
			defer server.Close()
			_, err := server.Next(new(frame.Chunk))
			timeout, ok := errors.AsType[net.Error](err)
			require.True(t, ok && timeout.Timeout(), "%v", err)
			require.Equal(t, s.waits, time.Since(began))
		})
	}
}
