package text

import (
	"compress/bzip2"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
)

func TestTheVocabularyIsThatOfTheBook(t *testing.T) {
	f, err := os.Open("data/adventures.txt.bz2")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	book, err := io.ReadAll(bzip2.NewReader(f))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(book)
	if got := string(slices.Compact(book)); got != Vocabulary() {
		t.Errorf("the book has %q, the vocabulary %q", got, Vocabulary())
	}
}

func TestFilesStaySmallAndLicensed(t *testing.T) {
	size := map[string]int64{}
	err := fs.WalkDir(os.DirFS("."), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			folder, _, _ := strings.Cut(path, "/")
			size[folder] += info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if size["models"] > 1<<20 || size["data"] > 200_000 {
		t.Errorf("got %v bytes", size)
	}
	licence, err := os.ReadFile("data/LICENSE")
	if err != nil || !strings.Contains(string(licence), "public domain") {
		t.Errorf("the terms of the book are gone: %v", err)
	}
}

func TestTorchWritesWords(t *testing.T) {
	words := strings.Fields(strings.TrimPrefix(Torch(), Start))
	if !strings.HasPrefix(Torch(), Start) || len(words) < 30 {
		t.Errorf("torch wrote %q", Torch())
	}
}
