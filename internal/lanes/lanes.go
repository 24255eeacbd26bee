// Package lanes opens the lanes of a client's session, as many as make it faster. It opens others
// for those that end, and does not know what they carry.
//
// A Lanes is used with its session locked, but for Count.
package lanes

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

// Config of the lanes of a session.
type Config struct {
	Session *session.Session
	// Most is the most lanes, and negative for none; with Fixed, as many as the server allows.
	Most  int
	Fixed bool
	// FarChunk is the size of chunks sent to a server that is far.
	FarChunk int
	// Address is that of the server's end of the session's connection, nil if it is not known,
	// and Dial connects to it, and secures the connection as that one is.
	Address net.Addr
	Dial    func(ctx context.Context, to net.Addr) (net.Conn, error)
	// Opening is how long it took to open the session: at least two round trips.
	Opening time.Duration
	// Known is what is known of the server.
	Known *Known
	// Go runs what ends with the session, or with a timeout. Context ends with the session.
	Go      func(func())
	Context context.Context
}

// Why a session has no more lanes, where two places say so.
const (
	whyMost = "the client or the server allows no more"
	whySoon = "it is being found out whether more are faster"
)

// Lanes are those of a session, whose lock guards them.
type Lanes struct {
	Config
	want    int // how many there should be; 0 before the first large tensor
	opening int
	open    []*lane.Conn
	count   atomic.Int32  // of open; read without the lock
	uses    int           // of the token, so far
	failed  int           // lanes in a row that were refused, or carried little
	why     string        // why there are not more; "": no tensor was large enough
	trip    time.Duration // the least round trip of a lane; 0 before the first
	busy    chan struct{} // tells grow of the next large tensor
}

// New returns the lanes of a session, of which none is open.
func New(cfg Config) *Lanes { return &Lanes{Config: cfg, busy: make(chan struct{}, 1)} }

// Known is what a client knows of the lanes to its server. The zero value is ready, and safe for
// concurrent use.
type Known struct{ atomic.Pointer[known] }

type known struct {
	until time.Time // what follows is forgotten then
	off   string    // if not "", why no session tries to open one
	want  int       // if not 0, how many were worth it
}

// now returns what is known now.
func (k *Known) now() known {
	if now := k.Load(); now != nil && time.Now().Before(now.until) {
		return *now
	}
	return known{}
}

// Want opens lanes in the background if a tensor of size bytes is large enough to be worth them.
func (l *Lanes) Want(m *stream.Machine, size int64) {
	if size < laneBytes {
		return
	}
	if l.want == 0 {
		if l.want = m.LanesAtOnce(); !l.Fixed {
			l.want = min(max(1, l.Known.now().want), l.want)
		}
	}
	select {
	case l.busy <- struct{}{}:
	default:
	}
	l.fill(m)
}

// fill opens lanes until there are as many as wanted.
func (l *Lanes) fill(m *stream.Machine) {
	token, uses := m.LaneOffer()
	off := l.Known.now().off
	for len(l.open)+l.opening < l.want {
		stop := off
		switch {
		case l.Most < 0:
			stop = "lanes are turned off here"
		case token.IsZero():
			stop = "the server offers none"
		case off == "" && l.Address == nil: // gRPC has lost the connection before it could be asked
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
		l.Go(func() { l.openOne(m, token, use, pause) })
	}
}

// openOne opens a lane for the session after pause.
func (l *Lanes) openOne(m *stream.Machine, token frame.LaneToken, use int, pause time.Duration) {
	ctx, cancel := context.WithTimeout(l.Context, pause+laneWait+l.Opening)
	defer cancel()
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
	// Dial the address of the session's connection: the name may resolve to another server.
	conn, err := l.Dial(ctx, l.Address)
	begin := time.Now()
	if err == nil {
		stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
		if err = lane.Greet(conn, token, use); err != nil || !stop() {
			_ = conn.Close()
			err = cmp.Or(err, context.Cause(ctx))
		}
	}
	if err != nil {
		l.Session.Do(func(*stream.Machine, stream.Instant) {
			l.opening--
			if conn == nil || errors.Is(err, lane.ErrFull) { // the token was not used
				l.uses--
			}
		})
		l.ended(m, err, nil, 0)
		return
	}
	c := lane.New(conn, nil)
	trip := cmp.Or(c.RoundTrip(), time.Since(begin))
	var before int64
	l.Session.Do(func(m *stream.Machine, _ stream.Instant) {
		before = byLanes(m)
		most := m.LanesAtOnce()
		l.opening--
		l.open = append(l.open, c)
		l.count.Store(int32(len(l.open)))
		first := l.trip == 0
		l.trip = min(cmp.Or(l.trip, trip), trip)
		switch {
		case l.Fixed:
			l.why = "the number is fixed, and the server may allow fewer"
		case near(l.Address) || l.trip < lane.Far:
			l.why = "one is enough: the server is less than 1 ms away"
		case l.want >= most:
			l.why = whyMost
		case first && l.want > 1:
			l.why = "more were not faster before"
		case first:
			l.why, l.want = whySoon, max(l.want, min(farLanes, most))
			l.fill(m)
			l.Go(func() { l.grow(most) })
		}
	})
	l.Session.AddLane(c, func(why error) { l.ended(m, why, c, before) })
}

// near reports whether an address is one of this machine.
func near(a net.Addr) bool {
	t, ok := a.(*net.TCPAddr)
	return !ok || t.IP.IsLoopback()
}

// Geometry cuts a tensor into chunks for the server.
func (l *Lanes) Geometry(m *stream.Machine, d tensor.Desc) (tensor.Geometry, error) {
	most := m.Status().PeerChunkBytes
	want := most
	if !near(l.Address) && cmp.Or(l.trip, l.Opening/2) >= farTrip {
		want = min(want, int64(l.FarChunk))
	}
	return session.Geometry(d, want, most)
}

// byLanes returns how many bytes a session's lanes have carried.
func byLanes(m *stream.Machine) int64 {
	st := m.Status().Stats
	return st.LaneBytesIn + st.LaneBytesOut
}

// ended records why lane c ended, before which lanes had carried before bytes, or why one
// could not be opened (nil), and opens another one if that may help.
func (l *Lanes) ended(m *stream.Machine, why error, c *lane.Conn, before int64) {
	l.Session.Do(func(*stream.Machine, stream.Instant) {
		opened := c != nil
		l.open = slices.DeleteFunc(l.open, func(o *lane.Conn) bool { return o == c })
		l.count.Store(int32(len(l.open)))
		if errors.Is(why, session.ErrSpare) {
			return
		}
		l.why = map[bool]string{true: "the last one ended: ", false: "it could not be opened: "}[opened] + why.Error()
		switch {
		case l.Session.Cause() != nil:
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
			l.Known.Store(&known{until: time.Now().Add(laneMemoryTime), off: l.why})
		} else if m.Status().Calls > 0 {
			l.fill(m)
		}
	})
}

// Count returns how many lanes there are now. It never waits.
func (l *Lanes) Count() int { return int(l.count.Load()) }

// Open returns how many lanes there are now, and the reason that there are not more.
func (l *Lanes) Open() (n int, why string) {
	return len(l.open), cmp.Or(l.why, "no tensor was large enough")
}
