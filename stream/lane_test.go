package stream

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// A world may have lanes, whose chunks come in order, in no order with the frames and those
// of other lanes, and not all of them when a lane is cut: both sides learn of that sooner or
// later or, in silence, find out. No call may fail for it.

// laneEnd is a party's end of a lane.
type laneEnd struct {
	open    bool         // for this side
	cut     bool         // and not for long
	cutAt   Instant      // in silence; 0 is noticed at once
	writing *laneChunk   // its views are being read
	sent    []*laneChunk // and not delivered
	claim   *openClaim
}

type laneChunk struct {
	frame.Chunk
	held chunker.Releaser
}

// worldLanes is how many lanes a world may have.
const worldLanes = 3

// openLane gives both sides a lane.
func (w *world) openLane(n int) {
	if w.cli.lanes[n].open || w.srv.lanes[n].open || w.halfDone {
		return
	}
	w.tracef("lane %d is opened", n)
	for _, p := range []*party{w.cli, w.srv} {
		p.lanes[n] = laneEnd{open: true}
		p.m.SetLanes(w.now, 1, 0)
		p.events()
	}
}

// cutLane loses a part of what is on a lane.
func (w *world) cutLane(n int, silent bool) {
	for _, p := range []*party{w.cli, w.srv} {
		l := &p.lanes[n]
		if !l.open || l.cut {
			continue
		}
		w.tracef("lane %d of %v is cut, in silence %v", n, p.name(), silent)
		l.cut, l.cutAt = true, 0
		if silent {
			l.cutAt = w.now + 1
			w.silent = true
		}
		l.sent = l.sent[:w.choose(len(l.sent)+1)]
	}
}

// notice has a side learn that a lane is cut, if it can.
func (p *party) notice(n int) bool {
	l := &p.lanes[n]
	if !l.open || !l.cut || l.cutAt > 0 && int(p.m.LaneStalled(p.w.now)) != n+1 && (l.claim == nil || p.w.now < l.cutAt+2*p.m.LanePatience(1)) {
		return false
	}
	p.w.tracef("%v learns that lane %d is cut", p.name(), n)
	l.open, l.cut = false, false
	if l.writing != nil {
		l.writing.held.Release()
		l.writing = nil
	}
	if c := l.claim; c != nil {
		_, _, err := c.c.Fill(bytes.NewReader(c.data[0][:p.w.choose(max(1, len(c.data[0])))]))
		l.claim = nil
		if err == nil {
			p.m.Commit(p.w.now, &c.c, c.sum, nil) // an empty one
		} else {
			p.m.Abort(p.w.now, &c.c)
		}
	}
	open := 0
	for _, l := range p.lanes {
		if l.open {
			open++
		}
	}
	p.m.SetLanes(p.w.now, open, 0)
	p.m.LoseLane(uint8(n + 1))
	p.events()
	return true
}

// sendLane begins or ends to write a chunk.
func (p *party) sendLane(n int) bool {
	l := &p.lanes[n]
	if p.over || !l.open {
		return false
	}
	if x := l.writing; x != nil {
		l.writing = nil
		if p.m.Status().Codec == codec.LZ4 {
			encode(&x.Chunk)
		}
		x.Data = [][]byte{bytes.Join(x.Data, nil)}
		x.Sum = p.sum(x.Tensor, x.Index, x.Data)
		x.held.Release()
		if !l.cut {
			l.sent = append(l.sent, x)
		}
		return true
	}
	pending, x := p.m.LanePending(), new(laneChunk)
	var ok bool
	if x.held, ok = p.m.NextLane(p.w.now, &x.Chunk, uint8(n+1)); ok && !pending {
		p.w.failf("%s: a chunk for a lane although none was pending", p.name())
	}
	p.events()
	if ok {
		p.w.tracef("%v writes chunk %v %d to lane %d", p.name(), x.Tensor, x.Index, n)
		l.writing = x
	}
	return ok
}

