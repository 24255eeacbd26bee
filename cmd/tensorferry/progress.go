package main

import (
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/cwriter"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/tensorferry/tensorferry/tensor"
)

// barTitle is how many characters of a tensor's name a bar shows. It leaves half of a
// narrow terminal for the figures.
const barTitle = 24

// mostBars is the maximum number of tensors with a line of their own: more would fill the
// screen.
const mostBars = 8

// progressBars show the progress of tensors. A single tensor has one line with bytes,
// percentage, speed and remaining time, which stays when it is complete. Of several, up to
// mostBars tensors in progress have such a line, in order, until they are complete; a last
// line shows the total and stays. A nil *progressBars shows nothing. It is safe for
// concurrent use.
type progressBars struct {
	w    io.Writer
	bars *mpb.Progress
	most int // lines of tensors
	// vanishing: no line stays at the end. It is set before the first tensor.
	vanishing bool

	count, done atomic.Int64 // tensors; drawing a line reads them without mu

	mu          sync.Mutex // guards all below
	ended       bool
	moved, size int64    // of all tensors
	all         *mpb.Bar // nil while there is one tensor
	first       *bar     // the only tensor; nil if it needs no line, or once there are several
	lines       map[*bar]*mpb.Bar
}

// newProgress returns bars on w, or nil if quiet is set or w is not a terminal with a
// movable cursor.
func newProgress(w io.Writer, quiet bool) *progressBars {
	if quiet || !isTerminal(w) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	p := &progressBars{w: w, bars: mpb.New(mpb.WithOutput(w)), most: mostBars, lines: map[*bar]*mpb.Bar{}}
	if _, rows, err := cwriter.GetSize(int(w.(*os.File).Fd())); err == nil {
		p.most = min(p.most, max(rows-2, 0)) // the last line, and the cursor's
	}
	return p
}

func quietFlag(c *cobra.Command, to *bool) {
	c.Flags().BoolVarP(to, "quiet", "q", false, "show no progress")
}

// isTerminal reports whether a reader or writer is a terminal.
func isTerminal(rw any) bool {
	f, ok := rw.(*os.File)
	return ok && cwriter.IsTerminal(int(f.Fd()))
}

// say reports the tensors that are converted, on w or above the lines.
func (p *progressBars) say(w io.Writer, list []*source) {
	if p != nil {
		w = p.bars
	}
	sayConverted(w, list)
}

// tensor adds a tensor. One without elements is complete immediately.
func (p *progressBars) tensor(title string, d tensor.Desc) *bar {
	size, err := d.Bytes()
	if p == nil || err != nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil
	}
	n := p.count.Add(1)
	p.size += size
	b := &bar{bars: p, title: title, size: size, order: int(n)}
	if n == 1 && size > 0 {
		p.first = b
		p.show(b)
	}
	if n == 2 {
		p.all = p.line(0, math.MaxInt, func() string { return fmt.Sprintf("%d of %d tensors", p.done.Load(), p.count.Load()) })
		p.all.SetCurrent(p.moved)
		if f := p.first; f != nil && (f.moved == 0 || f.moved == f.size) {
			p.hide(f) // it has not begun or is complete
		}
		p.first = nil
	}
	if p.all != nil {
		p.all.SetTotal(p.size, false)
	}
	if size == 0 {
		p.done.Add(1)
		return nil
	}
	return b
}

// pieceBytes is the unit in which the input of a call is counted: the default chunk size.
const pieceBytes = 1 << 20

// input adds the input of a call. Bytes of a reader count when they are read, mapped bytes
// when the server has them.
func (p *progressBars) input(s *source) {
	b := p.tensor(s.title, s.Desc)
	switch {
	case b == nil:
	case s.Reader != nil:
		s.Reader = io.TeeReader(s.Reader, b)
	default:
		rest := s.Data
		s.Data, s.Next = nil, func(over <-chan struct{}) ([]byte, func(), error) {
			piece := rest[:min(pieceBytes, len(rest))]
			rest = rest[len(piece):]
			return piece, func() {
				select {
				case <-over: // the server may not have it
				default:
					_, _ = b.Write(piece) // it never fails
				}
			}, nil
		}
	}
}

