package inbound

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/wire"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

// frame returns an HTTP/2 frame.
func frame(kind, flags byte, id uint32, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	b = append(b, flags)
	return append(binary.BigEndian.AppendUint32(b, id), payload...)
}

// message returns a message of gRPC of n bytes.
func message(n int) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(n)), make([]byte, n)...)
}

// transport reads a connection as gRPC's does, and knows what gRPC would hold.
type transport struct {
	*Conn
	peer net.Conn
	err  error // what ended it; after over
	over chan struct{}
}

func (m *Memory) transport(t testing.TB, busy func() bool) *transport {
	t.Helper()
	server, peer := net.Pipe()
	return &transport{Conn: m.Conn(server, nil, mib, busy), peer: peer, over: make(chan struct{})}
}

// read reads frames until the connection ends.
func (tr *transport) read(opened func(id uint32), data func(id uint32, payload int)) {
	defer close(tr.over)
	defer tr.End()
	tr.err = func() error {
		if _, err := io.ReadFull(tr.Conn, make([]byte, preface)); err != nil {
			return err
		}
		var h [headerBytes]byte
		b := make([]byte, 1<<16)
		for {
			if _, err := io.ReadFull(tr.Conn, h[:]); err != nil {
				return err
			}
			n := int(binary.BigEndian.Uint32(h[:]) >> 8)
			if _, err := io.ReadFull(tr.Conn, b[:n]); err != nil {
				return err
			}
			id := binary.BigEndian.Uint32(h[5:])
			switch h[3] {
			case typeHeaders:
				opened(id)
			case typeData:
				if h[4]&flagPadded != 0 {
					n -= 1 + int(b[0])
				}
				data(id, n)
			}
		}
	}()
}

func (m *Memory) charge() int64 {
	n, _, _ := m.Used()
	return n
}

func TestTheChargeIsWhatWasSentAndNotConsumed(t *testing.T) {
	for name, c := range map[string]struct {
		frames [][]byte // payloads of data frames
		pad    int
		// want is the charge after each frame, then after each message that is consumed.
		want []int64
	}{
		"a small message": {
			frames: [][]byte{message(100)}, want: []int64{118 + overhead, 0},
		},
		"an empty message": {
			frames: [][]byte{message(0)}, want: []int64{5 + overhead, 0},
		},
		"a large message is charged with its first byte": {
			frames: [][]byte{message(40 * kib)[:wire.FrameBytes], make([]byte, wire.FrameBytes), make([]byte, 8*kib+5)},
			want: []int64{
				wire.FrameBytes + overhead + 24*kib + 5, 2*(wire.FrameBytes+overhead) + 8*kib + 5, 3 * (wire.FrameBytes + overhead), 0,
			},
		},
		"a message in single bytes": {
			frames: [][]byte{{0}, {0}, {0}, {0}, {2}, {7}, {7}},
			want: []int64{
				1 + overhead, 2 * (1 + overhead), 3 * (1 + overhead), 4 * (1 + overhead), 5*(1+overhead) + 2, 6*(1+overhead) + 1, 7 * (1 + overhead), 0,
			},
		},
		"two messages in a frame are uncharged with the second": {
			frames: [][]byte{append(message(10), message(20)...)}, want: []int64{45 + overhead, 45 + overhead, 0},
		},
		"a frame is uncharged with the last message that begins in it": {
			frames: [][]byte{append(message(10), message(20)[:9]...), make([]byte, 16)},
			want:   []int64{27 + overhead + 16, 27 + 18 + 2*overhead, 27 + 18 + 2*overhead, 0},
		},
		"padding is held, and is no part of a message": {
			frames: [][]byte{message(1)[:1], message(1)[1:]}, pad: 250,
			want: []int64{252 + 31 + overhead, 252 + 31 + 256 + 32 + 2*overhead, 0},
		},
		"a message that gRPC refuses is not waited for": {
			frames: [][]byte{{0, 0xff, 0xff, 0xff, 0xff, 1}}, want: []int64{6 + overhead},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := NewMemory(0, mib)
				tr := m.transport(t, nil)
				go func() { _, _ = io.Copy(io.Discard, tr.peer) }() // ends with the connection
				var r *RPC
				go tr.read(func(uint32) {
					r, _ = tr.Open(map[string][]string{"a": {"bc"}}, func(error) {})
				}, func(uint32, int) {})
				send := func(b []byte) {
					if _, err := tr.peer.Write(b); err != nil {
						t.Error(err)
					}
					synctest.Wait()
				}
				send(make([]byte, preface))
				send(frame(typeHeaders, 0, 1, make([]byte, 30)))
				own := int64(rpcBytes + HeapShare*(2*fieldBytes+3))
				if got := m.charge(); got != own {
					t.Fatalf("an RPC is charged %d, want %d", got, own)
				}
				want := c.want
				check := func(what string) {
					t.Helper()
					if got := m.charge() - own; got != want[0] {
						t.Errorf("after %s %d bytes are charged, want %d", what, got, want[0])
					}
					want = want[1:]
				}
				for i, payload := range c.frames {
					flags := byte(0)
					if c.pad > 0 {
						flags = flagPadded
						payload = append(append([]byte{byte(c.pad)}, payload...), make([]byte, c.pad)...)
					}
					send(frame(typeData, flags, 1, payload))
					check(fmt.Sprintf("frame %d", i))
				}
				for i := range want {
					r.Next()
					r.Consumed()
					check(fmt.Sprintf("message %d", i))
				}
				r.Admitted()
				if got := m.charge(); len(c.want) > len(c.frames) && got != own-rpcBytes {
					t.Errorf("an admitted RPC is charged %d", got)
				}
				unread := m.charge() - r.own
				m.later = func(f func()) { go f() }
				r.End()
				r.End()
				if got := m.charge(); got != unread+own {
					t.Errorf("%d bytes are charged while gRPC has not written the status, want %d", got, unread+own)
				}
				if _, err := tr.Write(frame(typeHeaders, flagEnd, 1, nil)); err != nil {
					t.Error(err)
				}
				synctest.Wait()
				if got := m.charge(); got != 0 {
					t.Errorf("%d bytes are charged for what has ended", got)
				}
				if err := tr.peer.Close(); err != nil {
					t.Error(err)
				}
				<-tr.over
			})
		})
	}
}

