package terms

import (
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// Stats counts what a session has done. Bytes are bytes of tensors, whatever the codec.
type Stats struct {
	BytesIn, BytesOut   int64
	LaneBytesIn         int64 // of BytesIn
	LaneBytesOut        int64 // of BytesOut
	ChunksIn, ChunksOut int64
	Corrupt, Duplicate  int64
	CallsOpened         int64
}

// Add adds o's counts.
func (s *Stats) Add(o Stats) {
	s.BytesIn += o.BytesIn
	s.BytesOut += o.BytesOut
	s.LaneBytesIn += o.LaneBytesIn
	s.LaneBytesOut += o.LaneBytesOut
	s.ChunksIn += o.ChunksIn
	s.ChunksOut += o.ChunksOut
	s.Corrupt += o.Corrupt
	s.Duplicate += o.Duplicate
	s.CallsOpened += o.CallsOpened
}

// Status is the state of a machine.
type Status struct {
	Server   bool
	Session  tensor.ID      // zero on a server before the hello
	Open     bool           // the hellos have been exchanged, and Close was not called
	Draining bool           // one side opens nothing new
	Checksum codec.Checksum // of chunks
	Codec    codec.Codec    // of the chunks sent: the first one in the peer's hello that Config names, too
	// PeerChunkBytes is the largest chunk that the peer accepts.
	PeerChunkBytes int64
	PeerChunkIdle  Instant // the peer's idle timeout, unless this side says that it waits; 0 if unknown
	PeerStores     bool    // calls may be puts and gets
	PeerSequences  bool    // calls may be of sequences
	PeerTensors    int     // open tensors that the peer accepts
	Calls          int     // open
	Err            error   // why the session ended, or nil
	Stats          Stats
}
