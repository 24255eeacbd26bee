package conns

import (
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
	thin := s.limiter() // of all lanes together
	token, withdraw := s.lanes.Offer(lane.Owner{
		Permits: func(c net.Conn) bool { return permits(below(c).Info) },
		Admit:   func(c net.Conn) bool { return s.admitLane(below(c), owner) },
		Attach:  func(c net.Conn) { sess.AddLane(below(c).lane(thin)) },
	})
	sess.OfferLanes(token, lane.Uses, uint32(s.cfg.Lanes))
	return withdraw
}

// admitLane makes a connection a lane if there is room for another one of its owner. Else it
// counts beyond the limit: its peer may try again as soon as it hears that it is refused.
func (s *Set) admitLane(c *Conn, owner any) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if lanesShare*s.accepted > s.cfg.Connections || ownerShare*(s.laned[owner]+1) > s.cfg.Connections {
		if s.refusing < refusals {
			s.accepted--
			s.refusing++
			c.state = told
		}
		return false
	}
	s.laned[owner]++
	c.owner, c.state = owner, laned
	return true
}

// lane returns the connection as a lane, whose small chunks thin limits.
func (c *Conn) lane(thin *rate.Limiter) session.Lane {
	_ = c.Batch.SetDeadline(time.Time{}) // clear the handshake's deadline
	conn := c.Batch.Conn
	if c.secured != c {
		conn = lane.Secured{Conn: c.secured, Below: &c.Batch}
	}
	return pacedLane{lane.New(conn, func() error {
		c.leave()
		return conn.Close()
	}), thin}
}

// greeting returns the first bytes of a connection that gRPC is to serve. For one that asks to be a
// lane, it returns credentials.ErrConnDispatched, or the reason why the lane was refused.
func (c *Conn) greeting() (first []byte, err error) {
	first = make([]byte, len(lane.Magic))
	if _, err := io.ReadFull(c.secured, first); err != nil || string(first) != lane.Magic {
		return first, err
	}
	s := c.of
	if err := s.lanes.Accept(c.secured); err != nil {
		s.LanesRefused.Add(1)
		// Not a warning: its session may just have ended.
		s.noLane.Log(s.cfg.Log, slog.LevelInfo, "lane refused", "refused", slog.String("peer", c.RemoteAddr().String()), slog.String("reason", err.Error()))
		return nil, err
	}
	return nil, credentials.ErrConnDispatched // gRPC does not close it then
}

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
