package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/tensorferry/tensorferry/examples/fashion"
)

// A drawing is drawColumns characters wide and half as many lines high, because a
// character in a terminal is about twice as high as it is wide.
const (
	drawColumns = 24
	drawLines   = drawColumns / 2
)

// drawing is an image to draw, with its predicted and its true class.
type drawing struct {
	pixels           []float32 // fashion.Pixels values from 0 to 1
	predicted, label byte
}

func (d drawing) caption() string {
	text := fashion.ClassNames[d.predicted]
	if d.predicted != d.label {
		text += ", is " + fashion.ClassNames[d.label]
	}
	return text
}

// choose returns demoDrawn images of different classes to draw. The last one is a wrong
// prediction, if there is any.
func (n *splitNetwork) choose(classes []byte) []drawing {
	var drawn []drawing
	var shown [len(fashion.ClassNames)]bool
	for k := range demoDrawn {
		mistake := k == demoDrawn-1
		for i, c := range classes {
			label := n.labels[i]
			if (c != label) == mistake && !shown[label] && !shown[c] {
				shown[label] = true
				drawn = append(drawn, drawing{n.pixels[i*fashion.Pixels : (i+1)*fashion.Pixels], c, label})
				break
			}
		}
	}
	return drawn
}

// draw draws images side by side, in shades of gray or else in ASCII.
func draw(w io.Writer, images []drawing, shades bool) {
	for line := range drawLines {
		var text strings.Builder
		for i, d := range images {
			if i > 0 {
				text.WriteString("  ")
			}
			for column := range drawColumns {
				if upper, lower := d.at(column, 2*line, 1), d.at(column, 2*line+1, 1); shades {
					fmt.Fprintf(&text, "\x1b[38;5;%d;48;5;%dm▀", gray(upper), gray(lower))
				} else {
					const ramp = " .:-=+*#%@"
					text.WriteByte(ramp[int(d.at(column, 2*line, 2)*(float32(len(ramp))-0.01))])
				}
			}
			if shades {
				text.WriteString("\x1b[0m")
			}
		}
		fmt.Fprintln(w, strings.TrimRight(text.String(), " "))
	}
	var text strings.Builder
	for _, d := range images {
		fmt.Fprintf(&text, "%-*s", drawColumns+2, d.caption())
	}
	fmt.Fprintln(w, strings.TrimRight(text.String(), " "))
}

// at returns the mean of the pixels that a cell covers, each weighted by its covered
// share. The cell is one column wide and high half lines high.
func (d drawing) at(column, half, high int) float32 {
	const scale = float32(fashion.Width) / drawColumns
	overlap := func(i int, lo, hi float32) float32 { return max(0, min(hi, float32(i+1))-max(lo, float32(i))) }
	left, right := float32(column)*scale, float32(column+1)*scale
	top, bottom := float32(half)*scale, float32(half+high)*scale
	var sum float32
	for y := int(top); y < fashion.Height && float32(y) < bottom; y++ {
		for x := int(left); x < fashion.Width && float32(x) < right; x++ {
			sum += d.pixels[y*fashion.Width+x] * overlap(x, left, right) * overlap(y, top, bottom)
		}
	}
	return min(1, sum/(scale*scale*float32(high)))
}

// gray returns the terminal's color for a shade from 0 to 1. Color 232 is nearly black.
func gray(v float32) int { return 232 + int(v*23.99) }

// showsColors reports whether w is a terminal that shows colors.
func showsColors(w io.Writer) bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && isTerminal(w)
}
