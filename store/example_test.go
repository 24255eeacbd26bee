package store_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"

	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/tensor"
)

func Example_folder() {
	dir, err := os.MkdirTemp("", "store")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder
	if err := keep(context.Background(), dir); err != nil {
		log.Fatal(err)
	}
	// Output: layers/0/bias float32[2] xxh3:4533ce61c4655ba3c3e077b25dd1d769
}

func keep(ctx context.Context, dir string) error {
	s, err := folder.Open(dir, folder.Config{})
	if err != nil {
		return err
	}
	defer s.Close()
	x, err := tensor.Of([]float32{1, 2})
	if err != nil {
		return err
	}
	w, err := s.Create(ctx, "layers/0/bias", x.Desc, nil)
	if err != nil {
		return err
	}
	defer w.Abort()
	if err := w.WriteViews(ctx, 0, [][]byte{x.Data}); err != nil {
		return err
	}
	info, err := w.Commit(ctx) // on disk when it returns
	if err != nil {
		return err
	}
	fmt.Println(info.Name, info.Desc, info.Digest)
	return nil
}

// ramp makes a tensor for whoever pulls it.
var ramp = store.Tensor(func(_ context.Context, params map[string]string) (tensor.Tensor, error) {
	n, err := strconv.ParseUint(params["n"], 10, 16)
	if err != nil {
		return tensor.Tensor{}, fmt.Errorf("%w: n: %w", store.ErrParams, err)
	}
	data := make([]float32, n)
	for i := range data {
		data[i] = float32(i)
	}
	return tensor.Of(data)
})

func ExampleTensor() {
	var sources store.Sources
	if err := sources.Add("ramp", ramp); err != nil {
		log.Fatal(err)
	}
	src, _ := sources.Lookup("ramp")
	r, err := src(context.Background(), map[string]string{"n": "3"})
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	fmt.Println(r.Info().Desc)
	// Output: float32[3]
}
