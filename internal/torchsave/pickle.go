package torchsave

import (
	"bytes"
	"cmp"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/tensor"
)

// machine is the part of Python's pickle machine that a file of tensors needs. Its values
// are int64, bool, string, tuple, *dict, *storage, *rebuilt, mark and those of globals.
type machine struct {
	most  int                // bytes of the pickle
	limit func(Layout) error // of each tensor

	read, values int    // bytes; values that were pushed
	crc          uint32 // of what was read
	over         bool   // STOP came
	err          error  // the first one
	stack, memo  []any
	stores       map[string]*storage // by key
}

type (
	mark        struct{}
	tuple       []any
	storageType tensor.DataType // torch.FloatStorage; 0 is torch.storage.UntypedStorage
	dataType    tensor.DataType // torch.uint16
	function    func(m *machine, args tuple) any
)

// dict is a dict or an OrderedDict.
type dict struct {
	ordered, tensors bool // an OrderedDict; not only numbers, texts and dicts of such
	keys             []string
	values           []any
}

// storage is the bytes that tensors lie in: a record of the archive.
type storage struct {
	key            string
	kind           storageType
	elements, size int64 // an element of an untyped one is a byte; size is in bytes
	came           bool
	data           int64        // where its bytes begin in the file
	crc            uint32       // 0 is none
	intact         func() error // of a whole file: whether the checksum is right
}

// rebuilt is a tensor.
type rebuilt struct {
	*storage
	Layout
	offset int64 // of its window in the storage, in bytes
}

// readable is what errors about other content say.
const readable = "only dense tensors, and in files flat dicts of them such as model.state_dict(), are read"

// globals are the names that a pickle may say. A function only builds one of the machine's
// values.
var globals = map[string]any{
	"collections OrderedDict": function(func(m *machine, args tuple) any {
		m.count("an OrderedDict", args, 0)
		return &dict{ordered: true}
	}),
	"torch._utils _rebuild_tensor_v2": function(func(m *machine, args tuple) any { return m.rebuild(args, 6) }),
	"torch._utils _rebuild_tensor_v3": function(func(m *machine, args tuple) any { return m.rebuild(args, 7) }),
	"torch._utils _rebuild_parameter": function(func(m *machine, args tuple) any {
		args = m.count("a parameter", args, 3)
		m.flags(args[1], args[2])
		return want[*rebuilt](m, args[0])
	}),
	"torch.storage UntypedStorage": storageType(0),
	"torch BoolStorage":            storageType(tensor.Bool), "torch CharStorage": storageType(tensor.Int8),
	"torch ShortStorage": storageType(tensor.Int16), "torch IntStorage": storageType(tensor.Int32),
	"torch LongStorage": storageType(tensor.Int64), "torch ByteStorage": storageType(tensor.Uint8),
	"torch HalfStorage": storageType(tensor.Float16), "torch BFloat16Storage": storageType(tensor.BFloat16),
	"torch FloatStorage": storageType(tensor.Float32), "torch DoubleStorage": storageType(tensor.Float64),
	"torch ComplexFloatStorage": storageType(tensor.Complex64), "torch ComplexDoubleStorage": storageType(tensor.Complex128),
	"torch uint16": dataType(tensor.Uint16), "torch uint32": dataType(tensor.Uint32), "torch uint64": dataType(tensor.Uint64),
	"torch float8_e4m3fn": dataType(tensor.Float8E4M3FN), "torch float8_e5m2": dataType(tensor.Float8E5M2),
}

// opcode is an opcode that is known, and its argument: so many bytes, or one of these.
type opcode struct {
	name string
	arg  int
	do   func(m *machine, arg []byte)
}

const (
	argLines = -1 // two lines
	argLong  = -2 // a byte that says how many follow; -2 is the length with the opcode
	argText  = -5 // four bytes that say so
)