// TestWhatAnRPCLeftIsChargedUntilItIsCollected uses the collector itself.
func TestWhatAnRPCLeftIsChargedUntilItIsCollected(t *testing.T) {
	testkit.Start(t)
	m := NewMemory(0, mib)
	tr := m.transport(t, nil)
	rpcs := make(chan *RPC)
	got := make(chan uint32)
	go tr.read(func(uint32) {
		r, _ := tr.Open(nil, func(error) {})
		rpcs <- r
	}, func(id uint32, _ int) { got <- id })
	go func() { _, _ = tr.peer.Write(append(make([]byte, preface), frame(typeHeaders, 0, 1, nil)...)) }()
	r := <-rpcs
	go func() { _, _ = tr.peer.Write(frame(typeData, 0, 1, message(kib)[:100])) }()
	<-got
	r.End()
	all := int64(112 + overhead)
	go func() { _, _ = tr.peer.Write(frame(typeData, 0, 1, message(kib)[100:])) }()
	if id := <-got; id != nobody { // gRPC would take it until the status is written
		t.Errorf("RPC %d takes what nobody reads", id)
	}
	if n := m.charge(); n != all+rpcBytes {
		t.Errorf("%d bytes are charged for an RPC whose status is not written, want %d", n, all+rpcBytes)
	}
	tr.Conn.over(1)
	if n := m.charge(); n != all {
		t.Errorf("%d bytes are charged for what an RPC left, want %d", n, all)
	}
	go func() { _, _ = tr.peer.Write(frame(typeData, 0, 1, message(kib))) }()
	<-got // and drops it afterwards
	testkit.Eventually(t, func() bool {
		m.collect()
		return m.charge() == 0
	}, "the collection")
	_ = tr.peer.Close()
	<-tr.over
}

// TestACollectionThatFreesNothingIsRunAgain has no other collections than its own.
func TestACollectionThatFreesNothingIsRunAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMemory(0, mib)
		var freed func()
		m.later = func(f func()) { freed = f }
		ran := 0
		m.gc = func() {
			if ran++; ran%3 == 0 {
				freed()
			}
		}
		c := m.Conn(nil, nil, mib, nil)
		for i := range 4 {
			m.mu.Lock()
			m.add(c, kib)
			m.leave(c, kib)
			m.mu.Unlock()
			time.Sleep(3*collectAfter - 1)
			synctest.Wait()
			if n := m.charge(); n != kib {
				t.Errorf("%d bytes are charged, want %d", n, kib)
			}
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if n := m.charge(); n != 0 || ran != 3*(i+1) {
				t.Errorf("%d bytes are charged after %d collections", n, ran)
			}
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if ran != 12 {
			t.Errorf("%d collections, want none when nothing is left", ran)
		}
	})
}

