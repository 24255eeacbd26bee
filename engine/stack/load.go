// Package stack reads stack models, which apply layers to x one after the other, from
// a folder or from Go. It checks them and converts their weights to float32. It refuses to
// compute: an engine makes its own program of a Model.
//
// Models are read-only and safe for concurrent use; all their bytes are copies.
package stack

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// Spec is the content of model.json: a stack model's layers, in order.
type Spec struct {
	// Format is 1 or 2; 0 means 1. The kinds of a transformer and Mask need 2.
	Format  int    `json:"format,omitempty"`
	Name    string `json:"name"`
	Version string `json:"version"`
	// Width is the last axis of the input. Zero means the width that the first weight takes.
	Width int64 `json:"width,omitempty"`
	// Mask adds a second input, mask: bool or uint8 of [items positions]. Positions with 1 are
	// attended to; positions with 0 are padding. That is the meaning of Hugging Face's
	// attention_mask, and the opposite of torch's key_padding_mask.
	Mask   bool    `json:"mask,omitempty"`
	Layers []Layer `json:"layers"`
}

// Layer is one step of a stack model. Weights are named tensors; they are
// float32, float16, bfloat16 or float64, finite, and become float32.
type Layer struct {
	// Kind is one of
	//
	//	linear     x·Wᵀ + bias; weight of shape [out in], as torch.nn.Linear keeps it
	//	relu       max(x, 0); a NaN stays one
	//	gelu       x·Φ(x), exact unless Approximate is "tanh"
	//	silu       x / (1 + e⁻ˣ)
	//	layernorm  over the last axis; weight and bias of shape [width], either may be absent
	//	rmsnorm    over the last axis; weight of shape [width], may be absent
	//	residual   Op "start" remembers x, Op "add" adds what was remembered last
	//	scale      Factor · x
	//	softmax    over the last axis
	//
	// or, in format 2, one of the following. A model with one of the first three takes x as
	// [items positions width].
	//
	//	embedding  must be the first layer. x is int32 or int64 of [items positions]; each id is
	//	           replaced by its row of the weight, of shape [vocabulary width], whose data type y has
	//	positions  adds row i of the weight, of shape [positions width], to position i of each item
	//	attention  self-attention within each item, with Heads heads, as torch.nn.MultiheadAttention
	//	           stores and computes it: weight and bias are its in_proj, of shape [3·width width]
	//	           and [3·width]; out_weight and out_bias are its out_proj; biases may be absent. With
	//	           Causal, a position attends only to itself and those before it. If a position has
	//	           nothing to attend to, out_proj gets zeros for it
	//	gated      Activation(first half of the last axis) · second half; the result has half the width
	Kind        string   `json:"kind"`
	Weight      string   `json:"weight,omitempty"`
	Bias        string   `json:"bias,omitempty"`
	Approximate string   `json:"approximate,omitempty"` // gelu: "none" (or absent) or "tanh"
	Eps         *float64 `json:"eps,omitempty"`         // layernorm (absent: 1e-5), rmsnorm (1e-6)
	Op          string   `json:"op,omitempty"`          // residual
	Factor      *float64 `json:"factor,omitempty"`      // scale
	Heads       int      `json:"heads,omitempty"`       // attention, as are the next three
	Causal      bool     `json:"causal,omitempty"`
	OutWeight   string   `json:"out_weight,omitempty"`
	OutBias     string   `json:"out_bias,omitempty"`
	Activation  string   `json:"activation,omitempty"` // gated: relu, gelu, gelu_tanh, silu or sigmoid
}

// The files of a stack model's folder.
const (
	specFile    = "model.json"
	weightsFile = "weights.safetensors"
)

// Load reads a stack model from a folder that holds model.json (a Spec) and
// weights.safetensors. It copies the weights: nothing of the folder stays open. An
// error about a model that does not fit together wraps engine.ErrInfo.
func Load(dir string) (*Model, error) {
	return load(dir, os.DirFS(dir), func() (*tensorfile.Safetensors, error) {
		return tensorfile.OpenSafetensors(filepath.Join(dir, weightsFile))
	})
}

// LoadFS is Load from a folder of fsys, such as an embed.FS. It reads weights.safetensors
// into memory, where Load maps it, and copies the weights as Load does.
func LoadFS(fsys fs.FS, dir string) (*Model, error) {
	sub, err := fs.Sub(fsys, dir)
	if err != nil {
		return nil, fmt.Errorf("stack: %w", err)
	}
	return load(dir, sub, func() (*tensorfile.Safetensors, error) {
		data, err := fs.ReadFile(sub, weightsFile)
		if err != nil {
			return nil, err
		}
		weights, err := tensorfile.ParseSafetensors(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", weightsFile, err)
		}
		return weights, nil
	})
}

func load(dir string, files fs.FS, open func() (*tensorfile.Safetensors, error)) (*Model, error) {
	spec, err := readSpec(files)
	if err != nil {
		return nil, fmt.Errorf("stack: model in %s: %w", dir, err)
	}
	weights, err := open()
	if err != nil {
		return nil, fmt.Errorf("stack: model in %s: %w", dir, err)
	}
	defer weights.Close() // only ends the loan of the views; they have been copied
	m, err := build(spec, weights.Tensor)
	if err != nil {
		return nil, fmt.Errorf("%w (in %s)", err, dir)
	}
	return m, nil
}

func readSpec(files fs.FS) (Spec, error) {
	var s Spec
	f, err := files.Open(specFile)
	if err != nil {
		return s, err
	}
	defer f.Close() // read only: nothing is lost
	text := &io.LimitedReader{R: f, N: maxSpecBytes + 1}
	var read bytes.Buffer
	d := json.NewDecoder(io.TeeReader(text, &read))
	d.DisallowUnknownFields()
	if err = d.Decode(&s); err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("something follows the model")
		}
	}
	if err == nil {
		err = unique(json.NewDecoder(&read))
	}
	if bad, ok := errors.AsType[*json.SyntaxError](err); ok {
		err = fmt.Errorf("byte %d: %w", bad.Offset, err)
	}
	if text.N == 0 {
		err = fmt.Errorf("more than %d bytes", maxSpecBytes)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %w", specFile, engine.ErrInfo, err)
	}
	return s, err
}

// unique refuses a key that an object has twice, of which json takes the last. Keys that differ
// in case only are the same to json. The text is valid, and no deeper than a Spec.
func unique(d *json.Decoder) error {
	begin, err := d.Token()
	if _, is := begin.(json.Delim); !is {
		return err
	}
	seen := map[string]bool{}
	for d.More() {
		if begin == json.Delim('{') {
			key, _ := d.Token()
			name := fmt.Sprint(key)
			if seen[strings.ToLower(name)] {
				return fmt.Errorf("byte %d: the key %q comes twice", d.InputOffset(), name)
			}
			seen[strings.ToLower(name)] = true
		}
		if err := unique(d); err != nil {
			return err
		}
	}
	_, err = d.Token()
	return err
}

// New makes a stack model of a Spec. It copies the weights.
func New(s Spec, weights map[string]tensor.Tensor) (*Model, error) {
	return build(s, func(name string) (tensor.Tensor, error) {
		t, ok := weights[name]
		if !ok {
			return t, fmt.Errorf("no tensor %q", name)
		}
		return t, nil
	})
}
