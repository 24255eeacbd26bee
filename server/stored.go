package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/storing"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// PushTensors stores the tensors of a client's stream.
func (s *Server) PushTensors(conn grpc.ClientStreamingServer[pb.Frame, pb.PushTensorsResponse]) error {
	r := rpcOf(conn.Context())
	r.received.Admitted()
	return s.storing.Push(&r.conn.Caller, r.conn.Frames(conn, r.received), func(list []frame.Summary) error {
		resp := &pb.PushTensorsResponse{}
		for i := range list {
			resp.Summaries = append(resp.Summaries, wire.ToSummary(&list[i]))
		}
		return conn.SendAndClose(resp)
	})
}

// PullTensors sends what a client selects.
func (s *Server) PullTensors(req *pb.PullTensorsRequest, conn grpc.ServerStreamingServer[pb.Frame]) error {
	p, err := wire.ReadPull(req)
	if err != nil {
		return frame.Because("INVALID_ARGUMENT", "%s", reason.Plain(err))
	}
	req.Reset() // it takes more memory
	r := rpcOf(conn.Context())
	r.received.Consumed()
	r.received.Admitted()
	return s.storing.Pull(&r.conn.Caller, r.conn.Frames(conn, r.received), &p.Hello, p.Selections)
}

// ListTensors lists a page of the store.
func (s *Server) ListTensors(ctx context.Context, req *pb.ListTensorsRequest) (*pb.ListTensorsResponse, error) {
	if !rpcOf(ctx).received.Take(2 * listBytes) { // names, messages and their encoding
		return nil, errReceived
	}
	out := &pb.ListTensorsResponse{}
	if req.GetPageToken() == "" {
		for _, name := range s.cfg.Sources.Names() {
			if s.may(ctx, VerbGenerate, name, 0) == nil {
				out.Sources = append(out.Sources, name)
			}
		}
	}
	if s.cfg.Store == nil {
		return out, nil
	}
	if glob := req.GetGlob(); glob != "" { // a longer glob matches no name, but costs time
		if err := store.CheckName(glob); err != nil {
			return nil, frame.Because(reason.BadName, "glob: %s", reason.Plain(err))
		}
	}
	if err := s.may(ctx, VerbList, cmp.Or(req.GetGlob(), "**"), 0); err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, s.storing.Explain(err)
	}
	most := listPage
	if n := req.GetPageSize(); n > 0 && n < listPage {
		most = int(n)
	}
	// Request one more than the page holds, to see whether there is another page.
	list, err := s.restrict(VerbList).List(ctx, req.GetGlob(), req.GetPageToken(), most+1)
	if err != nil {
		return nil, s.storing.Explain(err)
	}
	bytes := 0
	for n, i := range list {
		if bytes += len(i.Name) + 8*len(i.Shape) + new(frame.Sizes).OfEntries(i.Metadata); n == most || n > 0 && bytes > listBytes {
			out.NextPageToken = list[n-1].Name
			break
		}
		size, err := i.Bytes()
		if err != nil {
			return nil, s.storing.Explain(err)
		}
		t := &pb.StoredTensor{
			Name: i.Name, Dtype: pb.DataType(i.DType), Shape: i.Shape, SizeBytes: uint64(size),
			StoredMillis: i.Stored.UnixMilli(), Durable: i.Durable, File: i.File, Metadata: i.Metadata,
		}
		if !i.Digest.IsZero() {
			t.Digest = i.Digest[:]
		}
		out.Tensors = append(out.Tensors, t)
	}
	return out, nil
}

// DeleteTensors removes tensors. If a name does not exist, the request fails before
// anything is removed.
func (s *Server) DeleteTensors(ctx context.Context, req *pb.DeleteTensorsRequest) (*pb.DeleteTensorsResponse, error) {
	switch n := len(req.GetNames()); {
	case s.cfg.Store == nil:
		return nil, s.storing.Explain(storing.ErrNoStore)
	case n == 0:
		return nil, frame.Errorf(frame.InvalidArgument, "names: none; give the name of a tensor, or a glob")
	case n > storing.Tensors:
		return nil, frame.Errorf(frame.ResourceExhausted, "names: %d, the limit is %d; use several requests", n, storing.Tensors)
	}
	kept := int64(2 * listBytes) // for a page of the store, as in ListTensors
	if !rpcOf(ctx).received.Take(kept) {
		return nil, errReceived
	}
	var names []string
	seen := make(map[string]struct{}) // so that overlapping globs count a tensor once
	for i, name := range req.GetNames() {
		if err := store.CheckName(name); err != nil {
			return nil, frame.Because(reason.BadName, "names[%d]: %s", i, reason.Plain(err))
		}
		for found, err := range s.match(ctx, name) {
			if err != nil {
				return nil, s.storing.Explain(err)
			}
			if _, twice := seen[found]; twice {
				continue
			}
			if kept += foundBytes + int64(len(found)); !rpcOf(ctx).received.Take(kept) {
				return nil, errReceived
			}
			seen[found] = struct{}{}
			names = append(names, found)
		}
	}
	deleted, err := s.cfg.Store.Delete(ctx, names...)
	if err != nil {
		return nil, s.storing.Explain(err)
	}
	return &pb.DeleteTensorsResponse{Deleted: deleted}, nil
}

// match yields the names that a name selects for deletion: itself or, if there is no such tensor
// and it may be a glob, all that match it.
func (s *Server) match(ctx context.Context, name string) iter.Seq2[string, error] {
	visible := s.restrict(VerbDelete)
	return func(yield func(string, error) bool) {
		r, err := visible.Open(ctx, name)
		if err == nil {
			r.Release()
		}
		if !errors.Is(err, store.ErrNotFound) || !strings.ContainsAny(name, "*?[") {
			yield(name, err)
			return
		}
		found := false
		for info, err := range store.Each(ctx, visible, name) {
			if found = true; !yield(info.Name, err) {
				return
			}
		}
		if !found {
			yield("", fmt.Errorf("%w: no tensor matches %q", store.ErrNotFound, name))
		}
	}
}

// GetTransfer returns the state of a push or a pull.
func (s *Server) GetTransfer(ctx context.Context, req *pb.GetTransferRequest) (*pb.GetTransferResponse, error) {
	id, ok := tensor.ParseID(req.GetTransferId())
	if !ok {
		return nil, frame.Errorf(frame.InvalidArgument, "transfer_id: want 16 bytes, not all zero: the session_id in the hello of a push or a pull")
	}
	state, tensors, ok := s.storing.State(id)
	if !ok || s.cfg.Authorize != nil && state.Principal != Principal(ctx) {
		return nil, frame.Errorf(frame.NotFound, "transfer %s: neither open nor among the last that ended", id)
	}
	out := &pb.GetTransferResponse{
		Open: state.Open, Push: state.Kind == serving.Push, Code: uint32(state.Code), Message: state.Message,
		AgeMillis: time.Since(state.Began).Milliseconds(),
	}
	for i := range tensors {
		t := &tensors[i]
		out.Tensors = append(out.Tensors, &pb.TensorState{Summary: wire.ToSummary(&t.Summary), Open: t.Open, MovedBytes: uint64(t.MovedBytes)})
	}
	return out, nil
}