func TestFramesThatBringNothingArePaced(t *testing.T) {
	const updates = 2*controlRate + 3*controlRate
	for name, c := range map[string]struct {
		kind    byte
		id      uint32
		written int // bytes
		sent    int // data frames
		size    int // bytes of one
		opened  int // RPCs
		want    time.Duration
	}{
		"window updates":               {8, 0, 0, 0, 0, 0, 3 * time.Second},
		"settings":                     {4, 0, 0, 0, 0, 0, 3 * time.Second},
		"pings":                        {6, 0, 0, 0, 0, 0, 3 * time.Second},
		"resets of what is not open":   {typeReset, 99, 0, 0, 0, 0, 3 * time.Second},
		"data for what is not open":    {typeData, 99, 0, 0, 0, 0, 3 * time.Second},
		"updates for what was written": {8, 0, controlPays * controlRate, 0, 0, 0, 2 * time.Second},
		"updates for small messages":   {8, 0, 0, controlRate / controlsOfData, paysData, 0, 2 * time.Second},
		"updates for RPCs":             {8, 0, 0, 0, 0, controlRate / controlsOfRPC, 2 * time.Second},
		"updates for a message that comes byte by byte": {8, 0, 0, controlRate / controlsOfData, paysData - 1, 0, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := NewMemory(0, mib)
				tr := m.transport(t, nil)
				go func() { _, _ = io.Copy(io.Discard, tr.peer) }() // ends with the connection
				go tr.read(func(uint32) {}, func(uint32, int) {})
				send := func(b []byte) {
					if _, err := tr.peer.Write(b); err != nil {
						t.Error(err)
					}
				}
				send(make([]byte, preface))
				if _, err := tr.Write(frame(5, 0, 1, make([]byte, c.written))); err != nil {
					t.Error(err)
				}
				for range c.sent {
					if _, err := tr.Write(frame(typeData, 0, 1, make([]byte, c.size))); err != nil {
						t.Error(err)
					}
				}
				for range c.opened {
					send(frame(typeHeaders, 0, 1, nil))
				}
				begin := time.Now()
				for range updates {
					send(frame(c.kind, 0, c.id, make([]byte, 8)))
				}
				if took := time.Since(begin); took < c.want-10*Debt || took > c.want+10*Debt {
					t.Errorf("%d frames were read within %v, want %v", updates, took, c.want)
				}
				_ = tr.peer.Close()
				<-tr.over
			})
		})
	}
}

func TestAConnectionThatNeverCalmsIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMemory(0, mib)
		tr := m.transport(t, nil)
		go func() { _, _ = io.Copy(io.Discard, tr.peer) }() // ends with the connection
		go func() {
			tr.read(func(uint32) {}, func(uint32, int) {})
			_ = tr.Close()
		}()
		_, _ = tr.peer.Write(make([]byte, preface))
		for range 3 { // bursts, between which it rests
			for range 2*controlRate + 7*controlRate {
				if _, err := tr.peer.Write(frame(8, 0, 0, make([]byte, 4))); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(2 * time.Second)
		}
		begin := time.Now()
		flood := frame(8, 0, 0, make([]byte, 4))
		for {
			if _, err := tr.peer.Write(flood); err != nil {
				break
			}
		}
		if took := time.Since(begin); took < pause || took > pause+2*time.Second {
			t.Errorf("it was closed after %v, want %v", took, pause)
		}
		<-tr.over
	})
}

