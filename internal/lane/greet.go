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

// Magic begins a connection that asks to be a lane. HTTP/2 and TLS begin with other bytes.
const Magic = "TFLANE/1"

// Errors of Greet.
var (
	// ErrRefused is wrapped when the server refuses the token.
	ErrRefused = errors.New("lane: refused")
	// ErrFull is wrapped when the server has no connections to spare for lanes; it may have
	// some later.
	ErrFull = errors.New("lane: refused for now")
	// ErrNoLane is wrapped when a greeting gets no answer, or not that of a lane.
	ErrNoLane = errors.New("lane: no answer to the greeting")
)

// A greeting is the magic, the token, the number of this use of the token, and zeros. An
// answer is a magic of its own and one byte, the result.
const (
	greetingBytes = len(Magic) + len(frame.LaneToken{}) + 8
	answerMagic   = "tflane:"
	answerBytes   = len(answerMagic) + 1
)

// answer is the result of a greeting.
type answer byte

const (
	opened  answer = iota
	unknown        // the token opens no session of this server
	used           // this use of the token, or all of them, are spent
	full           // the server has no connections to spare
	foreign        // the peer of the connection is not the session's principal
)

var refusals = map[answer]error{
	unknown: fmt.Errorf("%w: this server has no such session: it has ended, or a load balancer chose another server", ErrRefused),
	used:    fmt.Errorf("%w: this use of the token is spent or out of range", ErrRefused),
	full:    fmt.Errorf("%w: the server has no connections to spare", ErrFull),
	foreign: fmt.Errorf("%w: the certificate of this connection is not one of the session's principal", ErrRefused),
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
	how := answer(a[len(answerMagic)])
	if err := refusals[how]; err != nil || how == opened {
		return err
	}
	return fmt.Errorf("%w: answer %d", ErrRefused, how)
}

// Offers holds the tokens that a server's sessions offer. The zero Offers is ready to use.
// Safe for concurrent use.
type Offers struct {
	open sync.Map // of *offer by the token's hash, so that timing does not leak the token
}

// Owner has the lanes of a token.
type Owner struct {
	// Permits reports whether the peer of a connection may have the owner's lanes.
	Permits func(net.Conn) bool
	// Admit reports whether there is room for a lane. If so, the connection becomes one.
	Admit func(net.Conn) bool
	// Attach takes over a connection.
	Attach func(net.Conn)
}

type offer struct {
	Owner
	mu   sync.Mutex
	used [Uses / 64]uint64 // one bit per use; guarded by mu
}

// Uses is how many lanes a token opens.
const Uses = 256

// Offer returns a token. Its owner takes over the connections greeted with it until withdraw
// is called. Calls of Attach may run concurrently with withdraw.
func (o *Offers) Offer(owner Owner) (token frame.LaneToken, withdraw func()) {
	_, _ = rand.Read(token[:]) // it never fails
	key := sha256.Sum256(token[:])
	o.open.Store(key, &offer{Owner: owner})
	return token, func() { o.open.Delete(key) }
}

// Accept reads the rest of a greeting, after its magic, answers it, and hands over the
// connection to the owner of the token. The caller has set a deadline, and closes conn
// after an error, also one that it has been admitted before.
func (o *Offers) Accept(conn net.Conn) error {
	var g [greetingBytes - len(Magic)]byte
	if _, err := io.ReadFull(conn, g[:]); err != nil {
		return err
	}
	f, how := o.take(conn, frame.LaneToken(g[:32]), binary.LittleEndian.Uint64(g[32:]))
	if _, err := conn.Write(append([]byte(answerMagic), byte(how))); err != nil {
		return err
	}
	if how != opened {
		return refusals[how]
	}
	f.Attach(conn)
	return nil
}

// take spends one use of a token.
func (o *Offers) take(conn net.Conn, token frame.LaneToken, n uint64) (*offer, answer) {
	found, _ := o.open.Load(sha256.Sum256(token[:]))
	f, _ := found.(*offer)
	switch {
	case f == nil:
		return f, unknown
	case !f.Permits(conn): // not while others wait: it may check a certificate
		return f, foreign
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case n >= Uses || f.used[n/64]&(1<<(n%64)) != 0:
		return f, used
	case !f.Admit(conn):
		return f, full
	}
	f.used[n/64] |= 1 << (n % 64)
	return f, opened
}
