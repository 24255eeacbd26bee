package conns

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/session"
)

// Session is a session that takes over lanes that its peer opens.
type Session interface {
	// OfferLanes offers a token that opens lanes, as many as times, and atOnce at a time.
	OfferLanes(token frame.LaneToken, times, atOnce uint32)
	// AddLane makes the session use a lane, which it takes over.
	AddLane(l session.Lane)
}

// OfferLanes makes a session offer lanes until its handler calls withdraw. They count as its
// principal's, or as its own if that is "". permits reports whether the peer of another
// connection is the session's.
func (s *Set) OfferLanes(sess Session, principal string, permits func(credentials.AuthInfo) bool) (withdraw func()) {
	if s.cfg.Lanes == 0 {
		return func() {}
	}
	var owner any = principal
	if principal == "" {
		owner = sess
	}
	thin := s.one().thin // of all lanes together
	token, withdraw := s.lanes.Offer(lane.Owner{
		Permits: func(c net.Conn) bool { return permits(c.(*greeter).info) },
		Admit:   func(c net.Conn) bool { return s.admitLane(c.(*greeter).accepted, owner) },
		Attach:  func(c net.Conn) { sess.AddLane(c.(*greeter).lane(thin)) },
	})
	sess.OfferLanes(token, lane.Uses, uint32(s.cfg.Lanes))
	return withdraw
}

// admitLane makes a connection a lane if there is room for another one of its owner.
func (s *Set) admitLane(c *acceptedConn, owner any) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if lanesShare*s.accepted > s.cfg.Connections || ownerShare*(s.laned[owner]+1) > s.cfg.Connections {
		return false
	}
	s.laned[owner]++
	c.one.owner = owner
	c.lane.Store(true)
	return true
}

// greeter is a secured connection that greets.
type greeter struct {
	net.Conn
	info     credentials.AuthInfo
	accepted *acceptedConn // below Conn, or Conn itself
}

// lane returns the connection as a lane, whose small chunks thin limits.
func (g *greeter) lane(thin *rate.Limiter) session.Lane {
	_ = g.accepted.Conn.SetDeadline(time.Time{}) // clear the handshake's deadline
	conn := g.accepted.Conn
	if g.Conn != g.accepted {
		conn = lane.Secured{Conn: g.Conn, Below: &g.accepted.Batch}
	}
	return pacedLane{lane.New(conn, func() error {
		defer conn.Close()
		return g.accepted.Close()
	}), thin}
}

// withoutLane returns the connection for gRPC to serve. For a connection that asks to be a
// lane, it returns credentials.ErrConnDispatched, or the reason why the lane was refused.
func (s *Set) withoutLane(g *greeter) (net.Conn, error) {
	first := make([]byte, len(lane.Magic))
	if _, err := io.ReadFull(g, first); err != nil {
		return nil, err
	}
	if string(first) != lane.Magic {
		return begunConn{g.Conn, io.MultiReader(bytes.NewReader(first), g.Conn)}, nil
	}
	if err := s.lanes.Accept(g); err != nil {
		s.lanesRefused.Add(1)
		if n, due := s.noLane.Again(); due {
			// Not a warning: its session may just have ended.
			s.cfg.Log.Info("lane refused", slog.String("peer", g.RemoteAddr().String()), slog.String("reason", err.Error()), slog.Int64("refused", n))
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
	thin *rate.Limiter
}

// Next delays the reader after a chunk that carries less than its processing costs.
func (l pacedLane) Next(ch *frame.Chunk) (int, error) {
	n, err := l.Conn.Next(ch)
	if owed := 1 + placing - n/payBytes; err == nil && owed > 0 {
		time.Sleep(price(l.thin, owed)) // a tenth of a second at most, by default
	}
	return n, err
}
