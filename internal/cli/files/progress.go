package files

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	// barTitle is how many characters of a name the line shows, half of a narrow terminal.
	barTitle = 24
	// drawEvery is the time between two drawings of the line.
	drawEvery = 100 * time.Millisecond
)

// ProgressBars show the progress of tensors in one line, which stays when all are complete.
// A nil *ProgressBars shows nothing. It is safe for concurrent use.
type ProgressBars struct {
	terminal *os.File
	lanes    func() int // how many carry the bytes; may be nil

	mu          sync.Mutex // guards all below
	vanishing   bool       // the line does not stay at the end
	title       string
	count, done int           // tensors
	moved, size int64         // bytes of all tensors
	begun       time.Time     // zero while no tensor has bytes
	ended       chan struct{} // closed by End
	drawn       chan struct{} // closed when draw has returned
}

// NewProgress returns bars on w, or nil if quiet or without a terminal that moves its cursor.
// The line of complete tensors stays at the end, unless it is vanishing; see Whole.
func NewProgress(w io.Writer, quiet, vanishing bool, lanes func() int) *ProgressBars {
	if quiet || !IsTerminal(w) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	return &ProgressBars{
		terminal: w.(*os.File), lanes: lanes, vanishing: vanishing,
		ended: make(chan struct{}), drawn: make(chan struct{}),
	}
}

// IsTerminal tells whether a reader or writer is a terminal.
func IsTerminal(rw any) bool {
	f, ok := rw.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Tensor adds a tensor. One without elements is complete immediately.
func (p *ProgressBars) Tensor(title string, d tensor.Desc) *Bar {
	size, err := d.Bytes()
	if p == nil || err != nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count++
	p.size += size
	p.title = shorten(display.Plain(title))
	if size == 0 {
		p.done++
		return nil
	}
	if p.begun.IsZero() {
		p.begun = time.Now()
		go p.draw() // ends with End
	}
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

// Complete marks all tensors as complete, because their call has succeeded: the line stays.
func (p *ProgressBars) Complete() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.moved, p.done, p.vanishing = p.size, p.count, false
}

// draw draws the line until the end.
func (p *ProgressBars) draw() {
	defer close(p.drawn)
	for tick := time.Tick(drawEvery); ; {
		select {
		case <-tick:
			_, _ = io.WriteString(p.terminal, p.line())
		case <-p.ended:
			return
		}
	}
}

// line returns the line as it is now. It begins with a carriage return, because a terminal prints
// ^C at the cursor, and clears what was behind it.
func (p *ProgressBars) line() string {
	p.mu.Lock()
	title, moved, size := p.title, min(p.moved, p.size), p.size // an attempt may be repeated
	if p.count > 1 {
		title = fmt.Sprintf("%d of %d tensors", p.done, p.count)
	}
	took := max(time.Since(p.begun), time.Millisecond)
	p.mu.Unlock()
	left := fmt.Sprintf("%s  %s / %s [", title, inUnits(moved), inUnits(size))
	right := fmt.Sprintf("] %3d %% %s/s", int(100*(float64(moved)/float64(size))), inUnits(int64(float64(moved)/took.Seconds())))
	if p.lanes != nil && p.lanes() > 1 {
		right += fmt.Sprintf(" by %d lanes", p.lanes())
	}
	if moved > 0 && moved < size {
		rest := time.Duration(float64(took) * float64(size-moved) / float64(moved))
		right += " " + rest.Round(time.Second).String()
	}
	columns, _, _ := term.GetSize(int(p.terminal.Fd())) // 0 on error
	room := max(columns-len("^C")-1-utf8.RuneCountInString(left+right), 3)
	full := int(float64(room) * float64(moved) / float64(size))
	bar := (strings.Repeat("=", full) + ">" + strings.Repeat("-", room))[:room]
	return "\r" + left + bar + right + "\x1b[K"
}

func inUnits(n int64) string { return strings.Replace(display.Size(n), "bytes", "B", 1) }

// shorten keeps the end of a long title, because names differ there.
func shorten(title string) string {
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
	ended := p.begun.IsZero()
	select {
	case <-p.ended:
		ended = true
	default:
		close(p.ended)
	}
	stays := p.moved == p.size && !p.vanishing
	p.mu.Unlock()
	if ended {
		return
	}
	<-p.drawn
	last := "\r\x1b[J" // clears the rest of a line where ^C was printed, too
	if stays {
		last = p.line() + "\n"
	}
	_, _ = io.WriteString(p.terminal, last)
}

// Bar counts the bytes of one tensor. A nil Bar counts nothing.
type Bar struct {
	bars        *ProgressBars
	moved, size int64
}

// Write counts the bytes of p. It never fails.
func (b *Bar) Write(p []byte) (int, error) {
	b.add(int64(len(p)), false)
	return len(p), nil
}

// Set records that the first n bytes have moved, instead of Write.
func (b *Bar) Set(n int64) { b.add(n, true) }

func (b *Bar) add(n int64, all bool) {
	if b == nil {
		return
	}
	b.bars.mu.Lock()
	defer b.bars.mu.Unlock()
	if all {
		n -= b.moved
	}
	b.moved += n
	b.bars.moved += n
	if b.moved == b.size && n > 0 {
		b.bars.done++
	}
}
