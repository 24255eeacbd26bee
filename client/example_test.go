package client_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
)

// keepBias is what the README shows.
func keepBias(ctx context.Context, c *client.Client) error {
	bias, err := tensor.Of([]float32{1, 2, 3})
	if err != nil {
		return err
	}
	if _, err := c.Push(ctx, client.PushRequest{Tensors: []client.Input{
		{Name: "layer0/bias", Desc: bias.Desc, Data: bias.Data},
	}}); err != nil {
		return err
	}
	pulled, err := c.Pull(ctx, client.PullRequest{Select: []client.Selection{
		{Name: "layer0/*"}, // a name, or a glob
		{Name: "gen", Source: true, Params: map[string]string{"shape": "2,3", "fill": "count"}},
	}})
	if err != nil {
		return err
	}
	for _, t := range pulled {
		fmt.Println(t.Name, t.Desc, t.Digest)
	}
	return nil
}

func ExampleClient_Pull() {
	address, stop := serveBuiltins()
	defer stop()
	c, err := client.Dial(address, client.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	if err := keepBias(context.Background(), c); err != nil {
		fmt.Println(err)
	}
	// Output:
	// layer0/bias float32[3] xxh3:2c80bda405a7fdf62ca51b47fa70740e
	// gen float32[2 3] xxh3:2d0408b485dd77b108c27fcd95d1fea5
}

// A tensor larger than memory goes to a file, and of what the file has already
// nothing is sent again.
func ExampleAt() {
	address, stop := serveBuiltins()
	defer stop()
	c, err := client.Dial(address, client.Config{ChunkBytes: 64 << 10})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	file, err := os.CreateTemp("", "pulled")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = os.Remove(file.Name()) }()
	defer file.Close()

	pull := func(held ...client.Range) (client.Summary, error) {
		list, err := c.Pull(context.Background(), client.PullRequest{
			Select: []client.Selection{{Name: "gen", Source: true, Params: map[string]string{"shape": "1000000"}, Held: held}},
			To:     func(string, tensor.Desc) (client.Sink, error) { return client.At(file), nil },
		})
		if err != nil {
			return client.Summary{}, err
		}
		return list[0], nil
	}
	first, err := pull()
	if err != nil {
		fmt.Println(err)
		return
	}
	again, err := pull(client.Range{Len: 3_000_000})
	if err != nil {
		fmt.Println(err)
		return
	}
	how, err := c.Transfer(context.Background(), again.Transfer)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("same digest:", first.Digest == again.Digest)
	fmt.Printf("sent again: %d of %d bytes\n", how.Tensors[0].Moved, again.Bytes)
	// Output:
	// same digest: true
	// sent again: 1050880 of 4000000 bytes
}

// serveBuiltins is a server as tensorferry serve runs it, in this process.
func serveBuiltins() (address string, stop func()) {
	host := cpu.NewHost(cpu.HostConfig{})
	models := engine.NewRegistry()
	for _, m := range cpu.Builtins(host) {
		if err := models.Add(m); err != nil {
			panic(err)
		}
	}
	var sources store.Sources
	if err := sources.Add("gen", store.Generator()); err != nil {
		panic(err)
	}
	memory := memory.New(host.Pool(), 64<<20)
	s, err := server.New(server.Config{
		Models: models, Pool: host.Pool(), Budget: host.Budget(), Store: memory, Sources: &sources,
	})
	if err != nil {
		panic(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with s.Close
	return l.Addr().String(), func() { s.Close(); <-served; _ = memory.Close(); host.Close() }
}

// A client that repeats what fails and may be repeated, for half a minute.
func ExampleConfig_retry() {
	c, err := client.Dial("127.0.0.1:50051", client.Config{Retry: retry.Exponential(), RetryFor: 30 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
}
