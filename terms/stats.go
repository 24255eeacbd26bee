package terms

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
