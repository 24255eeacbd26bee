// Package kernels holds the programs that engine/cuda runs on a GPU: their source,
// kernels.cu, the PTX compiled from it, and a struct of parameters for each kernel. It
// does not compile, load or launch them: `make kernels` compiles, engine/cuda loads and
// launches, and nothing else imports this package. All of it is safe for concurrent
// use. PTX is handed over as a copy; an address of device memory owns nothing.
package kernels

import (
	"cmp"
	"embed"
	"encoding/json"
	"slices"
)

// Image is the PTX of all kernels for one kind of GPU.
type Image struct {
	Name   string   `json:"name"`   // the file is this and ".ptx"
	Target string   `json:"target"` // the oldest GPU that runs it, such as "sm_75"
	ISA    string   `json:"isa"`    // the version of PTX, such as "6.3": it decides the oldest driver
	SHA256 string   `json:"sha256"` // of PTX
	Flags  []string `json:"flags"`  // of the compiler, without the files
	GPUs   []string `json:"gpus"`   // that passed the tests of engine/cuda with exactly these bytes
	PTX    []byte   `json:"-"`      // text, without the NUL that a driver needs at its end
}

//go:embed manifest.json sm_75.ptx sm_80.ptx
var files embed.FS

// manifest records how the images were made.
type manifest struct {
	Compiler string            `json:"compiler"` // the first line of its --version
	Sources  map[string]string `json:"sources"`  // SHA-256 by file
	Images   []Image           `json:"images"`
}

// Images returns the images in the order in which a loader tries them: those first that a GPU
// has run, then the higher target. It hands over everything in them.
func Images() []Image {
	images := readManifest().Images
	for i := range images {
		images[i].PTX = read(images[i].Name + ".ptx")
	}
	inOrder(images)
	return images
}

func inOrder(images []Image) {
	slices.SortStableFunc(images, func(a, b Image) int {
		return cmp.Or(
			min(len(b.GPUs), 1)-min(len(a.GPUs), 1),
			len(b.Target)-len(a.Target), // sm_100 is above sm_90
			cmp.Compare(b.Target, a.Target),
		)
	})
}

func readManifest() (m manifest) {
	if err := json.Unmarshal(read("manifest.json"), &m); err != nil {
		panic("kernels: manifest.json: " + err.Error()) // a mistake in the build, which tests see
	}
	return m
}

// read copies an embedded file.
func read(name string) []byte {
	data, err := files.ReadFile(name)
	if err != nil {
		panic("kernels: " + err.Error()) // likewise
	}
	return data
}
