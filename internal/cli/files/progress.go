package files

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/cwriter"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/tensor"
)

// barTitle is how many characters of a name the line shows, half of a narrow terminal.
const barTitle = 24

// ProgressBars show the progress of tensors in one line, which stays when all are complete.
// A nil *progressBars shows nothing. It is safe for concurrent use.
type ProgressBars struct {
	w     io.Writer
	lanes func() int   // how many carry the line; it must not wait for who moves a bar
	title atomic.Value // string; drawing the line reads it without mu

	mu          sync.Mutex // guards all below
	vanishing   bool       // the line does not stay at the end
	ended       bool
	count, done int   // tensors
	moved, size int64 // bytes of all tensors
	bars        *mpb.Progress
	line        *mpb.Bar // of bars; nil while no tensor has bytes
}

// NewProgress returns bars on w, or nil if quiet or without a terminal that moves its cursor.
// The line of complete tensors stays at the end, unless it is vanishing; see whole.
func NewProgress(w io.Writer, quiet, vanishing bool, lanes func() int) *ProgressBars {
	if quiet || !isTerminal(w) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	return &ProgressBars{w: w, vanishing: vanishing, lanes: lanes}
}

func isTerminal(rw any) bool {
	f, ok := rw.(*os.File)
	return ok && cwriter.IsTerminal(int(f.Fd()))
}

// Tensor adds a tensor. One without elements is complete immediately.
func (p *ProgressBars) Tensor(title string, d tensor.Desc) *Bar {
	size, err := d.Bytes()
	if p == nil || err != nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil
	}
	p.count++
	p.size += size
	p.title.Store(Shorten(display.Plain(title)))
	if size == 0 {
		p.complete(1)
		return nil
	}
	p.complete(0)
	if p.line == nil {
		p.newLine()
	}
	p.line.SetTotal(p.size, false)
	return &Bar{bars: p, size: size}
}

// pieceBytes is the unit in which the input of a call is counted: the default chunk size.
const pieceBytes = 1 << 20

// Input adds the input of a call: bytes count when read, mapped ones when the server has them,
// or the call has ended.
func (p *ProgressBars) Input(s *Source) {
	b := p.Tensor(s.Title, s.Desc)
	switch {
	case b == nil:
	case s.Reader != nil:
		s.Reader = io.TeeReader(s.Reader, b)
	default:
		rest := s.Data
		s.Data, s.Next = nil, func(<-chan struct{}) ([]byte, func(), error) {
			piece := rest[:min(pieceBytes, len(rest))]
			rest = rest[len(piece):]
			return piece, func() { _, _ = b.Write(piece) }, nil // it never fails
		}
	}
}

// Whole marks all tensors as complete, because their call has succeeded: the line stays.
func (p *ProgressBars) Whole() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.moved, p.vanishing = p.size, false
	p.complete(p.count - p.done)
}

// newLine adds the line, which only Abort or SetTotal ends. The line begins with a carriage
// return, because a terminal prints ^C at the cursor and the next frame would begin after it.
func (p *ProgressBars) newLine() {
	begun := time.Now()
	p.bars = mpb.New(mpb.WithOutput(p.w))
	p.line = p.bars.AddBar(0,
		mpb.PrependDecorators(
			decor.Any(func(decor.Statistics) string { return "\r" + p.title.Load().(string) }),
			decor.Any(func(s decor.Statistics) string { return "  " + inUnits(s.Current) + " / " + inUnits(s.Total) }),
		),
		mpb.AppendDecorators(
			decor.Percentage(decor.WC{W: 5}),
			decor.Any(func(s decor.Statistics) string {
				speed := " " + inUnits(int64(float64(s.Current)/max(time.Since(begun).Seconds(), 1e-3))) + "/s"
				if p.lanes != nil && p.lanes() > 1 {
					speed += fmt.Sprintf(" by %d lanes", p.lanes())
				}
				return speed
			}),
			decor.OnComplete(decor.AverageETA(decor.ET_STYLE_GO, decor.WCSyncSpace), ""),
		))
}

func inUnits(n int64) string { return strings.Replace(display.Size(n), "bytes", "B", 1) }

// Shorten keeps the end of a long title, because names differ there.
func Shorten(title string) string {
	letters := []rune(title)
	if len(letters) <= barTitle {
		return title
	}
	return "…" + string(letters[len(letters)-barTitle+1:])
}

// End removes the line of incomplete tensors. Ending twice is a no-op.
func (p *ProgressBars) End() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	ended := p.ended
	p.ended = true
	if ended || p.line == nil {
		return
	}
	if p.moved == p.size && !p.vanishing {
		p.line.SetTotal(p.size, true)
	}
	p.line.Abort(true)                     // no effect if it is complete
	p.bars.Wait()                          // until a complete line has been drawn
	_, _ = io.WriteString(p.w, "\r\x1b[J") // clears the rest of a line where ^C was printed
}

// Bar counts the bytes of one tensor. A nil bar counts nothing.
type Bar struct {
	bars        *ProgressBars
	moved, size int64
}

// Write counts the bytes of p. It never fails.
func (b *Bar) Write(p []byte) (int, error) {
	if b != nil {
		b.add(int64(len(p)))
	}
	return len(p), nil
}

// Reach records that the first n bytes have moved, instead of Write.
func (b *Bar) Reach(n int64) {
	if b != nil {
		b.add(n - b.moved)
	}
}

func (b *Bar) add(n int64) {
	p := b.bars
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended || n == 0 {
		return
	}
	b.moved += n
	p.moved += n
	if b.moved == b.size {
		p.complete(1)
	}
	p.line.SetCurrent(p.moved)
}

// complete counts n more tensors as complete. The caller holds mu.
func (p *ProgressBars) complete(n int) {
	if p.done += n; p.count > 1 {
		p.title.Store(fmt.Sprintf("%d of %d tensors", p.done, p.count))
	}
}
