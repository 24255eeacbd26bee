// Command encoder splits a transformer: its embedding and first block run here, so that
// no token leaves; the other blocks on a server, which sees activations and the mask; its
// head here again. The result is that of the whole encoder, bit for bit.
//
//	go run ./examples/encoder
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/examples/local"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	vocabulary, classes  = 1000, 5
	width, hidden, heads = 64, 256, 4
	blocks               = 4
	items, positions     = 24, 96
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "encoder:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	weights, rng := make(map[string]tensor.Tensor), rand.New(rand.NewPCG(1, 2))
	weight := func(name string, shape ...int64) string { // a trained one would come from a file
		weights[name] = random(rng, shape...)
		return name
	}
	bottom := append([]stack.Layer{
		{Kind: "embedding", Weight: weight("tokens", vocabulary, width)},
		{Kind: "positions", Weight: weight("positions", positions, width)},
	}, block("0", weight)...)
	var trunk []stack.Layer
	for i := range blocks - 1 {
		trunk = append(trunk, block(fmt.Sprint(i+1), weight)...)
	}
	top := []stack.Layer{{Kind: "layernorm"}, {Kind: "linear", Weight: weight("classes", classes, width)}}
	models := make(map[string]engine.Model)
	for name, layers := range map[string][]stack.Layer{"bottom": bottom, "trunk": trunk, "top": top, "whole": slices.Concat(bottom, trunk, top)} {
		spec, err := stack.New(stack.Spec{Format: 2, Name: name, Version: "1", Mask: name != "top", Layers: layers}, weights)
		if err != nil {
			return err
		}
		if models[name], err = cpu.Stack(host, spec); err != nil {
			return err
		}
	}

	address, stop, err := local.Serve(host, server.Config{}, models["trunk"])
	if err != nil {
		return err
	}
	defer func() { _ = stop() }()
	c, err := client.Dial(address, client.Config{})
	if err != nil {
		return err
	}
	defer c.Close()

	ids, mask, err := sentences(rng)
	if err != nil {
		return err
	}
	x, err := engine.Compute(ctx, models["bottom"], nil, ids, mask)
	if err != nil {
		return err
	}
	call, err := c.Call(ctx, client.Request{Model: "trunk", Inputs: []client.Input{client.From("x", x[0]), client.From("mask", mask)}})
	if err != nil {
		return err
	}
	results, err := call.Wait()
	if err != nil {
		return err
	}
	split, err := engine.Compute(ctx, models["top"], nil, results["y"])
	if err != nil {
		return err
	}
	whole, err := engine.Compute(ctx, models["whole"], nil, ids, mask)
	if err != nil {
		return err
	}
	if !bytes.Equal(split[0].Data, whole[0].Data) {
		return errors.New("the split encoder's result is not that of the whole one")
	}
	fmt.Printf("%v became %v: split as whole, all %d bytes\n", ids.Desc, split[0].Desc, len(whole[0].Data))
	return nil
}

// block is one block of the encoder, whose weights have names that begin with prefix.
func block(prefix string, weight func(string, ...int64) string) []stack.Layer {
	return []stack.Layer{
		{Kind: "residual", Op: "start"},
		{Kind: "layernorm"},
		{Kind: "attention", Heads: heads, Weight: weight(prefix+".in", 3*width, width), OutWeight: weight(prefix+".out", width, width)},
		{Kind: "residual", Op: "add"},
		{Kind: "residual", Op: "start"},
		{Kind: "layernorm"},
		{Kind: "linear", Weight: weight(prefix+".up", hidden, width)},
		{Kind: "gelu"},
		{Kind: "linear", Weight: weight(prefix+".down", width, hidden)},
		{Kind: "residual", Op: "add"},
	}
}

// sentences are ids of several lengths, and the mask that says which of them are padding.
func sentences(rng *rand.Rand) (ids, mask tensor.Tensor, err error) {
	words, seen := make([]int64, items*positions), make([]bool, items*positions)
	for i := range items {
		for j := range positions - 3*i {
			words[i*positions+j], seen[i*positions+j] = rng.Int64N(vocabulary), true
		}
	}
	if ids, err = tensor.Of(words, items, positions); err == nil {
		mask, err = tensor.Of(seen, items, positions)
	}
	return ids, mask, err
}

func random(rng *rand.Rand, shape ...int64) tensor.Tensor {
	values := make([]float32, shape[0]*shape[1])
	for i := range values {
		values[i] = float32(rng.NormFloat64()) / 8
	}
	t, err := tensor.Of(values, shape...)
	if err != nil {
		panic(err) // only a mistake in a shape
	}
	return t
}
