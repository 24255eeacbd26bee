package tensorfile

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
)

// stFile makes a file of a header and n bytes of data.
func stFile(header string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, n)...)
}

func named(t testing.TB, name string, d tensor.DataType, shape ...int64) Named {
	t.Helper()
	desc := tensor.Desc{DType: d, Shape: shape}
	n, err := desc.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i*7 + int(d))
	}
	if d == tensor.Bool {
		for i := range data {
			data[i] &= 1
		}
	}
	return Named{name, tensor.Tensor{Desc: desc, Data: data}}
}

func TestSafetensorsReturnsWhatWasWritten(t *testing.T) {
	var all []Named
	for _, d := range tensor.DataTypes() {
		if d != tensor.Complex128 {
			all = append(all, named(t, "odd/"+d.String(), d, 3), named(t, "scalar "+d.String(), d),
				named(t, "empty<"+d.String()+">", d, 2, 0, 3), named(t, `quote"\`+d.String()+"é\x00", d, 1, 5))
		}
	}
	meta := map[string]string{"made by": "a test", "": "empty key", "é": "\"\n"}
	var file bytes.Buffer
	if err := WriteSafetensors(&file, all, meta); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "all.safetensors")
	if err := os.WriteFile(path, file.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	mapped, err := OpenSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := ParseSafetensors(file.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Safetensors{mapped, parsed} {
		if len(s.Names()) != len(all) {
			t.Errorf("%d names, wrote %d", len(s.Names()), len(all))
		}
		if got := s.Metadata(); fmt.Sprint(got) != fmt.Sprint(meta) {
			t.Errorf("metadata %q, wrote %q", got, meta)
		}
		for _, want := range all {
			got, err := s.Tensor(want.Name)
			if err != nil {
				t.Fatal(err)
			}
			if desc, err := s.Desc(want.Name); err != nil || !desc.Equal(want.Desc) || !got.Desc.Equal(want.Desc) {
				t.Errorf("%q: got %v and %v, %v; wrote %v", want.Name, got.Desc, desc, err, want.Desc)
			}
			if !bytes.Equal(got.Data, want.Data) {
				t.Errorf("%q: other bytes", want.Name)
			}
			if cap(got.Data) != len(got.Data) {
				t.Errorf("%q: an append would write into the next tensor", want.Name)
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := s.Close(); !errors.Is(err, ErrClosed) {
			t.Errorf("second Close: %v", err)
		}
		if _, err := s.Tensor(all[0].Name); !errors.Is(err, ErrClosed) {
			t.Errorf("Tensor after Close: %v", err)
		}
	}
}

func TestSafetensorsWriterAlignsEveryTensor(t *testing.T) {
	var all []Named
	for i, d := range []tensor.DataType{tensor.Bool, tensor.Int16, tensor.Uint8, tensor.Float64, tensor.Float32, tensor.Complex64} {
		all = append(all, named(t, strings.Repeat("n", i+1), d, 3))
	}
	var file bytes.Buffer
	if err := WriteSafetensors(&file, all, nil); err != nil {
		t.Fatal(err)
	}
	s, err := ParseSafetensors(file.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if n := binary.LittleEndian.Uint64(file.Bytes()); n%headerAlign != 0 {
		t.Errorf("header of %d bytes is not padded", n)
	}
	for _, e := range s.entries {
		if e.Off%int64(e.Desc.DType.Bits()/8) != 0 {
			t.Errorf("%v at offset %d", e.Desc, e.Off)
		}
	}
}

func TestSafetensorsUnalignedTensorIsReadAsBytesOnly(t *testing.T) {
	// 8-byte aligned file, so that a header of odd length makes the data odd.
	words := make([]uint64, 32)
	ref, err := tensor.Of(words)
	if err != nil {
		t.Fatal(err)
	}
	header := `{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`
	header += strings.Repeat(" ", 1-len(header)%2)
	file := ref.Data[:copy(ref.Data, stFile(header, 4))]
	s, err := ParseSafetensors(file)
	if err != nil {
		t.Fatal(err)
	}
	a, err := s.Tensor("a")
	if err != nil || len(a.Data) != 4 {
		t.Fatalf("%d bytes, %v", len(a.Data), err)
	}
	if _, err := tensor.Slice[float32](a); err == nil {
		t.Error("an unaligned slice was made")
	}
}

func TestSafetensorsWriterRefusesWhatNobodyCouldRead(t *testing.T) {
	one := named(t, "one", tensor.Float32, 1)
	short := one
	short.Data = short.Data[:3]
	with := func(name string) Named { n := one; n.Name = name; return n }
	for name, tc := range map[string]struct {
		tensors []Named
		meta    map[string]string
		want    error
	}{
		"name twice":           {[]Named{one, one}, nil, ErrFormat},
		"reserved name":        {[]Named{with(MetadataName)}, nil, ErrFormat},
		"name not UTF-8":       {[]Named{with("\xff")}, nil, ErrFormat},
		"name lost in UTF-8":   {[]Named{with("\ufffd")}, nil, ErrFormat},
		"too few bytes":        {[]Named{short}, nil, tensor.ErrShape},
		"no data type":         {[]Named{{Name: "z"}}, nil, tensor.ErrDataType},
		"complex128":           {[]Named{named(t, "c", tensor.Complex128, 1)}, nil, ErrUnsupported},
		"metadata not UTF-8":   {nil, map[string]string{"k": "\xff"}, ErrFormat},
		"metadata over limit":  {nil, map[string]string{"k": strings.Repeat("v", MaxSafetensorsHeader)}, ErrFormat},
		"bad one after a good": {[]Named{one, with("\xff")}, nil, ErrFormat},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := WriteSafetensors(&out, tc.tensors, tc.meta); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if out.Len() != 0 {
				t.Errorf("%d bytes written before the refusal", out.Len())
			}
		})
	}
}

type failingWriter struct{ left int }

var errFull = errors.New("full")

func (w *failingWriter) Write(b []byte) (int, error) {
	n := min(len(b), w.left)
	if w.left -= n; n < len(b) {
		return n, errFull
	}
	return n, nil
}

func TestSafetensorsWriterPassesOnTheErrorOfItsWriter(t *testing.T) {
	var whole bytes.Buffer
	tensors := []Named{named(t, "a", tensor.Float32, 4), named(t, "b", tensor.Int8, 4)}
	if err := WriteSafetensors(&whole, tensors, nil); err != nil {
		t.Fatal(err)
	}
	for n := range whole.Len() {
		if err := WriteSafetensors(&failingWriter{n}, tensors, nil); !errors.Is(err, errFull) {
			t.Errorf("writer full after %d bytes: %v", n, err)
		}
	}
}

// headers maps a name to a header with the bytes of data behind it. The fuzz
// target starts from them too.
var headers = map[string]struct {
	header string
	data   int
	want   error
}{
	"empty":                     {`{}`, 0, nil},
	"padded":                    {`{}   `, 0, nil},
	"scalar":                    {`{"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}`, 8, nil},
	"two":                       {`{"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]},"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}`, 5, nil},
	"keys in any order":         {`{ "a" : {"data_offsets":[0,4],"shape":[1 , 1],"dtype":"I32"} , "__metadata__" : {"k":"v"} }`, 4, nil},
	"escaped name":              {`{"\u0061\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, nil},
	"empty at a seam":           {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"e":{"dtype":"F32","shape":[0],"data_offsets":[1,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2, nil},
	"two empty":                 {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[4,0],"data_offsets":[0,0]}}`, 0, nil},
	"empty metadata":            {`{"__metadata__":{}}`, 0, nil},
	"rank 32":                   {`{"a":{"dtype":"U8","shape":[` + strings.Repeat("1,", 31) + `1],"data_offsets":[0,1]}}`, 1, nil},
	"rank 33":                   {`{"a":{"dtype":"U8","shape":[` + strings.Repeat("1,", 32) + `1],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"no header":                 {``, 0, ErrFormat},
	"only padding":              {`  `, 0, ErrFormat},
	"space first":               {` {}`, 0, ErrFormat},
	"newline last":              {"{}\n", 0, ErrFormat},
	"two objects":               {`{}{}`, 0, ErrFormat},
	"a list":                    {`[]`, 0, ErrFormat},
	"unclosed":                  {`{"a":{}`, 0, ErrFormat},
	"trailing comma":            {`{"__metadata__":{},}`, 0, ErrFormat},
	"not UTF-8":                 {"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, ErrFormat},
	"half a surrogate pair":     {`{"\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"name twice":                {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, 0, ErrFormat},
	"name twice, escaped":       {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, 0, ErrFormat},
	"metadata twice":            {`{"__metadata__":{},"__metadata__":{}}`, 0, ErrFormat},
	"metadata key twice":        {`{"__metadata__":{"a":"1","a":"1"}}`, 0, ErrFormat},
	"metadata no text":          {`{"__metadata__":{"a":1}}`, 0, ErrFormat},
	"metadata null":             {`{"__metadata__":null}`, 0, ErrFormat},
	"dtype twice":               {`{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"unknown key":               {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}}`, 1, ErrFormat},
	"no dtype":                  {`{"a":{"shape":[1],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"no shape":                  {`{"a":{"dtype":"U8","data_offsets":[0,1]}}`, 1, ErrFormat},
	"no offsets":                {`{"a":{"dtype":"U8","shape":[0]}}`, 0, ErrFormat},
	"key in capitals":           {`{"a":{"DType":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"dtype not here":            {`{"a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}`, 1, nil},
	"dtype not here, backwards": {`{"a":{"dtype":"F4","shape":[1],"data_offsets":[1,0]}}`, 0, ErrFormat},
	"dtype no text":             {`{"a":{"dtype":7,"shape":[1],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"tensor no object":          {`{"a":[1]}`, 1, ErrFormat},
	"shape no list":             {`{"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}}`, 1, ErrFormat},
	"shape nested":              {`{"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"negative dimension":        {`{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"minus zero":                {`{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}`, 0, ErrFormat},
	"fraction":                  {`{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"exponent":                  {`{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"number as text":            {`{"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"dimension over 2^63":       {`{"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}}`, 1, ErrFormat},
	"product over 2^63":         {`{"a":{"dtype":"U8","shape":[1099511627776,1099511627776],"data_offsets":[0,0]}}`, 0, tensor.ErrTooLarge},
	"size other than shape":     {`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4, ErrFormat},
	"end before begin":          {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}`, 0, ErrFormat},
	"one offset":                {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0]}}`, 0, ErrFormat},
	"three offsets":             {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}}`, 0, ErrFormat},
	"hole at the start":         {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2, ErrFormat},
	"hole in the middle":        {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}`, 3, ErrFormat},
	"rest at the end":           {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 2, ErrFormat},
	"overlap":                   {`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3, ErrFormat},
	"same bytes twice":          {`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2, ErrFormat},
	"empty inside another":      {`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}`, 2, ErrFormat},
	"past the end":              {`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 1, ErrFormat},
	"empty past the end":        {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[9,9]}}`, 0, ErrFormat},
	"data without tensors":      {`{}`, 1, ErrFormat},
	"deep nesting, no crash":    {`{"a":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + `}`, 0, ErrFormat},
	"offsets near the top":      {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[9223372036854775806,9223372036854775807]}}`, 1, ErrFormat},
	"offset over 2^63":          {`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551617]}}`, 1, ErrFormat},
	"number in a long format":   {`{"a":{"dtype":"U8","shape":[` + strings.Repeat("9", 400) + `],"data_offsets":[0,1]}}`, 1, ErrFormat},
}

func TestSafetensorsHeaderSaysOneThingOnly(t *testing.T) {
	for name, tc := range headers {
		t.Run(name, func(t *testing.T) {
			s, err := ParseSafetensors(stFile(tc.header, tc.data))
			if !errors.Is(err, tc.want) {
				t.Fatalf("got %v, want %v", err, tc.want)
			}
			if err != nil {
				return
			}
			for _, n := range s.Names() {
				if _, err := s.Tensor(n); err != nil && !(strings.HasPrefix(name, "dtype not here") && errors.Is(err, ErrUnsupported)) {
					t.Error(err)
				}
			}
			if _, err := s.Tensor("nobody"); !errors.Is(err, ErrNotFound) {
				t.Errorf("unknown name: %v", err)
			}
			if _, err := s.Desc("nobody"); !errors.Is(err, ErrNotFound) {
				t.Errorf("unknown name: %v", err)
			}
		})
	}
}

func TestSafetensorsHeaderLengthIsCheckedBeforeItIsBelieved(t *testing.T) {
	good := stFile(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, 4)
	for n := range good {
		if _, err := ParseSafetensors(good[:n]); !errors.Is(err, ErrFormat) {
			t.Errorf("file cut to %d bytes: %v", n, err)
		}
	}
	for name, n := range map[string]uint64{
		"one more than there is": uint64(len(good)) - lengthBytes + 1,
		"the limit":              MaxSafetensorsHeader,
		"one over the limit":     MaxSafetensorsHeader + 1,
		"near 2^63":              1<<63 - 1,
		"2^63":                   1 << 63,
		"2^64-1":                 1<<64 - 1,
		"2^64-8":                 1<<64 - 8,
	} {
		t.Run(name, func(t *testing.T) {
			b := slices.Clone(good)
			binary.LittleEndian.PutUint64(b, n)
			if _, err := ParseSafetensors(b); !errors.Is(err, ErrFormat) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestOpenRefusesWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		path string
		want error
	}{
		"folder":  {dir, ErrUnsupported},
		"nothing": {filepath.Join(dir, "none"), os.ErrNotExist},
		"empty":   {empty, ErrFormat},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := OpenSafetensors(tc.path); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

// modelAccepts is the slow, obvious safetensors header check: decode everything
// with encoding/json, then mark every byte.
func modelAccepts(header []byte, dataBytes int) bool {
	trimmed := strings.TrimRight(string(header), " ")
	if !strings.HasPrefix(trimmed, "{") || !strings.HasSuffix(trimmed, "}") || strings.ToValidUTF8(trimmed, "") != trimmed {
		return false
	}
	var root map[string]any
	dec := json.NewDecoder(strings.NewReader(trimmed))
	dec.UseNumber()
	if dec.Decode(&root) != nil || dec.Decode(new(any)) == nil || dec.InputOffset() != int64(len(trimmed)) {
		return false
	}
	// A map forgets keys that come twice: count the colons outside of strings.
	colons, inside := 0, false
	for i := 0; i < len(trimmed); i++ {
		switch {
		case inside && trimmed[i] == '\\':
			i++
		case trimmed[i] == '"':
			inside = !inside
		case !inside && trimmed[i] == ':':
			colons++
		}
	}
	if colons != countKeys(root) || holdsBrokenText(root) {
		return false
	}
	owner := make([]int, dataBytes)
	seams := map[int]bool{0: true}
	var empties []int
	for name, v := range root {
		m, ok := v.(map[string]any)
		if !ok {
			return false
		}
		if name == "__metadata__" {
			for _, v := range m {
				if _, ok := v.(string); !ok {
					return false
				}
			}
			continue
		}
		dtype, ok1 := m["dtype"].(string)
		shape, ok2 := m["shape"].([]any)
		offs, ok3 := m["data_offsets"].([]any)
		width, ok4 := map[string]int64{
			"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8,
			"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
		}[dtype]
		if len(m) != 3 || !ok1 || !ok2 || !ok3 || len(offs) != 2 || len(shape) > 32 {
			return false
		}
		size := big.NewInt(width)
		elements := big.NewInt(1)
		for _, d := range shape {
			n := whole(d)
			if n == nil || n.Cmp(big.NewInt(1<<40)) > 0 {
				return false
			}
			size.Mul(size, n)
			elements.Mul(elements, n)
		}
		begin, end := whole(offs[0]), whole(offs[1])
		if begin == nil || end == nil || end.Cmp(big.NewInt(int64(dataBytes))) > 0 || begin.Cmp(end) > 0 ||
			ok4 && new(big.Int).Sub(end, begin).Cmp(size) != 0 {
			return false
		}
		b, e := int(begin.Int64()), int(end.Int64())
		for i := b; i < e; i++ {
			owner[i]++
		}
		if b == e {
			empties = append(empties, b)
		} else {
			seams[b], seams[e] = true, true
		}
	}
	for _, n := range owner {
		if n != 1 {
			return false
		}
	}
	for _, at := range empties {
		if !seams[at] {
			return false
		}
	}
	return true
}

func whole(v any) *big.Int {
	n, _ := v.(json.Number)
	i, ok := new(big.Int).SetString(string(n), 10)
	if !ok || strings.HasPrefix(string(n), "-") {
		return nil
	}
	return i
}

func countKeys(v any) (n int) {
	switch v := v.(type) {
	case map[string]any:
		for _, m := range v {
			n += 1 + countKeys(m)
		}
	case []any:
		for _, m := range v {
			n += countKeys(m)
		}
	}
	return n
}

func holdsBrokenText(v any) bool {
	switch v := v.(type) {
	case string:
		return strings.Contains(v, "\ufffd")
	case map[string]any:
		for k, m := range v {
			if strings.Contains(k, "\ufffd") || holdsBrokenText(m) {
				return true
			}
		}
	}
	return false
}

func FuzzSafetensorsHeader(f *testing.F) {
	for _, h := range headers {
		if len(h.header) < 1000 {
			f.Add([]byte(h.header), uint16(h.data))
		}
	}
	f.Fuzz(func(t *testing.T, header []byte, dataBytes uint16) {
		entries, metadata, err := parseSafetensorsHeader(header, int64(dataBytes))
		if got, want := err == nil, modelAccepts(header, int(dataBytes)); got != want {
			t.Fatalf("accepted %v (%v), the model says %v: %q with %d bytes", got, err, want, header, dataBytes)
		}
		if err != nil {
			if !errors.Is(err, ErrFormat) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		// Whatever was accepted can be written and read again.
		var all []Named
		entries = slices.DeleteFunc(entries, func(e Entry) bool { return e.Foreign != "" })
		for _, e := range entries {
			all = append(all, Named{e.Name, tensor.Tensor{Desc: e.Desc, Data: make([]byte, e.Bytes)}})
		}
		var file bytes.Buffer
		if err := WriteSafetensors(&file, all, metadata); err != nil {
			t.Fatal(err)
		}
		s, err := ParseSafetensors(file.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Metadata(); len(got) != len(metadata) || fmt.Sprint(got) != fmt.Sprint(metadata) {
			t.Fatalf("metadata %q became %q", metadata, got)
		}
		for _, e := range entries {
			if d, err := s.Desc(e.Name); err != nil || !d.Equal(e.Desc) {
				t.Fatalf("%q: %v became %v, %v", e.Name, e.Desc, d, err)
			}
		}
	})
}

func TestAHeaderIsMadeWithoutTheBytes(t *testing.T) {
	x, err := tensor.Of([]float32{1, 2, 3, 4}, 2, 2)
	require.NoError(t, err)
	y, err := tensor.Of([]int8{5})
	require.NoError(t, err)
	var file bytes.Buffer
	require.NoError(t, WriteSafetensors(&file, []Named{{"x", x}, {"y", y}}, map[string]string{"made by": "test"}))
	header, err := SafetensorsHeader([]Entry{{Name: "x", Desc: x.Desc}, {Name: "y", Desc: y.Desc}}, map[string]string{"made by": "test"})
	require.NoError(t, err)
	require.Equal(t, file.Bytes(), slices.Concat(header, x.Data, y.Data))

	huge := tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{1 << 31, 1 << 31}}
	_, err = SafetensorsHeader([]Entry{{Name: "a", Desc: huge}, {Name: "b", Desc: huge}}, nil)
	require.ErrorIs(t, err, tensor.ErrTooLarge)
}

// A page that is gone when the header is parsed would end the process.
func TestAFileThatIsRewrittenInPlaceIsReadOrRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.safetensors")
	file := stFile(`{"__metadata__":{"k":"`+strings.Repeat("v", 4<<20)+`"}}`, 0)
	rounds := make(chan error)
	go func() {
		defer close(rounds)
		for range 25 {
			rounds <- os.WriteFile(path, file, 0o600) // shortens it to nothing first
		}
	}()
	for err := range rounds {
		require.NoError(t, err)
		for range 2 {
			s, err := OpenSafetensors(path)
			if err != nil {
				require.ErrorIs(t, err, ErrFormat)
				continue
			}
			require.NoError(t, s.Close())
		}
	}
}

func TestAHeaderHasAsManyEntriesAsTheLimitSays(t *testing.T) {
	entries := make([]Entry, MaxEntries+1)
	for i := range entries {
		entries[i] = Entry{Name: fmt.Sprint(i), Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{0}}}
	}
	_, err := SafetensorsHeader(entries, nil)
	require.ErrorIs(t, err, ErrFormat)
	file, err := SafetensorsHeader(entries[1:], map[string]string{"k": "v"})
	require.NoError(t, err)
	s, err := ParseSafetensors(file)
	require.NoError(t, err)
	require.Len(t, s.Names(), MaxEntries)

	more := `"more":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},`
	_, err = ParseSafetensors(stFile("{"+more+strings.TrimRight(string(file[9:]), " "), 0))
	require.ErrorIs(t, err, ErrFormat)
	require.ErrorContains(t, err, "more than 262144 tensors")

	var texts strings.Builder
	for i := range MaxEntries + 1 {
		fmt.Fprintf(&texts, `,"%d":"m.safetensors"`, i)
	}
	_, err = ParseSafetensors(stFile(`{"__metadata__":{`+texts.String()[1:]+`}}`, 0))
	require.ErrorContains(t, err, "more than 262144 texts")
}
