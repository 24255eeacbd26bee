package torchsave

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// rec is a record of a file that is made for a test.
type rec struct{ name, data string }

// archived is a file that is right as a zip archive, whatever its records say.
func archived(recs ...rec) []byte {
	var b []byte
	var p Parts
	for _, r := range recs {
		b = p.record(b, 0, r.name, []byte(r.data))
	}
	return closed(b, p.records)
}

// closed appends the directory.
func closed(b []byte, records []record) []byte {
	from := int64(len(b))
	for _, r := range records {
		b = append(b, r.entry()...)
	}
	return append(b, endRecords(len(records), from, int64(len(b)))...)
}

var (
	little  = rec{"byteorder", "little"}
	version = rec{"version", "3\n"}
	six     = rec{"data/0", strings.Repeat("\x00\x00\x80\x3f", 6)}
)

// pickled is a file with this data.pkl, behind PROTO, and six floats.
func pickled(opcodes string) []byte {
	return archived(rec{"data.pkl", "\x80\x02" + opcodes}, little, six, version)
}

// The parts of a data.pkl.
const (
	build   = "ctorch._utils\n_rebuild_tensor_v2\n"
	build3  = "ctorch._utils\n_rebuild_tensor_v3\n"
	hooks   = "ccollections\nOrderedDict\n)R"
	shape   = "K\x02K\x03\x86"
	strides = "K\x03K\x01\x86"
	float   = "ctorch\nFloatStorage\n"
	untyped = "ctorch.storage\nUntypedStorage\n"
)

func text(s string) string { return string(appendText(nil, s)) }

func num(n int64) string { return string(appendNumber(nil, n)) }

func stored(kind string, n int64) string {
	return "(" + text("storage") + kind + text("0") + text("cpu") + num(n) + "tQ"
}

// rebuilds are the opcodes of a tensor.
func rebuilds(storage string, offset int64, shape, strides, rest string) string {
	return build + "(" + storage + num(offset) + shape + strides + rest + "tR"
}

func tupleOf(n ...int64) string {
	b := "("
	for _, n := range n {
		b += num(n)
	}
	return b + "t"
}

var (
	sixFloats = stored(float, 6)
	good      = rebuilds(sixFloats, 0, shape, strides, "\x89"+hooks)
)

// changed is a copy of a file with other bytes at a place behind a text.
func changed(file []byte, behind string, at int, with string) []byte {
	file = slices.Clone(file)
	i := bytes.Index(file, []byte(behind))
	if i < 0 {
		panic("no " + behind)
	}
	copy(file[i+at:], with)
	return file
}

// inDirectory changes the directory's entry for data/0.
func inDirectory(at int, with string) []byte {
	file := pickled(good + ".")
	entry := bytes.LastIndex(file, []byte("archive/data/0")) - entrySize
	copy(file[entry+at:], with)
	return file
}

// atEnd changes the end of the directory.
func atEnd(at int, with string) []byte {
	return changed(pickled(good+"."), endBegin, at, with)
}

// wideHeader is a file up to a storage of n bytes, whose local header has an extra field.
func wideHeader(n int64, extra string) []byte {
	var p Parts
	b := p.record(nil, 0, "data.pkl", []byte("\x80\x02"+rebuilds(stored("ctorch\nByteStorage\n", n), 0, "K\x01\x85", "K\x01\x85", "\x89"+hooks)+"."))
	r := record{name: prefix + "data/0", size: 1, offset: int64(len(b))}
	h := r.local()[:localSize+len(r.name)]
	binary.LittleEndian.PutUint16(h[28:], uint16(len(extra)))
	return slices.Concat(b, h, []byte(extra), make([]byte, 100))
}

// bomb doubles a tuple n times.
func bomb(n byte) string {
	b := []byte(")q\x00")
	for i := range n {
		b = append(b, 'h', i, 'h', i, 0x86, 'q', i+1)
	}
	return string(b)
}

// withDirectory is a right file whose directory is that of other records.
func withDirectory(change func([]record) []record) []byte {
	var p Parts
	var b []byte
	for _, r := range []rec{{"data.pkl", "\x80\x02" + good + "."}, little, six, version} {
		b = p.record(b, 0, r.name, []byte(r.data))
	}
	return closed(b, change(p.records))
}

