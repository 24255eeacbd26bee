package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// Verb is what a client is about to do.
type Verb string

// The verbs. A glob of tensors is asked about as what it picks, and before that, as if it were a
// name, lest a refusal tell that it picks something.
const (
	VerbEnter    Verb = "enter"    // send any RPC; asked every 5 s while it is open, too
	VerbDescribe Verb = "describe" // show a model, in lists and by its health
	VerbCompute  Verb = "compute"  // a call of a model
	VerbPut      Verb = "put"      // store a tensor, and replace the one that has its name
	VerbGet      Verb = "get"      // send a tensor of the store
	VerbGenerate Verb = "generate" // send a source's tensor, or list the source
	VerbList     Verb = "list"     // list a tensor
	VerbDelete   Verb = "delete"   // delete a tensor
)

// Action is what Config.Authorize is asked about.
type Action struct {
	Verb  Verb
	Name  string // of the model, the tensor or the source
	Bytes int64  // of the tensor that is put
}

// may returns why the sender of ctx's RPC may not do something: store.ErrNotFound, wrapped, if the
// name is hidden from it, else a *terms.RefusedError. Without an RPC it is the program that does it.
func (s *Server) may(ctx context.Context, verb Verb, name string, bytes int64) (err error) {
	if s.cfg.Authorize == nil || ctx.Value(rpcKey{}) == nil {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			s.core.Panicked(p)
			err = errInternal
		}
	}()
	err = s.cfg.Authorize(ctx, Action{verb, name, bytes})
	_, own := errors.AsType[*terms.RefusedError](err)
	switch {
	case err == nil, own:
		return err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, store.ErrNotFound) && verb != VerbPut: // as if there were none
		return fmt.Errorf("%w: no tensor %q", store.ErrNotFound, name)
	}
	return &terms.RefusedError{Code: frame.PermissionDenied, Text: err.Error()}
}

// asks reports whether the senders of RPCs are identified.
func (s *Server) asks() bool { return s.cfg.Identify != nil || s.cfg.Authorize != nil }

// identify returns the name of the sender of an RPC over a connection, or why it is refused.
func (s *Server) identify(info credentials.AuthInfo, authorization []string) (principal string, err error) {
	if s.cfg.Identify != nil {
		principal, err = s.cfg.Identify(info, authorization)
	}
	if err == nil {
		err = s.may(context.WithValue(s.core.Context(), rpcKey{}, &rpc{principal: principal}), VerbEnter, "", 0)
	}
	return principal, err
}

// ask identifies the sender of an RPC, and counts and logs refusals.
func (s *Server) ask(r *rpc) (principal string, err error) {
	if principal, err = s.identify(r.conn.Info, r.authorization); err != nil {
		s.unauthenticated.Add(1)
		s.refusals.Of(err.Error()).Log(s.log, slog.LevelWarn, "RPC refused", "refused",
			slog.String("peer", r.conn.RemoteAddr().String()), slog.String("principal", r.principal), slog.String("error", err.Error()))
	}
	return principal, err
}

// askAgain asks about the senders of open RPCs again, and ends the RPC of one who is not allowed any
// more, or has another name now, and with it other rights.
func (s *Server) askAgain() {
	for key := range s.open.Range {
		r := key.(*rpc)
		principal, err := s.ask(r)
		if err == nil && principal != r.principal {
			err = errRenamed
		}
		if err != nil {
			r.end(errUnauthenticated(err)) // a no-op on an RPC that has ended meanwhile
		}
	}
}

// hides reports whether the sender of ctx's RPC may not know a model.
func (s *Server) hides(ctx context.Context, model string) bool {
	return s.may(ctx, VerbDescribe, model, 0) != nil
}

// restricted is the store as clients see it who read it for the sake of a verb.
type restricted struct {
	store.Store
	server *Server
	verb   Verb
}

// restrict returns the store for a verb; nil if there is none.
func (s *Server) restrict(verb Verb) store.Store {
	r := &restricted{s.cfg.Store, s, verb}
	sets, ok := s.cfg.Store.(store.Sets)
	switch {
	case s.cfg.Authorize == nil || s.cfg.Store == nil:
		return s.cfg.Store
	case ok:
		return struct {
			store.Store
			store.Sets
		}{r, sets}
	}
	return r
}

// Create asks with a ctx that ends with the put.
func (r *restricted) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	size, err := d.Bytes()
	if err == nil {
		err = r.server.may(ctx, VerbPut, name, size)
	}
	if err != nil {
		return nil, err
	}
	return r.Store.Create(ctx, name, d, metadata)
}

func (r *restricted) Open(ctx context.Context, name string) (store.Reader, error) {
	if err := r.server.may(ctx, r.verb, name, 0); err != nil {
		return nil, err
	}
	return r.Store.Open(ctx, name)
}

// List lists whole pages, however few names of them may be seen. For none it is told whether the
// store can be used.
func (r *restricted) List(ctx context.Context, glob, after string, most int) (all []store.Info, err error) {
	if most == 0 {
		return r.Store.List(ctx, glob, after, 0)
	}
	for n := max(most, listPage); len(all) < most; {
		page, err := r.Store.List(ctx, glob, after, n)
		if err != nil {
			return nil, err
		}
		for _, info := range page {
			after = info.Name
			if err = r.server.may(ctx, r.verb, after, 0); err == nil {
				all = append(all, info)
			} else if !errors.Is(err, store.ErrNotFound) {
				return nil, err
			}
		}
		if len(page) < n {
			break
		}
	}
	return all[:min(len(all), most)], nil
}
