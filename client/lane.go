package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"

	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/stream"
)

// Ways reports how the bytes of a session's tensors were carried.
type Ways struct {
	SentBytes, ReceivedBytes         int64 // total
	LaneSentBytes, LaneReceivedBytes int64 // the part carried by lanes
	// Lane reports whether there is a lane now; if not, Why is the reason.
	Lane bool
	Why  string
}

// Why a session has no lane.
const (
	whyOff     = "lanes are turned off here (Config.Lanes)"
	whySecured = "encrypted connections have none"
	whyCodec   = "chunks are compressed (Config.Codec)"
	whyOffer   = "the server offers none"
	whySmall   = "no tensor was large enough"
	whyOpening = "it is being opened"
	whyUsed    = "this session has used its eight lanes; open another session"
)

// laneState is the state of a session's lane. The session's lock guards it.
type laneState struct {
	busy    bool   // the lane is being opened, or open
	open    bool   // the lane is open
	uses    int    // of the token, so far
	failed  int    // lanes in a row that were refused, or carried little
	before  int64  // bytes carried by lanes when this one was opened
	why     string // why there is none; "" means whySmall
	address net.Addr
	wait    time.Duration // time limit for opening one
}

// lanesOff says that the server's lanes failed.
type lanesOff struct {
	until time.Time // no session tries before
	why   string
}

// noLanes returns why the client opens no lanes; "" if it does.
func (c *Client) noLanes() string {
	switch {
	case c.cfg.Lanes < 0:
		return whyOff
	case c.cfg.Credentials.Info().SecurityProtocol != insecure.NewCredentials().Info().SecurityProtocol:
		return whySecured
	case len(c.codecs()) > 0:
		return whyCodec
	}
	return ""
}

// wantLane opens a lane in the background if there is none and a tensor of size bytes is
// large enough to be worth one. The session is locked.
func (s *Session) wantLane(m *stream.Machine, size int64) {
	l := &s.lane
	if size < laneBytes || l.busy {
		return
	}
	token, uses := m.LaneOffer()
	why, off := s.client.noLanes(), s.client.lanes.Load()
	switch {
	case why != "":
		l.why = why
	case token.IsZero():
		l.why = whyOffer
	case off != nil && time.Now().Before(off.until):
		l.why = off.why
	case l.uses == int(min(uses, lane.Uses)):
		l.why = whyUsed
	default:
		use, pause := l.uses, time.Duration(l.failed)*laneWait
		l.uses++
		l.busy, l.why = true, whyOpening
		s.client.winding.Go(func() { s.openLane(m, token, use, pause) }) // ends after its timeout, or with the session, which winding counts, too
	}
}

// openLane opens a lane for the session after pause.
func (s *Session) openLane(m *stream.Machine, token frame.LaneToken, use int, pause time.Duration) {
	ctx, cancel := context.WithTimeout(s.own, pause+s.lane.wait)
	defer cancel()
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
	// Dial the address of the session's connection: the name may resolve to another server.
	conn, err := s.client.cfg.dial(ctx, s.lane.address.Network(), s.lane.address.String())
	if err == nil {
		stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
		if err = lane.Greet(conn, token, use); err != nil || !stop() {
			_ = conn.Close()
			err = cmp.Or(err, context.Cause(ctx))
		}
	}
	if err != nil {
		if conn == nil || errors.Is(err, lane.ErrFull) { // the token was not used
			s.sess.Do(func(*stream.Machine, stream.Instant) { s.lane.uses-- })
		}
		s.laneEnded(m, err)
		return
	}
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		s.lane.open, s.lane.why, s.lane.before = true, "", byLanes(m)
	})
	s.sess.AddLane(lane.New(conn, nil), func(why error) { s.laneEnded(m, why) })
}

// byLanes returns how many bytes a session's lanes have carried.
func byLanes(m *stream.Machine) int64 {
	st := m.Status().Stats
	return st.LaneBytesIn + st.LaneBytesOut
}

// laneEnded records why the lane ended or could not be opened, and opens another one if
// that may help.
func (s *Session) laneEnded(m *stream.Machine, why error) {
	s.sess.Do(func(*stream.Machine, stream.Instant) {
		l := &s.lane
		opened := l.open
		l.busy, l.open, l.why = false, false, "it could not be opened: "+why.Error()
		if opened {
			l.why = "the last one ended: " + why.Error()
		}
		select {
		case <-s.sess.Stopped():
			return
		default:
		}
		switch {
		case !opened && !errors.Is(why, lane.ErrRefused) && !errors.Is(why, lane.ErrNoLane):
			return // no connection, or the server is full: the next large tensor tries again
		case opened && !errors.Is(why, session.ErrStalled) && byLanes(m)-l.before >= laneBytes:
			l.failed = 0
		default:
			l.failed++
		}
		if l.failed >= laneTries {
			l.failed, l.why = 0, fmt.Sprintf("none for %v: %v", laneMemoryTime, why)
			s.client.lanes.Store(&lanesOff{time.Now().Add(laneMemoryTime), l.why})
		} else if m.Status().Calls > 0 {
			s.wantLane(m, laneBytes)
		}
	})
}

// Ways returns how the bytes of the session's tensors have been carried so far.
func (s *Session) Ways() (w Ways) {
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		st := m.Status().Stats
		w = Ways{
			SentBytes: st.BytesOut, ReceivedBytes: st.BytesIn, LaneSentBytes: st.LaneBytesOut, LaneReceivedBytes: st.LaneBytesIn,
			Lane: s.lane.open, Why: s.lane.why,
		}
		if !w.Lane && w.Why == "" {
			w.Why = whySmall
		}
	})
	return w
}

// Ways is like Session.Ways, for the session that Compute uses; zero before the first call.
func (c *Client) Ways() Ways {
	c.opening <- struct{}{}
	defer func() { <-c.opening }()
	if c.shared == nil {
		return Ways{}
	}
	return c.shared.Ways()
}

// carriedBy records the address of the server of a session that took so long to open.
func (s *Session) carriedBy(ctx context.Context, took time.Duration) {
	if p, ok := peer.FromContext(ctx); ok {
		s.lane.address, s.lane.wait = p.Addr, laneWait+took
	}
	// The address of a Unix socket is the path that the server bound, which may name
	// nothing here: the server may run in another folder or container.
	if u, err := url.Parse(s.client.conn.Target()); err == nil && u.Scheme == "unix" {
		s.lane.address = &net.UnixAddr{Net: u.Scheme, Name: cmp.Or(u.Path, u.Opaque)} // as gRPC reads it
	}
}
