package tensorfile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
)

func TestATensorOfAnUnknownDataTypeSpoilsItselfAlone(t *testing.T) {
	header := `{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"scale":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[2,5]},"b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}`
	file := append(stFile(header, 0), 1, 2, 9, 9, 9, 3)
	s, err := ParseSafetensors(file)
	require.NoError(t, err)
	require.Equal(t, []string{"a", "scale", "b"}, s.Names())
	b, err := s.Tensor("b")
	require.NoError(t, err)
	require.Equal(t, []byte{3}, b.Data)
	_, err = s.Desc("scale")
	require.ErrorIs(t, err, ErrUnsupported)
	require.ErrorContains(t, err, `tensor "scale" has the data type "F8_E8M0"; convert it in Python`)
	_, err = s.Tensor("scale")
	require.ErrorIs(t, err, ErrUnsupported)
}

func TestADocumentIsReadAsItWasWritten(t *testing.T) {
	for name, d := range map[string]Document{
		"of one file":                     {Metadata: map[string]string{"format": "pt", "<&>": "\u2028 é"}},
		"with keys like those of several": {Metadata: map[string]string{"index": "x", "text": "", "shards": "y"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseDocument(d.Encode())
			require.NoError(t, err)
			require.Equal(t, d, got)
		})
	}
	require.Nil(t, Document{}.Encode())
	require.Equal(t, `{"format":"pt"}`, string(Document{Metadata: map[string]string{"format": "pt"}}.Encode()))
}

// writeSharded writes a model of two files and its index, and returns the index's path.
func writeSharded(t testing.TB, dir string, weightMap map[string]string) string {
	t.Helper()
	for i, file := range []string{"m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"} {
		x, err := tensor.Of([]int32{int32(i), 7}, 2)
		require.NoError(t, err)
		var b bytes.Buffer
		require.NoError(t, WriteSafetensors(&b, []Named{{fmt.Sprint("t", i), x}}, map[string]string{"format": "pt", "n": fmt.Sprint(i)}))
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), b.Bytes(), 0o600))
	}
	text, err := json.MarshalIndent(map[string]any{"metadata": map[string]any{"total_size": 16}, "weight_map": weightMap}, "", "  ")
	require.NoError(t, err)
	path := filepath.Join(dir, "m"+IndexSuffix)
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return path
}

var goodMap = map[string]string{"t0": "m-00001-of-00002.safetensors", "t1": "m-00002-of-00002.safetensors"}

func TestAModelOfSeveralFilesOpensAsOne(t *testing.T) {
	dir := t.TempDir()
	path := writeSharded(t, dir, goodMap)
	found, err := ModelIn(dir)
	require.NoError(t, err)
	require.Equal(t, path, found)
	s, err := OpenModel(path)
	require.NoError(t, err)
	require.Equal(t, []string{"t0", "t1"}, s.Names())
	x, err := s.Tensor("t1")
	require.NoError(t, err)
	require.Equal(t, []byte{1, 0, 0, 0, 7, 0, 0, 0}, x.Data)
	require.Equal(t, map[string]string{"format": "pt"}, s.Metadata(), "what all files say")

	d, err := ParseDocument(s.Document().Encode())
	require.NoError(t, err)
	require.Equal(t, s.Document(), d)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(text), d.Text)
	require.Equal(t, "1", d.Shards["m-00002-of-00002.safetensors"]["n"])
	file, ok := d.File("t0")
	require.True(t, ok)
	require.Equal(t, "m-00001-of-00002.safetensors", file)
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.Close(), ErrClosed)
}

func TestAnIndexThatDisagreesWithItsFilesIsRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		weights map[string]string
		says    string
	}{
		"no tensors":          {map[string]string{}, "no weight_map"},
		"a path":              {map[string]string{"t0": "../m-00001-of-00002.safetensors"}, "not a .safetensors file beside it"},
		"another format":      {map[string]string{"t0": "m.bin"}, "not a .safetensors file beside it"},
		"no such file":        {map[string]string{"t0": "n.safetensors"}, "no such file"},
		"the wrong file":      {map[string]string{"t0": "m-00002-of-00002.safetensors", "t1": "m-00001-of-00002.safetensors"}, `tensor "t0" is in m-00001-of-00002.safetensors, the index says`},
		"a tensor not there":  {map[string]string{"t0": "m-00001-of-00002.safetensors", "t9": "m-00001-of-00002.safetensors"}, `tensor "t9" is not in m-00001-of-00002.safetensors`},
		"a tensor not listed": {map[string]string{"t1": "m-00001-of-00002.safetensors"}, `tensor "t0" is in`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := OpenModel(writeSharded(t, t.TempDir(), tc.weights))
			require.ErrorContains(t, err, tc.says)
		})
	}
}

