package kpu

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// received is a tensor that came whole.
type received struct {
	id   string
	desc tensor.Desc
	data []byte
}

// modelled is the slow and obvious receiver: it keeps all chunks, and reads a file anew from its
// beginning with each that comes.
func modelled(most limits, list []*pb.TensorChunk) (whole []received, code frame.Code) {
	open := make(map[string]map[uint32][]byte)
	totals := make(map[string]uint32)
	for _, c := range list {
		id, n, total := c.GetTensorId(), c.GetChunkNumber(), c.GetTotalChunks()
		chunks := int64(0)
		for _, t := range totals {
			chunks += int64(t)
		}
		was, again := open[id][n]
		switch {
		case n >= total, open[id] != nil && total != totals[id], again && !bytes.Equal(was, c.GetData()):
			return whole, frame.InvalidArgument
		case open[id] == nil && (len(open) == most.open || chunks+int64(total) > most.chunks):
			return whole, frame.ResourceExhausted
		case again:
			continue
		case open[id] == nil:
			open[id], totals[id] = make(map[uint32][]byte), total
		}
		open[id][n] = c.GetData()
		var data []byte
		r, next := torchsave.NewReader(terms.DefaultLimits().TensorBytes), uint32(0)
		for ; open[id][next] != nil; next++ {
			for p := open[id][next]; len(p) > 0; {
				part, rest, err := r.Next(p)
				if err != nil {
					return whole, frame.InvalidArgument
				}
				data, p = append(data, part...), rest
			}
		}
		if next < total {
			continue
		}
		if r.Close() != nil {
			return whole, frame.InvalidArgument
		}
		l, _ := r.Layout()
		size, _ := l.Bytes()
		dense := make([]byte, size)
		l.Gather(dense, data, 0)
		whole = append(whole, received{id, l.Desc, dense})
		delete(open, id)
		delete(totals, id)
	}
	return whole, frame.OK
}

// FuzzReceive holds the receiver to the model: chunks of three tensors in any order, again, damaged,
// with wrong numbers. Each sink ends once, and no memory is left.
func FuzzReceive(f *testing.F) {
	var models *server.Models
	fix := serve(f, func(fix *fixture) {
		fix.change = func(c *server.Config) {
			c.Services = append(c.Services, server.Service{Register: func(_ grpc.ServiceRegistrar, m *server.Models) { models = m }})
		}
	})
	var files [3][]byte
	for i, n := range []int{0, 5, 300} {
		files[i] = fileOf(f, floats(f, n))
	}
	f.Add([]byte{0, 0x10, 0, 1, 0x30, 0, 1, 0x31, 0, 1, 0x32, 0})
	f.Add([]byte{2, 0x42, 0, 2, 0x40, 0, 1, 0x20, 0, 2, 0x41, 0, 2, 0x41, 0, 2, 0x43, 0, 1, 0x21, 0})
	f.Add([]byte{2, 0x20, 0, 2, 0x20, 9, 2, 0x21, 0})
	f.Add([]byte{2, 0x21, 200, 2, 0x20, 0})
	f.Add([]byte{0, 0x20, 0, 1, 0x20, 0, 2, 0x20, 0})
	f.Fuzz(func(t *testing.T, script []byte) {
		most := defaults
		most.open, most.chunks = 2, 12
		var list []*pb.TensorChunk
		for ; len(script) >= 3 && len(list) < 64; script = script[3:] {
			which, n, total := script[0]%3, uint32(script[1]&15), uint32(script[1]>>4)
			c := &pb.TensorChunk{TensorId: string('a' + rune(which)), ChunkNumber: n, TotalChunks: total}
			if total > 0 {
				file := files[which]
				c.Data = bytes.Clone(file[len(file)*int(min(n, total))/int(total) : len(file)*int(min(n+1, total))/int(total)])
			}
			if hurt := int(script[2]); hurt > 0 && hurt <= len(c.Data) {
				c.Data[len(c.Data)-hurt] ^= 1 + script[2]>>1
			}
			list = append(list, c)
		}
		want, code := modelled(most, list)

		var got []received
		var begun, ended int
		s := &service{models: models, most: most}
		r := s.receiver(t.Context(), func(id string) sink {
			begun++
			v := received{id: id}
			return sink{
				open:  func(d tensor.Desc) error { v.desc = d.Clone(); return nil },
				write: func(data []byte) error { v.data = append(v.data, data...); return nil },
				end: func(err error) error {
					ended++
					if err == nil {
						got = append(got, v)
					}
					return err
				},
			}
		})
		rest := list
		err := r.receive(func() (*pb.TensorChunk, error) {
			if len(rest) == 0 {
				return nil, io.EOF
			}
			c := rest[0]
			rest = rest[1:]
			return c, nil
		})
		told, _ := errors.AsType[*frame.Error](err)
		switch {
		case code == frame.OK && err != nil, code != frame.OK && (told == nil || told.Code != code):
			t.Fatalf("told %v, want %v", err, code)
		case len(got) != len(want):
			t.Fatalf("%d tensors came, want %d", len(got), len(want))
		case begun != ended:
			t.Fatalf("%d sinks began, %d ended", begun, ended)
		case r.ctx.Err() != nil:
			t.Fatal(context.Cause(r.ctx))
		}
		for i, w := range want {
			if got[i].id != w.id || !got[i].desc.Equal(w.desc) || !bytes.Equal(got[i].data, w.data) {
				t.Fatalf("tensor %d is %v %v, want %v %v", i, got[i].id, got[i].desc, w.id, w.desc)
			}
		}
		if used, _, _ := fix.host.Budget().Used(); used != 0 {
			t.Fatalf("%d bytes are left", used)
		}
	})
}