func TestHostileFilesAreRefused(t *testing.T) {
	right := pickled(good + ".")
	_, _, window, err := read(right, 10, 24)
	require.NoError(t, err)
	require.Equal(t, six.data, string(window))
	const tooLarge = "tensor: the tensor is too large"
	for name, tc := range map[string]struct {
		file   []byte
		stream string // a part of the error
		files  string // of a whole file, if it is another one; "-" is none
	}{
		// The archive.
		"nothing":                               {nil, "ends too early, after 0 bytes", ""},
		"no archive":                            {[]byte(strings.Repeat("hello ", 20)), "not a file of torch.save", ""},
		"a legacy file":                         {[]byte("\x80\x02\x8a\x0a" + strings.Repeat("l", 40)), "before torch 1.6", ""},
		"a first record that is another":        {archived(version), `the first record is "archive/version"`, ""},
		"names without a folder":                {changed(right, "archive/data.pkl", 7, "_"), `the first record is "archive_data.pkl"`, ""},
		"a record that is compressed":           {changed(right, localBegin, 8, "\x08"), "is compressed", ""},
		"a size before the bytes":               {changed(right, localBegin, 18, "\x08"), "its size before it", ""},
		"a checksum before the bytes":           {changed(right, localBegin, 14, "\x08"), "its size before it", ""},
		"a record that is encrypted":            {changed(right, localBegin, 6, "\x09"), "or other flags", ""},
		"an old name":                           {changed(right, localBegin, 7, "\x00"), "or other flags", ""},
		"a name of 5000 bytes":                  {changed(right, localBegin, 26, "\x88\x13"), "a name of 5000 bytes", ""},
		"a record of a script":                  {archived(rec{"data.pkl", "\x80\x02" + good + "."}, rec{"code/x.py", "import os"}), `"archive/code/x.py": torch.save writes none`, ""},
		"a record of another folder":            {changed(right, "archive/byteorder", 0, "brchive/"), `"brchive/byteorder": torch.save writes none`, ""},
		"a record twice":                        {archived(rec{"data.pkl", "\x80\x02" + good + "."}, six, version, version), `"archive/version" comes twice`, ""},
		"a byte order that comes late":          {archived(rec{"data.pkl", "\x80\x02" + good + "."}, six, little, version), `"archive/byteorder" comes twice, or too late`, ""},
		"no storage":                            {archived(rec{"data.pkl", "\x80\x02" + good + "."}, version), "before the storage of a tensor", ""},
		"a storage that no tensor has":          {archived(rec{"data.pkl", "\x80\x02" + good + "."}, rec{"data/1", "1234"}, version), "is no storage of a tensor", ""},
		"a storage twice":                       {archived(rec{"data.pkl", "\x80\x02" + good + "."}, six, six, version), `"archive/data/0" comes twice`, ""},
		"a storage that is cut":                 {archived(rec{"data.pkl", "\x80\x02" + good + "."}, rec{"data/0", "1234"}, version), "does not end after its 24 bytes", ""},
		"a storage that goes on":                {archived(rec{"data.pkl", "\x80\x02" + good + "."}, rec{"data/0", six.data + "1"}, version), "does not end after its 24 bytes", ""},
		"a storage that promises a terabyte":    {pickled(rebuilds(stored(float, 1<<38), 0, shape, strides, "\x89"+hooks) + "."), "has no ZIP64 field for its 1099511627776 bytes", ""},
		"a storage of no bytes that has some":   {archived(rec{"data.pkl", "\x80\x02" + rebuilds(stored(float, 0), 0, "K\x00\x85", "K\x01\x85", "\x89"+hooks) + "."}, six, version), "or other flags", ""},
		"an entry that says less":               {changed(right, "\x00\x00\x80\x3fPK\x07\x08", 12, "\x17"), "says another size than its 24 bytes", ""},
		"a damaged data.pkl":                    {changed(right, "_rebuild_tensor_v2", 40, "\x01"), "", ""},
		"a damaged shape":                       {changed(right, "K\x02K\x03\x86K\x03", 1, "\x01"), `"archive/data.pkl" is damaged`, ""},
		"a damaged storage":                     {changed(right, six.data, 5, "\x01"), `"archive/data/0" is damaged`, "-"},
		"a damaged version":                     {changed(right, "3\nPK", 0, "4"), `"archive/version" is damaged`, ""},
		"big-endian":                            {archived(rec{"data.pkl", "\x80\x02" + good + "."}, rec{"byteorder", "big"}, six, version), `the byte order is "big"`, ""},
		"a byte order of 5000 bytes":            {archived(rec{"data.pkl", "\x80\x02" + good + "."}, rec{"byteorder", strings.Repeat("little", 834)}, six, version), "no bytes, or more than 4096", ""},
		"a version of no bytes":                 {changed(right, "3\nPK", 0, descriptorBegin), "no bytes, or more than 4096", ""},
		"ZIP64 where none is needed":            {wideHeader(6, "\x01\x00\x10\x00\x06\x00\x00\x00\x00\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00"), "has a ZIP64 field, and needs none", ""},
		"no ZIP64 where it is needed":           {wideHeader(1<<32, ""), "has no ZIP64 field for its 4294967296 bytes", ""},
		"ZIP64 with another size":               {wideHeader(1<<32, "\x01\x00\x10\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00"), "has no ZIP64 field for its 4294967296 bytes", ""},
		"a storage that the file does not have": {wideHeader(1<<40, "\x01\x00\x10\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), "ends too early", ""},
		"bytes between records":                 {bytes.Replace(right, []byte("PK\x03\x04"), []byte("..PK\x03\x04"), 2)[2:], "begins neither a record of torch.save nor", ""},
		"a directory before its time":           {changed(right, "little"+descriptorBegin, 6+16, entryBegin), "begins neither a record of torch.save nor", ""},
		"a directory with another name":         {inDirectory(entrySize+13, "1"), `does not have the record "archive/data/0"`, ""},
		"a directory with another checksum":     {inDirectory(16, "\x01"), `does not have the record "archive/data/0"`, ""},
		"a directory with another size":         {inDirectory(24, "\x01"), `does not have the record "archive/data/0"`, ""},
		"a directory with another packed size":  {inDirectory(20, "\x01"), `does not have the record "archive/data/0"`, ""},
		"a directory with another offset":       {inDirectory(42, "\x01"), `does not have the record "archive/data/0"`, ""},
		"a directory that says compressed":      {inDirectory(10, "\x08"), `does not have the record "archive/data/0"`, ""},
		"a directory with a comment":            {inDirectory(32, "\x01"), `does not have the record "archive/data/0"`, ""},
		"a directory that lacks the last":       {withDirectory(func(r []record) []record { return r[:3] }), `does not have the record "archive/version"`, ""},
		"a directory with one more":             {withDirectory(func(r []record) []record { return append(r, r[0]) }), "does not end with what came", ""},
		"another number of records":             {atEnd(24, "\x05"), "does not end with what came", ""},
		"another place of the directory":        {atEnd(48, "\x05"), "does not end with what came", ""},
		"another place of the end":              {atEnd(64, "\x05"), "does not end with what came", ""},
		"another number of records at the end":  {atEnd(84, "\x05"), "does not end with what came", ""},
		"a comment at the end":                  {atEnd(96, "\x05"), "does not end with what came", ""},
		"bytes behind the end":                  {append(slices.Clone(right), 0), "bytes follow the end", ""},

		// The opcodes.
		"no PROTO":                  {archived(rec{"data.pkl", good + "."}), "begin with its only PROTO", ""},
		"a second PROTO":            {pickled("\x80\x02" + good + "."), "begin with its only PROTO", ""},
		"protocol 4":                {archived(rec{"data.pkl", "\x80\x04" + good + "."}), "pickle protocol 4", ""},
		"INST":                      {pickled("(ios\nsystem\n."), "the opcode INST", ""},
		"STACK_GLOBAL":              {pickled(text("os") + text("system") + "\x93."), "the opcode STACK_GLOBAL", ""},
		"an unknown opcode":         {pickled("\xff."), "0xff in data.pkl is not an opcode", ""},
		"os.system":                 {pickled("cos\nsystem\n" + text("true") + "\x85R."), `the global "os system"`, ""},
		"eval":                      {pickled("cbuiltins\neval\n" + text("1") + "\x85R."), `the global "builtins eval"`, ""},
		"torch.load":                {pickled("ctorch\nload\n" + text("x.pt") + "\x85R."), `the global "torch load"`, ""},
		"a global of 5000 bytes":    {pickled("c" + strings.Repeat("x", 5000)), "a global of more than 4096 bytes", ""},
		"a kept value too far":      {pickled("h\x00."), "asks for the value 0 of 0", ""},
		"a value kept far away":     {pickled("r\xff\xff\xff\x7f"), "takes a value that is not there", ""},
		"a value kept at 2^31":      {pickled("K\x01r\xff\xff\xff\x7f"), "keeps a value as 2147483647, and not as 0", ""},
		"a value of nowhere":        {pickled("\x86."), "takes a value that is not there", ""},
		"a tuple without a mark":    {pickled("K\x01t."), "takes a value that is not there", ""},
		"a mark in a tuple":         {pickled("((\x86."), "takes a value that is not there", ""},
		"nothing but STOP":          {pickled("."), "takes a value that is not there", ""},
		"two values":                {pickled("K\x01" + good + "."), "leaves 2 values", ""},
		"a text of 5000 bytes":      {pickled(text(strings.Repeat("x", 5000))), "BINUNICODE of 5000 bytes", ""},
		"a text of 4 GiB":           {pickled("X\xff\xff\xff\xff"), "BINUNICODE of 4294967295 bytes", ""},
		"a text that is not UTF-8":  {pickled(text("\xff")), "not UTF-8", ""},
		"a negative number":         {pickled("J\xff\xff\xff\xff."), "a number that is negative", ""},
		"a number of 9 bytes":       {pickled("\x8a\x09123456789."), "or has 9 bytes", ""},
		"a number of 8 bytes":       {pickled("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\xff."), "a number that is negative", ""},
		"5000 opcodes":              {pickled(strings.Repeat("K\x01", 2500)), "data.pkl has more than 4096 bytes", "the opcode PERSID"},
		"a million values":          {pickled(strings.Repeat("(", 1<<20)), "data.pkl has more than 4096 bytes", "leaves more than 8192 waiting"},
		"a bomb of tuples":          {pickled("(" + bomb(200) + "t."), "a value of type tuple;", ""},
		"a dict in itself":          {pickled("}q\x00" + text("x") + "h\x00s."), "of type dict", `"x" in the dict is of type dict`},
		"a call of a tuple":         {pickled("))R."), "of type tuple where one of type function", ""},
		"a call of a type":          {pickled(float + ")R."), "of type storageType where", ""},
		"a call with a number":      {pickled("ccollections\nOrderedDict\nK\x01R."), "of type int where one of type tuple", ""},
		"an OrderedDict of a tuple": {pickled("ccollections\nOrderedDict\n)\x85R."), "an OrderedDict is made of 0 values, and not of 1", ""},
		"attributes":                {pickled(hooks + "}" + text("x") + "K\x01sb."), "a dict with 1 attributes", ""},
		"a tensor in the metadata":  {pickled(hooks + "}" + text("_metadata") + good + "sb."), "only _metadata", ""},
		"attributes of a tensor":    {pickled(good + "}b."), "of type tensor where one of type dict", ""},
		"a key without a value":     {pickled("}(" + text("x") + "u."), "a key without a value", ""},
		"an item of a number":       {pickled("K\x01" + text("x") + "K\x01s."), "of type int where one of type dict", ""},
		"another persistent id":     {pickled("(" + text("module") + float + text("0") + text("cpu") + "K\x01tQ."), `a "module" of 1 elements`, ""},
		"a bomb as persistent id":   {pickled("(" + "(" + bomb(200) + "t" + float + text("0") + text("cpu") + "K\x01tQ."), "of type tuple where", ""},
		"a short persistent id":     {pickled(text("storage") + "\x85Q."), "a storage is made of 5 values, and not of 1", ""},
		"a storage of 2^62":         {pickled(stored(float, 1<<62) + "."), "of 4611686018427387904 elements", ""},
		"a storage of two types":    {pickled(sixFloats + stored("ctorch\nIntStorage\n", 6) + "."), `the storage "0" is of two types or sizes`, ""},
		"a storage of a text":       {pickled(stored(text("FloatStorage"), 6) + "."), "of type str where one of type storageType", ""},

		// The tensors.
		"a tensor of five values":       {pickled(build + "(" + sixFloats + "K\x00" + shape + strides + "\x89tR."), "a tensor is made of 6 values, and not of 5", ""},
		"a shape of texts":              {pickled(rebuilds(sixFloats, 0, text("2")+"\x85", "K\x01\x85", "\x89"+hooks) + "."), "of type str where one of type int", ""},
		"a stride too few":              {pickled(rebuilds(sixFloats, 0, shape, "K\x01\x85", "\x89"+hooks) + "."), "a tensor of rank 2 has 1 strides", ""},
		"rank 33":                       {pickled(rebuilds(sixFloats, 0, tupleOf(slices.Repeat([]int64{1}, 33)...), tupleOf(slices.Repeat([]int64{0}, 33)...), "\x89"+hooks) + "."), "rank 33 is over the limit of 32", ""},
		"a shape of 2^80":               {pickled(rebuilds(sixFloats, 0, tupleOf(1<<40, 1<<40), tupleOf(0, 0), "\x89"+hooks) + "."), tooLarge, ""},
		"an axis of 2^41":               {pickled(rebuilds(sixFloats, 0, tupleOf(1<<41), tupleOf(0), "\x89"+hooks) + "."), "over the limit of 1099511627776", ""},
		"nothing of 2^80":               {pickled(rebuilds(sixFloats, 0, tupleOf(0, 1<<40, 1<<40), tupleOf(0, 0, 0), "\x89"+hooks) + "."), tooLarge, ""},
		"an offset at the end":          {pickled(rebuilds(sixFloats, 6, "K\x01\x85", "K\x01\x85", "\x89"+hooks) + "."), "ends behind its storage of 6 elements", ""},
		"an offset of 2^62":             {pickled(rebuilds(sixFloats, 1<<62, "K\x01\x85", "K\x01\x85", "\x89"+hooks) + "."), "ends behind its storage of 6 elements", ""},
		"a stride past the end":         {pickled(rebuilds(sixFloats, 0, shape, "K\x04K\x01\x86", "\x89"+hooks) + "."), "with strides [4 1] at offset 0 ends behind", ""},
		"a stride of 2^62":              {pickled(rebuilds(sixFloats, 0, shape, tupleOf(1<<62, 1<<62), "\x89"+hooks) + "."), "ends behind its storage of 6 elements", ""},
		"strides of 0 to 12 TB":         {pickled(rebuilds(sixFloats, 0, tupleOf(3<<20, 1<<20), tupleOf(0, 0), "\x89"+hooks) + "."), tooLarge + ": float32[3145728 1048576] has 13194139533312 bytes", "repeats its elements to 13194139533312 bytes"},
		"a window of a terabyte":        {pickled(rebuilds(stored(float, 1<<38), 0, "K\x02\x85", tupleOf(1<<37), "\x89"+hooks) + "."), "has 8 bytes, which take 549755813892", "has no ZIP64 field"},
		"a conjugated tensor":           {pickled(rebuilds(sixFloats, 0, shape, strides, "\x89"+hooks+"}"+text("conj")+"\x88s") + "."), "conjugated or negated", ""},
		"a tensor with hooks":           {pickled(rebuilds(sixFloats, 0, shape, strides, "\x89"+hooks+text("x")+"K\x01s") + "."), "a tensor with hooks", ""},
		"hooks that are none":           {pickled(rebuilds(sixFloats, 0, shape, strides, "\x89K\x00") + "."), "of type int where one of type dict", ""},
		"a gradient of a number":        {pickled(rebuilds(sixFloats, 0, shape, strides, "K\x01"+hooks) + "."), "of type int where one of type bool", ""},
		"an untyped storage":            {pickled(rebuilds(stored(untyped, 24), 0, shape, strides, "\x89"+hooks) + "."), "data type", ""},
		"a typed storage of a type":     {pickled(build3 + "(" + sixFloats + "K\x00" + shape + strides + "\x89" + hooks + "ctorch\nuint32\ntR."), "a data type of its own has an untyped storage", ""},
		"a type that is none":           {pickled(build3 + "(" + stored(untyped, 24) + "K\x00" + shape + strides + "\x89" + hooks + text("uint32") + "tR."), "of type str where one of type dataType is expected", ""},
		"uint64 past the end":           {pickled(build3 + "(" + stored(untyped, 24) + "K\x00" + shape + strides + "\x89" + hooks + "ctorch\nuint64\ntR."), "ends behind its storage of 3 elements", ""},
		"a parameter of a number":       {pickled("ctorch._utils\n_rebuild_parameter\nK\x01\x89" + hooks + "\x87R."), "of type int where one of type tensor", ""},
		"a dict of a tensor":            {pickled("}" + text("x") + good + "s."), "a dict of tensors", "-"},
		"a dict with a name twice":      {pickled("}(" + text("x") + good + text("x") + good + "u."), `"x" comes twice`, ""},
		"a dict with a number":          {pickled("}" + text("epoch") + "K\x01s."), `"epoch" in the dict is of type int;`, ""},
		"a dict with a number as a key": {pickled("}K\x01" + good + "s."), "a dict with a key of type int;", ""},
		"two storages":                  {pickled("}" + text("x") + strings.Replace(good, text("0"), text("1"), 1) + "s" + text("y") + good + "s."), "several storages", "before the storage of a tensor"},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, _, window, err := read(tc.file, 1<<20, 1<<30)
			_, inFile := parse(tc.file)
			runtime.ReadMemStats(&after)
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(1<<21))
			require.ErrorContains(t, err, tc.stream)
			typed(t, err)
			for _, pieces := range []int{1, 7, 64, 4096} {
				if len(tc.file) > 1<<16 && pieces < 64 {
					continue
				}
				_, _, cut, other := read(tc.file, pieces, 1<<30)
				require.Equal(t, err.Error(), other.Error())
				require.True(t, bytes.Equal(window, cut))
			}
			switch tc.files {
			case "":
				require.ErrorContains(t, inFile, tc.stream)
			case "-":
				require.NoError(t, inFile)
			default:
				require.ErrorContains(t, inFile, tc.files)
			}
			typed(t, inFile)
		})
	}
}

