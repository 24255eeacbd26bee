package demo

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/text"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	// A text ends with the first sentence that ends after so many characters.
	leastText = 400
	// The lower the temperature, the more often the likeliest character is the next.
	temperature = 0.5
	// columnWidth is that of each of two texts.
	columnWidth = 35
)

// part runs the next characters of a text through a part of the network.
type part func(context.Context, tensor.Tensor) (tensor.Tensor, error)

// writer writes a text, one character after the other. Two of the same seed write the same.
type writer struct {
	parts       []part
	states      []engine.State // of the parts that run here
	temperature float64
	random      *rand.Rand
	text        []byte
	read        int           // characters of it that have passed the parts
	took        time.Duration // all calls of next
}

// newWriter begins a text. The trunk runs on served, or here if that is nil. Close must follow.
func newWriter(ctx context.Context, host *cpu.Host, served *client.Sequence, seed uint64) (*writer, error) {
	w := &writer{temperature: temperature, random: rand.New(rand.NewPCG(seed, 0)), text: []byte(text.Start)}
	for _, name := range text.Models {
		if name == "trunk" && served != nil {
			w.parts = append(w.parts, served.Step)
			continue
		}
		p, s, err := here(ctx, host, name)
		if err != nil {
			w.Close()
			return nil, err
		}
		w.parts, w.states = append(w.parts, p), append(w.states, s)
	}
	return w, nil
}

// here begins a sequence of a part that runs in this process.
func here(ctx context.Context, host *cpu.Host, name string) (part, engine.State, error) {
	m, err := cpu.LoadFS(host, text.ModelFS(), name)
	if err != nil {
		return nil, nil, err
	}
	q, _ := engine.As[engine.Sequencer](m) // all stack models are
	s, err := q.Begin(ctx, engine.Sequence{MaxRows: text.Positions})
	return func(ctx context.Context, x tensor.Tensor) (y tensor.Tensor, err error) {
		out, err := engine.Step(ctx, m, s, x)
		if err == nil {
			y = out[0]
		}
		return y, err
	}, s, err
}

// Close ends the sequences of the parts that run here.
func (w *writer) Close() {
	for _, s := range w.states {
		s.Close()
	}
}

// next appends a character to the text.
func (w *writer) next(ctx context.Context) error {
	begin := time.Now()
	defer func() { w.took += time.Since(begin) }()
	vocabulary := text.Vocabulary()
	var ids []int32
	for _, c := range w.text[w.read:] {
		ids = append(ids, int32(strings.IndexByte(vocabulary, c)))
	}
	x, err := tensor.Of(ids, 1, int64(len(ids)))
	for _, p := range w.parts {
		if err == nil {
			x, err = p(ctx, x)
		}
	}
	if err != nil {
		return err
	}
	logits, err := tensor.Slice[float32](x) // of each character; those of the last tell the next
	if err != nil {
		return err
	}
	w.read = len(w.text)
	w.text = append(w.text, vocabulary[w.pick(logits[len(logits)-len(vocabulary):])])
	return nil
}

// pick returns an id by chance, as the logits say.
func (w *writer) pick(logits []float32) int {
	highest, sum := slices.Max(logits), 0.0
	sums := make([]float64, len(logits))
	for i, l := range logits {
		sum += math.Exp(float64(l-highest) / w.temperature)
		sums[i] = sum
	}
	i, _ := slices.BinarySearch(sums, sum*w.random.Float64())
	return i
}

// ended says that a sentence has ended and the text is long enough, or as long as it can be.
func (w *writer) ended() bool {
	n := len(w.text)
	return n == text.Positions || n >= leastText && strings.IndexByte(".!?", w.text[n-1]) >= 0
}

// perSecond returns how many characters w has written in a second.
func (w *writer) perSecond() float64 {
	return float64(len(w.text)-len(text.Start)) / w.took.Seconds()
}

// write writes a text twice at once, with the trunk on the server and with all parts here, and
// shows both as they come. It returns what to say of them.
func write(ctx context.Context, cl *client.Client, c *columns) (report string, err error) {
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	served, err := cl.Sequence(ctx, client.SequenceRequest{Model: textTrunk, MaxRows: text.Positions})
	if err != nil {
		return "", err
	}
	defer served.Close() // cl ends it otherwise
	seed := rand.Uint64()
	var both [2]*writer
	for i, trunk := range []*client.Sequence{served, nil} {
		if both[i], err = newWriter(ctx, host, trunk, seed); err != nil {
			return "", err
		}
		defer both[i].Close()
	}
	split, whole := both[0], both[1]
	for !split.ended() {
		for _, w := range both {
			if err := w.next(ctx); err != nil {
				return "", err
			}
		}
		if err := c.show(split.text, whole.text, split.ended()); err != nil {
			return "", err
		}
	}
	if !bytes.Equal(split.text, whole.text) {
		return "", fmt.Errorf("the two texts differ (seed %d)", seed)
	}
	return fmt.Sprintf("%d characters, the same on both sides\nspeed          %.0f tokens/s split, %.0f not split",
		len(split.text), split.perSecond(), whole.perSecond()), nil
}

// columns shows two texts beside each other while they grow.
type columns struct {
	w     *bufio.Writer
	live  bool // on a terminal: a line grows, too
	shown int  // characters of each that are in whole lines
}

// show shows what has come. The lines of right break where those of left do.
func (c *columns) show(left, right []byte, ended bool) error {
	for c.shown < len(left) {
		line := left[c.shown:]
		n, whole := len(line), ended
		if i := bytes.IndexByte(line, '\n'); i >= 0 {
			n, whole = i+1, true
		}
		if n > columnWidth {
			n, whole = cmp.Or(bytes.LastIndexByte(line[:columnWidth+1], ' ')+1, columnWidth), true
		}
		if !whole && !c.live {
			break
		}
		var sides []any
		for _, text := range [][]byte{left, right} {
			sides = append(sides, columnWidth, strings.TrimSpace(strings.ReplaceAll(string(text[c.shown:][:n]), "\n", " ")))
		}
		text := fmt.Sprintf("%-*s  %-*s", sides...)
		if c.live {
			text = "\r" + text // over what it was before
		} else {
			text = strings.TrimRight(text, " ")
		}
		fmt.Fprint(c.w, text)
		if !whole {
			break
		}
		fmt.Fprintln(c.w)
		c.shown += n
	}
	return c.w.Flush()
}