func TestAConnectionThatIsClosedIsToldWhyBetweenTwoFrames(t *testing.T) {
	const id = 7
	sent := frame(typeData, 0, id, make([]byte, 100))
	for name, cut := range map[string]int{"between": 0, "in a header": 3, "after a header": headerBytes, "in a frame": 50} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := NewMemory(0, mib)
				tr := m.transport(t, nil)
				var why error
				tr.Closing = func(err error) { why = err }
				go func() {
					tr.read(func(uint32) {}, func(uint32, int) {})
					_ = tr.Close()
				}()
				heard := make(chan []byte, 1)
				go func() {
					b, _ := io.ReadAll(tr.peer)
					heard <- b
				}()
				if _, err := tr.Write(append(bytes.Clone(sent), sent[:cut]...)); err != nil {
					t.Fatal(err)
				}
				_, _ = tr.peer.Write(make([]byte, preface))
				for why == nil { // with time for the writer below to find it so
					if _, err := tr.peer.Write(frame(6, 0, 0, make([]byte, 8))); err != nil {
						t.Fatal(err)
					}
					synctest.Wait()
				}
				if cut > 0 {
					if n, err := tr.Write(append(bytes.Clone(sent[cut:]), sent...)); err != nil || n != 2*len(sent)-cut {
						t.Error(n, err)
					}
				}
				if n, err := tr.Write(sent); err != nil || n != len(sent) { // nobody hears it
					t.Error(n, err)
				}
				_ = tr.peer.SetDeadline(time.Now().Add(2 * goodbye))
				<-tr.over
				if !errors.Is(why, ErrControl) || !errors.Is(tr.err, ErrControl) {
					t.Errorf("it was closed for %v, and %v", why, tr.err)
				}
				want := bytes.Clone(sent)
				if cut > 0 {
					want = append(want, sent...)
				}
				b := <-heard
				last, whole := bytes.CutPrefix(b, want)
				if text, _ := bytes.CutPrefix(last, []byte{0, 0, byte(len(last) - headerBytes), typeGoAway, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, enhanceYourCalm}); !whole || "inbound: "+string(text) != ErrControl.Error() {
					t.Errorf("the peer heard %q", b)
				}
			})
		})
	}
}

// charging returns a connection with an RPC that takes frames without gRPC.
func (m *Memory) charging() *RPC {
	c := m.Conn(discard{}, nil, mib, nil)
	r := &RPC{c: c, id: 1, cancel: func(error) {}}
	c.rpcs[1] = r
	return r
}

// fill charges a connection n bytes.
func (m *Memory) fill(n int64) *Conn {
	c := m.Conn(discard{}, nil, mib, nil)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.add(c, n)
	return c
}

func TestOneThatFitsIntoItsOwnShareWaitsForNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMemory(0, mib)
		full := m.fill(m.limit/beginOf + 2*Free)
		go func() { _, _ = m.charging().charge(wire.FrameBytes, mib, 0) }() // waits for the memory of all
		synctest.Wait()
		r := m.charging()
		for range 3 {
			if taken, err := r.charge(wire.FrameBytes, 0, 1); !taken || err != nil {
				t.Fatal(taken, err)
			}
		}
		took := make(chan time.Duration)
		begin := time.Now()
		go func() {
			taken, err := r.charge(wire.FrameBytes, 0, 1) // the fourth is more than Free
			if !taken || err != nil {
				t.Error(taken, err)
			}
			took <- time.Since(begin)
		}()
		synctest.Wait()
		r.Next()
		r.Consumed()
		if d := <-took; d > 0 {
			t.Errorf("a frame for which there is room waited %v", d)
		}
		m.mu.Lock()
		m.add(full, -full.charged)
		m.mu.Unlock()
		synctest.Wait()
	})
}

// TestASlowCollectionEndsAnRPCAndNotItsConnection has one that takes longer than a connection waits.
func TestASlowCollectionEndsAnRPCAndNotItsConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMemory(0, mib)
		m.later, m.gc = func(func()) {}, func() { time.Sleep(2 * pause) }
		full := m.fill(m.limit)
		m.mu.Lock()
		m.leave(full, 1)
		m.mu.Unlock()
		r := m.charging()
		var why error
		r.cancel = func(err error) { why = err }
		if taken, err := r.charge(wire.FrameBytes, mib, 0); taken || err != nil {
			t.Errorf("the frame: %v, %v", taken, err)
		}
		if !errors.Is(why, ErrMemory) {
			t.Errorf("its RPC was told %v", why)
		}
		m.overdue.Stop()
	})
}

// TestARefusalClosesTheConnectionThatLeavesMostUnread has RPCs that have ended and whose
// peers give no window for their statuses.
func TestARefusalClosesTheConnectionThatLeavesMostUnread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMemory(0, mib)
		m.rpcs = 2 * m.limit
		var deaf *Conn
		for n := range 2 {
			deaf = m.Conn(discard{}, nil, mib, nil)
			for i := 0; ; i++ {
				deaf.opening = uint32(2*i + 1)
				r, ok := deaf.Open(nil, func(error) {})
				if !ok || n == 0 && i == 20 {
					break
				}
				r.End()
			}
		}
		_, _, before := m.Used()
		other := m.Conn(discard{}, nil, mib, nil)
		m.mu.Lock()
		m.add(other, Free)
		m.mu.Unlock()
		if _, ok := other.Open(nil, func(error) {}); ok {
			t.Error("an RPC was opened without memory")
		}
		synctest.Wait()
		if deaf.shed {
			t.Error("a connection was closed that may read yet")
		}
		time.Sleep(stale)
		if _, ok := other.Open(nil, func(error) {}); ok {
			t.Error("an RPC was opened without memory")
		}
		<-deaf.done
		var swept func()
		m.later = func(f func()) { swept = f }
		deaf.End()
		if n := m.charge(); n < m.limit {
			t.Errorf("%d bytes are charged for RPCs that are not collected", n)
		}
		swept()
		if _, ok := other.Open(nil, func(error) {}); !ok {
			t.Error("an RPC is refused though there is memory")
		}
		if _, _, after := m.Used(); after != before+3 {
			t.Errorf("%d refusals and connections are counted, want 3", after-before)
		}
	})
}