// deliverLane has the peer read the header of the oldest chunk on a lane.
func (p *party) deliverLane(n, flaw int) bool {
	l, q := &p.lanes[n], p.peer
	if len(l.sent) == 0 || q.lanes[n].claim != nil {
		return false
	}
	x := l.sent[0]
	l.sent = l.sent[1:]
	if !q.lanes[n].open || p.over || q.over {
		return true
	}
	data, ch := bytes.Clone(x.Data[0]), x.Chunk
	ch.Data = nil
	name := chunkName{ch.Tensor, ch.Index}
	switch {
	case len(data) == 0:
	case flaw == flipped:
		data[p.w.choose(len(data))] ^= 1 << p.w.choose(8)
		if q.bad[name]++; q.bad[name] >= 3 {
			p.w.blame(ch.Tensor, "corrupt thrice")
		}
	case flaw == cutShort && ch.Codec == 0:
		data = data[1:]
		p.w.blame(ch.Tensor, "cut short")
	}
	claim := &openClaim{data: [][]byte{data}}
	wanted := q.m.ClaimLane(p.w.now, &ch, len(data), &claim.c)
	p.w.tracef("%v reads the header of chunk %v %d on lane %d, wanted %v, flaw %d", q.name(), ch.Tensor, ch.Index, n, wanted, flaw)
	if wanted {
		claim.sum = p.sum(ch.Tensor, ch.Index, [][]byte{data})
		q.lanes[n].claim = claim
	}
	q.events()
	return true
}

// finishLane reads the payload of a chunk to its place, unless that is wanted back.
func (p *party) finishLane(n int) bool {
	c := p.lanes[n].claim
	if c == nil || p.lanes[n].cut {
		return false
	}
	p.lanes[n].claim = nil
	if c.c.Dead() && p.w.choose(2) == 0 {
		p.m.Abort(p.w.now, &c.c)
	} else {
		got, left, err := c.c.Fill(bytes.NewReader(c.data[0]))
		if left > 0 || err != nil {
			p.w.failf("%s: %d bytes are missing: %v", p.name(), left, err)
		}
		failed := c.c.Decode(got)
		id, index := c.c.tensor.Desc.Tensor, c.c.Index()
		if got == c.sum && !c.c.Dead() {
			p.good[chunkName{id, index}] = true
		}
		p.m.Commit(p.w.now, &c.c, got, failed)
	}
	p.events()
	return true
}

// laneStep does one thing with a lane, by choice.
func (w *world) laneStep(p *party) {
	n := w.choose(worldLanes)
	switch w.choose(8) {
	case 0, 1:
		p.sendLane(n)
		p.sendLane(n)
	case 2:
		p.deliverLane(n, fine)
	case 3:
		p.deliverLane(n, []int{fine, flipped, cutShort}[w.choose(3)])
	case 4:
		p.finishLane(n)
	case 5:
		w.openLane(n)
	case 6:
		p.notice(n)
	case 7:
		switch w.choose(12) {
		case 1:
			w.cutLane(n, false)
		case 2:
			w.cutLane(n, true)
		}
	}
}

// laneFlow does what can be done with the lanes.
func (p *party) laneFlow() (moved bool) {
	for n := range p.lanes {
		moved = p.finishLane(n) || moved
		moved = p.notice(n) || moved
		moved = p.sendLane(n) || moved
		moved = p.deliverLane(n, fine) || moved
	}
	return moved
}

func TestALaneIsOfferedToAClientThatAsks(t *testing.T) {
	token := frame.LaneToken{1}
	for name, tc := range map[string]struct {
		asks  uint32
		offer uint32
		want  int
	}{
		"both":             {1, 8, 8},
		"the client alone": {1, 0, 0},
		"the server alone": {0, 8, 0},
	} {
		t.Run(name, func(t *testing.T) {
			c := New(Config{Session: tensor.ID{1}, Lanes: tc.asks, LanesAtOnce: 2}, 0)
			s := New(Config{Server: true}, 0)
			if tc.offer > 0 {
				s.OfferLanes(token, tc.offer, 4)
			}
			for _, m := range [][2]*Machine{{c, s}, {s, c}} {
				var f frame.Frame
				_, ok := m[0].Next(0, &f)
				require.True(t, ok)
				if m[0] == s && tc.want == 0 {
					require.Zero(t, f.Hello.Lanes)
					require.True(t, f.Hello.LaneToken.IsZero(), "a client that did not ask gets none")
				}
				require.NoError(t, m[1].Control(0, &f))
			}
			got, uses := c.LaneOffer()
			require.EqualValues(t, tc.want, uses)
			require.Equal(t, max(1, min(tc.want, 2)), c.LanesAtOnce())
			require.Equal(t, max(1, 2*min(1, int(tc.offer))), s.LanesAtOnce())
			require.Equal(t, tc.want > 0, got == token)
			c.SetLanes(0, 1, 0)
			require.Equal(t, tc.want > 0, c.out.Laned)
		})
	}
}

