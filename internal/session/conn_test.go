package session

import (
	"bytes"
	"context"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// link is one end of a connection that carries frames as they are.
type link struct {
	out, in chan *frame.Frame
	cut     func()          // ends both ends
	ended   <-chan struct{} // by cut
}

func newLink() (a, b *link) {
	there, back, ended := make(chan *frame.Frame, 16), make(chan *frame.Frame, 16), make(chan struct{})
	cut := sync.OnceFunc(func() { close(ended) })
	return &link{there, back, cut, ended}, &link{back, there, cut, ended}
}

func (l *link) Send(f *frame.Frame, held interface{ Release() }) error {
	c := *f
	c.Calls, c.Descs, c.Credits, c.Acks = slices.Clone(f.Calls), slices.Clone(f.Descs), slices.Clone(f.Credits), slices.Clone(f.Acks)
	c.Cancels, c.Failures, c.Dones = slices.Clone(f.Cancels), slices.Clone(f.Failures), slices.Clone(f.Dones)
	c.Ends, c.Summaries = slices.Clone(f.Ends), slices.Clone(f.Summaries)
	c.Chunk.Data = [][]byte{bytes.Join(f.Chunk.Data, nil)}
	if held != nil {
		held.Release()
	}
	select {
	case l.out <- &c:
		return nil
	case <-l.ended:
		return errCut
	}
}

func (l *link) Recv() (*frame.Frame, error) {
	select {
	case f, ok := <-l.in:
		if !ok {
			return nil, io.EOF
		}
		return f, nil
	case <-l.ended:
		return nil, errCut
	}
}

func (l *link) Free() {}

func (l *link) Clear(int) bool { return true }

// linked returns two sides without a connection.
func linked(t *testing.T) (client, server *side) {
	client = newSide(t, nil, stream.Config{Session: tensor.NewID(), Codecs: codec.All(), Limits: stream.Limits{SessionIdle: stream.Instant(365 * 24 * time.Hour)}})
	server = newSide(t, nil, stream.Config{Server: true, Codecs: codec.All()})
	return client, server
}

// echoes makes a call whose result must be there once nothing more happens.
func (s *side) echoes(n int) {
	s.t.Helper()
	data := compressible(n)
	call := s.call(data)
	synctest.Wait()
	s.isEcho(call, data)
}

func (s *side) isEcho(call [16]byte, data []byte) {
	s.t.Helper()
	require.True(s.t, s.ended(call))
	s.sess.Do(func(*stream.Machine, stream.Instant) {
		require.Equal(s.t, frame.OK, s.code)
		require.True(s.t, bytes.Equal(data, s.results[call]))
	})
}

func TestASessionIsCarriedByAConnectionThatIsNotGRPC(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := linked(t)
		a, b := newLink()
		client.sess.Carry(a)
		server.sess.Carry(b)
		for _, n := range []int{0, 1, 1000, 1 << 20} {
			client.echoes(n)
		}

		server.sess.Do(func(*stream.Machine, stream.Instant) { server.hold = true })
		call := client.call(make([]byte, 5000))
		synctest.Wait()
		require.False(t, client.ended(call))
		client.sess.Do(func(m *stream.Machine, _ stream.Instant) {
			m.Finish(frame.Done{Call: call, Code: frame.Cancelled, Message: "enough"})
		})
		synctest.Wait()
		require.True(t, client.ended(call))
		require.True(t, server.ended(call))
		require.Equal(t, frame.Cancelled, client.code)

		require.NoError(t, server.sess.Drain(context.Background(), "bye"))
		synctest.Wait()
		client.sess.Do(func(m *stream.Machine, _ stream.Instant) { require.True(t, m.Status().Draining) })
		close(a.out)
		<-server.sess.Stopped()
		require.Equal(t, ErrPeerClosed, server.sess.Cause())
		a.cut()
		server.over(nil)
		client.over(nil)
	})
}

func TestASessionGoesOnOverAnotherConnection(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := linked(t)
		for range 3 {
			a, b := newLink()
			lost := []<-chan error{client.sess.Carry(a), server.sess.Carry(b)}
			client.echoes(20_000)
			time.Sleep(time.Second) // the last acknowledgement
			synctest.Wait()
			a.cut()
			for _, l := range lost {
				require.Equal(t, errCut, <-l)
			}
			synctest.Wait()
		}
		data := compressible(20_000)
		call := client.call(data) // waits
		synctest.Wait()
		for _, s := range []*side{client, server} {
			select {
			case <-s.sess.Stopped():
				t.Fatal("the session ended with its connection")
			default:
			}
		}
		a, b := newLink()
		client.sess.Carry(a)
		server.sess.Carry(b)
		synctest.Wait()
		client.isEcho(call, data)
		a.cut()
		client.over(nil)
		server.over(nil)
		require.EqualValues(t, 4, server.sess.m.Status().Stats.CallsOpened)
	})
}

// deaf is a connection whose first Send of a chunk fails, as gRPC's does when the RPC
// has ended.
type deaf struct{ *link }

func (d deaf) Send(f *frame.Frame, held interface{ Release() }) error {
	if f.HasChunk() {
		if held != nil {
			held.Release()
		}
		d.cut()
		return errCut
	}
	return d.link.Send(f, held)
}

func TestASessionWhoseConnectionFailedInASendGoesOnOverAnother(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		client, server := linked(t)
		a, b := newLink()
		client.sess.Carry(deaf{a})
		server.sess.Carry(b)
		time.Sleep(time.Second)
		synctest.Wait()
		client.call(compressible(3 << 20)) // whose chunk is lost with the connection
		synctest.Wait()
		a.cut()
		synctest.Wait()

		a, b = newLink()
		client.sess.Carry(a)
		server.sess.Carry(b)
		synctest.Wait()
		data := compressible(3 << 20)
		call := client.call(data)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		ended := client.ended(call)
		a.cut()
		client.over(nil)
		server.over(nil)
		require.True(t, ended, "a call on the second connection ends")
	})
}
