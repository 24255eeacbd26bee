package session

import (
	"bytes"
	"io"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// narrow is a connection that may not be clear. It counts what is sent by who reads, and by others.
type narrow struct {
	*link
	clear              bool
	byReader, byOthers atomic.Int64
	asked              atomic.Int64
}

func (n *narrow) Clear(int) bool {
	n.asked.Add(1)
	return n.clear
}

func (n *narrow) Send(f *frame.Frame, held interface{ Release() }) error {
	stack := make([]byte, 1<<16)
	if bytes.Contains(stack[:runtime.Stack(stack, false)], []byte("session.(*Session).read(")) {
		n.byReader.Add(1)
	} else {
		n.byOthers.Add(1)
	}
	return n.link.Send(f, held)
}

// Who reads sends a result itself where that waits for nothing, and leaves it to the writer else.
func TestWhoReadsSendsOnlyWhatWaitsForNothing(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct{ clear, pass, encodes bool }{
		"clear": {clear: true}, "not clear": {}, "clear, and another reads": {clear: true, pass: true}, "clear, and there is a codec": {clear: true, encodes: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, server := linked(t)
				if !tc.encodes {
					server = newSide(t, nil, stream.Config{Server: true})
				}
				server.hold = true
				ended := 0
				var call tensor.ID
				server.ready = func() {
					server.sess.Go(func(turn *Turn) {
						if tc.pass {
							turn.Pass()
						}
						turn.DoSend(0, func(m *stream.Machine, _ stream.Instant) {
							server.sess.After(func() { ended++ })
							m.Finish(frame.Done{Call: call})
						})
					})
				}
				a, b := newLink()
				client.sess.Carry(a)
				n := &narrow{link: b, clear: tc.clear}
				server.sess.Carry(n)
				synctest.Wait()
				before := n.byOthers.Load()
				const calls = 10
				for i := range calls {
					client.sess.Do(func(m *stream.Machine, now stream.Instant) {
						call = tensor.NewID()
						require.NoError(t, m.OpenCall(now, frame.Call{ID: call, Model: "none"}))
					})
					synctest.Wait()
					require.True(t, client.ended(call), "call %d", i)
				}
				require.Equal(t, frame.OK, client.code)
				require.Equal(t, calls, ended)
				switch {
				case tc.pass:
					require.Zero(t, n.asked.Load(), "it may wait")
				case tc.clear && !tc.encodes:
					require.EqualValues(t, calls, n.byReader.Load())
				default:
					require.Zero(t, n.byReader.Load())
					require.GreaterOrEqual(t, n.byOthers.Load()-before, int64(calls))
				}
				a.cut()
				client.over(io.EOF)
				server.over(io.EOF)
			})
		})
	}
}
