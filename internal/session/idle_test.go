package session

import (
	"bytes"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// What a session was sent once it does not keep when it rests, however fat it was.
func TestASessionThatHadFatFramesAndIsIdleKeepsLittle(t *testing.T) {
	testkit.Start(t)
	const n, most = 60, 40 << 10 // about 18 KiB, and 32 with -race
	synctest.Test(t, func(t *testing.T) {
		measure := func() int {
			runtime.GC() // twice: the first shrinks stacks
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return int(m.HeapAlloc + m.StackInuse)
		}
		before := measure()
		var sides []*side
		var clients []*pipe
		for range n {
			a, b := newPipe()
			s := newSide(t, b, stream.Config{Server: true})
			s.start()
			sides, clients = append(sides, s), append(clients, a)
			var msg wire.Message
			f := &msg.Frame
			f.Hello = &frame.Hello{Version: frame.Version, Session: tensor.NewID(), Checksum: 1}
			require.NoError(t, a.SendMsg(&msg))
			f.Reset()
			for range 256 {
				f.Descs = append(f.Descs, frame.Desc{Tensor: tensor.NewID(), Call: tensor.NewID()})
				f.Credits = append(f.Credits, frame.Credit{Tensor: tensor.NewID(), Limit: 1})
				f.Failures = append(f.Failures, frame.Failure{Tensor: tensor.NewID(), Code: 1})
			}
			f.Drain = &frame.Drain{Reason: strings.Repeat("x", 4000)}
			require.NoError(t, a.SendMsg(&msg))
			f.Reset()
			for range 64 {
				f.Calls = append(f.Calls, frame.Call{ID: tensor.NewID()})
			}
			for range 40 {
				f.Acks = append(f.Acks, frame.Ack{Tensor: tensor.NewID(), Below: 1, Resend: make([]uint32, 1000)})
			}
			require.NoError(t, a.SendMsg(&msg))
			for answers := 256 + 256 + 40 + 64; answers > 0; {
				var got wire.Message
				require.NoError(t, a.RecvMsg(&got))
				require.NoError(t, got.Err)
				answers -= len(got.Frame.Failures) + len(got.Frame.Dones)
				got.Free()
			}
		}
		time.Sleep(11 * time.Second) // what has ended is forgotten by then
		synctest.Wait()
		kept := (measure() - before) / n
		t.Logf("%d bytes each", kept)
		require.Less(t, kept, most, "bytes")
		for i, s := range sides {
			clients[i].close()
			s.over(io.EOF)
		}
	})
}

// Whoever has run a call follows the reader, and ends when no call is open.
func TestGoroutinesThatRunCallsTakeTurnsToRead(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		ran := 0
		client, server := pair(t, func(_, server *side) {
			server.ready = func() {
				server.sess.Go(func(t *Turn) {
					t.Pass()
					ran++
				})
			}
		})
		call := func() {
			id := client.call(make([]byte, 100))
			for synctest.Wait(); !client.ended(id); synctest.Wait() {
				time.Sleep(time.Millisecond)
			}
		}
		goroutines := func() int {
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			return bytes.Count(stacks, []byte("created by github.com/tensorferry/tensorferry/internal/session.(*Session)"))
		}
		follows := func() bool {
			server.sess.mu.Lock()
			defer server.sess.mu.Unlock()
			return server.sess.following
		}
		rest := func() int {
			time.Sleep(time.Second)
			synctest.Wait()
			return goroutines()
		}
		call()
		idle := rest()
		for range 20 {
			call()
			require.True(t, follows())
			require.LessOrEqual(t, goroutines(), idle+2, "a follower and a writer")
		}
		require.Equal(t, idle, rest())
		require.False(t, follows())
		require.Equal(t, 21, ran)
		client.over(io.EOF)
		server.over(io.EOF)
	})
}
