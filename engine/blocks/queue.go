package blocks

import "context"

// Queue is a device's queue of blocks, which guards it. The zero value is empty.
type Queue struct {
	head, tail *Work
	n          int
}

// Len returns how many blocks there are.
func (q *Queue) Len() int { return q.n }

// Head returns the first block, nil without one.
func (q *Queue) Head() *Work { return q.head }

// Push adds a block at the end.
func (q *Queue) Push(w *Work) {
	w.next = nil
	if q.head == nil {
		q.head = w
	} else {
		q.tail.next = w
	}
	q.tail = w
	q.n++
}

// Pop takes the first block, nil without one.
func (q *Queue) Pop() *Work {
	w := q.head
	if w != nil {
		q.head = w.next
		q.n--
	}
	return w
}

// Append moves the blocks of behind to the end, in order.
func (q *Queue) Append(behind *Queue) {
	for w := behind.Pop(); w != nil; w = behind.Pop() {
		q.Push(w)
	}
}

// End ends all blocks, none of which is computed. The device holds no lock of its own.
func (q *Queue) End(why error) {
	for w := q.Pop(); w != nil; w = q.Pop() {
		w.End(why)
	}
}

// Take takes the blocks of a run out, in order.
func (q *Queue) Take(run context.Context) (taken Queue) {
	for range q.n {
		w, to := q.Pop(), q
		if w.Context() == run {
			to = &taken
		}
		to.Push(w)
	}
	return taken
}
