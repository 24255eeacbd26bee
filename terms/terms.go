// Package terms has what one side brings into a session: its configuration, its limits, and
// the hello that tells the peer about them; and it counts what a session retains of what the
// peer says.
//
// It refuses to know what happens in a session: stream does. A Config belongs to one
// goroutine at a time. It owns no bytes.
package terms

import (
	"slices"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Config configures one side of a session.
type Config struct {
	Server  bool
	Session tensor.ID      // chosen by the client; a server gets it from the hello
	Check   codec.Checksum // client: the checksum of the session; zero means CRC32C
	// Codecs are those that this side decodes, in order of preference. It encodes with
	// one of them if the peer decodes it, too. If empty, chunks are not encoded.
	Codecs []codec.Codec
	Limits Limits
	// Lanes is how many lanes a client would open at a time, or how often LaneToken, which
	// a server offers, opens one; 0 means none. LanesAtOnce is how many may be open at a time.
	Lanes       uint32
	LanesAtOnce uint32
	LaneToken   frame.LaneToken
	// Stores (server) means that calls may be puts and gets, of tensors of at most
	// StoredBytes.
	Stores      bool
	StoredBytes int64
	// OneWay (server) means that only one side sends tensors, and hears nothing: it needs no credit,
	// what it has sent counts as acknowledged, and a damaged chunk fails its tensor.
	OneWay bool
	// NoAllowance means that the peer may send nothing without credit, whatever Limits
	// says.
	NoAllowance bool
}

// SetDefaults applies defaults, and copies Codecs.
func (c *Config) SetDefaults() {
	c.Limits = c.Limits.WithDefaults()
	if c.NoAllowance {
		c.Limits.AllowanceBytes = 0
	}
	c.Codecs = slices.Clone(c.Codecs[:min(len(c.Codecs), frame.HelloCodecs)])
	if !c.Check.Valid() {
		c.Check = codec.CRC32C
	}
}

// Hello returns this side's hello. A server's has lanes if both sides would have them.
func (c *Config) Hello(lanes bool) *frame.Hello {
	h := &frame.Hello{
		Version: frame.Version, Session: c.Session, MaxChunkBytes: c.Limits.ChunkBytes,
		AllowanceBytes: c.Limits.AllowanceBytes, Checksum: uint8(c.Check), MaxOpenTensors: uint32(c.Limits.OpenTensors),
	}
	for _, k := range c.Codecs {
		h.Codecs = append(h.Codecs, uint8(k))
	}
	if lanes || !c.Server {
		h.Lanes, h.LaneToken, h.LanesAtOnce = c.Lanes, c.LaneToken, c.LanesAtOnce
	}
	if c.Server {
		h.ChunkIdleMillis = uint32(min(max(c.Limits.ChunkIdle/Millisecond, 1), 1<<32-1))
		h.Stores, h.Sequences = c.Stores, !c.OneWay
	}
	return h
}

// LanePatience returns how long a lane may take for n bytes of a chunk and their
// acknowledgement, if the peer's hello says that it waits told milliseconds for a chunk.
func (c *Config) LanePatience(told uint32, n int) Instant {
	idle := c.Limits.ChunkIdle
	if !c.Server && told > 0 {
		idle = Instant(told) * Millisecond
	}
	return min(laneStall*Instant(1+n>>20), idle/2)
}

// Accept checks the peer's hello, and returns the parts of it that bind this side, and the
// codec in which this side sends. On a server it sets Session and Check.
func (c *Config) Accept(h *frame.Hello) (peer frame.Hello, code codec.Codec, bad *frame.Error) {
	if bad := h.Check(); bad != nil {
		return peer, code, bad
	}
	kind := codec.Checksum(h.Checksum)
	if c.Server {
		c.Session, c.Check = h.Session, kind
	} else if kind != c.Check || h.Session != c.Session {
		return peer, code, frame.Errorf(frame.InvalidArgument, "the server's hello names another session or checksum")
	}
	peer = *h
	set(&peer.MaxChunkBytes, 1<<20, frame.ChunkBytesCeiling)
	set(&peer.MaxOpenTensors, 64, 1<<16)
	peer.AllowanceBytes = min(peer.AllowanceBytes, frame.AllowanceCeiling)
	peer.Codecs = nil // valid only as long as the frame
	return peer, codec.Choose(c.Codecs, h.Codecs[:min(len(h.Codecs), frame.HelloCodecs)]), nil
}
