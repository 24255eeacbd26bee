package wire

import (
	"math"

	"google.golang.org/protobuf/proto"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Pull is what a PullTensorsRequest says. A range of a selection takes a fifth of the
// memory that it takes in the message.
type Pull struct {
	Hello      frame.Hello
	Selections []frame.Selection
}

var pullFields = fields[Pull]{
	1: func(c *coder, p *Pull) { nested(c, "hello", &p.Hello, helloFields) },
	2: func(c *coder, p *Pull) { list(c, "selections", math.MaxInt, &p.Selections, selectionFields) },
}

// ReadPull copies what opens a pull.
func ReadPull(p *tensorferryv1.PullTensorsRequest) (*Pull, error) {
	v := new(Pull)
	return v, from(p, "pull", v, pullFields, "hello.session_id", &v.Hello.Session)
}

// Summary copies what ended a tensor of a push.
func Summary(p *tensorferryv1.Summary) (s frame.Summary, err error) {
	err = from(p, "summary", &s, summaryFields, "tensor_id", &s.Tensor)
	return s, err
}

// ToSummary copies a summary into its message.
func ToSummary(s *frame.Summary) *tensorferryv1.Summary {
	return to(new(tensorferryv1.Summary), s, summaryFields)
}

// from copies a message that the stock codec has read, and has the ID at a path.
func from[T any](p proto.Message, name string, v *T, of fields[T], path string, id *tensor.ID) error {
	b, err := proto.Marshal(p)
	if err != nil {
		return &FieldError{ErrMalformed, name, "a protobuf message", err.Error()}
	}
	c := new(coder)
	if read(c, b, v, of); id.IsZero() {
		c.fail(path, wantID, noID)
	}
	return c.failed(name)
}

// to copies a part, whose names have been checked, into a message of the stock codec.
func to[P proto.Message, T any](p P, v *T, of fields[T]) P {
	c := &coder{writes: true}
	write(c, v, of)
	_ = proto.Unmarshal(c.b, p)
	return p
}
