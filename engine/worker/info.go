package worker

import (
	"encoding/json"
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
)

// info is what a guest says of its model: the json of ready.
type info struct {
	described
	Stateful    bool        `json:"stateful"`
	Blocks      int         `json:"blocks"`      // it takes at a time: what it does not compute yet waits in order; 0 is 1
	Concurrency int         `json:"concurrency"` // how many it computes at once; 0 is 1
	Error       string      `json:"error"`
	Companions  []described `json:"companions"` // named after what they do
}

// described is one model of a guest.
type described struct {
	engine.Info
	BlockRows int64 `json:"block_rows"`
	Keeps     bool  `json:"keeps"`   // its calls leave something that takes memory
	Ordered   bool  `json:"ordered"` // its calls may say in which order they run
}

// parseInfo reads the json of ready, under the name that the model is served by.
func parseInfo(name string, text []byte) (*info, error) {
	var i info
	if err := json.Unmarshal(text, &i); err != nil {
		return nil, fmt.Errorf("its description is not JSON: %w", err)
	}
	if i.Error != "" {
		return nil, fmt.Errorf("it did not load: %s", cut(clean(i.Error), traceBytes))
	}
	for j := range i.Companions {
		c := &i.Companions[j]
		if err := c.check(name + "/" + c.Name); err != nil {
			return nil, err
		}
	}
	if i.Concurrency > 1 && (i.Stateful || len(i.Companions) > 0) {
		return nil, fmt.Errorf("a model that is stateful or trains computes one block at a time, not %d", i.Concurrency)
	}
	i.Blocks, i.Concurrency = min(i.Blocks, mostAhead), min(i.Concurrency, mostConcurrency)
	return &i, i.check(name)
}

// check checks what a guest says of a model, under the name that it is served by.
func (d *described) check(name string) error {
	if len(d.Inputs) == 0 && d.Rows != 0 {
		return fmt.Errorf("a model without inputs has no rows; it says %d", d.Rows)
	}
	d.Name, d.Info.BlockRows = name, d.BlockRows
	return d.Validate()
}
