package main

import (
	"io"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// writtenJSON is a tensor that a command wrote to a file, as --json prints it.
type writtenJSON struct {
	Port  string       `json:"port,omitempty"` // of a model
	Name  string       `json:"name,omitempty"` // in a .safetensors file
	File  string       `json:"file"`
	DType string       `json:"dtype"`
	Shape tensor.Shape `json:"shape"`
	Bytes int64        `json:"bytes"`
}

// written describes the only tensor of t, which must have been committed.
func (t *target) written(port string) writtenJSON {
	n := t.writers[0].named
	size, _ := n.Bytes() // begin has checked it
	j := writtenJSON{Port: port, File: t.path, DType: n.DType.String(), Shape: append(tensor.Shape{}, n.Shape...), Bytes: size}
	if strings.HasSuffix(t.path, tensorfile.FileSuffix) {
		j.Name = n.name
	}
	return j
}

// callJSON is a call as run --json prints it.
type callJSON struct {
	Call    string             `json:"call"` // the call's id
	Results []writtenJSON      `json:"results"`
	Seconds map[string]float64 `json:"seconds"` // as the server measured them
}

func printCall(w io.Writer, call *client.Call, results []writtenJSON) error {
	slices.SortFunc(results, func(a, b writtenJSON) int { return strings.Compare(a.Port, b.Port) })
	t := call.Timings()
	seconds := map[string]float64{}
	for name, d := range map[string]time.Duration{
		"total": t.Total, "queue": t.Queue, "receive": t.Receive, "h2d": t.H2D, "compute": t.Compute, "d2h": t.D2H,
		"first_result": t.FirstResult, "exposed": t.Exposed(),
	} {
		seconds[name] = d.Seconds()
	}
	return writeJSON(w, callJSON{call.ID().String(), results, seconds})
}
