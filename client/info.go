package client

import (
	"context"
	"fmt"
	"math"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// ServerInfo is what a server is, and what it does now.
type ServerInfo struct {
	Version string
	Uptime  time.Duration
	// Codecs are those that the server decodes, the one it prefers first.
	Codecs []codec.Codec
	// Limits and Counters are bytes, counts or milliseconds, as their names say.
	Limits, Counters map[string]int64
	Models           []ModelState // sorted by name
}

// ModelState is the current state of a model.
type ModelState struct {
	Name        string             `json:"name"`
	Unavailable string             `json:"unavailable,omitempty"` // why it cannot run; empty if it can
	Gauges      map[string]float64 `json:"gauges,omitempty"`      // what it measures, in the unit that the name ends with
}

// Model describes a model of a server, as its engine.Info does.
type Model struct {
	Name, Version, Device string
	Inputs, Outputs       []Port
	Rows                  int // leading axes that are independent of each other; -1 all, -2 all but the last
	Params                []Param
	Idempotent            bool // see Request
	About                 map[string]string
}

// Port is an input or an output of a model. In Shape, -1 is any size, and -2 any number of
// leading axes.
type Port struct {
	Name            string
	DTypes          []tensor.DataType // none means any
	Shape           []int64
	Whole, Optional bool // needed whole, before the first row; a call may leave it out
}

// Param is a parameter of a model's calls.
type Param struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"`
	Default string `json:"default,omitempty"` // empty where an absent one means something else
	Meaning string `json:"meaning,omitempty"`
}

// Models returns the server's models. It takes at most OpenTimeout.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	r, err := ask(ctx, c, c.stub.ListModels, &pb.ListModelsRequest{})
	return each(r.GetModels(), func(m *pb.Model) Model {
		return Model{
			Name: m.GetName(), Version: m.GetVersion(), Device: m.GetDevice(), Rows: int(m.GetRows()),
			Inputs: each(m.GetInputs(), port), Outputs: each(m.GetOutputs(), port),
			Params: each(m.GetParams(), func(p *pb.Param) Param {
				return Param{Name: p.GetName(), Kind: p.GetKind(), Default: p.GetDefault(), Meaning: p.GetMeaning()}
			}),
			Idempotent: m.GetIdempotent(), About: m.GetAbout(),
		}
	}), err
}

func port(p *pb.Port) Port {
	return Port{Name: p.GetName(), Shape: p.GetShape(), Whole: p.GetWhole(), Optional: p.GetOptional(), DTypes: each(p.GetDtypes(), func(d pb.DataType) tensor.DataType {
		return tensor.DataType(min(max(d, 0), math.MaxUint8))
	})}
}

// Info returns the server's limits and counters. It takes at most OpenTimeout.
func (c *Client) Info(ctx context.Context) (*ServerInfo, error) {
	r, err := ask(ctx, c, c.stub.GetServiceInfo, &pb.GetServiceInfoRequest{})
	if err != nil {
		return nil, err
	}
	return &ServerInfo{
		Version: r.GetVersion(), Uptime: time.Duration(r.GetUptimeMillis()) * time.Millisecond, Limits: r.GetLimits(), Counters: r.GetCounters(),
		Codecs: each(r.GetCodecs(), func(k pb.Codec) codec.Codec { return codec.Codec(min(max(k, 0), math.MaxUint8)) }),
		Models: each(r.GetModels(), func(m *pb.ModelState) ModelState {
			return ModelState{m.GetName(), m.GetUnavailable(), m.GetGauges()}
		}),
	}, nil
}

// each returns what f makes of each element.
func each[A, B any](in []A, f func(A) B) []B {
	out := make([]B, len(in))
	for i, a := range in {
		out[i] = f(a)
	}
	return out
}

// Failure is a call that failed on a server.
type Failure struct {
	Call  tensor.ID
	Model string
	Code  codes.Code
	// Cause is why, which the error of the call does not say.
	Cause  string
	Failed time.Time
}

// Failures returns why calls failed of which the callers were not told, the newest first: the
// last thousand or so. A server that identifies its callers tells each of its own; another
// one tells callers on its own machine.
func (c *Client) Failures(ctx context.Context) ([]Failure, error) { return c.failures(ctx, nil) }

// FailureOf returns why a call failed. The error's code is NotFound if the server does not
// know that, or not any more.
func (c *Client) FailureOf(ctx context.Context, call tensor.ID) (Failure, error) {
	list, err := c.failures(ctx, call[:])
	if err == nil && len(list) == 0 {
		err = &Error{Code: codes.NotFound, Message: fmt.Sprintf("the server knows of no call %s of yours that failed, or not any more", call)}
	}
	if err != nil {
		return Failure{}, err
	}
	return list[0], nil
}

func (c *Client) failures(ctx context.Context, call []byte) (list []Failure, err error) {
	for before := uint64(0); ; {
		page, err := ask(ctx, c, c.stub.ListFailures, &pb.ListFailuresRequest{CallId: call, Before: before})
		if err != nil {
			return nil, err
		}
		for _, f := range page.GetFailures() {
			id, _ := tensor.ParseID(f.GetCallId())
			list = append(list, Failure{Call: id, Model: f.GetModel(), Code: codes.Code(frame.Code(f.GetCode()).Known()), Cause: f.GetCause(), Failed: time.UnixMilli(f.GetFailedMillis())})
		}
		next := page.GetNextBefore()
		if next == 0 {
			return list, nil
		}
		if before > 0 && next >= before || len(list) > listTensors {
			return nil, &Error{Code: codes.Internal, Message: "the server's list of failures does not end"}
		}
		before = next
	}
}
