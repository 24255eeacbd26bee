package identity

import (
	"bytes"
	"encoding/base64"
	"io"
	"net"
	"strconv"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
)

// Refuse answers the RPCs of a client that speaks HTTP/2, of which read has been read, for a second with
// a status. It borrows both; the caller closes the connection. Such a client could not interpret an
// alert of TLS.
func Refuse(conn net.Conn, read []byte, st *spb.Status) {
	_ = conn.SetDeadline(time.Now().Add(goodbye))
	all := io.MultiReader(bytes.NewReader(read), conn)
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(all, preface); err != nil || string(preface) != http2.ClientPreface {
		return
	}
	f := http2.NewFramer(conn, all)
	f.SetMaxReadFrameSize(handshakeBytes)
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
			var encoded bytes.Buffer
			h := hpack.NewEncoder(&encoded)
			fields := [][2]string{{":status", "200"}, {"content-type", "application/grpc"}, {"grpc-status", strconv.Itoa(int(st.GetCode()))}, {"grpc-message", st.GetMessage()}}
			if details, err := proto.Marshal(st); err == nil && len(st.GetDetails()) > 0 {
				fields = append(fields, [2]string{"grpc-status-details-bin", base64.RawStdEncoding.EncodeToString(details)})
			}
			for _, field := range fields {
				_ = h.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}) // writing to a buffer does not fail
			}
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: frame.StreamID, BlockFragment: encoded.Bytes(), EndHeaders: true, EndStream: true})
		}
	}
	_, _ = io.CopyN(io.Discard, conn, handshakeBytes) // closing with unread bytes would lose the text
}
