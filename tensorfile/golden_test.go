package tensorfile

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
)

// The golden files were written by numpy and safetensors: testdata/make.py.
func TestFilesOfTheReferenceImplementationsReadAsTheyWereMeant(t *testing.T) {
	text, err := os.ReadFile("testdata/expected.json")
	if err != nil {
		t.Fatal(err)
	}
	var files map[string]struct {
		Tensors map[string]struct {
			DType string
			Shape tensor.Shape
			Hex   string
		}
		Metadata map[string]string
		Refusal  string
	}
	if err := json.Unmarshal(text, &files); err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		t.Run(name, func(t *testing.T) {
			got, metadata, closer, err := readGolden(filepath.Join("testdata", name))
			if kind := map[string]error{"format": ErrFormat, "unsupported": ErrUnsupported}[want.Refusal]; !errors.Is(err, kind) {
				t.Fatalf("got %v, want %v", err, kind)
			}
			if err != nil {
				return
			}
			defer closer.Close()
			if len(got) != len(want.Tensors) {
				t.Errorf("%d tensors, want %d", len(got), len(want.Tensors))
			}
			if !maps.Equal(metadata, want.Metadata) {
				t.Errorf("metadata %q, want %q", metadata, want.Metadata)
			}
			for name, w := range want.Tensors {
				g := got[name]
				if g.DType.String() != w.DType || !g.Shape.Equal(w.Shape) || hex.EncodeToString(g.Data) != w.Hex {
					t.Errorf("%q: got %v %x, want %s%v %s", name, g.Desc, g.Data, w.DType, w.Shape, w.Hex)
				}
			}
		})
	}
}

func readGolden(path string) (map[string]tensor.Tensor, map[string]string, io.Closer, error) {
	switch filepath.Ext(path) {
	case ".npy":
		a, closer, err := OpenNPY(path)
		if err != nil {
			return nil, nil, nil, err
		}
		t, err := readArray(a)
		return map[string]tensor.Tensor{"": t}, nil, closer, err
	case ".npz":
		z, err := OpenNPZ(path)
		if err != nil {
			return nil, nil, nil, err
		}
		all := map[string]tensor.Tensor{}
		for _, name := range z.Names() {
			a, err := z.Array(name)
			if err == nil {
				all[name], err = readArray(a)
			}
			if err != nil {
				return nil, nil, nil, err
			}
		}
		return all, nil, closer(func() error { return nil }), nil
	}
	s, err := OpenSafetensors(path)
	if err != nil {
		return nil, nil, nil, err
	}
	all := map[string]tensor.Tensor{}
	for _, name := range s.Names() {
		if all[name], err = s.Tensor(name); err != nil {
			return nil, nil, nil, errors.Join(err, s.Close())
		}
	}
	return all, s.Metadata(), s, nil
}

func readArray(a Array) (tensor.Tensor, error) {
	if a.Reader == nil {
		return tensor.New(a.Desc, a.Data)
	}
	data, err := io.ReadAll(a.Reader)
	if err != nil {
		return tensor.Tensor{}, err
	}
	return tensor.New(a.Desc, data)
}
