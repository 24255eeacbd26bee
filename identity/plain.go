package identity

import (
	"bytes"
	"io"
	"net"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// refusePlain answers the first RPC of a client that speaks HTTP/2 without TLS, which could
// not interpret a TLS alert. read is what was already read after the client's preface.
func refusePlain(conn net.Conn, read string) {
	_ = conn.SetDeadline(time.Now().Add(goodbye))
	f := http2.NewFramer(conn, io.MultiReader(strings.NewReader(read), conn))
	f.SetMaxReadFrameSize(goodbyeBytes)
	if f.WriteSettings() != nil {
		return
	}
	for range goodbyeFrames {
		frame, err := f.ReadFrame()
		if err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() && f.WriteSettingsAck() != nil {
				return
			}
		case *http2.HeadersFrame:
			var fields bytes.Buffer
			h := hpack.NewEncoder(&fields)
			for _, field := range [][2]string{ // grpc-status 16 is UNAUTHENTICATED
				{":status", "200"}, {"content-type", "application/grpc"},
				{"grpc-status", "16"}, {"grpc-message", "the server speaks TLS only; connect with the certificate of its authority"},
			} {
				_ = h.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}) // writing to a buffer does not fail
			}
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: frame.StreamID, BlockFragment: fields.Bytes(), EndHeaders: true, EndStream: true})
			_, _ = io.CopyN(io.Discard, conn, goodbyeBytes) // closing with unread bytes would lose the text
			return
		}
	}
}