// typed checks that an error is one of this package.
func typed(t testing.TB, err error) {
	t.Helper()
	if err != nil && (!strings.Contains(err.Error(), ": torch: ") || !errors.Is(err, tensorfile.ErrFormat) && !errors.Is(err, tensorfile.ErrUnsupported)) {
		t.Fatalf("untyped error: %v", err)
	}
}

func TestAFileThatIsCutIsRefused(t *testing.T) {
	for _, name := range []string{"float32", "view with an offset", "uint64 view with an offset", "empty of three axes"} {
		file := goldenOf(t, name)
		for n := range file {
			_, known, _, err := read(file[:n], n+1, 1<<20)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.ErrorIs(t, err, tensorfile.ErrFormat)
			require.Equal(t, known, n >= 400 || known)
			_, err = parse(file[:n])
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		}
	}
}

// Whatever byte is changed, a tensor is read as it was, or not at all.
func TestAChangedByteIsNoticed(t *testing.T) {
	file := goldenOf(t, "view with an offset")
	layout, _, window, err := read(file, len(file), 1<<20)
	require.NoError(t, err)
	passed := 0
	for at := range file {
		for _, bit := range []byte{1, 0x80, 0xff} {
			other := slices.Clone(file)
			other[at] ^= bit
			l, known, got, err := read(other, len(other), 1<<20)
			typed(t, err)
			if known { // its checksum was right
				require.Equal(t, layout, l)
			}
			if err == nil {
				passed++
				require.Equal(t, window, got)
			}
			f, err := parse(other)
			typed(t, err)
			if err == nil {
				a, err := f.Array("")
				require.NoError(t, err)
				if data, err := io.ReadAll(a.Reader); err == nil {
					require.Equal(t, dense(t, layout, window), data)
				}
			}
		}
	}
	require.Less(t, passed, len(file)*2) // padding, versions, times
}

