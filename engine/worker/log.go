package worker

import (
	"log/slog"
	"strings"
	"unicode"
)

// logLine logs a line, with the call that is computed: of several blocks, that of the oldest.
func (p *process) logLine(line string) {
	if line = clean(line); line == "" {
		return
	}
	call := ""
	p.host.mu.Lock()
	p.last = line
	if g := p.guest; g != nil && len(g.flight) > 0 {
		call = g.flight[0].work.Program.(*program).call
	}
	p.host.mu.Unlock()
	if !p.allow() {
		return
	}
	if n := p.dropped.Swap(0); n > 0 {
		p.log.Warn("worker said more than is logged", slog.Int64("lines", n))
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
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsControl(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "?")), lineBytes))
}

// cut returns the beginning of text, tail its end.
func cut(text string, n int) string {
	if len(text) > n {
		text = strings.ToValidUTF8(text[:n], "") + "…"
	}
	return text
}

func tail(text string, n int) string {
	if len(text) > n {
		text = "…" + strings.ToValidUTF8(text[len(text)-n:], "")
	}
	return text
}
