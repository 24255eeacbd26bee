// Package fashion is the demo's data: the first 1000 test images of Fashion-MNIST
// with their labels, a network that tells what they show, in three stack models,
// and what PyTorch predicted with it.
//
// It computes nothing. Everything is embedded, so that a program which imports it
// needs no file; tools/train/fashion.py in the repository made it. Safe for
// concurrent use.
package fashion

import (
	"bytes"
	"compress/gzip"
	"embed"
	"io"
	"io/fs"
)

// What the images are. A pixel is a byte, 0 is black; the network takes it as
// float32 divided by 255.
const (
	Count  = 1000
	Height = 28
	Width  = 28
	Pixels = Height * Width // of one image, row by row from the top
)

// ClassNames are the classes' names, indexed by label and prediction.
var ClassNames = [...]string{
	"t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
}

// Models are the folders of ModelFS in the order in which an image passes them:
// 784 to 128 with relu, 128 to 128 with relu, 128 to 10.
var Models = [...]string{"bottom", "trunk", "top"}

//go:embed data models
var files embed.FS

// Images copies the pixels of Count images, one after the other, and the label of
// each; the caller may keep and change them.
func Images() (pixels, labels []byte) {
	return idx("images-idx3-ubyte.gz", Count*Pixels), idx("labels-idx1-ubyte.gz", Count)
}

// Predictions copies the class that PyTorch gave each image, not always its label.
func Predictions() []byte {
	b := read("predictions.npy")
	return b[len(b)-Count:]
}

// ModelFS holds one folder for each of Models, each with a model.json and a
// weights.safetensors.
func ModelFS() fs.FS {
	sub, err := fs.Sub(files, "models")
	must(err)
	return sub
}

// idx reads a gzipped idx file of so many bytes, which follow its header.
func idx(name string, size int) []byte {
	z, err := gzip.NewReader(bytes.NewReader(read(name)))
	must(err)
	raw, err := io.ReadAll(z)
	must(err)
	return raw[len(raw)-size:]
}

func read(name string) []byte {
	b, err := files.ReadFile("data/" + name)
	must(err)
	return b
}

// must panics: embedded files were right when the program was built, or never.
func must(err error) {
	if err != nil {
		panic("fashion: " + err.Error())
	}
}
