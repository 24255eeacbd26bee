package tensorfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/tensorferry/tensorferry/tensor"
)

// npyFile makes a file of a version and a header.
func npyFile(major, minor byte, header string) []byte {
	b := append([]byte(npyMagic), major, minor)
	if major == 1 {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(header)))
	} else {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(header)))
	}
	return append(b, header...)
}

func TestNPYHeaderReturnsWhatWasWritten(t *testing.T) {
	for _, d := range tensor.DataTypes() {
		for _, shape := range []tensor.Shape{
			nil, {0}, {1}, {7}, {2, 3}, {2, 0, 3}, {tensor.MaxDim}, make(tensor.Shape, tensor.MaxRank),
		} {
			desc := tensor.Desc{DType: d, Shape: shape}
			t.Run(desc.String(), func(t *testing.T) {
				var out bytes.Buffer
				err := WriteNPYHeader(&out, desc)
				if _, has := npyNames[d]; !has {
					if !errors.Is(err, ErrUnsupported) || out.Len() != 0 {
						t.Fatalf("%d bytes, %v", out.Len(), err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if out.Len()%npyAlign != 0 {
					t.Errorf("the data would begin at byte %d", out.Len())
				}
				out.WriteString("data")
				r := iotest.OneByteReader(&out)
				got, err := readPlain(r)
				if err != nil || !got.Equal(desc) {
					t.Fatalf("got %v, %v", got, err)
				}
				if rest, _ := io.ReadAll(r); string(rest) != "data" {
					t.Errorf("the reader stands at %q", rest)
				}
			})
		}
	}
}

// The longest header a desc can have must fit what the 2 bytes of length can say.
func TestNPYHeaderOfTheLargestShapeFits(t *testing.T) {
	shape := slices.Repeat(tensor.Shape{1}, tensor.MaxRank)
	shape[0] = tensor.MaxDim
	var out bytes.Buffer
	if err := WriteNPYHeader(&out, tensor.Desc{DType: tensor.Complex128, Shape: shape}); err != nil {
		t.Fatal(err)
	}
	if out.Len() > 1024 {
		t.Errorf("%d bytes", out.Len())
	}
}

func TestNPYWriterRefusesWhatIsNoTensor(t *testing.T) {
	for name, tc := range map[string]struct {
		desc tensor.Desc
		want error
	}{
		"no data type":       {tensor.Desc{}, tensor.ErrDataType},
		"negative dimension": {tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{-1}}, tensor.ErrShape},
		"too large":          {tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{1 << 40, 1 << 40}}, tensor.ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := WriteNPYHeader(&out, tc.desc); !errors.Is(err, tc.want) || out.Len() != 0 {
				t.Errorf("%d bytes written, %v; want %v", out.Len(), err, tc.want)
			}
		})
	}
	if err := WriteNPYHeader(&failingWriter{10}, tensor.Desc{DType: tensor.Int8}); !errors.Is(err, errFull) {
		t.Errorf("full writer: %v", err)
	}
}

