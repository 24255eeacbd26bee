package server_test

import (
	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// In a bubble, servers listen in memory, and connect, reach and what dials through them find
// those. The clients of package client do not: they dial by themselves.
var (
	bubble  = testkit.Bubble
	listen  = testkit.Listen
	connect = testkit.Dial
	// reach makes gRPC connect to what listen has returned.
	reach = grpc.WithContextDialer(connect)
)
