package torchsave

import (
	"bytes"
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
	most  int // bytes of the pickle
	limit func(Layout) error

	read   int
	values int    // that were pushed
	crc    uint32 // of what was read
	over   bool   // STOP came
	stack  []any
	memo   []any
	stores map[string]*storage // by key
}

type (
	mark        struct{}
	tuple       []any
	storageType tensor.DataType // torch.FloatStorage; 0 is torch.storage.UntypedStorage
	elementType tensor.DataType // torch.uint16
	rebuilding  func(m *machine, args tuple) (any, error)
)

// dict is a dict or an OrderedDict. What it holds is looked at when it has become the root.
type dict struct {
	ordered bool
	plain   bool // only numbers, texts and dicts of such, when they were put
	keys    []any
	values  []any
}

// storage is the bytes that tensors lie in: a record of the archive.
type storage struct {
	key      string
	kind     storageType
	elements int64 // bytes, if untyped
	size     int64 // bytes
	came     bool
	data     int64  // where its bytes begin in the file
	crc      uint32 // 0 is none
}

// rebuilt is a tensor.
type rebuilt struct {
	*storage
	Layout
	offset int64 // of its window in the storage, in bytes
}

// globals are the names that a pickle may say. Those that are called only build one of the
// machine's values.
var globals = map[string]any{
	"torch._utils _rebuild_tensor_v2": rebuilding(func(m *machine, args tuple) (any, error) { return m.rebuild(args, 6) }),
	"torch._utils _rebuild_tensor_v3": rebuilding(func(m *machine, args tuple) (any, error) { return m.rebuild(args, 7) }),
	"torch._utils _rebuild_parameter": rebuilding(parameter),
	"collections OrderedDict":         rebuilding(orderedDict),
	"torch.storage UntypedStorage":    storageType(0),
	"torch FloatStorage":              storageType(tensor.Float32),
	"torch DoubleStorage":             storageType(tensor.Float64),
	"torch HalfStorage":               storageType(tensor.Float16),
	"torch BFloat16Storage":           storageType(tensor.BFloat16),
	"torch LongStorage":               storageType(tensor.Int64),
	"torch IntStorage":                storageType(tensor.Int32),
	"torch ShortStorage":              storageType(tensor.Int16),
	"torch CharStorage":               storageType(tensor.Int8),
	"torch ByteStorage":               storageType(tensor.Uint8),
	"torch BoolStorage":               storageType(tensor.Bool),
	"torch ComplexFloatStorage":       storageType(tensor.Complex64),
	"torch ComplexDoubleStorage":      storageType(tensor.Complex128),
	"torch uint16":                    elementType(tensor.Uint16),
	"torch uint32":                    elementType(tensor.Uint32),
	"torch uint64":                    elementType(tensor.Uint64),
	"torch float8_e4m3fn":             elementType(tensor.Float8E4M3FN),
	"torch float8_e5m2":               elementType(tensor.Float8E5M2),
}

// opcode is an opcode that is known, and how long its argument is.
type opcode struct {
	name string
	arg  int // bytes, or one of the following
	do   func(m *machine, arg []byte) error
}

const (
	argLines = -1 // two lines
	argLong  = -2 // a byte that says how many follow; the number is that of opcode and length
	argText  = -5 // four bytes that say so
)

