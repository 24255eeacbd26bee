package fashion

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// minRight is what tools/train/fashion.py asks of the network, in images.
const minRight = 860

func TestImagesAreThoseOfTheDataset(t *testing.T) {
	pixels, labels := Images()
	if len(pixels) != Count*Pixels || len(labels) != Count {
		t.Fatalf("%d pixels, %d labels", len(pixels), len(labels))
	}
	// The first labels of the test set, as the dataset's own page shows them.
	if want := []byte{9, 2, 1, 1, 6, 1, 4, 6, 5, 7}; !bytes.Equal(labels[:10], want) {
		t.Errorf("labels begin %v, want %v", labels[:10], want)
	}
	var perClass [len(ClassNames)]int
	for _, l := range labels {
		perClass[l]++
	}
	for class, n := range perClass {
		if n < 50 {
			t.Errorf("only %d images of class %s", n, ClassNames[class])
		}
	}
	pixels[0]++
	if again, _ := Images(); again[0] == pixels[0] {
		t.Error("two callers share the pixels")
	}
}

func TestAssetsStaySmallAndLicensed(t *testing.T) {
	var data, models int64
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if strings.HasPrefix(path, "data/") {
			data += info.Size()
		} else {
			models += info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if data > 500_000 || models > 500_000 {
		t.Errorf("%d bytes of data, %d of models", data, models)
	}
	if !strings.Contains(string(read("LICENSE")), "Copyright (c) 2017 Zalando SE") {
		t.Error("the terms of the dataset are gone")
	}
}

func TestPredictionsAreOneClassPerImageAndMostlyRight(t *testing.T) {
	desc, _, err := tensorfile.ReadNPYLayout(bytes.NewReader(read("predictions.npy")))
	if want := (tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{Count}}); err != nil || !desc.Equal(want) {
		t.Fatalf("got %v, %v", desc, err)
	}
	_, labels := Images()
	right := 0
	for i, p := range Predictions() {
		if int(p) >= len(ClassNames) {
			t.Fatalf("image %d: class %d", i, p)
		}
		if p == labels[i] {
			right++
		}
	}
	if right < minRight {
		t.Errorf("%d of %d right, want %d", right, Count, minRight)
	}
}

// The network in loops, in float32, summing in the most naive order: if this
// predicts what PyTorch did for every image, any engine can.
func TestNaiveForwardPassPredictsWhatTorchPredicted(t *testing.T) {
	pixels, _ := Images()
	want := Predictions()
	var layers []func([]float32) []float32
	for _, name := range Models {
		layers = append(layers, loadModel(t, name)...)
	}
	for i := range Count {
		x := make([]float32, Pixels)
		for j, p := range pixels[i*Pixels : (i+1)*Pixels] {
			x[j] = float32(p) / 255
		}
		for _, layer := range layers {
			x = layer(x)
		}
		best := 0
		for class := range x {
			if x[class] > x[best] {
				best = class
			}
		}
		if best != int(want[i]) {
			t.Errorf("image %d: %s, torch says %s", i, ClassNames[best], ClassNames[want[i]])
		}
		for class := range x {
			if class != best && x[best]-x[class] < 1e-3 {
				t.Errorf("image %d: class %d is %g from class %d", i, class, x[best]-x[class], best)
			}
		}
	}
}

func loadModel(t *testing.T, name string) (layers []func([]float32) []float32) {
	t.Helper()
	text, err := fs.ReadFile(ModelFS(), name+"/model.json")
	if err != nil {
		t.Fatal(err)
	}
	var model struct {
		Name, Version string
		Layers        []struct{ Kind, Weight, Bias string }
	}
	if err := json.Unmarshal(text, &model); err != nil || model.Name != "fashion-"+name || model.Version == "" {
		t.Fatalf("%+v, %v", model, err)
	}
	file, err := fs.ReadFile(ModelFS(), name+"/weights.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	weights, err := tensorfile.ParseSafetensors(file)
	if err != nil {
		t.Fatal(err)
	}
	floats := func(name string) ([]float32, tensor.Shape) {
		w, err := weights.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		w.Data = bytes.Clone(w.Data) // an embedded file may begin anywhere
		f, err := tensor.Slice[float32](w)
		if err != nil {
			t.Fatal(err)
		}
		return f, w.Shape
	}
	for _, l := range model.Layers {
		switch l.Kind {
		case "linear":
			w, shape := floats(l.Weight)
			b, _ := floats(l.Bias)
			outs, ins := int(shape[0]), int(shape[1])
			layers = append(layers, func(x []float32) []float32 {
				y := make([]float32, outs)
				for o := range y {
					y[o] = b[o]
					for i, xi := range x {
						y[o] += w[o*ins+i] * xi
					}
				}
				return y
			})
		case "relu":
			layers = append(layers, func(x []float32) []float32 {
				for i := range x {
					x[i] = max(x[i], 0)
				}
				return x
			})
		default:
			t.Fatalf("model %s has a layer of kind %q", name, l.Kind)
		}
	}
	return layers
}
