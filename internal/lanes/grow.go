package lanes

import (
	"cmp"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/stream"
)

// look is what was seen of lanes that were busy for a while. The line is full if packets wait
// in a queue, or many are dropped.
type look struct {
	rate    float64       // bytes per second; 0: they were not busy all the time
	queue   time.Duration // how long packets waited; 0: hardly
	dropped int           // of a hundred; 0: few
}

// growth finds how many lanes are worth having. It doubles them until the line is full. If
// twice as many carry no more, it undoes the last step, and waits longer before the next one. It
// starts again when, without a queue, they carry less than the most since the last burst of
// drops: where single packets get lost, new lanes fill a line only for an instant.
type growth struct {
	best, before, last float64 // rates: the most, before the last step, and in the look before
	from               int     // lanes before the last step; 0: it is done
	flat, undone       int     // looks in a row that carried less than they should; steps
	enough             bool
}

// next returns how many lanes there should be, up to most, after a look at n of them, and if they
// are enough, why.
func (g *growth) next(l look, n, most int) (want int, why string) {
	g.best = max(g.best, (l.rate+g.last)/2) // one look may see what waited before
	less := l.rate < laneGain*g.before
	if g.enough {
		less = l.rate*laneGain < g.best
	}
	opening := l.rate >= laneGain*g.last && !g.enough // their windows are
	if g.last = l.rate; less && !opening {
		g.flat++
	} else {
		g.flat = 0
	}
	switch {
	case l.queue > 0 || l.dropped > 0:
		if l.dropped > 0 {
			g.best, g.last = 0, 0 // windows will open anew
		}
		why = fmt.Sprintf("the line is full: packets wait %v in a queue, %d %% were dropped", l.queue.Round(time.Millisecond), l.dropped)
	case opening || less && g.flat < laneLooks<<g.undone || g.enough && !less:
		return n, ""
	case n >= most && (g.enough || !less) || n <= g.from: // or the last step was refused
		why = whyMost
	case less && !g.enough:
		g.best, g.undone = l.rate, g.undone+1
		n, why = g.from, fmt.Sprintf("%d carried no more than %d", n, g.from)
	default:
		*g = growth{best: g.best, before: l.rate, from: n, undone: g.undone}
		return min(2*n, most), whySoon
	}
	g.flat, g.from, g.enough = 0, 0, true
	return n, why
}

// grow has as many lanes as are worth it, up to most.
func (l *Lanes) grow(most int) {
	for g := new(growth); ; {
		seen, ok := l.look()
		if !ok {
			return
		}
		keep := most
		l.Session.Do(func(m *stream.Machine, _ stream.Instant) {
			if seen.rate == 0 || len(l.open) < l.want { // some are still being opened
				return
			}
			was := g.enough
			want, why := g.next(seen, l.want, most)
			l.want, keep, l.why = want, want, cmp.Or(why, l.why)
			if g.enough && !was && l.Known.now().off == "" {
				l.Known.Store(&known{until: time.Now().Add(laneMemoryTime), want: want})
			}
			l.fill(m)
		})
		l.Session.KeepLanes(keep)
	}
}

// look looks at the lanes for a while. It returns false when the session has ended.
func (l *Lanes) look() (seen look, ok bool) {
	var from int64
	var long, least time.Duration
	l.Session.Do(func(m *stream.Machine, _ stream.Instant) {
		from, least = byLanes(m), l.trip
		long = min(max(roadTrips*least, roadLeast), roadMost)
		l.road() // what was before
	})
	begin, queue := time.Now(), long
	var all lane.Road
	for range roadTrips {
		select {
		case <-time.After(long / roadTrips):
		case <-l.Session.Stopped():
			return look{}, false
		}
		busy, idle := false, false
		l.Session.Do(func(m *stream.Machine, _ stream.Instant) {
			busy, idle = m.LanesBusy(), m.Status().Calls == 0
			now := l.road()
			queue = min(queue, now.Trip-least)
			all.Moved, all.Sent, all.Again = all.Moved+now.Moved, all.Sent+now.Sent, all.Again+now.Again
			seen.rate = float64(cmp.Or(all.Moved, byLanes(m)-from)) / time.Since(begin).Seconds()
		})
		if idle {
			select {
			case <-l.busy:
			case <-l.Session.Stopped():
			}
		}
		if !busy {
			return look{}, true
		}
	}
	if queue >= max(least/fullShare, lane.Far) {
		seen.queue = queue
	}
	if all.Again >= fullLost {
		seen.dropped = 100 * all.Again / max(all.Sent, all.Again)
	}
	return seen, true
}

// road returns what the lanes have carried since the last time, with the least round trip.
func (l *Lanes) road() (all lane.Road) {
	for _, c := range l.open {
		r := c.Road()
		all.Trip = min(cmp.Or(all.Trip, r.Trip), cmp.Or(r.Trip, all.Trip))
		all.Moved, all.Sent, all.Again = all.Moved+r.Moved, all.Sent+r.Sent, all.Again+r.Again
	}
	return all
}