var opcodes = [256]opcode{
	0x80: {"PROTO", 1, (*machine).proto},
	'c':  {"GLOBAL", argLines, (*machine).global},
	'q':  {"BINPUT", 1, (*machine).put},
	'r':  {"LONG_BINPUT", 4, (*machine).put},
	'h':  {"BINGET", 1, (*machine).get},
	'j':  {"LONG_BINGET", 4, (*machine).get},
	'X':  {"BINUNICODE", argText, (*machine).text},
	'K':  {"BININT1", 1, func(m *machine, arg []byte) { m.push(number(arg)) }},
	'M':  {"BININT2", 2, func(m *machine, arg []byte) { m.push(number(arg)) }},
	'J':  {"BININT", 4, (*machine).signed},
	0x8a: {"LONG1", argLong, (*machine).signed},
	0x88: {"NEWTRUE", 0, func(m *machine, _ []byte) { m.push(true) }},
	0x89: {"NEWFALSE", 0, func(m *machine, _ []byte) { m.push(false) }},
	'(':  {"MARK", 0, func(m *machine, _ []byte) { m.push(mark{}) }},
	')':  {"EMPTY_TUPLE", 0, func(m *machine, _ []byte) { m.push(tuple{}) }},
	0x85: {"TUPLE1", 0, func(m *machine, _ []byte) { m.push(tuple(m.pop(1))) }},
	0x86: {"TUPLE2", 0, func(m *machine, _ []byte) { m.push(tuple(m.pop(2))) }},
	0x87: {"TUPLE3", 0, func(m *machine, _ []byte) { m.push(tuple(m.pop(3))) }},
	't':  {"TUPLE", 0, func(m *machine, _ []byte) { m.push(tuple(m.pop(m.marked()))) }},
	'}':  {"EMPTY_DICT", 0, func(m *machine, _ []byte) { m.push(&dict{}) }},
	's':  {"SETITEM", 0, func(m *machine, _ []byte) { m.set(m.pop(2)) }},
	'u':  {"SETITEMS", 0, func(m *machine, _ []byte) { m.set(m.pop(m.marked())) }},
	'Q':  {"BINPERSID", 0, (*machine).persistent},
	'R':  {"REDUCE", 0, (*machine).reduce},
	'b':  {"BUILD", 0, (*machine).build},
	'.':  {"STOP", 0, func(m *machine, _ []byte) { m.over = true }},
}

// others are the opcodes that are refused: each with its name behind it.
const others = "IINT LLONG SSTRING TBINSTRING USHORT_BINSTRING BBINBYTES CSHORT_BINBYTES NNONE VUNICODE FFLOAT GBINFLOAT " +
	"]EMPTY_LIST aAPPEND eAPPENDS lLIST dDICT 0POP 2DUP 1POP_MARK gGET pPUT iINST oOBJ PPERSID " +
	"\x8bLONG4 \x8eBINBYTES8 \x96BYTEARRAY8 \x97NEXT_BUFFER \x98READONLY_BUFFER \x8cSHORT_BINUNICODE \x8dBINUNICODE8 " +
	"\x8fEMPTY_SET \x90ADDITEMS \x91FROZENSET \x94MEMOIZE \x82EXT1 \x83EXT2 \x84EXT4 \x93STACK_GLOBAL \x81NEWOBJ \x92NEWOBJ_EX \x95FRAME"

// step runs the opcode that p begins with and returns its length, or 0 if p ends within it.
func (m *machine) step(p []byte) (n int) {
	op := &opcodes[p[0]]
	arg, skip := op.arg, 1
	switch {
	case op.do == nil:
		_, name, known := strings.Cut(" "+others, " "+string(p[:1]))
		name, _, _ = strings.Cut(name, " ")
		m.must(known, malformed, "the byte 0x%02x in data.pkl is not an opcode", p[0])
		m.must(false, unsupported, "the opcode %s in data.pkl; "+readable, name)
		return 0
	case arg == argLines:
		p = p[:min(len(p), maxText)]
		lines := bytes.SplitAfterN(p, []byte("\n"), 3)
		if len(lines) < 3 {
			m.must(len(p) < maxText, malformed, "a global of more than %d bytes: %.80q", maxText, p[1:])
			return 0
		}
		arg = len(lines[0]) + len(lines[1]) - skip
	case arg < 0: // a length, and as many bytes
		if skip = -arg; len(p) < skip {
			return 0
		}
		if arg = int(number(p[1:skip])); !m.must(arg <= maxText, malformed, "%s of %d bytes, the limit is %d", op.name, arg, maxText) {
			return 0
		}
	}
	if n = skip + arg; len(p) < n {
		return 0
	}
	m.read += n
	m.crc = crc32.Update(m.crc, crc32.IEEETable, p[:n])
	if m.must(m.read <= m.most, limited, "data.pkl has more than %d bytes", m.most) &&
		m.must((m.read == n) == (p[0] == 0x80), malformed, "data.pkl does not begin with its only PROTO") {
		op.do(m, p[skip:n])
	}
	return n
}

// must reports whether ok, and keeps the first error if not.
func (m *machine) must(ok bool, refuse func(string, ...any) error, text string, args ...any) bool {
	if !ok && m.err == nil {
		m.err = refuse(text, args...)
	}
	return ok
}

