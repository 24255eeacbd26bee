package inbound

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/internal/wire"
)

// largePeer is a peer whose messages may be larger than the server's own, which are of 64 KiB. A
// handler consumes them at once.
type largePeer struct {
	*transport
	t     *testing.T
	ended chan struct{} // closed when its RPC was told to end

	mu    sync.Mutex
	bytes int   // of messages that were consumed
	end   error // what its RPC was told
}

func (m *Memory) largePeer(t *testing.T, size int) *largePeer {
	l := &largePeer{transport: m.transport(t, nil), t: t, ended: make(chan struct{})}
	l.max = m.limit
	go func() { _, _ = io.Copy(io.Discard, l.peer) }() // ends with the connection
	come := 0
	var r *RPC
	go l.read(func(id uint32) {
		r, _ = l.Open(nil, func(why error) {
			l.mu.Lock()
			l.end = why
			l.mu.Unlock()
			close(l.ended)
			go func() { // as gRPC does
				r.End()
				l.Conn.over(id)
			}()
		})
		r.Begun()
		r.Admitted()
	}, func(id uint32, n int) {
		if id == nobody {
			return
		}
		if come += n; come >= prefixBytes+size {
			come -= prefixBytes + size
			r.Next()
			r.Consumed()
			l.mu.Lock()
			l.bytes += size
			l.mu.Unlock()
		}
	})
	_, _ = l.peer.Write(append(make([]byte, preface), frame(typeHeaders, 0, 1, nil)...))
	synctest.Wait()
	return l
}

func (l *largePeer) took() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bytes
}

func (l *largePeer) why() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.end
}

// send sends the bytes from one offset to another of a message of so many.
func (l *largePeer) send(size, from, to int) {
	b := message(size)[from:to]
	for len(b) > 0 {
		n := min(len(b), wire.FrameBytes)
		if _, err := l.peer.Write(frame(typeData, 0, 1, b[:n])); err != nil {
			return
		}
		b = b[n:]
	}
}

func (l *largePeer) close() {
	_ = l.peer.Close()
	<-l.over
}

// small returns a Memory of so many bytes, whose own messages are of 64 KiB.
func small(limit int64) *Memory {
	m := NewMemory(limit, 64*kib)
	m.later = func(f func()) { time.AfterFunc(time.Millisecond, f) } // a collection
	return m
}

func TestALargerMessageIsChargedAsItComesAndWithItsCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 60*wire.FrameBytes - prefixBytes
		m := small(64 * mib)
		if m.limit != 64*mib {
			t.Errorf("the limit is %d", m.limit)
		}
		l := m.largePeer(t, size+1)
		defer l.close()
		for i := range 60 {
			n := (i + 1) * wire.FrameBytes
			l.send(size+1, n-wire.FrameBytes, n)
			synctest.Wait()
			want := int64(n + (i+1)*overhead + HeapShare*n + min(prefixBytes+size+1-n, 64*kib))
			if got := m.charge(); got != want {
				t.Fatalf("%d bytes are charged after %d of %d, want %d", got, n, size+1, want)
			}
		}
		l.send(size+1, prefixBytes+size, prefixBytes+size+1)
		synctest.Wait()
		if got := m.charge(); got != 0 || l.took() != size+1 {
			t.Errorf("%d bytes are charged after the message, %d consumed", got, l.took())
		}
	})
}

func TestALargerMessageThatCanNeverBeHadEndsAtOnce(t *testing.T) {
	for name, c := range map[string]struct {
		size int
		ends bool
	}{
		"with its copies as much as there is for it": {252 * kib, false},
		"more":                    {256 * kib, true},
		"more than gRPC receives": {mib, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := small(mib)
				l := m.largePeer(t, c.size)
				l.max = mib - 1
				defer l.close()
				begin := time.Now()
				l.send(c.size, 0, prefixBytes+c.size)
				synctest.Wait()
				if !c.ends {
					if l.took() != c.size {
						t.Errorf("%d bytes were consumed", l.took())
					}
					return
				}
				<-l.ended
				large, ok := errors.AsType[*TooLargeError](l.why())
				if !ok || large.Bytes != int64(c.size) || (c.size >= mib) != (large.Takes == 0) || time.Since(begin) > 0 {
					t.Errorf("it ended after %v for %v", time.Since(begin), l.why())
				}
				if c.size < mib && (large.Takes <= large.Most || large.Most != 3*mib/4) {
					t.Errorf("it ended for %+v", large)
				}
			})
		})
	}
	t.Run("in small frames", func(t *testing.T) { // which take four times their bytes
		synctest.Test(t, func(t *testing.T) {
			const size = 200 * kib
			m := small(mib)
			l := m.largePeer(t, size)
			defer l.close()
			for n := 0; n < size; n += wire.SmallBytes + 1 {
				_, _ = l.peer.Write(frame(typeData, 0, 1, message(size)[n:min(n+wire.SmallBytes+1, size)]))
			}
			<-l.ended
			if large, ok := errors.AsType[*TooLargeError](l.why()); !ok || large.Takes <= large.Most {
				t.Errorf("it ended for %v", l.why())
			}
		})
	})
}

