package kinds

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/tensor"
)

// Tar names tar through a socket, from memory into memory: what many small tensors are
// compared with. It checks nothing but its headers.
const Tar = "tar through a socket"

// smalls splits a tensor's memory into measure.Many small ones of whole float32, or into
// fewer of 1 KiB.
func smalls(data []byte) (all [][]byte) {
	many := max(1, min(measure.Many, len(data)>>10))
	n := len(data) / many &^ 3
	for i := range many {
		all = append(all, data[i*n:(i+1)*n:(i+1)*n])
	}
	return all
}

func bytesOf(all [][]byte) int { return len(all) * len(all[0]) }

func smallName(i int) string { return fmt.Sprintf("many-%05d", i) }

// putMany stores small tensors, as a set or in pushes of as many as every version takes.
func (o *oursClient) putMany(ctx context.Context, set bool) error {
	var all []client.Input
	for i, data := range smalls(o.Source) {
		in := client.From("", bench.Floats(data))
		in.Name = smallName(i)
		all = append(all, in)
	}
	if set {
		_, err := o.clients[0].PutAll(ctx, client.PushRequest{Tensors: all})
		return err
	}
	for some := range slices.Chunk(all, pushTensors) {
		if _, err := o.clients[0].Push(ctx, client.PushRequest{Tensors: some}); err != nil {
			return err
		}
	}
	return nil
}

// fetchMany pulls small tensors to where they belong.
func (o *oursClient) fetchMany(ctx context.Context) error {
	to := make(map[string][]byte)
	for i, data := range smalls(o.To) {
		to[smallName(i)] = data
	}
	_, err := o.clients[0].Pull(ctx, client.PullRequest{
		Select: []client.Selection{{Name: "many-*"}},
		To:     func(name string, _ tensor.Desc) (client.Sink, error) { return client.Into(to[name]), nil },
	})
	return err
}

// pushMany times a push of small tensors, and compares what was stored.
func (o *oursClient) pushMany(set bool) func(context.Context, int) (bench.Sample, error) {
	return func(ctx context.Context, _ int) (bench.Sample, error) {
		all, _, err := o.clients[0].List(ctx, "many-*")
		if err != nil {
			return bench.Sample{}, err
		}
		var names []string
		for _, info := range all {
			names = append(names, info.Name)
		}
		for some := range slices.Chunk(names, pushTensors) { // those of the round before
			if _, err := o.clients[0].Delete(ctx, some...); err != nil {
				return bench.Sample{}, err
			}
		}
		s, err := bench.Timed(func() error { return o.putMany(ctx, set) })
		if err == nil {
			_, err = o.pullMany(ctx, 0)
		}
		return s, err
	}
}

func (o *oursClient) pullMany(ctx context.Context, _ int) (bench.Sample, error) {
	if infos, _, err := o.clients[0].List(ctx, "many-*"); err != nil || len(infos) < len(smalls(o.Source)) {
		if err := errors.Join(err, o.putMany(ctx, false)); err != nil {
			return bench.Sample{}, err
		}
	}
	n := bytesOf(smalls(o.To))
	return bench.Transfer(bench.Echo, o.To[:n], o.Source[:n], func() error { return o.fetchMany(ctx) })
}

// tarred is a socket on which each request is answered by an archive, or is one.
var tarred = bench.Kind{
	Name: Tar, OwnMemory: true,
	Serve: func(ctx context.Context, l net.Listener, p bench.Place) error {
		bench.FillFloats(p.To)
		return bench.Accept(ctx, l, func(conn net.Conn) error { return answers(newTarEnd(conn, p.To, p.To)) })
	},
	Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
		conn, err := p.Connect(ctx)
		if err != nil {
			return bench.Client{}, err
		}
		e := newTarEnd(conn, p.Source, p.To)
		push := func(context.Context, int) (bench.Sample, error) {
			return bench.Timed(func() error { return push(e) })
		}
		pull := func(context.Context, int) (bench.Sample, error) {
			n := bytesOf(smalls(p.To))
			return bench.Transfer(bench.Echo, p.To[:n], p.Source[:n], func() error { return pull(e) })
		}
		return bench.Client{
			Measure: map[bench.Op]func(context.Context, int) (bench.Sample, error){measure.PushMany: push, measure.PushSet: push, measure.PullMany: pull},
			Close:   conn.Close,
		}, nil
	},
}

// tarEnd is an end of Tar.
type tarEnd struct {
	*bufio.Reader
	out      *bufio.Writer
	from, to []byte
}

func newTarEnd(conn net.Conn, from, to []byte) tarEnd {
	return tarEnd{bufio.NewReaderSize(conn, bench.SmallPiece), bufio.NewWriterSize(conn, bench.SmallPiece), from, to}
}

// Write sends b at once.
func (e tarEnd) Write(b []byte) (int, error) {
	n, err := e.out.Write(b)
	return n, errors.Join(err, e.out.Flush())
}

func (e tarEnd) send() error {
	w := tar.NewWriter(e.out)
	for i, piece := range smalls(e.from) {
		err := w.WriteHeader(&tar.Header{Name: smallName(i), Size: int64(len(piece)), Mode: 0o600})
		if err == nil {
			_, err = w.Write(piece)
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), e.out.Flush())
}

func (e tarEnd) receive() error {
	r := tar.NewReader(e.Reader)
	for i, piece := range smalls(e.to) {
		h, err := r.Next()
		if err == nil && (h.Name != smallName(i) || h.Size != int64(len(piece))) {
			err = fmt.Errorf("bench: %s of %d bytes came instead of %s", h.Name, h.Size, smallName(i))
		}
		if err == nil {
			_, err = io.ReadFull(r, piece)
		}
		if err != nil {
			return err
		}
	}
	if _, err := r.Next(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("bench: the archive does not end: %w", err)
	}
	return nil
}