// TestWhatIsToBeSentWaitsForMemory has one peer read late, another never.
func TestWhatIsToBeSentWaitsForMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMemory(0, mib)
		late, deaf, c := m.Conn(discard{}, nil, mib, nil), m.Conn(discard{}, nil, mib, nil), m.Conn(discard{}, nil, mib, nil)
		took := func(n int64) time.Duration {
			begin := time.Now()
			c.Await(n, t.Context().Done())
			return time.Since(begin)
		}
		late.Queue(mib)
		deaf.Queue(m.limit/beginOf - 2*mib)
		if d := took(mib); d > 0 {
			t.Errorf("waited %v although there is memory", d)
		}
		c.Queue(Free)
		if charged, _, _ := m.Used(); charged != m.limit/beginOf-mib+Free {
			t.Errorf("%d bytes are charged", charged)
		}
		if c.Room(m.limit-m.limit/beginOf+mib+1) || !c.Room(m.limit-m.limit/beginOf+mib) { // Free of what is charged counts for nothing
			t.Error("there is room for as much as the limit leaves")
		}
		time.AfterFunc(patience/2, func() { late.Unqueue(mib, 0) })
		if d := took(mib); d < patience/2 || d > patience/2+queueEvery {
			t.Errorf("waited %v for a peer that reads", d)
		}
		c.Unqueue(Free, 0)
		late.Queue(2 * mib)
		if d := took(Free); d > 0 {
			t.Errorf("waited %v with what each may have", d)
		}
		ended := make(chan struct{})
		close(ended)
		c.Await(mib, ended)
		go func() {
			<-deaf.done
			deaf.End()
			deaf.Unqueue(mib, 0) // gRPC lets go of it late
		}()
		if d := took(mib); d < patience/4 || d > patience/2+queueEvery {
			t.Errorf("waited %v for a peer that never reads", d)
		}
		if late.shed || c.shed || !deaf.shed {
			t.Error("not the one was closed that leaves most unread")
		}
		late.End()
		if charged, _, _ := m.Used(); charged != 0 || m.queued != 0 {
			t.Errorf("%d bytes are charged, %d queued", charged, m.queued)
		}
	})
}

// TestEachMessageIsStuckOnItsOwn compares with a list of what is unread, and how many looks
// have found it since it was sent.
func TestEachMessageIsStuckOnItsOwn(t *testing.T) {
	r := testkit.Rand(t)
	c := NewMemory(0, mib).Conn(discard{}, nil, mib, nil)
	type sent struct{ look, looks int }
	var model []sent
	for range 20_000 {
		switch r.IntN(7) {
		case 0:
			want := false
			for i := range model {
				model[i].looks++
				want = want || model[i].looks > 1
			}
			c.m.Look()
			if c.shed != want {
				t.Fatalf("stuck: %v, want %v", !want, want)
			}
			c.shed = false
		case 1, 2, 3:
			model = append(model, sent{look: c.Queue(kib)})
		default:
			if len(model) > 0 {
				i := r.IntN(len(model))
				c.Unqueue(kib, model[i].look)
				model = append(model[:i], model[i+1:]...)
			}
		}
		if c.queued != int64(len(model)*kib) || c.fresh+c.found != len(model) {
			t.Fatalf("%d bytes are charged for %d messages", c.queued, len(model))
		}
	}
}

func TestABacklogThatNeverEmptiesTakesNoMoreMemory(t *testing.T) {
	m := NewMemory(0, mib)
	r := &RPC{c: &Conn{m: m}, taken: true}
	for range 3 {
		r.whole = append(r.whole, batch{1, 0})
	}
	for range 100_000 {
		r.whole = append(r.whole, batch{1, 0})
		r.taken = true
		r.consume()
	}
	if n := len(r.whole) - r.head; n != 3 || cap(r.whole) > 8*keptBatches {
		t.Errorf("%d messages wait in a list of %d", n, cap(r.whole))
	}
}

