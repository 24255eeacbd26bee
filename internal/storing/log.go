package storing

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/tensor"
)

// transferLog records the pushes and pulls that are open, and the last ones that ended.
type transferLog struct {
	mu    sync.Mutex // guards all below, and what is in the records
	byID  map[tensor.ID]*record
	ended []*record // oldest first
	kept  int       // tensors in records that ended
}

// record is what is known about one transfer.
type record struct {
	State
	id      tensor.ID
	session *serving.Session // of an open transfer
	all     bool             // a set
	stored  bool             // all of it is, however its call ends
	tensors []*progress      // the last Tensors that were announced
	bytes   atomic.Int64
}

// progress is the progress of one tensor of a transfer.
type progress struct {
	TensorState
	bytes atomic.Int64
}

// State is the state of a transfer.
type State struct {
	Open    bool
	Kind    serving.Direction
	Code    frame.Code
	Message string
	Began   time.Time
	// Principal is the name of whoever began it.
	Principal string
}

// TensorState is the state of one tensor of a transfer.
type TensorState struct {
	Summary    frame.Summary
	Open       bool
	MovedBytes int64
}

// begin opens a record, or returns why the transfer is refused.
func (l *transferLog) begin(id tensor.ID, k serving.Direction, on *serving.Session, all bool, principal string) (*record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.byID[id]; r != nil && r.Open {
		return nil, frame.Errorf(frame.AlreadyExists, "transfer %s is already open; use a new id", id)
	}
	r := &record{State: State{Open: true, Kind: k, Began: time.Now(), Principal: principal}, id: id, session: on, all: all}
	if l.byID == nil {
		l.byID = make(map[tensor.ID]*record)
	}
	l.byID[id] = r
	return r, nil
}

// openOn returns the record of a transfer that is open on a session, nil if there is none.
func (l *transferLog) openOn(on *serving.Session, id tensor.ID) *record {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.byID[id]; r != nil && r.session == on {
		return r
	}
	return nil
}

// tensor adds a tensor to a record.
func (l *transferLog) tensor(r *record, id tensor.ID, name string, size uint64) *progress {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := &progress{TensorState: TensorState{Summary: frame.Summary{Tensor: id, Name: name, SizeBytes: size}, Open: true}}
	if len(r.tensors) == Tensors {
		r.tensors[0] = nil
		r.tensors = r.tensors[1:]
	}
	r.tensors = append(r.tensors, p)
	return p
}

// tensorEnded records the outcome of a tensor.
func (l *transferLog) tensorEnded(p *progress, s frame.Summary) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.Message = frame.Clip(s.Message, recordMessage)
	p.Summary, p.Open = s, false
}

// damaged changes the outcome of a tensor that was thought to have ended well.
func (l *transferLog) damaged(r *record, id tensor.ID, code frame.Code, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range r.tensors {
		if p.Summary.Tensor == id {
			p.Summary.Digest, p.Summary.Code, p.Summary.Message = codec.Digest{}, code, frame.Clip(text, recordMessage)
		}
	}
}

// end records how a transfer ended, unless it is recorded, and forgets the oldest ended
// ones.
func (l *transferLog) end(r *record, code frame.Code, message string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !r.Open {
		return false
	}
	r.Open, r.session = false, nil
	if r.stored {
		code, message = frame.OK, ""
	}
	r.Code, r.Message = code, frame.Clip(message, recordMessage)
	for _, p := range r.tensors {
		if p.Open || r.all && code != frame.OK { // it ends with the transfer
			p.Open = false
			p.Summary.Code, p.Summary.Message = r.Code, r.Message
		}
	}
	l.ended = append(l.ended, r)
	l.kept += len(r.tensors)
	for len(l.ended) > recordsKept || l.kept > recordTensorsKept && len(l.ended) > 1 {
		old := l.ended[0]
		l.ended[0] = nil
		l.ended = l.ended[1:]
		l.kept -= len(old.tensors)
		if l.byID[old.id] == old {
			delete(l.byID, old.id)
		}
	}
	return true
}

// stored records that a set is stored, however its call has ended or will end.
func (l *transferLog) stored(r *record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.stored, r.Code, r.Message = true, frame.OK, ""
	for _, p := range r.tensors {
		p.Summary.Code, p.Summary.Message = frame.OK, ""
	}
}

// State returns the state of a put or a get, and of its tensors; false if it is not known.
func (s *Service) State(id tensor.ID) (of State, tensors []TensorState, known bool) {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	r := s.log.byID[id]
	if r == nil {
		return of, nil, false
	}
	for _, p := range r.tensors {
		tensors = append(tensors, TensorState{p.Summary, p.Open, p.bytes.Load()})
	}
	return r.State, tensors, true
}
