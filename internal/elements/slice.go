package elements

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// errSlice is wrapped when a text is not a slice of a tensor.
var errSlice = errors.New("elements: bad slice")

// Slice is a part of a tensor, as NumPy has it: of each axis one place, or every step-th
// of some.
type Slice struct {
	of   tensor.Desc
	axes []places
	// Desc is what the part is: an axis of which one place is taken is gone.
	Desc tensor.Desc
}

// places are those that a slice takes of an axis.
type places struct{ start, count, step int64 }

// ParseSlice reads a slice of a tensor: for each axis a place, or start:stop:step of
// which any may be left out, with commas between them. Negative places count from the
// end. Axes that are left out at the end, or for which ... stands, are whole.
func ParseSlice(text string, d tensor.Desc) (Slice, error) {
	s := Slice{of: d, Desc: tensor.Desc{DType: d.DType, Shape: tensor.Shape{}}}
	var parts []string
	if text != "" {
		parts = strings.Split(strings.ReplaceAll(text, " ", ""), ",")
	}
	missing := len(d.Shape) - len(parts)
	if at := slices.Index(parts, "..."); at >= 0 && missing >= -1 {
		parts = slices.Concat(parts[:at], slices.Repeat([]string{":"}, missing+1), parts[at+1:])
	} else if missing > 0 {
		parts = append(parts, slices.Repeat([]string{":"}, missing)...)
	}
	if len(parts) > len(d.Shape) {
		return s, fmt.Errorf("%w: %q has %d axes, %v has %d", errSlice, text, len(parts), d, len(d.Shape))
	}
	for i, part := range parts {
		p, single, err := parsePlaces(part, d.Shape[i])
		if err != nil {
			return s, fmt.Errorf("%w: %q: axis %d: %w", errSlice, text, i, err)
		}
		s.axes = append(s.axes, p)
		if !single {
			s.Desc.Shape = append(s.Desc.Shape, p.count)
		}
	}
	return s, nil
}

func parsePlaces(text string, dim int64) (p places, single bool, err error) {
	parts := strings.Split(text, ":")
	if len(parts) > 3 {
		return p, false, errors.New("use start:stop:step")
	}
	n := []int64{0, dim, 1}
	for i, part := range parts {
		if part == "" && len(parts) > 1 {
			continue
		}
		if n[i], err = strconv.ParseInt(part, 10, 64); err != nil {
			return p, false, fmt.Errorf("%q is not a whole number", part)
		}
		if i < 2 && n[i] < 0 {
			n[i] += dim
		}
	}
	if len(parts) == 1 {
		if n[0] < 0 || n[0] >= dim {
			return p, true, fmt.Errorf("%s is outside of the axis, which has %d places", text, dim)
		}
		return places{n[0], 1, 1}, true, nil
	}
	start, stop, step := min(max(n[0], 0), dim), min(max(n[1], 0), dim), n[2]
	if step < 1 {
		return p, false, errors.New("the step must be 1 or more")
	}
	p = places{start, 0, step}
	if stop > start {
		p.count = (stop-start-1)/step + 1
	}
	return p, false, nil
}

// Index returns where in the whole tensor the i-th element of the part is.
func (s *Slice) Index(i int64) []int64 {
	index := make([]int64, len(s.axes))
	for axis := len(s.axes) - 1; axis >= 0; axis-- {
		p := s.axes[axis]
		index[axis] = p.start + i%p.count*p.step
		i /= p.count
	}
	return index
}

// Reader returns the bytes of the part, of a whole tensor that r, which is borrowed,
// yields. It reads r to the tensor's end before it gives the last byte, or the end of
// none: if r checks what it brings, nothing unchecked is taken for the part.
func (s *Slice) Reader(r io.Reader) (io.Reader, error) {
	size, err := s.of.Bytes()
	if err != nil {
		return nil, err
	}
	part, err := s.Desc.Bytes()
	if err != nil {
		return nil, err
	}
	c := &cutting{run: int64(s.of.DType.Bits() / 8)}
	if b, ok := r.(*bytes.Reader); ok {
		c.r = view{b}
	} else {
		c.r = bufio.NewReaderSize(io.LimitReader(r, size), compareBytes)
	}
	axis := len(s.axes) - 1
	for ; axis >= 0 && s.axes[axis] == (places{0, s.of.Shape[axis], 1}); axis-- {
		c.run *= s.of.Shape[axis]
	}
	c.axes = slices.Clone(s.axes[:axis+1])
	step := c.run // bytes from one place of the axis to the next
	for i := axis; i >= 0; i-- {
		c.axes[i].start *= step
		c.axes[i].step *= step
		step *= s.of.Shape[i]
	}
	if axis >= 0 && s.axes[axis].step == 1 { // its places lie side by side
		c.run *= c.axes[axis].count
		c.axes[axis].count = 1
	}
	return tensorfile.HoldBack(c, part, func() error { return c.skipTo(size) }), nil
}

// cutting reads a part of a tensor: runs of bytes, and skips what is between.
type cutting struct {
	r interface {
		io.Reader
		Discard(n int) (int, error)
	}
	read  int64    // bytes of the tensor so far
	run   int64    // bytes of a run
	inRun int64    // bytes of this one that are still to come
	runs  int64    // those that have begun
	axes  []places // those that runs are counted in, in bytes
}

func (c *cutting) Read(p []byte) (int, error) {
	if c.inRun == 0 {
		if err := c.skipTo(c.next()); err != nil {
			return 0, err
		}
		c.inRun = c.run
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.inRun)])
	c.read, c.inRun = c.read+int64(n), c.inRun-int64(n)
	return n, unexpected(err)
}

// next returns where the next run begins.
func (c *cutting) next() (off int64) {
	n := c.runs
	c.runs++
	for _, p := range slices.Backward(c.axes) {
		off += p.start + n%p.count*p.step
		n /= p.count
	}
	return off
}

// skipTo passes over the bytes before off.
func (c *cutting) skipTo(off int64) error {
	for c.read < off {
		n, err := c.r.Discard(int(min(off-c.read, math.MaxInt32)))
		c.read += int64(n)
		if err != nil {
			return unexpected(err)
		}
	}
	return nil
}

// view is a tensor in memory, of which nothing is read that is discarded.
type view struct{ *bytes.Reader }

func (v view) Discard(n int) (int, error) {
	if n > v.Len() {
		return 0, io.EOF
	}
	_, err := v.Seek(int64(n), io.SeekCurrent)
	return n, err
}
