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

// progressBars show how far tensors are: one line each with bytes, share, speed and
// time left, and one for all of them as soon as there are several. Those past
// mostBars are in the latter only. Nil ones, and their nil bars, show nothing. Safe
// for concurrent use.
type progressBars struct {
	bars *mpb.Progress

	mu    sync.Mutex // guards all below
	ended bool
	count int
	total int64
	all   *mpb.Bar // nil while there is one tensor
	first *mpb.Bar
}

// newProgress returns what shows progress on w, nil if w is no terminal, or one
// without cursor movement, or if it is to be quiet.
func newProgress(w io.Writer, quiet bool) *progressBars {
	if quiet || !isTerminal(w) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	return &progressBars{bars: mpb.New(mpb.WithOutput(w), mpb.PopCompletedMode())}
}

func quietFlag(c *cobra.Command, to *bool) {
	c.Flags().BoolVarP(to, "quiet", "q", false, "show no progress")
}

// isTerminal reports whether w is one.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && cwriter.IsTerminal(int(f.Fd()))
}

// tensor adds a line for a tensor whose size its desc says; one without elements
// needs none.
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
	p.total += size
	var line *mpb.Bar // none for those past mostBars
	if p.count <= mostBars {
		line = p.line(shorten(plain(title)), size)
	}
	switch {
	case p.count == 1:
		p.first = line
	case p.all == nil:
		p.all = p.line("in all", 0, mpb.BarPriority(math.MaxInt)) // below the others
		p.all.SetCurrent(p.first.Current())
		fallthrough
	default:
		p.all.SetTotal(p.total, false)
	}
	return &bar{p, line}
}

func (p *progressBars) line(title string, size int64, options ...mpb.BarOption) *mpb.Bar {
	return p.bars.AddBar(size, append(options,
		mpb.PrependDecorators(
			decor.Name(title, decor.WCSyncSpaceR),
			decor.CountersKibiByte("% .1f / % .1f", decor.WCSyncSpace),
		),
		mpb.AppendDecorators(
			decor.Percentage(decor.WC{W: 5}),
			decor.AverageSpeed(decor.SizeB1024(0), "% .1f", decor.WCSyncSpace),
			decor.OnComplete(decor.AverageETA(decor.ET_STYLE_GO, decor.WCSyncSpace), ""),
		))...)
}

// shorten keeps the end of a long title: where names differ.
func shorten(title string) string {
	n := utf8.RuneCountInString(title)
	if n <= barTitle {
		return title
	}
	return "…" + string([]rune(title)[n-barTitle+1:])
}

// end takes down what is not finished; finished lines stay. Ending twice is well.
func (p *progressBars) end() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		p.ended = true
		p.bars.Shutdown()
	}
}

// bar is the line of one tensor, and its share of the line for all.
type bar struct {
	p    *progressBars
	line *mpb.Bar // nil without one of its own
}

// add counts n more bytes.
func (b *bar) add(n int) {
	if b == nil {
		return
	}
	b.p.mu.Lock()
	defer b.p.mu.Unlock()
	if b.line != nil {
		b.line.IncrBy(n)
	}
	if b.p.all != nil {
		b.p.all.IncrBy(n)
	}
}

// reader counts what is read from r.
func (b *bar) reader(r io.Reader) io.Reader {
	if b == nil {
		return r
	}
	return barReader{b, r}
}

// writer counts what is written to w.
func (b *bar) writer(w io.Writer) io.Writer {
	if b == nil {
		return w
	}
	return barWriter{b, w}
}

type barReader struct {
	bar *bar
	r   io.Reader
}

func (b barReader) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	b.bar.add(n)
	return n, err
}

type barWriter struct {
	bar *bar
	w   io.Writer
}

func (b barWriter) Write(p []byte) (int, error) {
	n, err := b.w.Write(p)
	b.bar.add(n)
	return n, err
}
