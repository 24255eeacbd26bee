package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Ways reports how the bytes of a session's tensors were carried.
type Ways struct {
	SentBytes, ReceivedBytes         int64 // total
	LaneSentBytes, LaneReceivedBytes int64 // the part carried by lanes
	// Lanes is how many lanes there are now, and Why the reason that there are not more.
	Lanes int
	Why   string
}

// Why a session has no more lanes, where two places say so.
const (
	whyMost = "the client or the server allows no more"
	whySoon = "it is being found out whether more are faster"
)

// lanes is the state of a session's lanes. The session's lock guards it.
type lanes struct {
	want    int // how many there should be; 0 before the first large tensor
	opening int
	open    []*lane.Conn
	count   atomic.Int32 // of open; read without the lock
	uses    int          // of the token, so far
	failed  int          // lanes in a row that were refused, or carried little
	why     string       // why there are not more; "": no tensor was large enough
	address net.Addr
	wait    time.Duration // time limit for opening one
	trip    time.Duration // the least round trip of a lane; 0 before the first
	busy    chan struct{} // tells grow of the next large tensor
}

// lanesKnown is what a client knows of the lanes to its server.
type lanesKnown struct {
	until time.Time // what follows is forgotten then
	off   string    // if not "", why no session tries to open one
	want  int       // if not 0, how many were worth it
}

func (c *Client) knownLanes() lanesKnown {
	if k := c.lanes.Load(); k != nil && time.Now().Before(k.until) {
		return *k
	}
	return lanesKnown{}
}

// wantLane opens lanes in the background if a tensor of size bytes is large enough to be
// worth them. The session is locked.
func (s *Session) wantLane(m *stream.Machine, size int64) {
	if size < laneBytes {
		return
	}
	l := &s.lanes
	if l.want == 0 {
		if l.want = m.LanesAtOnce(); !s.client.cfg.FixedLanes {
			l.want = min(max(1, s.client.knownLanes().want), l.want)
		}
	}
	select {
	case l.busy <- struct{}{}:
	default:
	}
	s.openLanes(m)
}

// openLanes opens lanes until there are as many as wanted. The session is locked.
func (s *Session) openLanes(m *stream.Machine) {
	l := &s.lanes
	token, uses := m.LaneOffer()
	off := s.client.knownLanes().off
	for len(l.open)+l.opening < l.want {
		stop := off
		switch {
		case s.client.cfg.Lanes < 0:
			stop = "lanes are turned off here"
		case token.IsZero():
			stop = "the server offers none"
		case off == "" && l.address == nil: // gRPC has lost the connection before it could be asked
			stop = "gRPC does not say where the server is"
		case off == "" && l.uses == int(min(uses, lane.Uses)):
			stop = "this session has opened as many as it may, 256; open another session"
		}
		if stop != "" {
			l.why = stop
			return
		}
		use, pause := l.uses, time.Duration(l.failed)*laneWait
		l.uses++
		l.opening++
		if len(l.open) == 0 {
			l.why = "it is being opened"
		}
		s.client.winding.Go(func() { s.openLane(m, token, use, pause) }) // ends after its timeout, or with the session, which winding counts, too
	}
}

// openLane opens a lane for the session after pause.
func (s *Session) openLane(m *stream.Machine, token frame.LaneToken, use int, pause time.Duration) {
	ctx, cancel := context.WithTimeout(s.own, pause+s.lanes.wait)
	defer cancel()
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
	// Dial the address of the session's connection: the name may resolve to another server.
	conn, err := s.client.dialLane(ctx, s.lanes.address)
	begin := time.Now()
	if err == nil {
		stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
		if err = lane.Greet(conn, token, use); err != nil || !stop() {
			_ = conn.Close()
			err = cmp.Or(err, context.Cause(ctx))
		}
	}
	if err != nil {
		s.sess.Do(func(*stream.Machine, stream.Instant) {
			s.lanes.opening--
			if conn == nil || errors.Is(err, lane.ErrFull) { // the token was not used
				s.lanes.uses--
			}
		})
		s.laneEnded(m, err, nil, 0)
		return
	}
	c := lane.New(conn, nil)
	trip := cmp.Or(c.RoundTrip(), time.Since(begin))
	var before int64
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		before = byLanes(m)
		l, most := &s.lanes, m.LanesAtOnce()
		l.opening--
		l.open = append(l.open, c)
		l.count.Store(int32(len(l.open)))
		first := l.trip == 0
		l.trip = min(cmp.Or(l.trip, trip), trip)
		switch {
		case s.client.cfg.FixedLanes:
			l.why = "the number is fixed, and the server may allow fewer"
		case near(l.address) || l.trip < lane.Far:
			l.why = "one is enough: the server is less than 1 ms away"
		case l.want >= most:
			l.why = whyMost
		case first && l.want > 1:
			l.why = "more were not faster before"
		case first:
			l.why, l.want = whySoon, max(l.want, min(farLanes, most))
			s.openLanes(m)
			s.client.winding.Go(func() { s.grow(most) }) // ends with the session, or when more are not faster
		}
	})
	s.sess.AddLane(c, func(why error) { s.laneEnded(m, why, c, before) })
}

