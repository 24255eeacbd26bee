// Package recent remembers which IDs have ended, the last Most of them, so that a session
// knows a frame that crossed an end from one that makes no sense.
//
// It refuses to know what the IDs are of. An IDs belongs to one goroutine at a time.
package recent

import "github.com/tensorferry/tensorferry/tensor"

// IDs are the last that were added. The zero value is ready.
type IDs struct {
	ids    map[tensor.ID]struct{}
	order  []tensor.ID // grows to Most, then the oldest makes room
	oldest int
}

// Add adds an ID, which is not among them.
func (r *IDs) Add(id tensor.ID) {
	if r.ids == nil {
		r.ids = make(map[tensor.ID]struct{})
	}
	r.ids[id] = struct{}{}
	if len(r.order) < Most {
		r.order = append(r.order, id)
		return
	}
	delete(r.ids, r.order[r.oldest])
	r.order[r.oldest] = id
	r.oldest = (r.oldest + 1) % Most
}

// Has reports whether an ID is among them.
func (r *IDs) Has(id tensor.ID) bool {
	_, ok := r.ids[id]
	return ok
}

// Len returns how many there are.
func (r *IDs) Len() int { return len(r.ids) }