// laned returns two machines with a lane between them, and a call whose result of n
// bytes, in chunks of one, the client has memory for.
func laned(t *testing.T, n int) (cli, srv *Machine, call, id tensor.ID, mem []byte) {
	t.Helper()
	cli, srv = New(Config{Session: tensor.ID{1}, Lanes: 1, Limits: Limits{AllowanceBytes: 1}}, 0), New(Config{Server: true}, 0)
	srv.OfferLanes(frame.LaneToken{1}, 8, 4)
	call, id, mem = tensor.ID{2}, tensor.ID{3}, make([]byte, n)
	require.NoError(t, cli.OpenCall(0, frame.Call{ID: call, Model: "m"}))
	exchange(t, cli, srv)
	require.NoError(t, srv.OpenTensor(0, bytesDesc(id, call, int64(n), 1)))
	exchange(t, cli, srv)
	require.NoError(t, cli.Lend(0, id, mem, nil))
	exchange(t, cli, srv)
	cli.SetLanes(0, 1, 0)
	srv.SetLanes(0, 1, 0)
	require.NoError(t, srv.Offer(0, id, 0, bytes.Repeat([]byte{7}, n), nil))
	return cli, srv, call, id, mem
}

// exchange delivers frames until there is none, and drops what the machines tell.
func exchange(t *testing.T, cli, srv *Machine) {
	t.Helper()
	for moved := true; moved; {
		moved = false
		for _, m := range [][2]*Machine{{cli, srv}, {srv, cli}} {
			var f frame.Frame
			held, ok := m[0].Next(0, &f)
			if !ok {
				continue
			}
			moved = true
			require.NoError(t, m[1].Control(0, &f))
			if f.HasChunk() {
				var c Claim
				f.Chunk.Sum = m[0].cfg.Check.Update(m[0].cfg.Check.Seed(f.Chunk.Tensor, f.Chunk.Index), f.Chunk.Data[0])
				if place, err := m[1].Claim(0, &f.Chunk, &c); place {
					sum, failed := c.Copy(f.Chunk.Data)
					m[1].Commit(0, &c, sum, failed)
				} else {
					require.NoError(t, err)
				}
				held.Release()
			}
			for more := true; more; {
				_, more = m[0].Event()
			}
			for more := true; more; {
				_, more = m[1].Event()
			}
		}
	}
}

func TestWhatIsOnALaneGoesAgainInTheSessionWhenThePeerHasEndedItsSide(t *testing.T) {
	cli, srv, call, id, mem := laned(t, 3)
	for srv.LanePending() {
		var ch frame.Chunk
		held, ok := srv.NextLane(0, &ch, 1)
		require.True(t, ok)
		held.Release() // and it is never seen again
	}
	srv.Finish(frame.Done{Call: call, Outputs: []frame.Binding{{Port: "x", Tensor: id}}})
	exchange(t, cli, srv)
	require.Equal(t, 1, srv.Status().Calls, "nothing is acknowledged")
	srv.PeerDone(0)
	require.False(t, srv.LanePending())
	require.Equal(t, 1, srv.Status().Calls, "the results are to be sent again")
	exchange(t, cli, srv)
	require.Equal(t, []byte{7, 7, 7}, mem)
	require.Zero(t, srv.Status().Calls)
	require.EqualValues(t, 3, srv.Status().Stats.LaneBytesOut)
	require.Zero(t, cli.Status().Stats.LaneBytesIn)
}

func TestAChunkThatIsHereIsNotComparedWithOneOfALane(t *testing.T) {
	cli, srv, _, id, mem := laned(t, 2)
	srv.SetLanes(0, 0, 0)
	exchange(t, cli, srv) // all by the session, but the lane is there
	require.Equal(t, []byte{7, 7}, mem)
	for _, sum := range []uint32{1, 2} {
		var c Claim
		require.False(t, cli.ClaimLane(0, &frame.Chunk{Tensor: id, Index: 1, Sum: sum}, 1, &c))
		require.False(t, c.Dead())
	}
	require.False(t, cli.ClaimLane(0, &frame.Chunk{Tensor: tensor.ID{9}}, 1, new(Claim)), "nobody knows the tensor")
	require.Empty(t, cli.failures, "and nobody is told")
	require.Zero(t, cli.calls.open[tensor.ID{2}].claims)
}

