package identity

import (
	"bytes"
	"encoding/base64"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Refuse answers the RPCs of a client, for a second, with a status, whose code and text it copies, like its
// details, which are a google.rpc.Status or nothing. The caller closes the connection.
func Refuse(conn net.Conn, code uint32, text string, details []byte) {
	_ = conn.SetDeadline(time.Now().Add(goodbye))
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(conn, preface); err == nil && string(preface) == http2.ClientPreface {
		refuse(conn, "", code, text, details)
	}
}

// refuse is Refuse after the client's preface, and after what was read behind it. A client that
// speaks HTTP/2 without TLS could not interpret an alert of TLS.
func refuse(conn net.Conn, read string, code uint32, text string, details []byte) {
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
			var encoded bytes.Buffer
			h := hpack.NewEncoder(&encoded)
			fields := [][2]string{{":status", "200"}, {"content-type", "application/grpc"}, {"grpc-status", strconv.Itoa(int(code))}, {"grpc-message", text}}
			if len(details) > 0 { // empty ones would say OK
				fields = append(fields, [2]string{"grpc-status-details-bin", base64.RawStdEncoding.EncodeToString(details)})
			}
			for _, field := range fields {
				_ = h.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}) // writing to a buffer does not fail
			}
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: frame.StreamID, BlockFragment: encoded.Bytes(), EndHeaders: true, EndStream: true})
		}
	}
	_, _ = io.CopyN(io.Discard, conn, goodbyeBytes) // closing with unread bytes would lose the text
}