// recorded keeps what is written.
type recorded struct {
	net.Conn
	b []byte
}

func (r *recorded) Write(b []byte) (int, error) {
	r.b = append(r.b, b...)
	return len(b), nil
}

func TestTheResetOfALateRPCIsLeftToItsPeer(t *testing.T) {
	before, after := frame(typeHeaders, 0, 1, make([]byte, 20)), frame(typeReset, 0, 5, []byte{0, 0, 0, 0})
	late := frame(typeReset, 0, 3, []byte{0, 0, 0, codeCancel})
	for name, all := range map[string][][]byte{
		"alone": {before, late, after}, "first": {before, slices.Concat(late, after)},
		"last": {slices.Concat(before, late), after}, "between others": {slices.Concat(before, late, after)},
		"twice": {slices.Concat(before, late, late), after},
	} {
		to := new(recorded)
		c := &Conn{Conn: to, m: NewMemory(0, mib), rpcs: make(map[uint32]*RPC)}
		c.rpcs[3] = &RPC{c: c, id: 3}
		for _, b := range all {
			if n, err := c.Write(b); n != len(b) || err != nil {
				t.Fatal(name, n, err)
			}
		}
		if !bytes.Equal(to.b, slices.Concat(before, after)) || !c.rpcs[3].over {
			t.Errorf("%s: wrote %x; the RPC is over: %v", name, to.b, c.rpcs[3].over)
		}
	}
}

// TestTheEndOfAnRPCIsSeenInWhatIsWritten splits what gRPC writes at every place.
func TestTheEndOfAnRPCIsSeenInWhatIsWritten(t *testing.T) {
	written := slices.Concat(
		frame(typeHeaders, 0, 1, make([]byte, 20)), frame(typeData, 0, 1, bytes.Repeat([]byte{typeReset, flagEnd}, 40)),
		frame(4, flagEnd, 0, nil), frame(typeHeaders, flagEnd, 3, make([]byte, 5)), frame(typeReset, 0, 5, make([]byte, 4)), frame(typeData, flagEnd, 7, nil),
	)
	for cut := range written {
		c := &Conn{Conn: discard{}, m: NewMemory(0, mib), rpcs: make(map[uint32]*RPC)}
		for id := uint32(1); id < 11; id += 2 {
			c.rpcs[id] = &RPC{c: c, id: id}
		}
		for _, b := range [][]byte{written[:cut], written[cut:]} {
			if n, err := c.Write(b); n != len(b) || err != nil {
				t.Fatal(n, err)
			}
		}
		for id, want := range map[uint32]bool{1: false, 3: true, 5: true, 7: true, 9: false} {
			if c.rpcs[id].over != want {
				t.Errorf("cut at %d: RPC %d is over: %v", cut, id, !want)
			}
		}
	}
}

type discard struct{ net.Conn }

func (discard) Write(b []byte) (int, error) { return len(b), nil }
func (discard) Close() error                { return nil }

func FuzzScan(f *testing.F) {
	f.Add(append(message(3), message(0)...), []byte{1, 2, 3, 4})
	f.Add(message(300), []byte{255, 7})
	f.Fuzz(func(t *testing.T, sent, cuts []byte) {
		want := 0
		for rest := sent; len(rest) >= prefixBytes; want++ {
			n := uint64(binary.BigEndian.Uint32(rest[1:])) + prefixBytes
			if uint64(len(rest)) < n {
				break
			}
			rest = rest[n:]
		}
		var r RPC
		got := 0
		for rest := sent; len(rest) > 0; {
			n := len(rest)
			if len(cuts) > 0 {
				n, cuts = min(n, int(cuts[0])), cuts[1:]
			}
			got += r.scan(rest[:n])
			rest = rest[n:]
		}
		if got != want {
			t.Fatalf("%d messages end in %x, want %d", got, sent, want)
		}
	})
}

var schedules = flag.Int("schedules", 500, "how many random schedules of connections that wait are run")

// TestPausedConnectionsNeverStandStill has connections whose peers send on several RPCs
// at a time, whose handlers consume at once, late, never, or when another RPC of the
// connection has moved, within memory that is too small for all. Whatever happens, every
// handler has its messages, or is ended, or its connection is, in bounded time; and
// nothing stays charged.
func TestPausedConnectionsNeverStandStill(t *testing.T) {
	var sum outcome
	for seed := range *schedules {
		synctest.Test(t, func(t *testing.T) { sum.add(schedule(t, uint64(seed))) })
		if t.Failed() {
			t.Fatalf("schedule %d", seed)
		}
	}
	t.Logf("%+v", sum)
	for name, n := range map[string]int{"messages": sum.consumed, "ended RPCs": sum.shed, "closed connections": sum.closed, "refused RPCs": sum.refused} {
		if n == 0 {
			t.Errorf("no %s in %d schedules: they show nothing", name, *schedules)
		}
	}
}

