package cpu

import (
	"bytes"
	"errors"
	"io/fs"
	"testing"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestTheEmbeddedNetworkPredictsWhatTorchDid(t *testing.T) {
	h := NewHost(HostConfig{Workers: 2})
	defer h.Close()
	pixels, _ := fashion.Images()
	images := make([]float32, len(pixels))
	for i, p := range pixels {
		images[i] = float32(p) / 255
	}
	x, err := tensor.Of(images, fashion.Count, fashion.Pixels)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range fashion.Models {
		m, err := LoadFS(h, fashion.ModelFS(), name)
		if err != nil {
			t.Fatal(err)
		}
		out, err := engine.Compute(t.Context(), m, nil, x)
		if err != nil {
			t.Fatal(err)
		}
		x = out[0]
	}
	logits, err := tensor.Slice[float32](x)
	if err != nil {
		t.Fatal(err)
	}
	const k = len(fashion.ClassNames)
	classes := make([]byte, fashion.Count)
	for i := range classes {
		for c, v := range logits[i*k : (i+1)*k] {
			if v > logits[i*k+int(classes[i])] {
				classes[i] = byte(c)
			}
		}
	}
	if !bytes.Equal(classes, fashion.Predictions()) {
		t.Error("predictions differ from torch's")
	}
}

func TestAFolderThatIsNotEmbeddedIsNotFound(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	for _, name := range []string{"attic", "../models/top", ""} {
		if _, err := LoadFS(h, fashion.ModelFS(), name); err == nil || name == "attic" && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q: got %v", name, err)
		}
	}
}
