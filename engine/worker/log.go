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
	if !p.lines.Allow() {
		p.dropped++
		return
	}
	if p.dropped > 0 {
		p.log.Warn("worker said more than is logged", slog.Int64("lines", p.dropped))
		p.dropped = 0
	}
	p.log.Info("worker says", slog.String("line", line), slog.String("call", call))
}

// clean makes text of a guest one line.
func clean(text string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsControl(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "?")))
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
