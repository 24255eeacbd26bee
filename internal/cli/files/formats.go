package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// format is a file format that tensorferry neither reads nor writes.
type format struct {
	name    string
	endings []string
	magic   string // first bytes of a file; empty if unknown
	convert string // Python that converts it to a supported format
}

var formats = []format{
	{"checkpoint", []string{".ckpt"}, "", `torch.save(torch.load("x.ckpt", weights_only=True)["state_dict"], "x.pt")`},
	{"HDF5", []string{".h5", ".hdf5", ".keras"}, "\x89HDF\r\n\x1a\n", `numpy.save("x.npy", h5py.File("x.h5")["name"][:])`},
	{"ONNX", []string{".onnx"}, "", `numpy.savez("x.npz", **{w.name: onnx.numpy_helper.to_array(w) for w in onnx.load("x.onnx").graph.initializer})`},
	{"text", []string{".txt", ".csv", ".tsv", ".json"}, "", `numpy.save("x.npy", numpy.loadtxt("x.txt")), with delimiter="," for .csv`},
	{"pickle", []string{".pkl", ".pickle"}, "", `numpy.save("x.npy", array) in the program that made it; tensorferry does not unpickle`},
	{"GGUF", []string{".gguf"}, "GGUF", `numpy.savez("x.npz", **{t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader("x.gguf").tensors})`},
	{"MATLAB", []string{".mat"}, "MATLAB 5.0 MAT-file", `numpy.save("x.npy", scipy.io.loadmat("x.mat")["name"])`},
	{"Parquet", []string{".parquet"}, "PAR1", `numpy.save("x.npy", pandas.read_parquet("x.parquet").to_numpy())`},
	{"TensorFlow", []string{".tflite", ".pb"}, "", `numpy.savez("x.npz", **{w.name: w.numpy() for w in model.variables})`},
}

// formatOf finds a format by a file's extension. One without a name is none of formats.
func formatOf(path string) (found format) {
	for _, f := range formats {
		if slices.Contains(f.endings, strings.ToLower(filepath.Ext(path))) {
			found = f
		}
	}
	return found
}

// formatError returns the error of reading a file as .npy, or one that names the format that the
// file has by its first bytes, head. raw is what else the command reads.
func formatError(title string, head []byte, raw RawInput, err error) error {
	if !errors.Is(err, tensorfile.ErrFormat) || bytes.HasPrefix(head, []byte("\x93NUMPY")) {
		return err
	}
	f := formatOf(title)
	for _, other := range formats {
		if other.magic != "" && bytes.HasPrefix(head, []byte(other.magic)) {
			f = other
		}
	}
	zip := bytes.HasPrefix(head, []byte("PK\x03\x04"))
	switch {
	case zip && bytes.Contains(head, []byte("/data.pkl")):
		return fail.Hinted(fmt.Errorf("%s is a PyTorch file with another extension", title), "rename it to end in .pt")
	case f.name != "":
		return fail.Hinted(fail.In(title, fmt.Errorf("%s files are not supported", f.name)), "convert it in Python: "+f.convert)
	case zip:
		return fail.Hinted(fmt.Errorf("%s is a zip archive, not a .npy file", title), "files of numpy.savez must have names that end in .npz")
	case len(head) > 9 && binary.LittleEndian.Uint64(head) <= tensorfile.MaxSafetensorsHeader && head[8] == '{':
		return fail.Hinted(fmt.Errorf("%s is a .safetensors file with another extension", title), "rename it to end in .safetensors")
	}
	hint := "raw bytes need --dtype and --shape"
	if raw.Shaped == nil { // the command has neither
		hint = "for raw bytes, store them with tensorferry push NAME=FILE --dtype TYPE --shape SHAPE, and use @NAME"
	}
	return fail.Hinted(fmt.Errorf("%s is not a .npy file", title), hint)
}

// headOf returns the first bytes of a file, as far as they can be read.
func headOf(path string) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	head := make([]byte, 128)
	n, _ := io.ReadFull(f, head) // the file may be shorter
	return head[:n]
}

const arraysSuffix = ".npz"

// torchSuffixes end the names of files of torch.save: of one tensor, or of a dict of several.
var torchSuffixes = []string{".pt", ".pth"}

func hasSuffix(path string, endings []string) bool {
	return slices.ContainsFunc(endings, func(ending string) bool { return strings.HasSuffix(path, ending) })
}

// IsTorch reports whether a path is of a file of torch.save.
func IsTorch(path string) bool { return hasSuffix(path, torchSuffixes) }