func TestADocumentOfSeveralFilesIsCheckedBeforeItNamesAFile(t *testing.T) {
	good := `{"index":"m.safetensors.index.json","text":"{\"weight_map\":{\"a\":\"m.safetensors\"}}","shards":{"m.safetensors":{}}}`
	d, err := ParseDocument([]byte(good))
	require.NoError(t, err)
	require.Equal(t, "m.safetensors.index.json", d.Index)
	for name, text := range map[string]string{
		"no JSON":           `{`,
		"no object":         `["a"]`,
		"a number":          `{"a":1}`,
		"another key":       `{"index":"m.safetensors.index.json","text":"{}","shards":{},"more":1}`,
		"index elsewhere":   `{"index":"../m.safetensors.index.json","text":"{\"weight_map\":{\"a\":\"m.safetensors\"}}","shards":{"m.safetensors":{}}}`,
		"file elsewhere":    `{"index":"m.safetensors.index.json","text":"{\"weight_map\":{\"a\":\"/m.safetensors\"}}","shards":{"/m.safetensors":{}}}`,
		"file not indexed":  `{"index":"m.safetensors.index.json","text":"{\"weight_map\":{\"a\":\"m.safetensors\"}}","shards":{"m.safetensors":{},"n.safetensors":{}}}`,
		"index is no JSON":  `{"index":"m.safetensors.index.json","text":"?","shards":{}}`,
		"index without map": `{"index":"m.safetensors.index.json","text":"{}","shards":{}}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseDocument([]byte(text))
			require.ErrorIs(t, err, ErrFormat)
		})
	}
}

func TestAFileThatADocumentNamesHasAPlainName(t *testing.T) {
	for _, bad := range []string{"\x1b]0;pwn\a\n", "a\u0085b", "-rf", ".hidden", "a/b", "a\\b", "a\x00b", ""} {
		file, index := bad+FileSuffix, bad+IndexSuffix
		text := quote(map[string]map[string]string{"weight_map": {"a": file}})
		_, err := parseIndex(text)
		require.ErrorIs(t, err, ErrFormat, "%q", bad)
		_, err = ParseDocument(quote(Document{Index: "m" + IndexSuffix, Text: string(text), Shards: map[string]map[string]string{file: {}}}))
		require.ErrorIs(t, err, ErrFormat, "%q", bad)
		text = quote(map[string]map[string]string{"weight_map": {"a": "m.safetensors"}})
		_, err = ParseDocument(quote(Document{Index: index, Text: string(text), Shards: map[string]map[string]string{"m.safetensors": {}}}))
		require.ErrorIs(t, err, ErrFormat, "%q", bad)
	}
	require.False(t, plainFile("\xff"+FileSuffix, FileSuffix))
	require.True(t, plainFile("é 1"+FileSuffix, FileSuffix))
}

func TestAFolderWithSeveralModelsNamesNone(t *testing.T) {
	dir := t.TempDir()
	_, err := ModelIn(dir)
	require.ErrorIs(t, err, ErrNotFound)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.safetensors"), nil, 0o600))
	path, err := ModelIn(dir)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "a.safetensors"), path)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.safetensors"), nil, 0o600))
	_, err = ModelIn(dir)
	require.ErrorIs(t, err, ErrUnsupported)
}

func FuzzDocument(f *testing.F) {
	f.Add([]byte(`{"format":"pt"}`))
	f.Add([]byte(`{"index":"m.safetensors.index.json","text":"{\"weight_map\":{\"a\":\"m.safetensors\"}}","shards":{"m.safetensors":{"k":"v"}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := ParseDocument(text)
		if err != nil {
			require.ErrorIs(t, err, ErrFormat)
			return
		}
		for file := range d.Shards {
			require.Equal(t, filepath.Base(file), file)
		}
		if encoded := d.Encode(); encoded != nil {
			again, err := ParseDocument(encoded)
			require.NoError(t, err)
			require.Equal(t, d, again)
		}
	})
}
