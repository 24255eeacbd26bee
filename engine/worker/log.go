package worker

import (
	"bytes"
	"log/slog"
	"strings"
	"unicode"
	"unicode/utf8"
)

// lines is a stream of a process's own, which goes to the log line by line.
type lines struct {
	process *process
	rest    []byte
}

// Write implements io.Writer.
func (l *lines) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		line, rest, ended := bytes.Cut(b, []byte("\n"))
		room := max(0, lineBytes-len(l.rest))
		l.rest = append(l.rest, line[:min(room, len(line))]...)
		if b = rest; ended {
			l.flush()
		}
	}
	return n, nil
}

// flush logs what there is of a line.
func (l *lines) flush() {
	if text := clean(string(l.rest)); text != "" {
		l.process.says(text)
	}
	l.rest = l.rest[:0]
}

// says logs a line, with the call that is computed.
func (p *process) says(line string) {
	p.mu.Lock()
	p.last = line
	g := p.guest
	p.mu.Unlock()
	if !p.allow() {
		return
	}
	if n := p.dropped.Swap(0); n > 0 {
		p.log.Warn("worker said more than is logged", slog.Int64("lines", n))
	}
	call := ""
	if g != nil {
		h := p.host
		h.mu.Lock()
		if g.block != nil {
			call = g.block.Program.(*program).call
		}
		h.mu.Unlock()
	}
	p.log.Info("worker says", slog.String("line", line), slog.String("call", call))
}

// allow reports whether one line more is logged.
func (p *process) allow() bool {
	ok := p.lines.Allow()
	if !ok {
		p.dropped.Add(1)
	}
	return ok
}

// clean makes text of a guest one line of bounded length.
func clean(text string) string {
	return strings.TrimSpace(cut(strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case unicode.IsControl(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "?")), lineBytes))
}

// cut returns the beginning of text, tail its end.
func cut(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n] + "…"
}

func tail(text string, n int) string {
	if len(text) > n {
		text = "…" + strings.ToValidUTF8(text[len(text)-n:], "")
	}
	return text
}
