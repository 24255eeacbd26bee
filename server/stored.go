package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// ListTensors lists a page of the store.
func (s *Server) ListTensors(_ context.Context, req *pb.ListTensorsRequest) (*pb.ListTensorsResponse, error) {
	out := &pb.ListTensorsResponse{}
	if req.GetPageToken() == "" {
		out.Sources = s.cfg.Sources.Names()
	}
	if s.cfg.Store == nil {
		return out, nil
	}
	most := int(req.GetPageSize())
	if most == 0 || most > listPage {
		most = listPage
	}
	// One more than the page tells whether there is another.
	list, err := s.cfg.Store.List(req.GetGlob(), req.GetPageToken(), most+1)
	if err != nil {
		return nil, s.storedStatus("list failed", err)
	}
	if len(list) > most {
		list = list[:most]
		out.NextPageToken = list[most-1].Name
	}
	for _, i := range list {
		size, err := i.Bytes()
		if err != nil {
			return nil, s.storedStatus("list failed", err)
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
func (s *Server) DeleteTensors(_ context.Context, req *pb.DeleteTensorsRequest) (*pb.DeleteTensorsResponse, error) {
	switch n := len(req.GetNames()); {
	case s.cfg.Store == nil:
		return nil, s.storedStatus("", errNoStore)
	case n == 0:
		return nil, unaryStatus(stream.InvalidArgument, "names: none", 0)
	case n > transferTensors:
		return nil, unaryStatus(stream.ResourceExhausted, fmt.Sprintf("names: %d, the limit is %d; use several requests", n, transferTensors), 0)
	}
	out := &pb.DeleteTensorsResponse{}
	var names []string
	for _, name := range req.GetNames() {
		if err := store.CheckName(name); err != nil {
			return nil, s.storedStatus("", err)
		}
		found, err := s.match(name)
		if err != nil {
			return nil, s.storedStatus("delete failed", err)
		}
		names = append(names, found...)
	}
	for _, name := range names {
		switch err := s.cfg.Store.Delete(name); {
		case errors.Is(err, store.ErrNotFound): // named twice, or deleted meanwhile
		case err != nil:
			return nil, s.storedStatus("delete failed", err)
		default:
			out.Deleted = append(out.Deleted, name)
		}
	}
	return out, nil
}

// match returns the names that a name or a glob picks, one at least.
func (s *Server) match(name string) ([]string, error) {
	r, err := s.cfg.Store.Open(context.Background(), name)
	if err == nil {
		r.Release()
		return []string{name}, nil
	}
	if !errors.Is(err, store.ErrNotFound) || !strings.ContainsAny(name, `*?[`) {
		return nil, err
	}
	var names []string
	for after := ""; ; after = names[len(names)-1] {
		page, err := s.cfg.Store.List(name, after, listPage)
		if err != nil {
			return nil, err
		}
		for _, i := range page {
			names = append(names, i.Name)
		}
		if len(names) == 0 {
			return nil, fmt.Errorf("%w: no tensor matches %q", store.ErrNotFound, name)
		}
		if len(page) < listPage {
			return names, nil
		}
	}
}

// GetTransfer tells how a push or a pull goes, or went.
func (s *Server) GetTransfer(_ context.Context, req *pb.GetTransferRequest) (*pb.GetTransferResponse, error) {
	id, ok := tensor.ParseID(req.GetTransferId())
	if !ok {
		return nil, unaryStatus(stream.InvalidArgument, "transfer_id: 16 bytes, not all zero: the session_id of the hello of a push or a pull", 0)
	}
	state := s.transfers.state(id)
	if state == nil {
		return nil, unaryStatus(stream.NotFound, fmt.Sprintf("transfer %s: not open, and not among the last that ended", id), 0)
	}
	return state, nil
}

// storedStatus is what a request about the store ends with.
func (s *Server) storedStatus(what string, err error) error {
	code, text, retry, known := storedCode(err)
	if !known {
		s.log.Error(what, slog.String("error", err.Error()))
	}
	return unaryStatus(code, text, retry)
}