func (m *machine) push(v any) {
	m.values++
	if m.must(m.values <= maxValues && len(m.stack) < maxStack, limited, "data.pkl makes more than %d values, or leaves more than %d waiting", maxValues, maxStack) {
		m.stack = append(m.stack, v)
	}
}

// pop removes and copies the last n values. If they are not there, it fails and returns others.
func (m *machine) pop(n int) []any {
	begin := len(m.stack) - n
	if !m.must(n >= 0 && begin >= 0 && !slices.Contains(m.stack[max(begin, 0):], any(mark{})), malformed, "data.pkl takes a value that is not there") {
		return make([]any, max(n, 0))
	}
	popped := slices.Clone(m.stack[begin:])
	m.stack = m.stack[:begin]
	return popped
}

// marked removes the last mark and returns how many values follow it, or -1.
func (m *machine) marked() int {
	for i, v := range slices.Backward(m.stack) {
		if v == any(mark{}) {
			m.stack = slices.Delete(m.stack, i, i+1)
			return len(m.stack) - i
		}
	}
	return -1
}

// want returns a value of this type, and fails for any other.
func want[T any](m *machine, v any) (t T) {
	t, ok := v.(T)
	if !ok {
		m.must(ok, unsupported, "a value of type %s where one of type %s is expected", kind(v), kind(t))
	}
	return t
}

// kind is what a value is, for errors: the name of its type, in Python if it has one there.
func kind(v any) string {
	name := strings.TrimPrefix(strings.TrimPrefix(fmt.Sprintf("%T", v), "*"), "torchsave.")
	return cmp.Or(map[string]string{"int64": "int", "string": "str", "rebuilt": "tensor"}[name], name)
}

// number is a number without a sign, of which b has up to 8 bytes, the lowest first.
func number(b []byte) int64 {
	wide := [8]byte{}
	copy(wide[:], b)
	return int64(le.Uint64(wide[:]))
}

func (m *machine) signed(arg []byte) {
	m.must(len(arg) == 0 || len(arg) <= 8 && arg[len(arg)-1] <= math.MaxInt8, malformed, "a number that is negative or has %d bytes", len(arg))
	m.push(number(arg))
}

func (m *machine) proto(arg []byte) {
	m.must(arg[0] == 2, unsupported, "pickle protocol %d; torch.save it without pickle_protocol", arg[0])
}

func (m *machine) global(arg []byte) {
	name := strings.Replace(string(arg[:len(arg)-1]), "\n", " ", 1)
	v, known := globals[name]
	m.must(known, unsupported, "the global %.80q in data.pkl; "+readable, name)
	m.push(v)
}

func (m *machine) text(arg []byte) {
	m.must(utf8.Valid(arg), malformed, "a text that is not UTF-8: %.80q", arg)
	m.push(string(arg))
}

// put keeps the last value at the end of the memo: pickle counts, so nobody says where it ends.
func (m *machine) put(arg []byte) {
	v := m.pop(1)[0]
	m.must(number(arg) == int64(len(m.memo)), malformed, "data.pkl keeps a value as %d, and not as %d", number(arg), len(m.memo))
	m.memo = append(m.memo, v)
	m.push(v)
}

func (m *machine) get(arg []byte) {
	if m.must(number(arg) < int64(len(m.memo)), malformed, "data.pkl asks for the value %d of %d that it has kept", number(arg), len(m.memo)) {
		m.push(m.memo[number(arg)])
	}
}

// set puts pairs into the dict that is last.
func (m *machine) set(pairs []any) {
	d := want[*dict](m, m.pop(1)[0])
	m.must(len(pairs)%2 == 0, malformed, "a key without a value")
	for i := 0; i < len(pairs) && m.err == nil; i += 2 {
		key, text := pairs[i].(string)
		m.must(text, unsupported, "a dict with a key of type %s; "+readable, kind(pairs[i]))
		d.keys, d.values = append(d.keys, key), append(d.values, pairs[i+1])
		switch v := pairs[i+1].(type) {
		case int64, string, bool:
		case *dict:
			d.tensors = d.tensors || v.tensors
		default:
			d.tensors = true
		}
	}
	m.push(d)
}

// build drops what a state dict has beside its tensors: the versions of its modules.
func (m *machine) build([]byte) {
	state := want[*dict](m, m.pop(1)[0])
	if d := want[*dict](m, m.pop(1)[0]); m.err == nil {
		m.must(d.ordered && !state.tensors && slices.Equal(state.keys, []string{"_metadata"}), unsupported,
			"a dict with %d attributes; only _metadata of a state dict is known, numbers and texts", len(state.keys))
		m.push(d)
	}
}

