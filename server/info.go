package server

import (
	"context"
	"net/netip"
	"runtime/debug"
	"slices"
	"time"

	"google.golang.org/grpc/peer"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/storing"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// ListModels names the models that the client may know.
func (s *Server) ListModels(ctx context.Context, _ *pb.ListModelsRequest) (*pb.ListModelsResponse, error) {
	known := slices.DeleteFunc(s.cfg.Models.Infos(), func(i engine.Info) bool { return s.hides(ctx, i.Name) })
	return &pb.ListModelsResponse{Models: each(known, func(i engine.Info) *pb.Model {
		return &pb.Model{
			Name: i.Name, Version: i.Version, Device: i.Device, Rows: int32(i.Rows),
			Inputs: each(i.Inputs, port), Outputs: each(i.Outputs, port), About: i.About, Idempotent: i.Idempotent,
			Params: each(i.Params, func(p engine.Param) *pb.Param {
				return &pb.Param{Name: p.Name, Kind: p.Kind, Default: p.Default, Meaning: p.Meaning}
			}),
		}
	})}, nil
}

func port(p engine.Port) *pb.Port {
	return &pb.Port{
		Name: p.Name, Shape: p.Shape, Whole: p.Whole, Optional: p.Optional,
		Dtypes: each(p.DTypes, func(d tensor.DataType) pb.DataType { return pb.DataType(d) }),
	}
}

// each returns what f makes of each element.
func each[A, B any](in []A, f func(A) B) (out []B) {
	for _, a := range in {
		out = append(out, f(a))
	}
	return out
}

// GetServiceInfo returns limits, counters and the states of the models.
func (s *Server) GetServiceInfo(ctx context.Context, _ *pb.GetServiceInfoRequest) (*pb.GetServiceInfoResponse, error) {
	v := s.values()
	states := slices.DeleteFunc(s.core.ModelStates(), func(m serving.ModelState) bool { return s.hides(ctx, m.Name) })
	return &pb.GetServiceInfoResponse{
		Version:      s.cfg.Version,
		UptimeMillis: time.Since(s.started).Milliseconds(),
		Limits:       s.shownLimits(&v),
		Counters:     metrics.Counters(&v),
		Codecs:       each(codec.All(), func(k codec.Codec) pb.Codec { return pb.Codec(k) }),
		Models: each(states, func(m serving.ModelState) *pb.ModelState {
			state := &pb.ModelState{Name: m.Name, Unavailable: m.Unavailable, Gauges: make(map[string]float64)}
			for _, g := range m.Gauges {
				state.Gauges[g.Name] = g.Value
			}
			return state
		}),
	}, nil
}

// ReceiveLimit returns how many bytes clients may have sent that nothing has consumed;
// Budget does not include them.
func (s *Server) ReceiveLimit() int64 {
	_, limit, _ := s.received.Used()
	return limit
}

// values returns what the core has counted and what the store holds.
func (s *Server) values() metrics.Values {
	v := s.core.Values()
	v.ReceiveUsed, v.ReceiveLimit, v.ReceiveEnded = s.received.Used()
	v.LanesRefused = s.conns.LanesRefused.Load()
	v.HandshakesFailed, v.Unauthenticated = s.conns.HandshakesFailed.Load(), s.unauthenticated.Load()
	v.HeapLimit = debug.SetMemoryLimit(-1)
	v.StoreEvicted, v.StoreDamaged, v.StoreAvailable = s.storing.Evicted.Load(), s.storing.Damaged.Load(), s.available.Load()
	if st, ok := s.cfg.Store.(store.Meter); ok {
		v.StoreUsed, v.StoreLimit = st.Used()
	}
	return v
}

// shownLimits returns the limits that a peer can run into, each of which is a row of
// docs/limits.md.
func (s *Server) shownLimits(v *metrics.Values) map[string]int64 {
	l, c := s.cfg.Session, s.cfg
	millis := func(d time.Duration) int64 { return d.Milliseconds() }
	return map[string]int64{
		"chunk_bytes": int64(l.ChunkBytes), "chunks_per_tensor": tensor.MaxChunks, "tensor_bytes": l.TensorBytes,
		"rank": tensor.MaxRank, "dimension": tensor.MaxDim,
		"message_bytes": int64(l.ChunkBytes) + wire.MaxControlBytes, "window_bytes": int64(c.WindowBytes), "thin_frames_per_second": int64(c.ThinFrames),
		"allowance_bytes": int64(l.AllowanceBytes), "allowance_chunks": frame.AllowanceChunks,
		"open_tensors_per_session": int64(l.OpenTensors), "open_calls_per_session": int64(l.OpenCalls),
		"sessions": int64(c.Sessions), "calls": int64(c.QueuedCalls), "sequences": int64(c.QueuedCalls),
		"transfers": int64(c.Transfers), "stored_tensor_bytes": c.StoredBytes, "tensors_per_transfer": storing.Tensors,
		"open_tensors_per_push": storing.PushTensors, "compute_bytes": computeBytes, "tensors_per_page": listPage, "request_parts": requestParts,
		"lanes_per_session": int64(c.Lanes),
		"memory_bytes":      v.MemoryLimit, "receive_bytes": v.ReceiveLimit, "memory_wait_millis": millis(c.MemoryWait),
		"first_frame_millis": millis(time.Duration(l.FirstFrame)), "chunk_idle_millis": millis(time.Duration(l.ChunkIdle)),
		"input_idle_millis": millis(time.Duration(l.InputIdle)), "session_idle_millis": millis(time.Duration(l.SessionIdle)),
		"name_bytes": frame.NameBytes, "entries": frame.Entries, "entry_key_bytes": frame.KeyBytes,
		"entry_value_bytes": frame.ValueBytes, "entries_bytes": frame.EntriesBytes,
		"connections": int64(c.Connections), "streams_per_connection": int64(c.StreamsPerConnection), "header_list_bytes": int64(c.HeaderListBytes),
		"handshake_millis": millis(c.Handshake), "keepalive_millis": millis(c.Keepalive),
		"keepalive_timeout_millis": millis(c.KeepaliveTimeout), "keepalive_min_millis": millis(c.KeepaliveMin),
	}
}

// ListFailures tells a caller why calls failed: if the server identifies callers, its own;
// otherwise the one that it names, or all if it is on this machine.
func (s *Server) ListFailures(ctx context.Context, req *pb.ListFailuresRequest) (*pb.ListFailuresResponse, error) {
	named := len(req.GetCallId()) > 0
	call, valid := tensor.ParseID(req.GetCallId())
	switch {
	case named && !valid:
		return nil, frame.Errorf(frame.InvalidArgument, "call_id: %d bytes; an id has %d, which are not all 0", len(req.GetCallId()), len(call))
	case !named && s.cfg.Identify == nil && !onThisMachine(ctx):
		return nil, frame.Errorf(frame.FailedPrecondition, "this server does not know who you are: name the call, or ask from its own machine")
	case !rpcOf(ctx).received.Take(2 * failuresPage * (1<<10 + frame.NameBytes)):
		return nil, errReceived
	}
	who := Principal(ctx)
	list := s.core.Failures.Before(req.GetBefore(), failuresPage, func(f *failures.Failure) bool {
		return f.Principal == who && (!named || f.Call == call)
	})
	out := &pb.ListFailuresResponse{Failures: each(list, func(f failures.Failure) *pb.CallFailure {
		return &pb.CallFailure{CallId: f.Call[:], Model: f.Model, Code: uint32(f.Code), Cause: f.Cause, FailedMillis: f.At.UnixMilli()}
	})}
	if len(list) == failuresPage {
		out.NextBefore = list[len(list)-1].Number
	}
	return out, nil
}

// onThisMachine reports whether the sender of ctx's RPC is on this machine.
func onThisMachine(ctx context.Context) bool {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return false
	}
	at, err := netip.ParseAddrPort(p.Addr.String())
	return p.Addr.Network() == "unix" || err == nil && at.Addr().Unmap().IsLoopback()
}
