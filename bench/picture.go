package main

import (
	"bytes"
	"fmt"
	"strings"
	"text/template"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// The picture's measures, in its own units.
const (
	pictureWidth = 800
	labelWidth   = 300 // left of the bars
	valueWidth   = 190 // right of the longest bar
	rowHeight    = 24
	barHeight    = 16
	margin       = 12
)

// Its colors. It has no background: each has to stand on white and on the nearly
// black of a dark page, and text be legible on both.
const (
	textColor  = "#787878"
	oursColor  = "#2f81f7"
	theirColor = "#9a9a9a"
)

// bar is a line of the picture: the bar of one peer, or without a value a heading.
type bar struct {
	Y      int // of the text's base line
	Text   string
	Ours   bool
	Top    int
	Length int
	Value  string
	ValueX int
}

var pictureTemplate = template.Must(template.New("picture").Parse(strings.TrimLeft(`
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{.Width}} {{.Height}}" width="{{.Width}}" height="{{.Height}}" role="img" font-family="system-ui, sans-serif" font-size="13" fill="{{.TextColor}}">
<title>Rates of tensorferry and its peers</title>
<desc>{{html .Foot}}</desc>
{{range .Bars}}{{if .Value -}}
<text x="{{$.Label}}" y="{{.Y}}" text-anchor="end"{{if .Ours}} font-weight="bold"{{end}}>{{html .Text}}</text>
<rect x="{{$.Left}}" y="{{.Top}}" width="{{.Length}}" height="{{$.Thick}}" rx="2" fill="{{if .Ours}}{{$.OursColor}}{{else}}{{$.TheirColor}}{{end}}"/>
<text x="{{.ValueX}}" y="{{.Y}}">{{html .Value}}</text>
{{else -}}
<text x="{{$.Margin}}" y="{{.Y}}" font-weight="bold">{{html .Text}}</text>
{{end}}{{end -}}
<text x="{{.Margin}}" y="{{.FootY}}" font-size="11">{{html .Foot}}</text>
</svg>
`, "\n")))

// picture draws the rates of two processes over TCP as horizontal bars, as SVG.
func (r *Report) picture() []byte {
	longest := 0.0
	var shown []*bench.Comparison
	for _, c := range r.Comparisons {
		if c.Net == "tcp" && c.Processes == 2 && c.Delay == 0 && (c.Work == bench.Upload || c.Work == bench.Echo) {
			shown = append(shown, c)
			longest = max(longest, c.Ours.Rate, c.Theirs.Rate)
		}
	}
	const left = margin + labelWidth
	var bars []bar
	y, last := margin-rowHeight/2, bench.Comparison{}
	add := func(text string, rate float64, value string, ours bool) {
		y += rowHeight
		length := int(rate / longest * (pictureWidth - left - valueWidth))
		bars = append(bars, bar{
			Y: y - 7, Text: text, Ours: ours, Top: y - barHeight - 3,
			Length: length, Value: fmt.Sprintf("%.2f%s", rate, value), ValueX: left + length + 6,
		})
	}
	for _, c := range shown {
		if c.Work != last.Work {
			y += rowHeight * 3 / 2
			bars = append(bars, bar{Y: y - 7, Text: fmt.Sprintf("%s of %s over TCP on loopback between two processes, GB/s", c.Work, bench.ByteText(c.Bytes))})
		}
		if c.Work != last.Work || c.Who != last.Who { // ours is the same beside all
			add(c.Who, c.Ours.Rate, "", true)
		}
		last = *c
		add(c.Beside, c.Theirs.Rate, fmt.Sprintf(" (tensorferry × %.2f)", c.Ratio.Median), false)
	}
	y += rowHeight / 2
	foot := fmt.Sprintf("%s · %s", r.Machine, r.Date)
	if r.Smoke {
		foot = "SMOKE RUN, the figures mean nothing · " + foot
	}
	var b bytes.Buffer
	err := pictureTemplate.Execute(&b, map[string]any{
		"Width": pictureWidth, "Height": y + rowHeight + margin, "FootY": y + rowHeight - 7,
		"Label": left - 8, "Left": left, "Thick": barHeight, "Margin": margin, "Bars": bars,
		"TextColor": textColor, "OursColor": oursColor, "TheirColor": theirColor,
		"Foot": foot,
	})
	if err != nil {
		panic(err) // the template does not fit its data
	}
	return b.Bytes()
}
