// Package text is the demo's writer: a transformer of characters that has read The Adventures of
// Sherlock Holmes, in three stack models, and what PyTorch writes with it.
//
// It computes nothing. All but what was read is embedded, so that a program which imports it
// needs no file; tools/train/text.py in the repository made it. Safe for concurrent use.
package text

import (
	"embed"
	"io/fs"
)

// Positions is the most characters that a text may have.
const Positions = 512

// Start is what Torch begins with.
const Start = "Sherlock Holmes "

// Models are the folders of ModelFS in the order in which a text passes them: ids of characters,
// int32 of [1 characters], become float32 of [1 characters width] after the first block, then
// after two more, and then for each character how likely each is to follow, as logits.
var Models = [...]string{"bottom", "trunk", "top"}

//go:embed data/*.txt models
var files embed.FS

// Vocabulary has the characters; an id is a place in it.
func Vocabulary() string { return read("vocabulary.txt") }

// Torch is Start and the characters that PyTorch takes for the likeliest, one after the other.
func Torch() string { return read("torch.txt") }

// ModelFS holds one folder for each of Models, each with a model.json and a
// weights.safetensors.
func ModelFS() fs.FS {
	sub, err := fs.Sub(files, "models")
	must(err)
	return sub
}

func read(name string) string {
	b, err := files.ReadFile("data/" + name)
	must(err)
	return string(b)
}

// must panics: embedded files were right when the program was built, or never.
func must(err error) {
	if err != nil {
		panic("text: " + err.Error())
	}
}
