package files

import (
	"archive/zip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func TestAPipeGivesItsLastByteOnlyWhenNothingFollows(t *testing.T) {
	const size = 3
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{size}}
	for name, tc := range map[string]struct {
		sent string
		read int
	}{
		"whole":    {"abc", 3},
		"one more": {"abcd", 2},
		"two more": {"abcde", 2},
		"short":    {"ab", 2},
		"nothing":  {"", 0},
	} {
		t.Run(name, func(t *testing.T) {
			r, w := io.Pipe()
			go func() {
				_, _ = w.Write([]byte(tc.sent)) // it fails when nobody reads on
				_ = w.Close()
			}()
			s, err := pipedSource("stdin", d, size, r)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 { // and no more when it is asked again
				got, err := io.ReadAll(s.Open())
				if len(got) != tc.read || (err != nil) != (len(tc.sent) > size) {
					t.Errorf("read %d bytes, %v; want %d", len(got), err, tc.read)
				}
				tc.read = 0
			}
			_ = r.Close() // the writer ends
		})
	}
}

func TestAPipeThatStaysOpenIsNotWaitedFor(t *testing.T) {
	r, w := io.Pipe()
	defer w.Close()
	go func() { _, _ = w.Write([]byte("abc")) }()
	s, err := pipedSource("stdin", tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{3}}, 3, r)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 3)
	if _, err := io.ReadFull(s.Open(), got); err != nil || string(got) != "abc" {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestAnArrayOfAnUnsupportedTypeSpoilsItselfAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.npz")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	z := zip.NewWriter(f)
	for _, name := range []string{"int8.npy", "object.npy"} {
		text, err := os.ReadFile("../../../tensorfile/testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		w, err := z.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(text); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(z.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	got, err := openSeveral(path, nil)
	if err != nil || len(got.Tensors) != 1 || got.Tensors[0].Name != "int8" || !errors.Is(got.Errors(), tensorfile.ErrUnsupported) {
		t.Errorf("opened as %+v, %v", got, err)
	}
	if _, err := openSeveral(path, []string{"object"}); !errors.Is(err, tensorfile.ErrUnsupported) {
		t.Errorf("the array itself: %v", err)
	}
}

func TestALongTitleKeepsItsEnd(t *testing.T) {
	if got := shorten("encoder.layers.11.attention.weight"); got != "…ers.11.attention.weight" {
		t.Errorf("it is %q", got)
	}
}