var opcodes = [256]opcode{
	0x80: {"PROTO", 1, (*machine).proto},
	'c':  {"GLOBAL", argLines, (*machine).global},
	'q':  {"BINPUT", 1, (*machine).put},
	'r':  {"LONG_BINPUT", 4, (*machine).put},
	'h':  {"BINGET", 1, (*machine).get},
	'j':  {"LONG_BINGET", 4, (*machine).get},
	'(':  {"MARK", 0, pushing(func() any { return mark{} })},
	'X':  {"BINUNICODE", argText, (*machine).text},
	'K':  {"BININT1", 1, (*machine).number},
	'M':  {"BININT2", 2, (*machine).number},
	'J':  {"BININT", 4, (*machine).signed},
	0x8a: {"LONG1", argLong, (*machine).signed},
	')':  {"EMPTY_TUPLE", 0, pushing(func() any { return tuple{} })},
	0x85: {"TUPLE1", 0, func(m *machine, _ []byte) error { return m.tuple(1) }},
	0x86: {"TUPLE2", 0, func(m *machine, _ []byte) error { return m.tuple(2) }},
	0x87: {"TUPLE3", 0, func(m *machine, _ []byte) error { return m.tuple(3) }},
	't':  {"TUPLE", 0, func(m *machine, _ []byte) error { return m.tuple(m.marked()) }},
	'Q':  {"BINPERSID", 0, (*machine).persistent},
	0x88: {"NEWTRUE", 0, pushing(func() any { return true })},
	0x89: {"NEWFALSE", 0, pushing(func() any { return false })},
	'R':  {"REDUCE", 0, (*machine).reduce},
	'}':  {"EMPTY_DICT", 0, pushing(func() any { return &dict{plain: true} })},
	's':  {"SETITEM", 0, func(m *machine, _ []byte) error { return m.set(2) }},
	'u':  {"SETITEMS", 0, func(m *machine, _ []byte) error { return m.set(m.marked()) }},
	'b':  {"BUILD", 0, (*machine).build},
	'.':  {"STOP", 0, func(m *machine, _ []byte) error { m.over = true; return nil }},
}

// others are the names of the opcodes that are refused, behind the letters that they are.
const others = "IINT LLONG SSTRING TBINSTRING USHORT_BINSTRING BBINBYTES CSHORT_BINBYTES NNONE VUNICODE FFLOAT GBINFLOAT " +
	"]EMPTY_LIST aAPPEND eAPPENDS lLIST dDICT 0POP 2DUP 1POP_MARK gGET pPUT iINST oOBJ PPERSID " +
	"\x8bLONG4 \x8eBINBYTES8 \x96BYTEARRAY8 \x97NEXT_BUFFER \x98READONLY_BUFFER \x8cSHORT_BINUNICODE \x8dBINUNICODE8 " +
	"\x8fEMPTY_SET \x90ADDITEMS \x91FROZENSET \x94MEMOIZE \x82EXT1 \x83EXT2 \x84EXT4 \x93STACK_GLOBAL \x81NEWOBJ \x92NEWOBJ_EX \x95FRAME"

// refusedOpcode is the error of an opcode that no file of tensors needs.
func refusedOpcode(op byte) error {
	for _, name := range strings.Fields(others) {
		if name[0] == op {
			return unsupported("the opcode %s in data.pkl: it holds more than tensors of numbers", name[1:])
		}
	}
	return malformed("the byte 0x%02x in data.pkl is no opcode", op)
}

// step runs the opcode that p begins with and returns its length, or 0 if p ends within it.
func (m *machine) step(p []byte) (n int, err error) {
	op := &opcodes[p[0]]
	if op.do == nil {
		return 0, refusedOpcode(p[0])
	}
	arg, skip := op.arg, 1
	switch {
	case arg == argLines:
		first := bytes.IndexByte(p, '\n')
		second := bytes.IndexByte(p[first+1:], '\n')
		if len(p) > maxGlobal && (first < 0 || second < 0 || first+second > maxGlobal) {
			return 0, malformed("a global of more than %d bytes: %.*q", maxGlobal, quoted, p[1:])
		}
		if first < 0 || second < 0 {
			return 0, nil
		}
		arg = first + 1 + second
	case arg < 0: // a length, and as many bytes
		skip = -arg
		if len(p) < skip {
			return 0, nil
		}
		length := [4]byte{}
		copy(length[:], p[1:skip])
		if le.Uint32(length[:]) > maxText {
			return 0, malformed("%s of %d bytes, the limit is %d", op.name, le.Uint32(length[:]), maxText)
		}
		arg = int(le.Uint32(length[:]))
	}
	if n = skip + arg; len(p) < n {
		return 0, nil
	}
	m.read += n
	m.crc = crc32.Update(m.crc, crc32.IEEETable, p[:n])
	switch {
	case m.read > m.most:
		return 0, limited("data.pkl has more than %d bytes", m.most)
	case m.values > maxValues:
		return 0, limited("data.pkl makes more than %d values", maxValues)
	case m.read == n && p[0] != 0x80:
		return 0, malformed("data.pkl begins with %s, and not with PROTO", op.name)
	}
	return n, op.do(m, p[skip:n])
}

