package client

import (
	"context"
	"fmt"
	"math"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// Summary is the outcome of one tensor of a push or a pull.
type Summary = calling.Summary

// Progress is the progress of one tensor.
type Progress = calling.Progress

// Stored is a tensor in a server's store.
type Stored struct {
	Name string
	tensor.Desc
	Bytes int64
	// Digest is zero if it has not been computed.
	Digest codec.Digest
	Stored time.Time
	// Durable: the tensor survives a crash of the server.
	Durable bool
	// Metadata is what was pushed with the tensor.
	Metadata map[string]string
	// File is the file that contains the tensor; empty if the tensor was pushed.
	File string
}

// String returns the name and the desc.
func (s Stored) String() string {
	return fmt.Sprintf("%q %v", s.Name, s.Desc)
}

// List returns the tensors of the server's store whose names match glob, sorted by name,
// and the names of its sources. An empty glob matches all. OpenTimeout applies to each
// page. More than a million tensors are an error: narrow the glob.
func (c *Client) List(ctx context.Context, glob string) (list []Stored, sources []string, err error) {
	bytes, told := 0, 0
	for token := ""; ; {
		page, err := ask(ctx, c, c.stub.ListTensors, &pb.ListTensorsRequest{Glob: glob, PageToken: token})
		if err != nil {
			return nil, nil, err
		}
		bytes += proto.Size(page)
		told += max(len(page.GetTensors()), 1) // empty pages count, too
		if told > listTensors || bytes > calling.ListBytes {
			return nil, nil, &Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("the server lists more than %d tensors or %d bytes; narrow the glob", listTensors, calling.ListBytes)}
		}
		for _, t := range page.GetTensors() {
			s, err := stored(t)
			if err != nil {
				return nil, nil, err
			}
			list = append(list, s)
		}
		if token == "" {
			sources = page.GetSources()
		}
		next := page.GetNextPageToken()
		if next == "" {
			return list, sources, nil
		}
		if next <= token { // it would never end
			return nil, nil, &Error{Code: codes.Internal, Message: "the server's page tokens do not ascend"}
		}
		token = next
	}
}

// stored converts a tensor that the server lists.
func stored(t *pb.StoredTensor) (Stored, error) {
	kind := tensor.DataType(t.GetDtype())
	if pb.DataType(kind) != t.GetDtype() || len(t.GetShape()) > tensor.MaxRank || len(t.GetName()) > frame.NameBytes {
		return Stored{}, &Error{Code: codes.Internal, Message: fmt.Sprintf(
			"the server lists an invalid tensor: %.40q, data type %d, rank %d", t.GetName(), t.GetDtype(), len(t.GetShape()))}
	}
	s := Stored{
		Name: t.GetName(), Desc: tensor.Desc{DType: kind, Shape: t.GetShape()}, Bytes: int64(min(t.GetSizeBytes(), math.MaxInt64)),
		Stored: time.UnixMilli(t.GetStoredMillis()), Durable: t.GetDurable(), File: t.GetFile(), Metadata: t.GetMetadata(),
	}
	copy(s.Digest[:], t.GetDigest())
	return s, nil
}

// Delete removes tensors from the server's store, by name or glob, and returns their names.
// If a name does not exist, it removes nothing and fails; of more than 1 024 names it has removed
// those that it returns.
func (c *Client) Delete(ctx context.Context, names ...string) (deleted []string, err error) {
	for {
		some := names[:min(len(names), requestNames)]
		r, err := ask(ctx, c, c.stub.DeleteTensors, &pb.DeleteTensorsRequest{Names: some})
		deleted = append(deleted, r.GetDeleted()...)
		if names = names[len(some):]; err != nil || len(names) == 0 {
			return deleted, err
		}
	}
}

// Transfer is the state of a push or a pull.
type Transfer struct {
	Open, Push bool
	Age        time.Duration
	// Err is why it failed; nil while it is open.
	Err error
	// Tensors are those announced, oldest first, at most 1024.
	Tensors []TensorState
}

// TensorState is the state of one tensor of a transfer. While it is Open, its Summary has
// only name and bytes.
type TensorState struct {
	Summary
	Open  bool
	Moved int64 // bytes
}

// Transfer returns what the server knows about a push or a pull.
func (c *Client) Transfer(ctx context.Context, id tensor.ID) (*Transfer, error) {
	r, err := ask(ctx, c, c.stub.GetTransfer, &pb.GetTransferRequest{TransferId: id[:]})
	if err != nil {
		return nil, err
	}
	t := &Transfer{Open: r.GetOpen(), Push: r.GetPush(), Age: time.Duration(r.GetAgeMillis()) * time.Millisecond}
	if r.GetCode() != 0 {
		t.Err = &Error{Code: codes.Code(frame.Code(r.GetCode()).Known()), Message: r.GetMessage()}
	}
	for _, p := range r.GetTensors() {
		s, err := wire.Summary(p.GetSummary())
		if err != nil {
			return nil, &Error{Code: codes.Internal, Cause: err}
		}
		state := TensorState{
			Summary: Summary{Name: s.Name, Bytes: int64(s.SizeBytes), Digest: s.Digest, Durable: s.Durable, Err: calling.SummaryError(&s), Transfer: id},
			Open:    p.GetOpen(), Moved: int64(p.GetMovedBytes()),
		}
		state.Evicted, state.EvictedBytes = calling.EvictedFor(&s)
		t.Tensors = append(t.Tensors, state)
	}
	return t, nil
}