// near reports whether an address is one of this machine.
func near(a net.Addr) bool {
	t, ok := a.(*net.TCPAddr)
	return !ok || t.IP.IsLoopback()
}

// geometry cuts a tensor into chunks for the server. The session is locked.
func (s *Session) geometry(m *stream.Machine, d tensor.Desc) (tensor.Geometry, error) {
	most, l := m.Status().PeerChunkBytes, &s.lanes
	want := most
	// Opening a session takes at least two round trips.
	if !near(l.address) && cmp.Or(l.trip, (l.wait-laneWait)/2) >= farTrip {
		want = min(want, int64(s.client.cfg.farChunk))
	}
	return session.Geometry(d, want, most)
}

// byLanes returns how many bytes a session's lanes have carried.
func byLanes(m *stream.Machine) int64 {
	st := m.Status().Stats
	return st.LaneBytesIn + st.LaneBytesOut
}

// laneEnded records why lane c ended, before which lanes had carried before bytes, or why one
// could not be opened (nil), and opens another one if that may help.
func (s *Session) laneEnded(m *stream.Machine, why error, c *lane.Conn, before int64) {
	s.sess.Do(func(*stream.Machine, stream.Instant) {
		l := &s.lanes
		opened := c != nil
		l.open = slices.DeleteFunc(l.open, func(o *lane.Conn) bool { return o == c })
		l.count.Store(int32(len(l.open)))
		if errors.Is(why, session.ErrSpare) {
			return
		}
		l.why = map[bool]string{true: "the last one ended: ", false: "it could not be opened: "}[opened] + why.Error()
		switch {
		case s.sess.Cause() != nil:
			return
		case !opened && !errors.Is(why, lane.ErrRefused) && !errors.Is(why, lane.ErrNoLane):
			l.want = max(1, len(l.open)) // no connection, or the server is full: the next large tensor tries again
			return
		case opened && !errors.Is(why, session.ErrStalled) && byLanes(m)-before >= laneBytes:
			l.failed = 0
		default:
			l.failed++
		}
		if l.failed >= laneTries {
			l.failed, l.why = 0, fmt.Sprintf("none for %v: %v", laneMemoryTime, why)
			s.client.lanes.Store(&lanesKnown{until: time.Now().Add(laneMemoryTime), off: l.why})
		} else if m.Status().Calls > 0 {
			s.openLanes(m)
		}
	})
}

// Lanes returns how many lanes there are now. Unlike Ways, it never waits, so that what the
// session calls, such as an Input's release, may call it.
func (s *Session) Lanes() int { return int(s.lanes.count.Load()) }

// Ways returns how the bytes of the session's tensors have been carried so far.
func (s *Session) Ways() (w Ways) {
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		st := m.Status().Stats
		w = Ways{
			SentBytes: st.BytesOut, ReceivedBytes: st.BytesIn, LaneSentBytes: st.LaneBytesOut, LaneReceivedBytes: st.LaneBytesIn,
			Lanes: len(s.lanes.open), Why: cmp.Or(s.lanes.why, "no tensor was large enough"),
		}
	})
	return w
}

// Lanes is like Session.Lanes, for the session that Compute uses; 0 while there is none.
func (c *Client) Lanes() (n int) {
	select {
	case c.opening <- struct{}{}:
		if c.shared != nil {
			n = c.shared.Lanes()
		}
		<-c.opening
	default:
	}
	return n
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