func TestAnAbortedChunkPassesNoLimitOfResends(t *testing.T) {
	const n = 3 * chunker.MaxResends
	cli, _, _, id, _ := laned(t, n)
	spoil := func(i uint32) {
		var c Claim
		if place, _ := cli.Claim(0, &frame.Chunk{Tensor: id, Index: i, Data: [][]byte{{1}}}, &c); place {
			got, failed := c.Copy([][]byte{{1}})
			cli.Commit(0, &c, got, failed)
		}
	}
	for i := range uint32(chunker.MaxResends) {
		spoil(i)
	}
	var c Claim
	require.True(t, cli.ClaimLane(0, &frame.Chunk{Tensor: id, Index: n - 1}, 1, &c))
	cli.Abort(0, &c)
	require.NotNil(t, cli.in.tensors[id])
	spoil(chunker.MaxResends)
	require.Nil(t, cli.in.tensors[id], "the tensor fails")
}

func TestAChunkOnAllowanceDoesNotComeByALane(t *testing.T) {
	cli, srv := pair(t, Limits{})
	call, id := tensor.ID{2}, tensor.ID{3}
	d := bytesDesc(id, call, 4, 4)
	d.SizeBytes, d.OnAllowance = 4, true
	require.NoError(t, srv.Control(0, &frame.Frame{Calls: []frame.Call{{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: id}}}}, Descs: []frame.Desc{d}}))
	require.NoError(t, srv.Lend(0, id, make([]byte, 4), nil))
	require.False(t, srv.ClaimLane(0, &frame.Chunk{Tensor: id}, 4, new(Claim)))
	exchange(t, cli, srv)
	require.Nil(t, srv.in.tensors[id])
}

func TestAChunkThatIsAskedForAgainIsNoProgress(t *testing.T) {
	for _, byLane := range []bool{true, false} {
		_, srv, _, id, _ := laned(t, 3)
		srv.SetLanes(0, map[bool]int{true: 1}[byLane], 0)
		send := func(now Instant) (sent int) {
			for {
				var f frame.Frame
				held, ok := srv.NextLane(now, &f.Chunk, 1)
				if !ok {
					if held, ok = srv.Next(now, &f); !ok {
						return sent
					}
				}
				if held != nil {
					sent++
					held.Release()
				}
			}
		}
		require.Equal(t, 3, send(0))
		var now Instant
		for ; now < srv.cfg.Limits.ChunkIdle; now += second {
			require.NoError(t, srv.Tick(now))
			require.Equal(t, 1, srv.Status().Calls, "at %d", now)
			require.Equal(t, byLane && now >= srv.LanePatience(1), srv.LaneStalled(now) == 1, "at %d", now)
			require.NoError(t, srv.Control(now, &frame.Frame{Acks: []frame.Ack{{Tensor: id, Resend: []uint32{0}}}}))
			require.Equal(t, 1, send(now))
		}
		require.NoError(t, srv.Tick(now))
		require.Nil(t, srv.out.tensors[id], "the call has expired")
	}
}

func TestALaneThatIsLostLeavesTimeToSendItsChunksAgain(t *testing.T) {
	for _, tc := range []struct {
		idle, chunk int
		want        Instant
	}{{30, 1 << 20, 10 * second}, {30, 4 << 20, 15 * second}, {6, 1, 3 * second}, {600, 4 << 20, 25 * second}} {
		limits := Limits{ChunkIdle: Instant(tc.idle) * second}
		cli, srv := pair(t, limits)
		require.Equal(t, tc.want, srv.LanePatience(tc.chunk))
		require.Equal(t, tc.want, cli.LanePatience(tc.chunk), "as the server's hello says")
	}
}