var npyHeaders = map[string]struct {
	header string
	want   error
}{
	"as numpy writes":         {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   \n", nil},
	"scalar":                  {"{'descr': '|b1', 'fortran_order': False, 'shape': (), }\n", nil},
	"one axis":                {"{'descr': '<c16', 'fortran_order': False, 'shape': (3,), }\n", nil},
	"no spaces":               {"{'descr':'<i8','fortran_order':False,'shape':(0,2)}\n", nil},
	"double quotes":           {"{\"descr\": \"<i8\", 'fortran_order': False, 'shape': (0,2,)}\n", nil},
	"other order of keys":     {"{'shape': (1,), 'fortran_order': False, 'descr': '=u2'}\n", nil},
	"no newline":              {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }", ErrFormat},
	"newline, then bytes":     {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n ", ErrFormat},
	"no header":               {"", ErrFormat},
	"only a newline":          {"\n", ErrFormat},
	"only a brace":            {"{", ErrFormat},
	"empty dict":              {"{}\n", ErrFormat},
	"a comma alone":           {"{,}\n", ErrFormat},
	"no shape":                {"{'descr': '<f4', 'fortran_order': False}\n", ErrFormat},
	"key twice":               {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}\n", ErrFormat},
	"all keys and one again":  {"{'descr': '<f4', 'fortran_order': False, 'shape': (), 'shape': ()}\n", ErrFormat},
	"unknown key":             {"{'descr': '<f4', 'fortran_order': False, 'shape': (), 'x': 1}\n", ErrFormat},
	"empty key":               {"{'descr': '<f4', 'fortran_order': False, '': ()}\n", ErrFormat},
	"unclosed quote":          {"{'descr\n", ErrFormat},
	"escape":                  {"{'descr': '<\\x664', 'fortran_order': False, 'shape': ()}\n", ErrFormat},
	"shape no tuple":          {"{'descr': '<f4', 'fortran_order': False, 'shape': (3)}\n", ErrFormat},
	"shape a list":            {"{'descr': '<f4', 'fortran_order': False, 'shape': [3]}\n", ErrFormat},
	"shape of commas":         {"{'descr': '<f4', 'fortran_order': False, 'shape': (,)}\n", ErrFormat},
	"negative dimension":      {"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}\n", ErrFormat},
	"long of Python 2":        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3L,)}\n", ErrFormat},
	"leading zero":            {"{'descr': '<f4', 'fortran_order': False, 'shape': (03,)}\n", ErrFormat},
	"dimension over limit":    {"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627777,)}\n", tensor.ErrShape},
	"dimension over 2^63":     {"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808,)}\n", ErrFormat},
	"product over 2^63":       {"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,1099511627776)}\n", tensor.ErrTooLarge},
	"rank 33":                 {"{'descr': '<f4', 'fortran_order': False, 'shape': (" + strings.Repeat("1,", 33) + ")}\n", ErrFormat},
	"fortran":                 {"{'descr': '<f4', 'fortran_order': True, 'shape': (3, 4), }\n", ErrUnsupported},
	"fortran no truth":        {"{'descr': '<f4', 'fortran_order': 0, 'shape': (3, 4), }\n", ErrFormat},
	"big-endian":              {"{'descr': '>f4', 'fortran_order': False, 'shape': (3, 4), }\n", ErrUnsupported},
	"no order where needed":   {"{'descr': '|f4', 'fortran_order': False, 'shape': (3, 4), }\n", ErrUnsupported},
	"no order at all":         {"{'descr': 'f4', 'fortran_order': False, 'shape': (3, 4), }\n", ErrUnsupported},
	"object":                  {"{'descr': '|O', 'fortran_order': False, 'shape': (3, 4), }\n", ErrUnsupported},
	"structured":              {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3, 4), }\n", ErrUnsupported},
	"descr a number":          {"{'descr': 4, 'fortran_order': False, 'shape': (3, 4), }\n", ErrFormat},
	"tab":                     {"{\t'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n", ErrFormat},
	"two dicts":               {"{'descr': '<f4', 'fortran_order': False, 'shape': ()}{}\n", ErrFormat},
	"no comma between keys":   {"{'descr': '<f4' 'fortran_order': False, 'shape': ()}\n", ErrFormat},
	"no comma between dims":   {"{'descr': '<f4', 'fortran_order': False, 'shape': (3 4)}\n", ErrFormat},
	"two commas between keys": {"{'descr': '<f4',, 'fortran_order': False, 'shape': ()}\n", ErrFormat},
	"closed twice":            {"{'descr': '<f4', 'fortran_order': False, 'shape': ()}}\n", ErrFormat},
}

func TestNPYHeaderIsReadAsPythonWouldAndNoLooser(t *testing.T) {
	for name, tc := range npyHeaders {
		for major := byte(1); major <= 3; major++ {
			t.Run(name, func(t *testing.T) {
				if _, err := readPlain(bytes.NewReader(npyFile(major, 0, tc.header))); !errors.Is(err, tc.want) {
					t.Errorf("version %d: got %v, want %v", major, err, tc.want)
				}
			})
		}
	}
}

func TestNPYPrefixIsCheckedBeforeMemoryIsTaken(t *testing.T) {
	good := npyFile(2, 0, "{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n")
	for n := range good {
		if _, err := readPlain(bytes.NewReader(good[:n])); !errors.Is(err, ErrFormat) || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("file cut to %d bytes: %v", n, err)
		}
	}
	length := func(n uint32) []byte {
		return binary.LittleEndian.AppendUint32(append([]byte(npyMagic), 2, 0), n)
	}
	for name, tc := range map[string]struct {
		file []byte
		want error
	}{
		"other magic":            {append([]byte("\x93NUMPX"), good[6:]...), ErrFormat},
		"version 0.0":            {npyFile(0, 0, "{}\n"), ErrUnsupported},
		"version 4.0":            {npyFile(4, 0, "{}\n"), ErrUnsupported},
		"version 1.1":            {npyFile(1, 1, "{}\n"), ErrUnsupported},
		"longest header, absent": {length(math.MaxUint16), io.ErrUnexpectedEOF},
		"one over the limit":     {length(math.MaxUint16 + 1), ErrFormat},
		"4 GiB of header":        {length(1<<32 - 1), ErrFormat},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := readPlain(bytes.NewReader(tc.file)); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
	if _, err := readPlain(iotest.ErrReader(errFull)); !errors.Is(err, errFull) || errors.Is(err, ErrFormat) {
		t.Errorf("a reader's own error is not the file's: %v", err)
	}
}