func (m *machine) proto(arg []byte) error {
	switch {
	case m.read > 2:
		return malformed("a second PROTO in data.pkl")
	case arg[0] != 2:
		return unsupported("pickle protocol %d; torch.save it without pickle_protocol", arg[0])
	}
	return nil
}

func (m *machine) global(arg []byte) error {
	name := strings.Replace(string(arg[:len(arg)-1]), "\n", " ", 1)
	v, ok := globals[name]
	if !ok {
		return unsupported("the global %.*q: it is none that plain tensors need", quoted, name)
	}
	return m.push(v)
}

func (m *machine) push(v any) error {
	if len(m.stack) == maxStack {
		return limited("more than %d values wait in data.pkl", maxStack)
	}
	m.stack = append(m.stack, v)
	m.values++
	return nil
}

func pushing(value func() any) func(*machine, []byte) error {
	return func(m *machine, _ []byte) error { return m.push(value()) }
}

// pop removes the last n values, which are valid until the next push.
func (m *machine) pop(n int) ([]any, error) {
	begin := len(m.stack) - n
	if n < 0 || begin < 0 || slices.Contains(m.stack[begin:], any(mark{})) {
		return nil, malformed("data.pkl takes a value that is not there")
	}
	popped := m.stack[begin:]
	m.stack = m.stack[:begin]
	return popped, nil
}

// marked removes the last mark and returns how many values follow it, or -1.
func (m *machine) marked() int {
	for i := len(m.stack) - 1; i >= 0; i-- {
		if m.stack[i] == any(mark{}) {
			m.stack = slices.Delete(m.stack, i, i+1)
			return len(m.stack) - i
		}
	}
	return -1
}

// number pushes a number without a sign, of which arg has the bytes from the lowest on.
func (m *machine) number(arg []byte) error {
	b := [8]byte{}
	copy(b[:], arg)
	return m.push(int64(le.Uint64(b[:])))
}

func (m *machine) signed(arg []byte) error {
	switch {
	case len(arg) > 8:
		return malformed("a number of %d bytes", len(arg))
	case len(arg) > 0 && arg[len(arg)-1] > math.MaxInt8:
		return malformed("a negative number")
	}
	return m.number(arg)
}

func (m *machine) text(arg []byte) error {
	if !utf8.Valid(arg) {
		return malformed("a text that is not UTF-8: %.*q", quoted, arg)
	}
	return m.push(string(arg))
}

// at is the place in the memo that an argument of one or four bytes says.
func at(arg []byte) int64 {
	b := [8]byte{}
	copy(b[:], arg)
	return int64(le.Uint64(b[:]))
}

func (m *machine) put(arg []byte) error {
	top, err := m.pop(1)
	if err != nil {
		return err
	}
	if i := at(arg); i != int64(len(m.memo)) { // pickle counts; so nobody says where the memory ends
		return malformed("data.pkl keeps a value as %d, and not as %d", i, len(m.memo))
	}
	m.memo = append(m.memo, top[0])
	return m.push(top[0])
}

func (m *machine) get(arg []byte) error {
	i := at(arg)
	if i >= int64(len(m.memo)) {
		return malformed("data.pkl asks for the value %d of %d that it has kept", i, len(m.memo))
	}
	return m.push(m.memo[i])
}

