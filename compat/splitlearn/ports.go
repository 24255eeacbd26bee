package splitlearn

import (
	"fmt"
	"slices"

	pb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

// ports says where a model takes and gives what a request and an answer have. Keys and values
// of a layer come and go at ports of their own: past_key_0, past_value_0, present_key_0, …
type ports struct {
	engine.Info
	data, result  int   // the input and the output that are of no layer
	past, present []int // the others: two of each layer, in order
	trains        bool
}

// layers finds the ports of layers, and the only other one or -1.
func layers(all []engine.Port, prefix string) (of []int, other int) {
	for at := 0; at >= 0; {
		name := fmt.Sprintf("%s_%s_%d", prefix, [...]string{"key", "value"}[len(of)%2], len(of)/2)
		if at = slices.IndexFunc(all, func(p engine.Port) bool { return p.Name == name }); at >= 0 {
			of = append(of, at)
		}
	}
	if len(of)%2 > 0 || len(all) != len(of)+1 {
		return of, -1
	}
	for slices.Contains(of, other) {
		other++
	}
	return of, other
}

// inputsOf returns the inputs of a call at ports.
func inputsOf(ports []engine.Port) []engine.Input {
	in := make([]engine.Input, len(ports))
	for i, p := range ports {
		in[i].Port = p.Name
	}
	return in
}

// inputs returns what a request gives the model. A layer without an entry gets an empty one.
func (p *ports) inputs(data tensor.Tensor, entries []*pb.KVCacheEntry, m maker) ([]tensor.Tensor, error) {
	if n := len(p.past) / 2; len(entries) > n {
		return nil, invalid("past_key_values: %d entries; model %q has the inputs past_key_0, past_value_0 and so on of %d layers", len(entries), p.Name, n)
	}
	in := make([]tensor.Tensor, len(p.Inputs))
	in[p.data] = data
	for i, at := range p.past {
		var err error
		port := p.Inputs[at]
		if i/2 >= len(entries) {
			in[at], err = absent(port)
		} else if e := entries[i/2]; i%2 == 0 {
			in[at], _, err = decode(port.Name, e.GetKeyData(), e.GetKeyShape(), m)
		} else {
			in[at], _, err = decode(port.Name, e.GetValueData(), e.GetValueShape(), m)
		}
		if err != nil {
			return nil, err
		}
	}
	return in, nil
}

// absent returns the empty tensor for a port with one axis of any size.
func absent(port engine.Port) (t tensor.Tensor, err error) {
	t.DType = append(slices.Clone(port.DTypes), tensor.Float32)[0]
	free := int64(0)
	for _, d := range port.Shape {
		free += max(0, -d) // AnyAxes are two
		t.Shape = append(t.Shape, max(0, d))
	}
	if free != 1 {
		err = invalid("%s is absent, and cannot be empty: the model must declare it with one axis of any size", port.Name)
	}
	return t, err
}

// answer encodes the outputs of a run.
func (p *ports) answer(resp *pb.ComputeResponse, out []tensor.Tensor, c codec, caches bool, m maker) (err error) {
	resp.Data, resp.Shape, err = encode(out[p.result], c, m)
	for i := 0; caches && err == nil && i < len(p.present); i += 2 {
		e := new(pb.KVCacheEntry)
		if e.KeyData, e.KeyShape, err = encode(out[p.present[i]], c, m); err == nil {
			e.ValueData, e.ValueShape, err = encode(out[p.present[i+1]], c, m)
		}
		resp.PresentKeyValues = append(resp.PresentKeyValues, e)
	}
	return err
}
