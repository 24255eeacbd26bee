// Package kpu serves the contract of another system, kpu.torch.Service: its clients send
// tensors, as files of torch.save in chunks, to a server's models and its store.
//
// It refuses pickles of anything but a tensor. A program passes Config.Service to
// server.Config; it is safe for concurrent use. It keeps no bytes but chunks out of order,
// strided tensors, and results until they are sent, in memory of the server's budget.
package kpu

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// What empty names in Config mean, and what comes before the id of a tensor in its name in the
// store.
const (
	DefaultModel  = "echo"
	DefaultSource = "gen"
	Prefix        = "kpu/"
)

// Config configures the service.
type Config struct {
	// Model is what StreamTensors runs: a model with one input and one output.
	Model string
	// Source is what SendTensors sends: a source, which gets the parameter shape, or else a
	// tensor of the store. DefaultSource must be a store.Generator; it makes N(0, 1).
	Source string
}

// Service returns the service on a listener of its own, which the server takes over.
func (c Config) Service(l net.Listener) server.Service {
	return c.service(l, defaults)
}

func (c Config) service(l net.Listener, most limits) server.Service {
	return server.Service{
		Listener: l, MessageBytes: MessageBytes, FirstMessage: Idle, Idle: Idle,
		Register: func(r grpc.ServiceRegistrar, m *server.Models) {
			pb.RegisterServiceServer(r, &service{model: cmp.Or(c.Model, DefaultModel), source: cmp.Or(c.Source, DefaultSource), models: m, most: most})
		},
	}
}

type service struct {
	pb.UnimplementedServiceServer
	model, source string
	models        *server.Models
	most          limits
}

// nameOf returns the name of an ID in the store, where no other ID has it. None ends in a slash: a
// last part that is empty gets a dot, and one of dots another.
func nameOf(id string) string {
	if last := id[strings.LastIndexByte(id, '/')+1:]; strings.Trim(last, ".") == "" {
		id += "."
	}
	return Prefix + id
}

// ReceiveTensors brings tensors into the store.
func (s *service) ReceiveTensors(stream grpc.ClientStreamingServer[pb.TensorChunk, pb.TensorResponse]) error {
	var ids []string
	bytes := 0
	r := s.receiver(stream.Context(), func(id string) sink {
		var put *server.Transfer
		return sink{
			open: func(d tensor.Desc) (err error) {
				put, err = s.models.Put(stream.Context(), nameOf(id), d)
				return err
			},
			write: func(data []byte) error { return put.Write(data) },
			end: func(err error) error {
				if put != nil {
					err = put.End(err)
				}
				if err != nil {
					return err
				}
				if bytes += len(id); bytes > answerBytes {
					return frame.Errorf(frame.ResourceExhausted, "the ids received have more than %d bytes; use several RPCs", answerBytes)
				}
				ids = append(ids, id)
				return nil
			},
		}
	})
	go func() { r.fail(cmp.Or(r.receive(stream.Recv), io.EOF)) }() // ends with the RPC
	if err := r.wait(); err != nil {
		return err
	}
	return stream.SendAndClose(&pb.TensorResponse{Success: true, Message: fmt.Sprintf("Received %d tensor(s)", len(ids)), ReceivedTensorIds: ids})
}

// SendTensors sends tensors of a source, one after the other.
func (s *service) SendTensors(req *pb.TensorRequest, stream grpc.ServerStreamingServer[pb.TensorChunk]) error {
	shape, err := shapeOf(req.GetParameters())
	if err != nil {
		return err
	}
	buffer, err := s.models.Buffer(2 * chunkBytes)
	if err != nil {
		return err
	}
	defer buffer.Release()
	for range max(req.GetCount(), 1) {
		if err := s.send(shape, stream, buffer.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

// send sends one tensor. The first half of buffer is for its chunks, the other for its bytes.
func (s *service) send(shape string, stream grpc.ServerStreamingServer[pb.TensorChunk], buffer []byte) error {
	params := map[string]string{"shape": shape}
	if s.source == DefaultSource {
		params["fill"], params["seed"] = "normal", strconv.FormatUint(rand.Uint64(), 10)
	}
	get, err := s.models.Get(stream.Context(), s.source, true, params)
	if why, ok := errors.AsType[*terms.RefusedError](err); ok && why.Code == frame.NotFound {
		get, err = s.models.Get(stream.Context(), s.source, false, nil)
	}
	if err != nil {
		return err
	}
	f := file{id: uuid.NewString(), desc: get.Desc, step: chunkBytes, room: func() ([]byte, error) { return buffer[:chunkBytes], nil }, send: stream.Send}
	err = f.begin(s.most.chunks)
	for err == nil && !f.whole() {
		data := buffer[chunkBytes:][:min(chunkBytes, f.left)]
		if err = get.Read(data); err == nil {
			err = f.data(data)
		}
	}
	return get.End(err)
}

// integer is what Python's int reads.
var integer = regexp.MustCompile(`^\s*([+-]?\d+(?:_\d+)*)\s*$`)

// shapeOf returns the shape that a request asks for: 10 by 10 if what it says is not integers.
func shapeOf(params map[string]string) (shape string, err error) {
	rank := 0
	for dim := range strings.SplitSeq(params["shape"], ",") {
		if rank++; rank > tensor.MaxRank { // a message has room for millions
			return "", frame.Errorf(frame.InvalidArgument, "shape: more than %d dimensions", tensor.MaxRank)
		}
		text := integer.FindStringSubmatch(dim)
		if text == nil {
			return "10,10", nil
		}
		n, bad := strconv.ParseInt(strings.ReplaceAll(text[1], "_", ""), 10, 64)
		switch {
		case err != nil:
		case n < 0:
			err = frame.Errorf(frame.InvalidArgument, "shape: dimension %d must not be negative", n)
		case bad != nil:
			err = frame.Errorf(frame.ResourceExhausted, "shape: a dimension is beyond 2^63")
		}
		shape += "," + strconv.FormatInt(n, 10)
	}
	return strings.TrimPrefix(shape, ","), err
}