type outcome struct{ consumed, shed, closed, refused int }

func (o *outcome) add(p outcome) {
	o.consumed += p.consumed
	o.shed += p.shed
	o.closed += p.closed
	o.refused += p.refused
}

// handler is one RPC of a schedule.
type handler struct {
	kind   int
	rpc    *RPC
	ended  chan struct{} // closed when it was ended from outside
	whole  chan struct{} // a token for each message that has come
	acked  chan struct{} // of kind waitsForAck: a token for each message of another RPC
	buffer []byte        // what has come of a message
}

const (
	atOnce      = iota // as a session does
	late               // as a push to a slow disk
	waitsForAck        // as a push that waits for memory of results
	never              // as one whose handler hangs, for 30 s
	kinds
)

// schedule runs one random schedule.
func schedule(t *testing.T, seed uint64) (o outcome) {
	rnd := rand.New(rand.NewPCG(seed, 11))
	m := NewMemory(0, mib)
	m.limit = int64(256+rnd.IntN(1024)) * kib
	m.share, m.rpcs = m.limit/shareOf, m.limit/shareOf
	if seed%2 == 1 {
		m.own = 20 * kib // others' messages are larger
	}
	conns := 1 + rnd.IntN(4)
	m.later = func(f func()) {
		go func() { // a collection
			time.Sleep(time.Duration(seed%7) * time.Millisecond)
			f()
		}()
	}
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range conns {
		tr := m.transport(t, func() bool { return seed%3 == 0 })
		if i%2 == 1 && tr.large {
			tr.max, tr.large = m.own, false
		}
		handlers := make(map[uint32]*handler) // the reader's
		var handling sync.WaitGroup
		kindOf := make(map[uint32]int)
		script := peerScript(rnd, kindOf)
		acks := make(chan struct{}, 1<<12)
		all.Go(func() {
			tr.read(func(id uint32) {
				h := &handler{kind: kindOf[id], ended: make(chan struct{}), whole: make(chan struct{}, 1<<12), acked: acks}
				once := sync.OnceFunc(func() { close(h.ended) })
				fields := map[string][]string{"a": {strings.Repeat("b", int(seed+uint64(id))%20*kib)}}
				var ok bool
				if h.rpc, ok = tr.Open(fields, func(error) {
					mu.Lock()
					o.shed++
					mu.Unlock()
					once()
				}); !ok {
					mu.Lock()
					o.refused++
					mu.Unlock()
					return
				}
				h.rpc.Begun()
				handlers[id] = h
				delay := time.Duration((seed+uint64(id))%300) * time.Millisecond
				handling.Go(func() {
					defer func() {
						h.rpc.End()
						tr.Conn.over(id)
					}()
					n := h.handle(tr, delay)
					mu.Lock()
					o.consumed += n
					mu.Unlock()
				})
			}, func(id uint32, n int) {
				if n := m.charge(); n > m.limit+int64(conns*Free) {
					t.Errorf("%d bytes are charged, the limit is %d", n, m.limit)
				}
				h := handlers[id]
				if h == nil {
					return
				}
				for h.buffer = append(h.buffer, make([]byte, n)...); ; {
					// Messages have 5 bytes and the size that the script gave all.
					if len(h.buffer) < prefixBytes+script.size {
						return
					}
					h.buffer = h.buffer[prefixBytes+script.size:]
					h.whole <- struct{}{}
				}
			})
			_ = tr.Close()
			handling.Wait()
			if errors.Is(tr.err, ErrMemory) {
				mu.Lock()
				o.closed++
				mu.Unlock()
			}
		})
		go func() { // ends with the connection
			_, _ = tr.peer.Write(make([]byte, preface))
			for _, b := range script.frames {
				if b == nil {
					time.Sleep(time.Duration(seed%50) * 10 * time.Millisecond)
				} else if _, err := tr.peer.Write(b); err != nil {
					break
				}
			}
			_ = tr.peer.Close()
		}()
	}
	begin := time.Now()
	all.Wait()
	if took := time.Since(begin); took > 5*time.Minute {
		t.Errorf("the connections took %v", took)
	}
	synctest.Wait()
	time.Sleep(time.Second) // collections
	if n := m.charge(); n != 0 {
		t.Errorf("%d bytes are charged when all is over", n)
	}
	if len(m.conns) != 0 || len(m.waiting) != 0 || m.used != 0 || m.opened != 0 {
		t.Errorf("%d connections, %d that wait, and %d bytes are left", len(m.conns), len(m.waiting), m.used)
	}
	return o
}

