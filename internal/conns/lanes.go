package conns

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/session"
)

// LanesPerSession returns how many lanes a session may have at a time.
func (s *Set) LanesPerSession() int {
	if s.cfg.Lanes {
		return 1
	}
	return 0
}

// Session is a session that takes over lanes that its peer opens.
type Session interface {
	// OfferLanes offers a token that opens lanes, as many as times.
	OfferLanes(token frame.LaneToken, times uint32)
	// AddLane makes the session use a lane, which it takes over.
	AddLane(l session.Lane)
}

// OfferLanes makes a session offer lanes until its handler calls withdraw.
func (s *Set) OfferLanes(sess Session) (withdraw func()) {
	if !s.cfg.Lanes {
		return func() {}
	}
	token, withdraw := s.lanes.Offer(func(c net.Conn) {
		accepted := c.(*acceptedConn)
		_ = accepted.Conn.SetDeadline(time.Time{}) // clear the handshake's deadline
		sess.AddLane(pacedLane{lane.New(accepted.Conn, accepted.Close), accepted.one})
	})
	sess.OfferLanes(token, lane.Uses)
	return withdraw
}

// crowded reports whether too many connections are open for another lane.
func (s *Set) crowded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return lanesShare*s.accepted > s.cfg.Connections
}

// withoutLane returns the connection for gRPC to serve. For a connection that asks to be a
// lane, it returns credentials.ErrConnDispatched, or the reason why the lane was refused.
func (h handshakes) withoutLane(c *acceptedConn) (net.Conn, error) {
	if !h.lanes {
		return c, nil
	}
	first := make([]byte, len(lane.Magic))
	if _, err := io.ReadFull(c, first); err != nil {
		return nil, err
	}
	if string(first) != lane.Magic {
		return begunConn{c, io.MultiReader(bytes.NewReader(first), c)}, nil
	}
	if err := h.of.lanes.Accept(c, func() bool {
		c.lane.Store(!h.of.crowded())
		return c.lane.Load()
	}); err != nil {
		h.of.lanesRefused.Add(1)
		if n, due := h.of.noLane.Again(); due {
			// Not a warning: its session may just have ended.
			h.of.cfg.Log.Info("lane refused", slog.String("peer", c.RemoteAddr().String()), slog.String("reason", err.Error()), slog.Int64("refused", n))
		}
		return nil, err
	}
	return nil, credentials.ErrConnDispatched // gRPC does not close it then
}

// begunConn is a connection whose first bytes have already been read.
type begunConn struct {
	net.Conn
	all io.Reader
}

// Read returns the first bytes again, then the rest.
func (c begunConn) Read(p []byte) (int, error) { return c.all.Read(p) }

// pacedLane is a lane on which small chunks cost as much as small frames.
type pacedLane struct {
	*lane.Conn
	one *Conn
}

// Next delays the reader after a chunk that carries less than its processing costs.
func (l pacedLane) Next(ch *frame.Chunk) (int, error) {
	n, err := l.Conn.Next(ch)
	if owed := 1 + placing - n/payBytes; err == nil && owed > 0 {
		time.Sleep(price(l.one.thin, owed)) // a tenth of a second at most, by default
	}
	return n, err
}
