package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// Tensorferry names it as its users have it, with every default.
const Tensorferry = "tensorferry"

// OursWith names tensorferry with a checksum.
func OursWith(sum codec.Checksum) string { return Tensorferry + ", " + SumText(sum) }

// dialOurs is the client of a tensorferry server, with one open session.
func dialOurs(ctx context.Context, p Place) (Client, error) {
	c, err := client.Dial(Address(p), client.Config{Checksum: codec.CRC32C})
	if err != nil {
		return Client{}, err
	}
	s, err := c.Session(ctx)
	if err != nil {
		return Client{}, errors.Join(err, c.Close())
	}
	return Client{
		Run: func(ctx context.Context, op Op, first *time.Time) error {
			return Move(ctx, s, op, p.Source, p.To, first)
		},
		Close: c.Close,
	}, nil
}

// Address returns what a client of tensorferry dials.
func Address(p Place) string {
	if p.Network == "unix" {
		return "unix:" + p.Address
	}
	return p.Address
}

// Floats returns a tensor of one dimension that shares data.
func Floats(data []byte) tensor.Tensor {
	return tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(len(data) / 4)}}, Data: data}
}

// Move does op over a session of a server with the built-in models, as Client.Run does. An
// upload goes to the model that assembles it whole and answers with its size; what it
// left there is compared by the checksums alone. It borrows both.
func Move(ctx context.Context, s *client.Session, op Op, source, to []byte, first *time.Time) error {
	model := string(op)
	if op == Upload {
		model = "sink"
	}
	r := client.Request{Model: model, Inputs: []client.Input{client.From("", Floats(source))}}
	if op.Back() {
		r.Results = map[string]client.Sink{"y": client.Into(to)}
	}
	call, err := s.Call(ctx, r)
	if err != nil {
		return err
	}
	if first != nil {
		for _, err := range call.Regions() {
			if err != nil {
				return err
			}
			*first = time.Now()
			break
		}
	}
	results, err := call.Wait()
	if err != nil || op.Back() {
		return err
	}
	if got := results["bytes"].Data; len(got) != 8 || binary.LittleEndian.Uint64(got) != uint64(len(source)) {
		return fmt.Errorf("bench: %d bytes were sent, the server says %x", len(source), got)
	}
	return nil
}
