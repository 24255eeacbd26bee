package main

import (
	"io"
	"math"
	"os"
	"sync"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/cwriter"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/tensorferry/tensorferry/tensor"
)

// barTitle is how many characters of a tensor's name a bar shows: half of a narrow
// terminal is left for the figures.
const barTitle = 24

// mostBars is how many tensors have a line of their own: more would fill a screen.
const mostBars = 8

// progressBars show how far tensors are: a line each with bytes, share, speed and time
// left, and one for the sum as soon as there are several. Those past mostBars have no
// line of their own. A nil *progressBars shows nothing. Safe for concurrent use.
type progressBars struct {
	bars *mpb.Progress

	mu          sync.Mutex // guards all below
	ended       bool
	count       int
	moved, size int64    // of all tensors
	all         *mpb.Bar // nil while there is one tensor
	lines       []*mpb.Bar
	vanishing   bool // finished lines leave the screen
}

// newProgress returns bars on w, or nil if quiet is set or w is not a terminal with a
// cursor that moves.
func newProgress(w io.Writer, quiet bool) *progressBars {
	if quiet || !isTerminal(w) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	return &progressBars{bars: mpb.New(mpb.WithOutput(w), mpb.PopCompletedMode())}
}

func quietFlag(c *cobra.Command, to *bool) {
	c.Flags().BoolVarP(to, "quiet", "q", false, "show no progress")
}

// isTerminal reports whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && cwriter.IsTerminal(int(f.Fd()))
}

// vanish has finished lines leave the screen, from the next tensor on.
func (p *progressBars) vanish() {
	if p != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.vanishing = true
	}
}

// tensor adds a tensor; one without elements needs no line.
func (p *progressBars) tensor(title string, d tensor.Desc) *bar {
	size, err := d.Bytes()
	if p == nil || err != nil || size == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil
	}
	p.count++
	p.size += size
	b := &bar{bars: p}
	if p.count <= mostBars {
		b.line = p.line(shorten(plain(title)), size)
	}
	if p.count == 2 {
		p.all = p.line("total", 0, mpb.BarPriority(math.MaxInt)) // below the others
		p.all.SetCurrent(p.moved)
	}
	if p.all != nil {
		p.all.SetTotal(p.size, false)
	}
	return b
}

func (p *progressBars) line(title string, size int64, options ...mpb.BarOption) *mpb.Bar {
	if p.vanishing {
		options = append(options, mpb.BarRemoveOnComplete(), mpb.BarNoPop())
	}
	line := p.bars.AddBar(size, append(options,
		mpb.PrependDecorators(
			decor.Name(title, decor.WCSyncSpaceR),
			decor.CountersKibiByte("% .1f / % .1f", decor.WCSyncSpace),
		),
		mpb.AppendDecorators(
			decor.Percentage(decor.WC{W: 5}),
			decor.AverageSpeed(decor.SizeB1024(0), "% .1f", decor.WCSyncSpace),
			decor.OnComplete(decor.AverageETA(decor.ET_STYLE_GO, decor.WCSyncSpace), ""),
		))...)
	p.lines = append(p.lines, line)
	return line
}

// shorten keeps the end of a long title: where names differ.
func shorten(title string) string {
	n := utf8.RuneCountInString(title)
	if n <= barTitle {
		return title
	}
	return "…" + string([]rune(title)[n-barTitle+1:])
}

// end removes the unfinished lines; finished ones stay. Ending twice is a no-op.
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
	if p.all != nil && p.moved == p.size {
		p.all.SetTotal(p.size, true)
	}
	for _, line := range p.lines {
		line.Abort(true) // without effect on one that is complete
	}
	p.bars.Wait() // until all that is complete has been drawn
}

// bar counts the bytes of one tensor. A nil bar counts nothing.
type bar struct {
	bars  *progressBars
	line  *mpb.Bar // nil without one of its own
	moved int64
}

// reach notes that the first n bytes have moved.
func (b *bar) reach(n int64) {
	if b == nil {
		return
	}
	b.bars.mu.Lock()
	defer b.bars.mu.Unlock()
	more := n - b.moved
	b.moved = n
	b.bars.moved += more
	if b.line != nil {
		b.line.IncrInt64(more)
	}
	if b.bars.all != nil {
		b.bars.all.IncrInt64(more)
	}
}

// Write counts the bytes of p.
func (b *bar) Write(p []byte) (int, error) {
	if b != nil {
		b.reach(b.moved + int64(len(p)))
	}
	return len(p), nil
}
