package client

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

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
		if before > 0 && next >= before || len(list) > mostFailures {
			return nil, &Error{Code: codes.Internal, Message: "the server's list of failures does not end"}
		}
		before = next
	}
}
