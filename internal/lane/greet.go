package lane

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/tensorferry/tensorferry/frame"
)

// Magic is what a connection begins with that wants to be a lane. HTTP/2 begins with
// other bytes, and so does TLS.
const Magic = "TFLANE/1"

// Errors of Greet.
var (
	// ErrRefused is wrapped when the server does not take the token.
	ErrRefused = errors.New("lane: refused")
	// ErrFull is wrapped when the server has no connections to spare for lanes: later it may.
	ErrFull = errors.New("lane: refused for now")
	// ErrNoLane is wrapped when what answers does not know lanes.
	ErrNoLane = errors.New("lane: no answer of a lane")
)

// A greeting is the magic, the token, the number of its use, and zeros. An answer is its
// own magic and one byte, which says how it was taken.
const (
	greetingBytes = len(Magic) + len(frame.LaneToken{}) + 8
	answerMagic   = "tflane:"
	answerBytes   = len(answerMagic) + 1
)

// answer is how a greeting was taken.
type answer byte

const (
	opened  answer = iota
	unknown        // the token opens no session of this server
	used           // this use of the token, or all of them, have been
	full           // the server has no connections to spare
)

var answers = map[answer]string{
	unknown: "this server has no such session: it has ended, or a balancer chose another server",
	used:    "this use of the token is spent or out of range",
	full:    "the server has no connections to spare",
}

// Greet opens a lane over conn with the n-th use of a token, counted from 0. It waits for
// the answer until conn is closed or its deadline passes.
func Greet(conn net.Conn, token frame.LaneToken, n int) error {
	g := append(make([]byte, 0, greetingBytes), Magic...)
	g = append(g, token[:]...)
	g = binary.LittleEndian.AppendUint64(g, uint64(uint32(n)))
	if _, err := conn.Write(g); err != nil {
		return err
	}
	var a [answerBytes]byte
	if _, err := io.ReadFull(conn, a[:]); err != nil {
		return fmt.Errorf("%w: %w", ErrNoLane, err)
	}
	if string(a[:len(answerMagic)]) != answerMagic {
		return ErrNoLane
	}
	if how := answer(a[len(answerMagic)]); how != opened {
		text, ok := answers[how]
		if !ok {
			text = fmt.Sprintf("answer %d", how)
		}
		if how == full {
			return fmt.Errorf("%w: %s", ErrFull, text)
		}
		return fmt.Errorf("%w: %s", ErrRefused, text)
	}
	return nil
}

// Offers are the tokens that sessions of a server have offered. The zero Offers are
// ready. Safe for concurrent use.
type Offers struct {
	mu   sync.Mutex
	open map[[sha256.Size]byte]*offer // by the hash of the token: no time tells how much of one is right; guarded by mu
}

type offer struct {
	used   uint64 // bits, guarded by Offers.mu
	attach func(net.Conn)
}

// Uses is how many lanes a token opens, one after the other.
const Uses = 8

// Offer returns a token. attach takes over each connection that was greeted with it, until
// withdraw is called; it may still run once, concurrently with that.
func (o *Offers) Offer(attach func(net.Conn)) (token frame.LaneToken, withdraw func()) {
	_, _ = rand.Read(token[:]) // it never fails
	key := sha256.Sum256(token[:])
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.open == nil {
		o.open = make(map[[sha256.Size]byte]*offer)
	}
	o.open[key] = &offer{attach: attach}
	return token, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.open, key)
	}
}

// Accept reads the greeting of a connection behind its magic, answers, and hands it over to
// who has offered the token. The caller has set a deadline, and closes conn after an
// error. admit reports whether there is room for a lane; if there is, one follows.
func (o *Offers) Accept(conn net.Conn, admit func() bool) error {
	var g [greetingBytes - len(Magic)]byte
	if _, err := io.ReadFull(conn, g[:]); err != nil {
		return err
	}
	attach, how := o.take(frame.LaneToken(g[:32]), binary.LittleEndian.Uint64(g[32:]), admit)
	if _, err := conn.Write(append([]byte(answerMagic), byte(how))); err != nil {
		return err
	}
	if attach == nil {
		return fmt.Errorf("%w: %s", ErrRefused, answers[how])
	}
	attach(conn)
	return nil
}

// take uses a token.
func (o *Offers) take(token frame.LaneToken, n uint64, admit func() bool) (attach func(net.Conn), how answer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f := o.open[sha256.Sum256(token[:])]
	switch {
	case f == nil:
		return nil, unknown
	case n >= Uses || f.used&(1<<n) != 0:
		return nil, used
	case !admit():
		return nil, full
	}
	f.used |= 1 << n
	return f.attach, opened
}