// torch may leave checksums out.
func TestAChecksumOfZeroIsNone(t *testing.T) {
	var p Parts
	var b []byte
	for _, r := range []rec{{"data.pkl", "\x80\x02" + good + "."}, little, six, version} {
		b = p.record(b, 0, r.name, []byte(r.data))
		le.PutUint32(b[len(b)-12:], 0)
		p.records[len(p.records)-1].crc = 0
	}
	b = closed(b, p.records)
	_, _, window, err := read(b, 50, 24)
	require.NoError(t, err)
	require.Equal(t, six.data, string(window))
	f, err := parse(b)
	require.NoError(t, err)
	a, err := f.Array("")
	require.NoError(t, err)
	data, err := io.ReadAll(a.Reader)
	require.NoError(t, err)
	require.Equal(t, six.data, string(data))
}

func TestALargerTensorThanAllowedIsRefused(t *testing.T) {
	file := goldenOf(t, "column") // 4 floats in a window of 19
	_, _, _, err := read(file, 100, 19*4)
	require.NoError(t, err)
	_, known, window, err := read(file, 100, 19*4-1)
	require.ErrorIs(t, err, tensor.ErrTooLarge)
	require.False(t, known)
	require.Empty(t, window)
}

func TestAReaderTakesAFewKiB(t *testing.T) {
	file := goldenOf(t, "rank 32")
	const times = 100
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range times {
		_, _, _, _ = read(file, 7, 1<<20)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(times*64<<10))
}

// What is found damaged behind the tensor does not take back what has been said of it.
func TestALayoutStaysKnown(t *testing.T) {
	_, known, window, err := read(changed(pickled(good+"."), six.data, 5, "\x01"), 64, 24)
	require.ErrorContains(t, err, "is damaged")
	require.True(t, known)
	require.Len(t, window, 24)
}
