package worker

import (
	"slices"

	"github.com/tensorferry/tensorferry/engine/blocks"
)

// line is calls that have blocks which wait, in the order of their turns: none waits for more than one block
// of each other.
type line []*program

// push adds a block behind those of its call.
func (l *line) push(w *blocks.Work) {
	p := w.Program.(*program)
	if p.queue.Push(w); p.queue.Len() == 1 {
		*l = append(*l, p)
	}
}

// pop takes the next block that a guest may compute, nil without one.
func (l *line) pop(g *guest) (w *blocks.Work) {
	at := slices.IndexFunc(*l, func(p *program) bool { return p.fits(g) })
	if at >= 0 {
		p := (*l)[at]
		*l = slices.Delete(*l, at, at+1)
		if w = p.queue.Pop(); p.queue.Len() > 0 {
			*l = append(*l, p)
		}
	}
	return w
}

// take moves the blocks of some calls to a queue.
func (l *line) take(some func(*program) bool, to *blocks.Queue) {
	*l = slices.DeleteFunc(*l, func(p *program) bool {
		if some(p) {
			to.Append(&p.queue)
		}
		return p.queue.Len() == 0
	})
}

// len is how many blocks there are.
func (l *line) len() (n int) {
	for _, p := range *l {
		n += p.queue.Len()
	}
	return n
}

// fits reports whether a guest may compute the next block of the call. It has one block of a sequence at a time
// where it would compute several at once.
func (p *program) fits(g *guest) bool {
	return (p.owner == nil || p.owner == g) && (p.state == nil || g.atOnce() == 1 ||
		!slices.ContainsFunc(g.flight, func(f *flight) bool { return f.work.Program.(*program).state == p.state }))
}
