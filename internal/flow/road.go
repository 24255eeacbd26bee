package flow

import "github.com/tensorferry/tensorferry/terms"

// Road is what is known of the way to the peer.
type Road struct {
	Trip  terms.Instant // the least round trip of a lane; 0: it is short, or not known
	Lanes int           // that are open

	since terms.Instant // when moved was noted
	moved int64         // bytes of tensors
	ahead int64

	rest, until terms.Instant // how long, and until when, lanes rest
}

// Rest has lanes rest, twice as long as the time before: one has stalled, and others that go
// the same way may, too.
func (r *Road) Rest(now terms.Instant) {
	if !r.Rests(now) {
		r.rest = max(laneRest, 2*r.rest)
		r.until = now + r.rest
	}
}

// Rests reports whether lanes rest.
func (r *Road) Rests(now terms.Instant) bool { return now < r.until }

// Ahead returns how many bytes of a tensor to lend, or to offer, ahead of what has moved, so
// that nobody waits for the other: four times what is on its way, so that the rate can grow,
// and laneAhead for each lane. moved is how many bytes have moved in the session until now.
// Ahead returns 0 where the round trip is short.
func (r *Road) Ahead(now terms.Instant, moved int64) int64 {
	if r.Trip == 0 {
		return 0
	}
	if passed := now - r.since; passed >= max(r.Trip, roadLook) {
		onTheWay := float64(moved-r.moved) / float64(passed) * float64(r.Trip)
		r.ahead = max(4*int64(onTheWay), r.ahead-r.ahead/8) // a pause does not end it
		r.since, r.moved = r.since+passed, moved
	}
	return min(r.ahead+int64(r.Lanes)*laneAhead, aheadMost)
}