func (m *machine) tuple(n int) error {
	values, err := m.pop(n)
	if err != nil {
		return err
	}
	return m.push(tuple(slices.Clone(values)))
}

func (m *machine) set(n int) error {
	values, err := m.pop(n)
	if err != nil {
		return err
	}
	values = slices.Clone(values)
	top, err := m.pop(1)
	if err != nil {
		return err
	}
	d, ok := top[0].(*dict)
	if !ok || n%2 != 0 {
		return malformed("SETITEM of %s", kind(top[0]))
	}
	for pair := range slices.Chunk(values, 2) {
		d.keys, d.values = append(d.keys, pair[0]), append(d.values, pair[1])
		switch v := pair[1].(type) {
		case int64, string, bool:
		case *dict:
			d.plain = d.plain && v.plain
		default:
			d.plain = false
		}
	}
	return m.push(d)
}

// build drops what a state dict has beside its tensors: the versions of its modules.
func (m *machine) build([]byte) error {
	values, err := m.pop(2)
	if err != nil {
		return err
	}
	d, isDict := values[0].(*dict)
	state, ok := values[1].(*dict)
	if !isDict || !d.ordered || !ok || !state.plain || len(state.keys) != 1 || state.keys[0] != any("_metadata") {
		return unsupported("%s has attributes; of a state dict only _metadata is known, numbers and texts", kind(values[0]))
	}
	return m.push(d)
}

func (m *machine) reduce([]byte) error {
	values, err := m.pop(2)
	if err != nil {
		return err
	}
	call, callable := values[0].(rebuilding)
	args, ok := values[1].(tuple)
	if !callable || !ok {
		return malformed("REDUCE calls %s with %s", kind(values[0]), kind(values[1]))
	}
	v, err := call(m, args)
	if err != nil {
		return err
	}
	return m.push(v)
}

func orderedDict(_ *machine, args tuple) (any, error) {
	if len(args) > 0 {
		return nil, malformed("OrderedDict with arguments")
	}
	return &dict{ordered: true, plain: true}, nil
}

// hooks reports whether v is what torch writes for the hooks of a tensor: none.
func hooks(v any) bool {
	d, ok := v.(*dict)
	return ok && d.ordered && len(d.keys) == 0
}

func parameter(_ *machine, args tuple) (any, error) {
	if len(args) == 3 {
		t, ok := args[0].(*rebuilt)
		_, flag := args[1].(bool)
		if ok && flag && hooks(args[2]) {
			return t, nil
		}
	}
	return nil, malformed("a parameter is not made of a tensor, a bool and an empty OrderedDict")
}

// persistent makes a storage of ("storage", type, key, location, elements).
func (m *machine) persistent([]byte) error {
	top, err := m.pop(1)
	if err != nil {
		return err
	}
	id, ok := top[0].(tuple)
	if !ok || len(id) != 5 || id[0] != any("storage") {
		return malformed("a persistent id that is no storage")
	}
	s := &storage{}
	var typed, named, placed, counted bool
	s.kind, typed = id[1].(storageType)
	s.key, named = id[2].(string)
	_, placed = id[3].(string)
	s.elements, counted = id[4].(int64)
	if !typed || !named || !placed || !counted {
		return malformed("a storage is not made of a type, two texts and a number")
	}
	unit := int64(max(tensor.DataType(s.kind).Bits(), 8) / 8)
	if s.elements > math.MaxInt64/unit {
		return malformed("a storage of %d elements", s.elements)
	}
	s.size = s.elements * unit
	if old := m.stores[s.key]; old != nil {
		if old.kind != s.kind || old.size != s.size {
			return malformed("the storage %.*q is of two types or sizes", quoted, s.key)
		}
		return m.push(old)
	}
	if len(m.stores) == maxTensors {
		return limited("more than %d storages", maxTensors)
	}
	m.stores[s.key] = s
	return m.push(s)
}