func TestOpenNPYWantsExactlyOneArray(t *testing.T) {
	var file bytes.Buffer
	want := []int16{1, -2, 3, -4, 5, -6}
	src, err := tensor.Of(want, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteNPYHeader(&file, src.Desc); err != nil {
		t.Fatal(err)
	}
	file.Write(src.Data)
	for name, tc := range map[string]struct {
		file []byte
		ok   bool
	}{
		"exact":        {file.Bytes(), true},
		"a byte short": {file.Bytes()[:file.Len()-1], false},
		"a byte more":  {append(bytes.Clone(file.Bytes()), 0), false},
		"header only":  {file.Bytes()[:file.Len()-len(src.Data)], false},
		"empty":        {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "x.npy")
			if err := os.WriteFile(path, tc.file, 0o600); err != nil {
				t.Fatal(err)
			}
			got, closer, err := OpenNPY(path)
			if !tc.ok {
				if !errors.Is(err, ErrFormat) || closer != nil {
					t.Errorf("got %v, %v", closer, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !got.Desc.Equal(src.Desc) || !bytes.Equal(got.Data, src.Data) {
				t.Errorf("got %v % x", got.Desc, got.Data)
			}
			if _, err := tensor.Slice[int16](tensor.Tensor{Desc: got.Desc, Data: got.Data}); err != nil {
				t.Error(err)
			}
			if err := closer.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	if _, _, err := OpenNPY(filepath.Join(t.TempDir(), "none.npy")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// readPlain reads the header of a file whose bytes lie as a tensor's do.
func readPlain(r io.Reader) (tensor.Desc, error) {
	d, l, err := readNPYHeader(r)
	if err == nil && l != (Layout{}) {
		err = ErrUnsupported
	}
	return d, err
}

func FuzzNPYHeader(f *testing.F) {
	for _, h := range npyHeaders {
		f.Add(npyFile(1, 0, h.header))
	}
	f.Add(npyFile(3, 0, npyHeaders["as numpy writes"].header))
	f.Fuzz(func(t *testing.T, file []byte) {
		r := bytes.NewReader(file)
		desc, err := readPlain(r)
		if err != nil {
			if !errors.Is(err, ErrFormat) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		read := file[:len(file)-r.Len()]
		if read[len(read)-1] != '\n' {
			t.Fatalf("stopped after %q", read)
		}
		// The model: the text with all freedom taken out is the one that a simple
		// print of the desc gives.
		length := 10
		if file[6] > 1 {
			length = 12
		}
		text := strings.NewReplacer(" ", "", `"`, "'", "\n", "", "=", "<", "|", "<").Replace(string(read[length:]))
		text = strings.NewReplacer(",)", ")", ",}", "}").Replace(text)
		dims := strings.ReplaceAll(strings.Trim(desc.Shape.String(), "[]"), " ", ",")
		fields := []string{
			"'descr':'<" + npyNames[desc.DType] + "'",
			"'fortran_order':False",
			"'shape':(" + dims + ")",
		}
		if want := len("{,,}") + len(strings.Join(fields, "")); len(text) != want {
			t.Fatalf("%q was read as %v", read, desc)
		}
		for _, field := range fields {
			if !strings.Contains(text, field) {
				t.Fatalf("%q was read as %v", read, desc)
			}
		}
		var again bytes.Buffer
		if err := WriteNPYHeader(&again, desc); err != nil {
			t.Fatal(err)
		}
		if got, err := readPlain(&again); err != nil || !got.Equal(desc) {
			t.Fatalf("%v came back as %v, %v", desc, got, err)
		}
	})
}

func FuzzNPYRoundTrip(f *testing.F) {
	f.Add(byte(tensor.Float32), int64(3), int64(4), byte(2))
	f.Add(byte(tensor.BFloat16), int64(-1), int64(1)<<41, byte(33))
	f.Fuzz(func(t *testing.T, dtype byte, even, odd int64, rank byte) {
		desc := tensor.Desc{DType: tensor.DataType(dtype), Shape: make(tensor.Shape, rank%40)}
		for i := range desc.Shape {
			desc.Shape[i] = []int64{even, odd}[i%2]
		}
		_, bad := desc.Bytes()
		_, has := npyNames[desc.DType]
		var out bytes.Buffer
		err := WriteNPYHeader(&out, desc)
		if (err == nil) != (bad == nil && has) {
			t.Fatalf("%v: %v, its size: %v", desc, err, bad)
		}
		if err != nil {
			return
		}
		if got, err := readPlain(&out); err != nil || !got.Equal(desc) || out.Len() != 0 {
			t.Fatalf("%v came back as %v, %v, %d bytes left", desc, got, err, out.Len())
		}
	})
}