// A model may end before the last input is acknowledged, long before its results are sent.
func TestAnInputThatCameByALaneIsAcknowledgedThoughItsModelHasEnded(t *testing.T) {
	cli, srv := New(Config{Session: tensor.ID{1}, Lanes: 1, Limits: Limits{AllowanceBytes: 1}}, 0), New(Config{Server: true, NoAllowance: true}, 0)
	srv.OfferLanes(frame.LaneToken{1}, 8, 4)
	call, in, out := tensor.ID{2}, tensor.ID{3}, tensor.ID{4}
	exchange(t, cli, srv)
	require.NoError(t, cli.OpenCall(0, frame.Call{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: in}}}))
	require.NoError(t, cli.OpenTensor(0, bytesDesc(in, call, 1, 1)))
	require.NoError(t, cli.Offer(0, in, 0, []byte{7}, nil))
	exchange(t, cli, srv)
	require.NoError(t, srv.Lend(0, in, make([]byte, 1), nil))
	cli.SetLanes(0, 1, 0)
	exchange(t, cli, srv)
	var ch frame.Chunk
	held, ok := cli.NextLane(0, &ch, 1)
	require.True(t, ok)
	ch.Sum = cli.cfg.Check.Update(cli.cfg.Check.Seed(in, 0), ch.Data[0])
	var c Claim
	require.True(t, srv.ClaimLane(0, &ch, 1, &c))
	got, _, err := c.Fill(bytes.NewReader(ch.Data[0]))
	require.NoError(t, err)
	held.Release()
	srv.Commit(0, &c, got, nil)
	require.NoError(t, srv.OpenTensor(0, bytesDesc(out, call, 2, 1)))
	require.NoError(t, srv.Offer(0, out, 0, []byte{8, 8}, nil))
	srv.Finish(frame.Done{Call: call, Outputs: []frame.Binding{{Port: "y", Tensor: out}}})
	exchange(t, cli, srv)
	require.Equal(t, 1, cli.Status().Calls, "the result has no memory yet")
	require.Nil(t, cli.out.tensors[in], "all of it is acknowledged")
	require.Zero(t, cli.LaneStalled(srv.LanePatience(1)))
}

func TestALaneThatIsLostIsNoProgress(t *testing.T) {
	t.Run("with a result", func(t *testing.T) {
		_, srv, _, id, _ := laned(t, 3)
		var now Instant
		for ; now < srv.cfg.Limits.ChunkIdle; now += second {
			require.NoError(t, srv.Tick(now))
			require.Equal(t, 1, srv.Status().Calls, "at %d", now)
			var ch frame.Chunk
			held, ok := srv.NextLane(now, &ch, 1)
			require.True(t, ok)
			held.Release()
			srv.LoseLane(1)
		}
		require.NoError(t, srv.Tick(now))
		require.Nil(t, srv.out.tensors[id], "the call has expired")
	})
	t.Run("with an input of which a header has come", func(t *testing.T) {
		cli, srv := pair(t, Limits{AllowanceBytes: 1})
		call, in := tensor.ID{2}, tensor.ID{3}
		require.NoError(t, cli.OpenCall(0, frame.Call{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: in}}}))
		require.NoError(t, cli.OpenTensor(0, bytesDesc(in, call, 2, 2)))
		exchange(t, cli, srv)
		require.NoError(t, srv.Lend(0, in, make([]byte, 2), nil))
		exchange(t, cli, srv)
		var now Instant
		for ; now < srv.cfg.Limits.ChunkIdle; now += second {
			require.NoError(t, srv.Tick(now))
			require.Equal(t, 1, srv.Status().Calls, "at %d", now)
			var c Claim
			require.True(t, srv.ClaimLane(now, &frame.Chunk{Tensor: in}, 2, &c))
			srv.Abort(now, &c)
		}
		require.NoError(t, srv.Tick(now))
		require.Nil(t, srv.in.tensors[in], "the call has expired")
	})
}

func TestAfterAStallChunksLeaveInTheSessionForAWhile(t *testing.T) {
	_, srv, _, _, _ := laned(t, 3)
	now := Instant(0)
	for _, rest := range []Instant{60 * second, 120 * second, 240 * second} {
		require.True(t, srv.LanePending())
		for range 3 { // they stall together
			srv.RestLanes(now)
			srv.SetLanes(now, 2, 0)
			require.False(t, srv.LanePending())
		}
		require.True(t, srv.Pending())
		srv.PeerWaits(now + rest)
		require.NoError(t, srv.Tick(now+rest-1))
		require.False(t, srv.LanePending())
		now += rest
		require.NoError(t, srv.Tick(now+second))
		now += second
	}
	require.True(t, srv.LanePending())
}
