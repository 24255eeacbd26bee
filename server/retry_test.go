package server_test

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// tellsWhenToRetry reports whether a status says how long to wait.
func tellsWhenToRetry(st *status.Status) bool {
	for _, d := range st.Details() {
		if r, ok := d.(*errdetails.RetryInfo); ok && r.GetRetryDelay().AsDuration() > 0 {
			return true
		}
	}
	return false
}
