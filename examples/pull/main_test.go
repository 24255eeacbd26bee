package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/store"
)

func TestTheProgramEndsByItselfAndShowsWhatItPulled(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"weights/bias", "train/images", "train/wave", "sources: [gen mandelbrot]", "every byte is the one that was sent"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it does not print %q:\n%s", want, out.String())
		}
	}
}

func TestTheSourceSaysWhichParameterItDoesNotTake(t *testing.T) {
	for _, bad := range []string{"", "0", "-1", "4096", "wide"} {
		_, err := mandelbrot(t.Context(), map[string]string{"width": bad})
		if !errors.Is(err, store.ErrParams) || !strings.Contains(err.Error(), "width") {
			t.Errorf("width %q: %v", bad, err)
		}
	}
	r, err := mandelbrot(t.Context(), map[string]string{"width": "4095", "height": "1"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	if got := r.Info().Desc.String(); got != "uint8[1 4095]" {
		t.Errorf("it made %s", got)
	}
}