// rebuild makes a tensor of storage, offset, size, stride, requires_grad, hooks and, if it
// has n = 7 arguments, its data type.
func (m *machine) rebuild(args tuple, n int) (any, error) {
	if len(args) == n+1 {
		if d, ok := args[n].(*dict); ok && len(d.keys) > 0 {
			return nil, unsupported("a tensor that is marked %.*v; save tensor.resolve_conj().resolve_neg()", quoted, d.keys[0])
		}
	}
	if len(args) != n {
		return nil, malformed("a tensor is made of %d values, and not of %d", len(args), n)
	}
	s, stored := args[0].(*storage)
	offset, placed := args[1].(int64)
	shape, shaped := numbers(args[2])
	strides, strided := numbers(args[3])
	_, flag := args[4].(bool)
	if !stored || !placed || !shaped || !strided || !flag || !hooks(args[5]) {
		return nil, malformed("a tensor is not made of a storage, a number, two tuples of numbers, a bool and an empty OrderedDict")
	}
	dtype, elements := tensor.DataType(s.kind), s.elements
	if n == 7 {
		t, ok := args[6].(elementType)
		if !ok {
			return nil, malformed("the data type of a tensor is %s", kind(args[6]))
		}
		dtype, elements = tensor.DataType(t), s.size/int64(tensor.DataType(t).Bits()/8)
	}
	if (s.kind == 0) != (n == 7) {
		return nil, malformed("a tensor with a data type of its own has an untyped storage, and no other has")
	}
	l, err := layoutOf(tensor.Desc{DType: dtype, Shape: shape}, strides, offset, elements)
	if err == nil {
		err = m.limit(l)
	}
	if err != nil {
		return nil, err
	}
	t := &rebuilt{storage: s, Layout: l}
	if l.Window > 0 {
		t.offset = offset * width(l.Desc)
	}
	return t, nil
}

func numbers(v any) (list []int64, ok bool) {
	t, ok := v.(tuple)
	for _, v := range t {
		n, isNumber := v.(int64)
		list, ok = append(list, n), ok && isNumber
	}
	return list, ok
}

// kind is what a value is, for errors.
func kind(v any) string {
	switch v := v.(type) {
	case int64, bool:
		return "a number"
	case string:
		return "a text"
	case tuple:
		return "a tuple"
	case *dict:
		return "a dict"
	case *storage:
		return "a storage"
	case *rebuilt:
		return "a tensor"
	default:
		return fmt.Sprintf("%T", v)
	}
}

// entry is a tensor of a file, under the name that a dict has for it.
type entry struct {
	name string
	*rebuilt
}

// root returns the tensors that the pickle holds: one without a name, or those of a dict.
func (m *machine) root() (entries []entry, bare bool, err error) {
	top, err := m.pop(1)
	if err == nil && len(m.stack) > 0 {
		err = malformed("data.pkl leaves %d values", len(m.stack)+1)
	}
	if err != nil {
		return nil, false, err
	}
	d, isDict := top[0].(*dict)
	if t, bare := top[0].(*rebuilt); bare {
		return []entry{{"", t}}, true, nil
	} else if !isDict {
		return nil, false, unsupported("it holds %s, and not a tensor or a dict of tensors", kind(top[0]))
	}
	seen := make(map[string]bool, len(d.keys))
	for i, key := range d.keys {
		name, isText := key.(string)
		t, isTensor := d.values[i].(*rebuilt)
		switch {
		case !isText:
			return nil, false, unsupported("%s names a tensor in the dict; only texts can", kind(key))
		case !isTensor:
			return nil, false, unsupported("%.*q in the dict is %s; torch.save a dict of tensors alone", quoted, name, kind(d.values[i]))
		case seen[name]:
			return nil, false, malformed("%.*q comes twice in the dict", quoted, name)
		case len(entries) == maxTensors:
			return nil, false, limited("more than %d tensors", maxTensors)
		}
		seen[name] = true
		entries = append(entries, entry{name, t})
	}
	return entries, false, nil
}
