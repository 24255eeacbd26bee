package worker

import (
	"encoding/json"
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
)

// info is what a guest says of its model: the json of ready.
type info struct {
	engine.Info
	BlockRows int64  `json:"block_rows"`
	Stateful  bool   `json:"stateful"`
	Error     string `json:"error"`
}

// parseInfo reads the json of ready, under the name that the model is served by.
func parseInfo(name string, text []byte) (*info, error) {
	var i info
	if err := json.Unmarshal(text, &i); err != nil {
		return nil, fmt.Errorf("its description is not JSON: %w", err)
	}
	if i.Error != "" {
		return nil, fmt.Errorf("it did not load: %s", clean(i.Error))
	}
	if len(i.Inputs) == 0 && i.Rows != 0 {
		return nil, fmt.Errorf("a model without inputs has no rows; it says %d", i.Rows)
	}
	i.Name, i.Info.BlockRows = name, i.BlockRows
	return &i, i.Validate()
}
