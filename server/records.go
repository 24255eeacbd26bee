package server

import (
	"sync"
	"sync/atomic"
	"time"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// kind is which way a transfer goes, in the word that metrics have for it.
type kind string

const (
	pushTransfer kind = "push"
	pullTransfer kind = "pull"
)

// records knows the pushes and pulls that are open, and the last that ended.
type records struct {
	mu    sync.Mutex // guards all below, and what is in the records
	byID  map[tensor.ID]*record
	ended []*record // oldest first
	kept  int       // tensors in records that ended
}

// record is what is known of one transfer.
type record struct {
	id      tensor.ID
	kind    kind
	open    bool
	code    frame.Code
	message string
	began   time.Time
	tensors []*progress // the last recordTensors that were announced
	bytes   atomic.Int64
}

// progress is how far one tensor of a transfer is.
type progress struct {
	summary frame.Summary
	open    bool
	bytes   atomic.Int64
}

// begin opens a record, or says why the transfer is refused.
func (rs *records) begin(id tensor.ID, k kind) (*record, error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if r := rs.byID[id]; r != nil && r.open {
		return nil, errTransferExists(id)
	}
	r := &record{id: id, kind: k, open: true, began: time.Now()}
	if rs.byID == nil {
		rs.byID = make(map[tensor.ID]*record)
	}
	rs.byID[id] = r
	return r, nil
}

// tensor adds a tensor to a record.
func (rs *records) tensor(r *record, id tensor.ID, name string, size uint64) *progress {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	p := &progress{summary: frame.Summary{Tensor: id, Name: name, SizeBytes: size}, open: true}
	if len(r.tensors) == recordTensors {
		r.tensors[0] = nil
		r.tensors = r.tensors[1:]
	}
	r.tensors = append(r.tensors, p)
	return p
}

// over notes how a tensor ended.
func (rs *records) over(p *progress, s frame.Summary) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	s.Message = frame.Clip(s.Message, recordMessage)
	p.summary, p.open = s, false
}

// end notes how a transfer ended, and forgets the oldest of those that did. r is nil
// for one that never said its name.
func (rs *records) end(r *record, err error) {
	if r == nil {
		return
	}
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r.open = false
	r.code, r.message = statusParts(err)
	r.message = frame.Clip(r.message, recordMessage)
	for _, p := range r.tensors {
		if p.open { // it ends with the transfer
			p.open = false
			p.summary.Code, p.summary.Message = r.code, r.message
		}
	}
	rs.ended = append(rs.ended, r)
	rs.kept += len(r.tensors)
	for len(rs.ended) > recordsKept || rs.kept > recordTensorsKept && len(rs.ended) > 1 {
		old := rs.ended[0]
		rs.ended[0] = nil
		rs.ended = rs.ended[1:]
		rs.kept -= len(old.tensors)
		if rs.byID[old.id] == old {
			delete(rs.byID, old.id)
		}
	}
}

// state copies what GetTransfer tells.
func (rs *records) state(id tensor.ID) *pb.GetTransferResponse {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r := rs.byID[id]
	if r == nil {
		return nil
	}
	out := &pb.GetTransferResponse{
		Open: r.open, Push: r.kind == pushTransfer, Code: uint32(r.code), Message: r.message, AgeMillis: time.Since(r.began).Milliseconds(),
	}
	for _, p := range r.tensors {
		out.Tensors = append(out.Tensors, &pb.TensorState{
			Summary: wire.ToSummary(&p.summary), Open: p.open, MovedBytes: uint64(p.bytes.Load()),
		})
	}
	return out
}