// whole marks all tensors as complete, because their call has succeeded.
func (p *progressBars) whole() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.moved = p.size
	p.done.Store(p.count.Load())
	if p.all != nil {
		p.all.SetCurrent(p.size)
	}
}

// show gives b a line, unless there are too many. The caller holds mu.
func (p *progressBars) show(b *bar) {
	if p.lines[b] == nil && (len(p.lines) < p.most || b == p.first) {
		title := shorten(plain(b.title))
		p.lines[b] = p.line(b.size, b.order, func() string { return title })
	}
}

// hide removes the line of b. The caller holds mu.
func (p *progressBars) hide(b *bar) {
	if line := p.lines[b]; line != nil {
		line.Abort(true)
		delete(p.lines, b)
	}
}

// line adds a line, which only Abort or SetTotal ends. It calls title without mu whenever
// it draws the line. Every line begins with a carriage return, because a terminal prints
// ^C at the cursor and the next frame would begin after it.
func (p *progressBars) line(size int64, order int, title func() string) *mpb.Bar {
	begun := time.Now()
	line := p.bars.AddBar(0, mpb.BarPriority(order),
		mpb.PrependDecorators(
			decor.Any(func(decor.Statistics) string { return "\r" + title() }, decor.WCSyncSpaceR),
			decor.Any(func(s decor.Statistics) string { return inUnits(s.Current) + " / " + inUnits(s.Total) }, decor.WCSyncSpace),
		),
		mpb.AppendDecorators(
			decor.Percentage(decor.WC{W: 5}),
			decor.Any(func(s decor.Statistics) string {
				return inUnits(int64(float64(s.Current)/max(time.Since(begun).Seconds(), 1e-3))) + "/s"
			}, decor.WCSyncSpace),
			decor.OnComplete(decor.AverageETA(decor.ET_STYLE_GO, decor.WCSyncSpace), ""),
		))
	line.SetTotal(size, false)
	return line
}

// inUnits formats a number of bytes for a line.
func inUnits(n int64) string { return strings.Replace(sizeText(n), "bytes", "B", 1) }

// shorten keeps the end of a long title, because names differ there.
func shorten(title string) string {
	n := utf8.RuneCountInString(title)
	if n <= barTitle {
		return title
	}
	return "…" + string([]rune(title)[n-barTitle+1:])
}

// end removes the lines of incomplete tensors and leaves the cursor at the beginning of a
// line. Ending twice is a no-op.
func (p *progressBars) end() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	p.ended = true
	last := p.all
	if p.first != nil {
		last = p.lines[p.first]
	}
	if last != nil && p.moved == p.size && !p.vanishing {
		last.SetTotal(p.size, true)
	}
	for b := range p.lines {
		p.hide(b) // no effect if it is complete
	}
	if p.all != nil {
		p.all.Abort(true)
	}
	p.bars.Wait() // until complete lines have been drawn
	if last != nil {
		_, _ = io.WriteString(p.w, "\r\x1b[J") // clears the rest of a line where ^C was printed
	}
}

// bar counts the bytes of one tensor. A nil bar counts nothing.
type bar struct {
	bars  *progressBars
	title string
	size  int64
	order int
	moved int64
}

// reach records that the first n bytes have moved.
func (b *bar) reach(n int64) {
	if b != nil {
		b.bars.mu.Lock()
		defer b.bars.mu.Unlock()
		b.move(n)
	}
}

// Write counts the bytes of p. It never fails.
func (b *bar) Write(p []byte) (int, error) {
	if b != nil {
		b.bars.mu.Lock()
		defer b.bars.mu.Unlock()
		b.move(b.moved + int64(len(p)))
	}
	return len(p), nil
}

// move is reach for a caller that holds mu.
func (b *bar) move(n int64) {
	p := b.bars
	more := n - b.moved
	if p.ended || more == 0 {
		return
	}
	b.moved = n
	p.moved += more
	if n == b.size {
		p.done.Add(1)
	} else {
		p.show(b)
	}
	if line := p.lines[b]; line != nil {
		line.SetCurrent(n)
	}
	if n == b.size && b != p.first {
		p.hide(b)
	}
	if p.all != nil {
		p.all.IncrInt64(more)
	}
}