func (m *machine) reduce([]byte) {
	args := want[tuple](m, m.pop(1)[0])
	if call := want[function](m, m.pop(1)[0]); m.err == nil {
		m.push(call(m, args))
	}
}

// count returns the n values that something is made of, and fails if there are others.
func (m *machine) count(what string, args tuple, n int) tuple {
	if !m.must(len(args) == n, malformed, "%s is made of %d values, and not of %d", what, n, len(args)) {
		return make(tuple, n)
	}
	return args
}

// flags checks what a tensor has beside its numbers: whether it requires a gradient, and hooks.
func (m *machine) flags(gradient, hooks any) {
	want[bool](m, gradient)
	if d := want[*dict](m, hooks); m.err == nil {
		m.must(len(d.keys) == 0, unsupported, "a tensor with hooks")
	}
}

// persistent makes a storage of ("storage", type, key, location, elements).
func (m *machine) persistent([]byte) {
	id := m.count("a storage", want[tuple](m, m.pop(1)[0]), 5)
	what, device := want[string](m, id[0]), want[string](m, id[3])
	s := &storage{kind: want[storageType](m, id[1]), key: want[string](m, id[2]), elements: want[int64](m, id[4])}
	unit := max(int64(tensor.DataType(s.kind).Bits()/8), 1)
	s.size = s.elements * unit
	m.must(what == "storage" && s.elements <= math.MaxInt64/2/unit, malformed, "a %.80q of %d elements on %.80q", what, s.elements, device)
	if old := m.stores[s.key]; old != nil {
		m.must(old.kind == s.kind && old.elements == s.elements, malformed, "the storage %.80q is of two types or sizes", s.key)
		s = old
	}
	m.stores[s.key] = s
	m.push(s)
}

// rebuild makes a tensor of storage, offset, size, stride, requires_grad, hooks and, if it
// has n = 7 arguments, its data type.
func (m *machine) rebuild(args tuple, n int) any {
	if len(args) > n {
		want[*dict](m, args[n])
		m.must(false, unsupported, "a tensor that is conjugated or negated; save tensor.resolve_conj().resolve_neg()")
	}
	args = m.count("a tensor", args, n)
	s, offset, shape, strides := want[*storage](m, args[0]), want[int64](m, args[1]), m.numbers(args[2]), m.numbers(args[3])
	if m.flags(args[4], args[5]); m.err != nil {
		return nil
	}
	d, elements := tensor.Desc{DType: tensor.DataType(s.kind), Shape: shape}, s.elements
	if n == 7 {
		d.DType = tensor.DataType(want[dataType](m, args[6]))
		elements = s.size / max(width(d), 1)
	}
	m.must((s.kind == 0) == (n == 7), malformed, "a tensor with a data type of its own has an untyped storage, and no other has")
	l, err := layoutOf(d, strides, offset, elements)
	if err == nil {
		err = m.limit(l)
	}
	if m.err == nil {
		m.err = err
	}
	return &rebuilt{s, l, offset * min(l.Window, width(d))} // no bytes begin nowhere
}

func (m *machine) numbers(v any) (list []int64) {
	for _, v := range want[tuple](m, v) {
		list = append(list, want[int64](m, v))
	}
	return list
}

// entry is a tensor of a file, under the name that a dict has for it.
type entry struct {
	name string
	*rebuilt
}

// root returns the tensors that the pickle holds: one without a name, or those of a dict.
func (m *machine) root() (entries []entry, bare bool) {
	top := m.pop(1)[0]
	m.must(len(m.stack) == 0, malformed, "data.pkl leaves %d values", len(m.stack)+1)
	if t, bare := top.(*rebuilt); bare {
		return []entry{{"", t}}, true
	}
	d, many := top.(*dict)
	m.must(many, unsupported, "a value of type %s; "+readable, kind(top))
	seen := map[string]bool{}
	for i := 0; m.err == nil && i < len(d.keys); i++ {
		name := d.keys[i]
		t, ok := d.values[i].(*rebuilt)
		m.must(ok, unsupported, "%.80q in the dict is of type %s; "+readable, name, kind(d.values[i]))
		m.must(!seen[name], malformed, "%.80q comes twice in the dict", name)
		entries, seen[name] = append(entries, entry{name, t}), true
	}
	return entries, false
}
