package worker

import (
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

// info is what a guest says of its model.
type info struct {
	engine   engine.Info
	stateful bool
}

func (i *info) equal(o *info) bool { return reflect.DeepEqual(i, o) }

// readyJSON is that of the message.
type readyJSON struct {
	Error     string            `json:"error"`
	Version   string            `json:"version"`
	Device    string            `json:"device"`
	Inputs    []portJSON        `json:"inputs"`
	Outputs   []portJSON        `json:"outputs"`
	Rows      int               `json:"rows"`
	BlockRows int64             `json:"block_rows"`
	Params    []engine.Param    `json:"params"`
	About     map[string]string `json:"about"`
	Stateful  bool              `json:"stateful"`
}

type portJSON struct {
	Name   string   `json:"name"`
	DTypes []string `json:"dtypes"`
	Shape  []int64  `json:"shape"`
	Whole  bool     `json:"whole"`
}

// parseInfo reads the json of ready, under the name that the model is served by.
func parseInfo(name string, text []byte) (*info, error) {
	var r readyJSON
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("its description is not JSON: %w", err)
	}
	if r.Error != "" {
		return nil, fmt.Errorf("it did not load: %s", clean(r.Error))
	}
	i := &info{stateful: r.Stateful, engine: engine.Info{
		Name: name, Version: r.Version, Device: r.Device, Rows: r.Rows, BlockRows: r.BlockRows, Params: r.Params, About: r.About,
	}}
	for _, side := range []struct {
		from []portJSON
		to   *[]engine.Port
	}{{r.Inputs, &i.engine.Inputs}, {r.Outputs, &i.engine.Outputs}} {
		for _, p := range side.from {
			port := engine.Port{Name: p.Name, Shape: p.Shape, Whole: p.Whole}
			for _, text := range p.DTypes {
				d, err := tensor.ParseDataType(text)
				if err != nil {
					return nil, fmt.Errorf("port %q: %w", p.Name, err)
				}
				port.DTypes = append(port.DTypes, d)
			}
			*side.to = append(*side.to, port)
		}
	}
	if len(r.Inputs) == 0 && r.Rows != 0 {
		return nil, fmt.Errorf("a model without inputs has no rows; it says %d", r.Rows)
	}
	return i, i.engine.Validate()
}
