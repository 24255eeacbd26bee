package server_test

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/peer"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestWhoIsElsewhereAndUnknownMustNameACall(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(*server.Config) {})
	ask := func(ctx context.Context, call []byte) frame.Code {
		_, err := f.server.ListFailures(ctx, &pb.ListFailuresRequest{CallId: call})
		if why, refused := errors.AsType[*frame.Error](err); refused {
			return why.Code
		}
		require.NoError(t, err)
		return frame.OK
	}
	id := tensor.NewID()
	for address, all := range map[net.Addr]frame.Code{
		&net.UnixAddr{Name: "/x", Net: "unix"}:                       frame.OK,
		&net.TCPAddr{IP: net.IPv4(127, 0, 0, 9), Port: 1}:            frame.OK,
		&net.TCPAddr{IP: net.IPv6loopback, Port: 1}:                  frame.OK,
		&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}:             frame.FailedPrecondition,
		&net.TCPAddr{IP: net.ParseIP("fe80::1"), Port: 1, Zone: "x"}: frame.FailedPrecondition,
	} {
		ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: address})
		require.Equal(t, all, ask(ctx, nil), "%v", address)
		require.Equal(t, frame.OK, ask(ctx, id[:]))
		require.Equal(t, frame.InvalidArgument, ask(ctx, id[:15]))
		require.Equal(t, frame.InvalidArgument, ask(ctx, append(id[:], 1)))
	}
}
