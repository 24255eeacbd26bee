package wire

import (
	"math"

	"google.golang.org/protobuf/proto"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
)

// Pull is what a PullTensorsRequest says. A range of a selection takes a fifth of the
// memory that it takes in the message.
type Pull struct {
	Hello      frame.Hello
	Selections []frame.Selection
}

func (c *coder) pull(p *Pull) {
	nested(c, 1, "hello", &p.Hello, (*coder).hello)
	list(c, 2, "selections", math.MaxInt, &p.Selections, (*coder).selection)
}

// ReadPull copies what opens a pull.
func ReadPull(p *tensorferryv1.PullTensorsRequest) (*Pull, error) {
	v := new(Pull)
	return v, from(p, "pull", v, (*coder).pull)
}

// Summary copies what ended a tensor of a push.
func Summary(p *tensorferryv1.Summary) (s frame.Summary, err error) {
	err = from(p, "summary", &s, (*coder).summary)
	return s, err
}

// ToSummary copies a summary into its message.
func ToSummary(s *frame.Summary) *tensorferryv1.Summary {
	return to(new(tensorferryv1.Summary), s, (*coder).summary)
}

// from copies a message that the stock codec has read.
func from[T any](p proto.Message, name string, v *T, body func(*coder, *T)) error {
	b, err := proto.Marshal(p)
	if err != nil {
		return &FieldError{ErrMalformed, name, "a protobuf message", err.Error()}
	}
	c := new(coder)
	read(c, b, v, body)
	c.mode = checking
	body(c, v)
	return c.failed(name)
}

// to copies a part, whose names have been checked, into a message of the stock codec.
func to[P proto.Message, T any](p P, v *T, body func(*coder, *T)) P {
	c := &coder{mode: writing}
	body(c, v)
	_ = proto.Unmarshal(c.b, p)
	return p
}
