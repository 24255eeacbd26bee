// Command minus serves a model of two inputs, the difference of their bytes, on a
// free port of the loopback interface until it is killed. It says where as
// tensorferry serve does. No built-in model has several inputs; make old-new
// needs one in each of two commits.
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

func port(name string) engine.Port {
	return engine.Port{Name: name, DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.AnyAxes}}
}

var minus = cpu.RowFunc{
	Info: engine.Info{
		Name: "minus", Rows: engine.AllAxes,
		Inputs: []engine.Port{port("a"), port("b")}, Outputs: []engine.Port{port("y")},
	},
	Rows: func(_ context.Context, b cpu.RowBlock) error {
		for i := range b.Out[0] {
			b.Out[0][i] = b.In[0][i] - b.In[1][i]
		}
		return nil
	},
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func main() {
	host := cpu.NewHost(cpu.HostConfig{})
	models := engine.NewRegistry()
	must(0, models.Add(must(minus.Model(host))))
	s := must(server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget()}))
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	fmt.Fprintf(os.Stderr, "level=INFO msg=listening address=%s\n", l.Addr())
	must(0, s.Serve(l))
}