// handle consumes messages until the RPC ends, and returns how many.
func (h *handler) handle(tr *transport, delay time.Duration) (n int) {
	for {
		h.rpc.Next()
		select {
		case <-h.whole:
		case <-h.ended:
			return n
		case <-tr.over:
			return n
		}
		n++
		var wait <-chan struct{}
		var clock <-chan time.Time
		switch h.kind {
		case atOnce:
			select {
			case h.acked <- struct{}{}:
			default:
			}
			continue
		case late:
			clock = time.After(delay)
		case waitsForAck:
			wait, clock = h.acked, time.After(30*time.Second)
		case never:
			select {
			case <-time.After(30 * time.Second):
			case <-tr.over:
			}
			continue
		}
		select {
		case <-wait:
		case <-clock:
		case <-h.ended:
			return n
		case <-tr.over:
			return n
		}
	}
}

// sending is what a peer sends.
type sending struct {
	size   int      // bytes of each message
	frames [][]byte // nil: it rests
}

// peerScript returns frames of messages on several RPCs, interleaved.
func peerScript(rnd *rand.Rand, kindOf map[uint32]int) (s sending) {
	s.size = []int{1, 100, 20 * kib, 100 * kib, 200 * kib}[rnd.IntN(5)]
	type rpc struct {
		id   uint32
		rest []byte
	}
	var open []rpc
	for i := range 1 + rnd.IntN(6) {
		id := uint32(2*i + 1)
		kindOf[id] = rnd.IntN(kinds)
		s.frames = append(s.frames, frame(typeHeaders, 0, id, make([]byte, rnd.IntN(40))))
		messages := bytes.Repeat(message(s.size), 1+rnd.IntN(6))
		open = append(open, rpc{id, messages[:len(messages)-rnd.IntN(2)*rnd.IntN(len(messages))]}) // perhaps never complete
	}
	for len(open) > 0 && len(s.frames) < 3000 {
		i := rnd.IntN(len(open))
		r := &open[i]
		n := min(len(r.rest), 1+rnd.IntN([]int{10, 1000, wire.FrameBytes}[rnd.IntN(3)]))
		s.frames = append(s.frames, frame(typeData, 0, r.id, r.rest[:n]))
		if r.rest = r.rest[n:]; len(r.rest) == 0 {
			open = append(open[:i], open[i+1:]...)
		}
		if rnd.IntN(200) == 0 {
			s.frames = append(s.frames, nil)
		}
	}
	for range rnd.IntN(3) {
		s.frames = append(s.frames, nil)
	}
	return s
}

func TestBytesComeOnlyAtTheirRateAndWhileNobodyWaits(t *testing.T) {
	for name, tc := range map[string]struct {
		second int64 // bytes that come in each
		wait   bool
		comes  bool
	}{
		"at the rate": {1 << 10, false, true}, "slower": {1 << 9, false, false}, "not": {0, false, false}, "another waiting": {1 << 20, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := NewMemory(0, mib)
				r := m.charging()
				look := func() bool { // every 8 s as many bytes as in that time
					time.Sleep(time.Second)
					if time.Now().Unix()%8 == 0 {
						r.sent += 8 * tc.second
					}
					return r.Comes(1<<10, 30*time.Second)
				}
				time.Sleep(time.Hour) // nobody looked
				for range 32 {
					look()
				}
				full := m.fill(m.limit)
				if tc.wait {
					go func() { _, _ = m.charging().charge(wire.FrameBytes, mib, 0) }()
					synctest.Wait()
				}
				came := 0
				for range 4 { // before the one that waits is ended
					for range 4 {
						if look() {
							came++
						}
					}
					if tc.wait {
						break
					}
				}
				if (came > 0) != tc.comes {
					t.Errorf("bytes came in %d of the looks", came)
				}
				m.mu.Lock()
				m.add(full, -full.charged)
				m.mu.Unlock()
				synctest.Wait()
			})
		})
	}
	if (*RPC)(nil).Comes(0, 0) {
		t.Error("nothing comes for no RPC")
	}
}
