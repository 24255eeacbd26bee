package wire

import "sync"

// InFlight knows what is sent on one connection that gRPC has not let go of: frames
// and answers. The zero value is ready. Safe for concurrent use.
type InFlight struct {
	mu    sync.Mutex
	first *loan // linked by next and prev; guarded by mu
}

// nobody waits for the end of a loan.
type nobody struct{}

func (nobody) Release() {}

// loan is what gRPC has of a frame or an answer. It is apart from that, so that
// the frame can become garbage: gRPC forgets a frame, instead of freeing it, when
// its RPC ended just before, and all of them when the connection dies.
type loan struct {
	held       Releaser  // nil: nothing is lent
	flight     *InFlight // that it was added to; nil: to none
	next, prev *loan     // guarded by flight.mu, as is held once it was added
	looks      int       // guarded by flight.mu
}

// Abandon ends the loans of the frames that were queued on the connection when it
// died. The caller knows that gRPC's writer of the connection has ended, so that
// nobody reads them any more.
func (f *InFlight) Abandon() {
	for {
		f.mu.Lock()
		l := f.first
		if l == nil {
			f.mu.Unlock()
			return
		}
		held := l.held
		f.remove(l)
		f.mu.Unlock()
		held.Release()
	}
}

// Look counts one more look at each frame that is there, and reports Stuck.
func (f *InFlight) Look() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for l := f.first; l != nil; l = l.next {
		l.looks++
	}
	return f.stuck()
}

// Stuck reports whether a frame is there that two looks have found: the peer has
// not read it all this while, or gRPC has forgotten it, which the next garbage
// collection finds out.
func (f *InFlight) Stuck() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stuck()
}

func (f *InFlight) stuck() bool {
	for l := f.first; l != nil; l = l.next {
		if l.looks > 1 {
			return true
		}
	}
	return false
}

func (f *InFlight) add(l *loan) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l.flight, l.next = f, f.first
	if f.first != nil {
		f.first.prev = l
	}
	f.first = l
}

// remove takes l out, and what is lent out of l; mu is held.
func (f *InFlight) remove(l *loan) {
	if l.prev == nil {
		f.first = l.next
	} else {
		l.prev.next = l.next
	}
	if l.next != nil {
		l.next.prev = l.prev
	}
	l.next, l.prev, l.held, l.looks = nil, nil, nil, 0
}

// end ends the loan of a frame that nobody reads any more, unless it has ended.
func (l *loan) end() {
	f := l.flight
	if f != nil {
		f.mu.Lock()
		l.flight = nil
	}
	held := l.held
	if held != nil && f != nil {
		f.remove(l)
	}
	l.held = nil
	if f != nil {
		f.mu.Unlock()
	}
	if held != nil {
		held.Release()
	}
}