// TestLargerMessagesComeOneAfterTheOther has each be most of what there is for all.
func TestLargerMessagesComeOneAfterTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size, pieces = 200 * kib, 10
		m := small(mib)
		var all []*largePeer
		done := make(chan struct{})
		for i := range 5 {
			l := m.largePeer(t, size)
			all = append(all, l)
			go func() { // two of them rest in between
				defer func() { done <- struct{}{} }()
				for piece := range pieces {
					l.send(size, piece*size/pieces, (piece+1)*size/pieces)
					if i < 2 {
						time.Sleep(time.Second / pieces / 2)
					}
				}
				l.send(size, size, size+prefixBytes)
			}()
		}
		for range all {
			<-done
		}
		synctest.Wait()
		for i, l := range all {
			if l.took() != size || l.why() != nil {
				t.Errorf("peer %d: %d bytes were consumed, %v", i, l.took(), l.why())
			}
			l.close()
		}
		if n := m.charge(); n != 0 || m.denied != 0 {
			t.Errorf("%d bytes are charged at the end", n)
		}
	})
}

// TestAPeerThatStopsInALargerMessageEndsForOthers has eight stop in theirs, whoever is first.
func TestAPeerThatStopsInALargerMessageEndsForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 3 * mib // half of it comes faster than all of it may
		m := small(16 * mib)
		var all []*largePeer
		for range 8 {
			l := m.largePeer(t, size)
			all = append(all, l)
			go l.send(size, 0, size/2)
			synctest.Wait()
		}
		honest := m.largePeer(t, size)
		begin := time.Now()
		go honest.send(size, 0, prefixBytes+size)
		for { // a message of the server's own never waits
			r := &RPC{c: m.Conn(discard{}, nil, 64*kib, nil), id: 1, cancel: func(error) {}}
			m.mu.Lock()
			r.c.rpcs[1] = r
			m.mu.Unlock()
			before := time.Now()
			if taken, err := r.charge(wire.FrameBytes, 48*kib, 0); !taken || err != nil || time.Since(before) > 0 {
				t.Fatalf("one of the server's own: %v, %v after %v", taken, err, time.Since(before))
			}
			if n, limit, _ := m.Used(); n > limit+int64(len(m.conns))*Free {
				t.Fatalf("%d bytes are charged, the limit is %d", n, limit)
			}
			r.c.End()
			select {
			case <-honest.ended:
				if !errors.Is(honest.why(), ErrMemory) || time.Since(begin) < patience {
					t.Errorf("it ended for %v, after %v", honest.why(), time.Since(begin))
				}
			default:
			}
			select {
			case <-honest.over:
				t.Fatal("a connection was closed")
			default:
			}
			if honest.took() == size || honest.why() != nil {
				break
			}
			time.Sleep(lookEvery)
		}
		if took := time.Since(begin); took > 2*patience {
			t.Errorf("it took %v", took)
		}
		told := 0
		for _, l := range all {
			if l.why() != nil {
				told++
				if !errors.Is(l.why(), ErrMemory) {
					t.Errorf("a peer was told %v", l.why())
				}
			}
			select {
			case <-l.done:
				t.Error("a connection was closed")
			default:
			}
			l.close()
		}
		if told == 0 { // one may make room enough
			t.Error("no peer was told to end")
		}
		honest.close()
		time.Sleep(time.Second)
		if n := m.charge(); n != 0 {
			t.Errorf("%d bytes are charged at the end", n)
		}
	})
}

// part returns an RPC with a message of so many bytes.
func (m *Memory) part(size uint32) *RPC {
	r := m.charging()
	r.cancel = func(error) {
		r.End()
		r.c.over(1)
	}
	binary.BigEndian.PutUint32(r.prefix[1:], size)
	return r
}

// frames charges what comes of its message from one offset to another, and reports whether it is taken.
func (r *RPC) frames(from, to int64) bool {
	for ; from < to; from += wire.FrameBytes {
		coming := max(r.length()-from-wire.FrameBytes, 0)
		ended := 0
		if coming == 0 {
			ended = 1
		}
		if taken, err := r.charge(wire.FrameBytes, coming, ended); !taken || err != nil {
			return false
		}
	}
	return true
}

// TestALargerMessageWaitsInLineForTheRestOfOne has another come slowly, and a third wait to begin.
func TestALargerMessageWaitsInLineForTheRestOfOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := small(4 * mib)
		first, second := m.part(320*kib), m.part(800*kib)
		if !first.frames(0, wire.FrameBytes) || !second.frames(0, wire.FrameBytes) {
			t.Fatal("there is room for both")
		}
		taken := make(chan bool, 2)
		go func() { taken <- second.frames(wire.FrameBytes, 800*kib) }()
		synctest.Wait()
		third := m.part(100 * kib)
		go func() { taken <- third.frames(0, wire.FrameBytes) }()
		for from := int64(wire.FrameBytes); from < 320*kib; from += wire.FrameBytes {
			time.Sleep(stale / 8)
			first.frames(from, from+1)
		}
		synctest.Wait() // none of it is consumed
		if len(taken) > 0 || second.part < mib || m.line[0] != second || second.shed || third.shed {
			t.Errorf("when the first was whole, the second had %d bytes; %v, %v were told to end", second.part, second.shed, third.shed)
		}
		first.Next()
		first.Consumed()
		if !<-taken || second.shed || third.shed {
			t.Errorf("%v, %v were told to end", second.shed, third.shed)
		}
		for _, r := range []*RPC{first, second, third} {
			r.c.End()
		}
		<-taken
		time.Sleep(time.Second)
	})
}

