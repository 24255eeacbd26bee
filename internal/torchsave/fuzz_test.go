package torchsave

import (
	"bytes"
	"io"
	"slices"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
)

const fuzzMost = 1 << 16

// fuzzSeeds are files, and parts of them that a fuzzer combines.
func fuzzSeeds(f *testing.F) {
	for _, g := range goldens(f) {
		if len(g.file) < 3000 {
			f.Add(g.file, byte(len(g.file)&^1))
		}
	}
	for _, opcodes := range []string{good, hooks + "}" + text("_metadata") + hooks + "sb" + text("w") + good + "s", "ctorch._utils\n_rebuild_parameter\n" + good + "\x88" + hooks + "\x87R",
		rebuilds(sixFloats, 2, tupleOf(2, 2, 1), tupleOf(0, 2, 1<<40), "\x89"+hooks), "(" + bomb(9) + "t", "M\x01\x02q\x00h\x00\x86"} {
		f.Add(pickled(opcodes+"."), byte(6))
		f.Add([]byte(opcodes), byte(63))
	}
	f.Add(wideHeader(1<<33, "\x01\x00\x10\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), byte(64))
}

// odd is the file itself or, if pieces is odd, one whose data.pkl has these opcodes: what a
// fuzzer changes in the pickle then comes further than its checksum.
func odd(file []byte, pieces byte) []byte {
	if pieces%2 == 0 {
		return file
	}
	return pickled(string(file) + ".")
}

// FuzzReader holds a Reader that is fed in pieces against one that is fed everything.
func FuzzReader(f *testing.F) {
	fuzzSeeds(f)
	f.Fuzz(func(t *testing.T, file []byte, pieces byte) {
		file = odd(file, pieces)
		l, known, window, err := read(file, len(file)+1, fuzzMost)
		l2, known2, window2, err2 := read(file, int(pieces)+1, fuzzMost)
		if known != known2 || !l.Equal(l2.Desc) || !bytes.Equal(window, window2) || (err == nil) != (err2 == nil) || err != nil && err.Error() != err2.Error() {
			t.Fatalf("whole: %v %v %x %v; in pieces: %v %v %x %v", l, known, window, err, l2, known2, window2, err2)
		}
		typed(t, err)
		size, bad := l.Bytes()
		switch {
		case !known && len(window) > 0:
			t.Fatal("data without a layout")
		case !known:
			return
		case bad != nil || size > fuzzMost || l.Window > fuzzMost || int64(len(window)) > l.Window:
			t.Fatalf("%v: %d of %d bytes, %v", l, len(window), l.Window, bad)
		case err != nil:
			return
		}
		data := make([]byte, size)
		l.Gather(data, window, 0)
		if !bytes.Equal(data, slowly(l, window)) {
			t.Fatalf("%v gathered otherwise", l)
		}
		if whole, err := parse(file); err != nil || !whole.Bare {
			t.Fatalf("a file that was read is refused: %v", err)
		}
	})
}

// slowly gathers element by element.
func slowly(l Layout, window []byte) []byte {
	data, w := []byte{}, width(l.Desc)
	n, _ := l.Shape.Elements()
	for i := range n {
		off := int64(0)
		for axis, dim := range slices.Backward(l.Shape) {
			off += i % dim * l.Strides[axis]
			i /= dim
		}
		data = append(data, window[off*w:(off+1)*w]...)
	}
	return data
}

// FuzzFile reads whole files, and what they hold.
func FuzzFile(f *testing.F) {
	fuzzSeeds(f)
	f.Fuzz(func(t *testing.T, file []byte, pieces byte) {
		file = odd(file, pieces)
		opened, err := parse(file)
		typed(t, err)
		if err != nil {
			return
		}
		for _, name := range opened.Names() {
			if l := opened.entries[name].Layout; l.Window > int64(len(file)) {
				t.Fatalf("%v in %d bytes", l, len(file))
			}
			a, err := opened.Array(name)
			typed(t, err)
			if size, _ := a.Bytes(); err != nil || size > fuzzMost {
				continue
			}
			data, err := io.ReadAll(a.Reader)
			typed(t, err)
			if _, bad := tensor.New(a.Desc, data); err == nil && bad != nil {
				t.Fatal(bad)
			}
		}
	})
}
