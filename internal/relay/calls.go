package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/tensor"
)

// call begins a call. An error ends the link.
func (r *relay) call(m *link.Call) (run func(), err error) {
	o, err := r.begin(m.ID)
	if err != nil {
		return nil, err
	}
	q := client.Request{
		Model: m.Model, Params: table(m.Params), Timeout: time.Duration(m.Millis) * time.Millisecond,
		Results: make(map[string]client.Sink, len(m.Sinks)), Idempotent: m.Flags&link.Idempotent != 0,
	}
	o.inputs = make([]*pieces, len(m.Inputs))
	for i, in := range m.Inputs {
		c := client.Input{
			Port: in.Port, Desc: tensor.Desc{DType: tensor.DataType(in.DType), Shape: in.Shape}, Name: in.Name, Metadata: table(in.Metadata),
		}
		if in.How == link.Whole {
			if c.Data, err = o.share(in.Range); err != nil {
				return nil, err
			}
		} else {
			o.inputs[i] = o.newPieces(c.Desc)
			c.Next = o.inputs[i].next
		}
		q.Inputs = append(q.Inputs, c)
	}
	for _, s := range m.Sinks {
		q.Results[s.Port] = o.writer(s.Port)
		if s.How == link.Whole {
			into, err := o.share(s.Range)
			if err != nil {
				return nil, err
			}
			q.Results[s.Port] = client.Into(into)
		}
	}
	q.To = func(port string, d tensor.Desc) (client.Sink, error) {
		s, whole, err := o.makeRoom(port, d)
		if !whole && err == nil {
			s = o.writer(port)
		}
		return s, err
	}
	return o.run(m.Millis, func() ([]byte, error) { return o.compute(m, q) }), nil
}

// table makes a map of pairs.
func table(pairs [][2]string) map[string]string {
	if len(pairs) == 0 {
		return nil
	}
	t := make(map[string]string, len(pairs))
	for _, p := range pairs {
		t[p[0]] = p[1]
	}
	return t
}

// compute runs a call to its end, and answers its id. Results that the guest does not know are
// left to done.
func (o *op) compute(m *link.Call, q client.Request) (answer []byte, err error) {
	defer o.dropResults()
	cl, err := o.caller(m.Connection)
	if err != nil {
		return nil, err
	}
	c, err := cl.Call(o.ctx, q)
	if err != nil {
		return nil, err
	}
	if m.Flags&link.Regions != 0 {
		for region, err := range c.Regions() {
			if err != nil {
				break // Wait has it too
			}
			a, err := o.sendResult(region.Port, region.Desc)
			if err == nil {
				err = o.region(a.Result, region.Off, int64(len(region.Data)))
			}
			if err != nil {
				c.Cancel()
				break
			}
		}
	}
	results, err := c.Wait()
	o.timings = c.Timings()
	for _, port := range slices.Sorted(maps.Keys(results)) {
		if a, known := o.announce(port, results[port].Desc); !known {
			o.rest = append(o.rest, a)
		}
	}
	rows := ""
	if s, ok := cl.(*client.Sequence); ok {
		rows = fmt.Sprintf(`,"rows":%d`, s.Rows())
	}
	return []byte(`{"call":"` + c.ID().String() + `"` + rows + `}`), err
}

// result is one on its way to the guest.
type result struct {
	n      uint32 // its place among those of the op
	name   string
	block  *link.Block // where it lies whole, until the guest knows
	known  bool        // by the guest
	writer *writer     // to which it goes in pieces
}

// result returns the result of a name, a new one if there is none; o.mu is held.
func (o *op) result(name string) *result {
	at := slices.IndexFunc(o.results, func(r *result) bool { return r.name == name })
	if at < 0 {
		at = len(o.results)
		o.results = append(o.results, &result{n: uint32(at), name: name})
	}
	return o.results[at]
}

// makeRoom says where a result goes whose place the guest has not named: into memory of
// the link, if there is enough.
func (o *op) makeRoom(name string, d tensor.Desc) (s client.Sink, whole bool, err error) {
	n, err := d.Bytes()
	if err != nil {
		return client.Sink{}, false, err
	}
	o.moves(n)
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.result(name)
	r.drop() // that of an attempt before
	if r.writer != nil {
		return client.Sink{}, false, nil // nor does another attempt have other room
	}
	if r.block, err = o.conn.TryNew(n); r.block == nil {
		return client.Sink{}, false, err
	}
	return client.Into(r.block.Bytes()[:n:n]), true, nil
}

// dropResults frees the memory of results that the guest has not heard of.
func (o *op) dropResults() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, r := range o.results {
		r.drop()
	}
}

func (r *result) drop() {
	if r.block != nil {
		r.block.Release()
		r.block = nil
	}
}

// announce returns what the guest is to be told of a result, whose memory is the guest's
// from now on, and whether it knows already.
func (o *op) announce(name string, d tensor.Desc) (a link.Announced, known bool) {
	a = link.Announced{Name: name, DType: uint8(d.DType), Shape: d.Shape, How: link.Whole}
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.result(name)
	a.Result, known, r.known = r.n, r.known, true
	if r.writer != nil {
		a.How = link.Pieces
	}
	if r.block != nil {
		size, _ := d.Bytes() // makeRoom has checked it
		a.Range = r.block.Range(size)
		o.conn.Own(r.block)
		r.block = nil
	}
	return a, known
}

// sendResult announces a result to the guest, which may know it already.
func (o *op) sendResult(name string, d tensor.Desc) (a link.Announced, err error) {
	a, known := o.announce(name, d)
	if !known {
		err = o.conn.Send(&link.Result{Head: link.Head{ID: o.id}, Announced: a})
	}
	return a, err
}

