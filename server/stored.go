package server

import (
	"context"
	"iter"
	"log/slog"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// ListTensors lists a page of the store.
func (s *Server) ListTensors(ctx context.Context, req *pb.ListTensorsRequest) (*pb.ListTensorsResponse, error) {
	out := &pb.ListTensorsResponse{}
	if req.GetPageToken() == "" {
		out.Sources = s.cfg.Sources.Names()
	}
	if s.cfg.Store == nil {
		return out, nil
	}
	if glob := req.GetGlob(); glob != "" { // a longer one matches no name, and costs time
		if err := store.CheckName(glob); err != nil {
			return nil, frame.Errorf(frame.InvalidArgument, "glob: %v", err)
		}
	}
	most := listPage
	if n := req.GetPageSize(); n > 0 && n < listPage {
		most = int(n)
	}
	// One more than the page tells whether there is another.
	list, err := s.cfg.Store.List(ctx, req.GetGlob(), req.GetPageToken(), most+1)
	if err != nil {
		return nil, s.storedError(err)
	}
	if len(list) > most {
		list = list[:most]
		out.NextPageToken = list[most-1].Name
	}
	for _, i := range list {
		size, err := i.Bytes()
		if err != nil {
			return nil, s.storedError(err)
		}
		t := &pb.StoredTensor{
			Name: i.Name, Dtype: pb.DataType(i.DType), Shape: i.Shape, SizeBytes: uint64(size),
			StoredMillis: i.Stored.UnixMilli(), Durable: i.Durable, File: i.File,
		}
		if !i.Digest.IsZero() {
			t.Digest = i.Digest[:]
		}
		out.Tensors = append(out.Tensors, t)
	}
	return out, nil
}

// DeleteTensors removes tensors. A name that is not there fails the request before
// anything is removed.
func (s *Server) DeleteTensors(ctx context.Context, req *pb.DeleteTensorsRequest) (*pb.DeleteTensorsResponse, error) {
	switch n := len(req.GetNames()); {
	case s.cfg.Store == nil:
		return nil, s.storedError(errNoStore)
	case n == 0:
		return nil, frame.Errorf(frame.InvalidArgument, "names: none; give a tensor's, or a glob")
	case n > transferTensors:
		return nil, frame.Errorf(frame.ResourceExhausted, "names: %d, the limit is %d; use several requests", n, transferTensors)
	}
	var names []string
	seen := make(map[string]struct{}) // so that a thousand globs find no more than there is
	for i, name := range req.GetNames() {
		if err := store.CheckName(name); err != nil {
			return nil, frame.Errorf(frame.InvalidArgument, "names[%d]: %v", i, err)
		}
		for found, err := range s.match(ctx, name) {
			if err != nil {
				return nil, s.storedError(err)
			}
			if _, twice := seen[found]; !twice {
				seen[found] = struct{}{}
				names = append(names, found)
			}
		}
	}
	deleted, err := s.cfg.Store.Delete(ctx, names...)
	if err != nil {
		return nil, s.storedError(err)
	}
	return &pb.DeleteTensorsResponse{Deleted: deleted}, nil
}

// match yields the names that a name or a glob picks.
func (s *Server) match(ctx context.Context, name string) iter.Seq2[string, error] {
	literal := func() (string, error) {
		r, err := s.cfg.Store.Open(ctx, name)
		if err == nil {
			r.Release()
		}
		return name, err
	}
	return store.Pick(name, literal, func(yield func(string, error) bool) {
		for info, err := range store.Each(ctx, s.cfg.Store, name) {
			if !yield(info.Name, err) {
				return
			}
		}
	})
}

// GetTransfer tells how a push or a pull goes, or went.
func (s *Server) GetTransfer(_ context.Context, req *pb.GetTransferRequest) (*pb.GetTransferResponse, error) {
	id, ok := tensor.ParseID(req.GetTransferId())
	if !ok {
		return nil, frame.Errorf(frame.InvalidArgument, "transfer_id: 16 bytes, not all zero: the session_id of the hello of a push or a pull")
	}
	state := s.transferLog.state(id)
	if state == nil {
		return nil, frame.Errorf(frame.NotFound, "transfer %s: not open, and not among the last that ended", id)
	}
	return state, nil
}

// storedError is what a request about the store ends with.
func (s *Server) storedError(err error) error {
	why := explainStored(err)
	if why.Secret {
		s.log.Error("store failed", slog.String("error", err.Error()))
	}
	return why
}