// TestTheFirstInLineGetsWhatALaterOneHas has a message begin while the one before it needs
// little, and the next in line need what that has.
func TestTheFirstInLineGetsWhatALaterOneHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := small(mib)
		first, second := m.part(80*kib), m.part(240*kib)
		if !first.frames(0, 32*kib) || !second.frames(0, 16*kib) {
			t.Fatal("there is room for both")
		}
		third := m.part(200 * kib)
		rest := second.rest
		first.rest, second.rest = 0, 0 // as if they were nearly whole
		if !third.frames(0, 64*kib) {
			t.Fatal("there is room for a third")
		}
		second.rest = rest
		second.c.parts++ // as if another message of its connection were not whole
		first.c.End()
		ended := make(chan bool, 2)
		go func() { ended <- third.frames(64*kib, 200*kib) }()
		synctest.Wait()
		begin := time.Now()
		go func() { ended <- second.frames(16*kib, 240*kib) }()
		if <-ended || !<-ended || !third.shed || second.shed {
			t.Errorf("the first in line ended: %v, the last: %v", second.shed, third.shed)
		}
		if took := time.Since(begin); took >= patience {
			t.Errorf("it took %v", took)
		}
		second.c.End()
		third.c.End()
		time.Sleep(time.Second)
	})
}

func TestLargerMessagesOfOneRPCTakeTheirPlacesAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size, n = 200 * kib, 4
		m := small(mib)
		l := m.largePeer(t, size)
		defer l.close()
		b := bytes.Repeat(message(size), n)
		for i := 0; i < len(b); i += wire.FrameBytes { // all but the first begin in a frame of the one before
			if _, err := l.peer.Write(frame(typeData, 0, 1, b[i:min(i+wire.FrameBytes, len(b))])); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if i == 2*wire.FrameBytes {
				m.mu.Lock()
				m.line = append(m.line, &RPC{c: l.Conn}) // which needs no more
				m.mu.Unlock()
			}
			if m.line[0].c != l.Conn || (i+wire.FrameBytes > size+prefixBytes) != (m.line[0].cancel == nil) {
				t.Fatalf("after %d bytes the first in line is %v", i, m.line[0])
			}
		}
		if l.took() != n*size || l.why() != nil {
			t.Errorf("%d bytes were consumed, %v", l.took(), l.why())
		}
	})
}

// TestLargerMessagesAndOthersShareWhatThereIs has what others have leave little, and a message that
// begins wait before the rest of one.
func TestLargerMessagesAndOthersShareWhatThereIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := small(mib)
		own := m.Conn(discard{}, nil, 64*kib, nil)
		grow := func(n int64) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.add(own, n)
		}
		r := &RPC{c: own, since: time.Now(), whole: []batch{{1, mib / 4}}, ready: mib / 4} // stale soon
		own.rpcs[1] = r                                                                    // before anybody looks
		grow(mib/4 + Free)
		part, begins := m.largePeer(t, 200*kib), m.largePeer(t, 200*kib)
		part.send(200*kib, 0, 40*kib)
		go begins.send(200*kib, 0, 40*kib)
		synctest.Wait()
		begin := time.Now()
		go part.send(200*kib, 40*kib, prefixBytes+200*kib)
		synctest.Wait()
		if n := m.charge(); part.took() > 0 || n > mib-mib/8 {
			t.Errorf("%d bytes are charged though others may begin to need as much as they have", n)
		}
		time.Sleep(2 * stale)
		if r.shed || part.why() != nil {
			t.Errorf("one of the others was told to end: %v; the first in line: %v", r.shed, part.why())
		}
		grow(-mib / 8)
		synctest.Wait()
		if part.took() != 200*kib || time.Since(begin) > 2*stale {
			t.Errorf("the rest waits behind what has not begun: %d bytes came in %v, %v", part.took(), time.Since(begin), part.why())
		}
		begins.close()
		grow(-mib/8 - Free)
		own.Queue(mib / 2)
		other := m.largePeer(t, 200*kib)
		go other.send(200*kib, 0, prefixBytes+200*kib)
		synctest.Wait()
		if other.took() > 0 {
			t.Error("a larger message took what is for others that read")
		}
		own.Unqueue(mib/2, 0)
		own.rpcs = nil
		for _, l := range []*largePeer{part, other} {
			l.close()
		}
		time.Sleep(time.Second)
	})
}