// region says that bytes of a result have arrived, or bytes of a push were sent.
func (o *op) region(n uint32, off, length int64) error {
	return o.conn.Send(&link.Region{Head: link.Head{ID: o.id}, Result: n, Offset: uint64(off), Len: uint64(length)})
}

// writer has a result go to the guest in pieces.
func (o *op) writer(name string) client.Sink {
	return client.Writer(func(d tensor.Desc) (io.Writer, error) { return o.openWriter(name, d) })
}

// openWriter announces a result that comes in pieces.
func (o *op) openWriter(name string, d tensor.Desc) (*writer, error) {
	n, _ := d.Bytes() // the client checks it
	o.moves(n)
	o.mu.Lock()
	r := o.result(name)
	if r.writer == nil { // else an attempt before this one has opened it, and written nothing
		r.writer = &writer{op: o, n: r.n, out: make(chan struct{}, piecesOut)}
	}
	o.mu.Unlock()
	_, err := o.sendResult(name, d)
	return r.writer, err
}

// writer writes a result in pieces.
type writer struct {
	op  *op
	n   uint32
	off int64
	out chan struct{} // a token for each piece that the guest has
}

// Write copies p into pieces and hands them over, waiting for a guest that has many.
func (w *writer) Write(p []byte) (n int, err error) {
	n, err = w.WriteAt(p, w.off)
	w.off += int64(n)
	return n, err
}

// ReadAt fails: a server sends what it is asked for in order, and nothing is read again.
func (w *writer) ReadAt([]byte, int64) (int, error) {
	return 0, errors.New("relay: the server does not send in order")
}

// WriteAt is Write at an offset.
func (w *writer) WriteAt(p []byte, off int64) (n int, err error) {
	o := w.op
	for n < len(p) {
		select {
		case w.out <- struct{}{}:
		case <-o.ctx.Done():
			return n, o.ctx.Err()
		}
		ctx, stop := context.WithTimeout(o.ctx, pieceWait)
		b, err := o.conn.New(ctx, o.pieces, int64(min(len(p)-n, pieceBytes)))
		stop()
		if err != nil {
			<-w.out
			return n, err
		}
		b.Freed = func() { <-w.out }
		k := copy(b.Bytes()[:min(len(b.Bytes()), pieceBytes)], p[n:])
		m := &link.Region{Head: link.Head{ID: o.id, Flags: link.Piece}, Result: w.n, Offset: uint64(off) + uint64(n), Len: uint64(k), Range: b.Range(int64(k))}
		o.conn.Own(b)
		if err := o.conn.Send(m); err != nil {
			return n, err
		}
		n += k
	}
	return n, nil
}

// pieces are an input that the guest sends little by little.
type pieces struct {
	conn *link.Conn
	size int64
	news chan struct{} // capacity 1: a piece came

	mu    sync.Mutex // guards all below
	queue []piece
	got   int64 // bytes
	over  bool
	rest  []byte          // of the piece that Read reads
	done  func()          // gives that piece back
	ended <-chan struct{} // for Read: nothing more is waited for
}

type piece struct {
	block *link.Block
	n     uint64
}

func (o *op) newPieces(d tensor.Desc) *pieces {
	n, _ := d.Bytes() // the client checks it
	o.moves(n)
	return &pieces{conn: o.conn, size: n, news: make(chan struct{}, 1)}
}

// data passes the next piece of an input on. An error ends the link.
func (r *relay) data(m *link.Data) error {
	b, err := r.conn.Taken(m.Range)
	if err != nil {
		return err
	}
	o := r.op(m.ID)
	if o == nil || int(m.Input) >= len(o.inputs) || o.inputs[m.Input] == nil {
		r.conn.GiveBack(b) // it has ended meanwhile
		return nil
	}
	if err := o.inputs[m.Input].add(piece{b, m.Range.Len}); err != nil {
		o.cancel(err)
	}
	return nil
}

func (p *pieces) add(next piece) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	size := uint64(len(next.block.Bytes()))
	if p.over || next.n == 0 || next.n > size || int64(next.n) > p.size-p.got {
		p.conn.GiveBack(next.block)
		if p.over {
			return nil
		}
		return fmt.Errorf("%w: a piece of %d bytes after %d of %d", client.ErrInput, next.n, p.got, p.size)
	}
	p.got += int64(next.n)
	p.queue = append(p.queue, next)
	select {
	case p.news <- struct{}{}:
	default:
	}
	return nil
}

// next is what client.Input.Next wants: it waits for a piece.
func (p *pieces) next(over <-chan struct{}) (data []byte, release func(), err error) {
	if p.size == 0 {
		return []byte{}, func() {}, nil
	}
	for {
		p.mu.Lock()
		if len(p.queue) > 0 {
			defer p.mu.Unlock()
			first := p.queue[0]
			p.queue = slices.Delete(p.queue, 0, 1)
			return first.block.Bytes()[:first.n:first.n], func() { p.conn.GiveBack(first.block) }, nil
		}
		p.mu.Unlock()
		select {
		case <-p.news:
		case <-over:
			return nil, nil, errors.New("relay: it has ended")
		}
	}
}

// drop gives back what came and is not used.
func (p *pieces) drop() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	for _, q := range p.queue {
		p.conn.GiveBack(q.block)
	}
	p.queue = nil
	if p.done != nil {
		p.done()
		p.done = nil
	}
}

// Read implements io.Reader, for a push, which keeps what it reads.
func (p *pieces) Read(to []byte) (n int, err error) {
	if len(p.rest) == 0 {
		if p.rest, p.done, err = p.next(p.ended); err != nil {
			return 0, err
		}
	}
	n = copy(to, p.rest)
	if p.rest = p.rest[n:]; len(p.rest) == 0 { // the guest may wait for it, to send the next tensor
		p.done()
		p.done = nil
	}
	return n, nil
}
