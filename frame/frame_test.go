package frame

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestATextIsClippedAtTheLimitAndBetweenCharacters(t *testing.T) {
	const most = 256
	for _, r := range []string{"a", "ö", "€", "𝄞", "\x80"} {
		for n := most - 8; n <= most+8; n++ {
			for lead := range len(r) {
				text := strings.Repeat("-", lead) + strings.Repeat(r, n)
				got := Clip(text, most)
				require.True(t, strings.HasPrefix(text, got))
				require.LessOrEqual(t, len(got), most)
				if len(text) <= most {
					require.Equal(t, text, got)
					continue
				}
				require.Greater(t, len(got), most-utf8.UTFMax-1)
				require.True(t, utf8.ValidString(got) || r == "\x80")
			}
		}
	}
}

func TestOneFrameCarriesEveryCallThatPassesItsCheck(t *testing.T) {
	texts := func(n int) map[string]string {
		m := make(map[string]string)
		for i := range n / ValueBytes {
			m[strings.Repeat("k", i+1)] = strings.Repeat("v", ValueBytes-i-1)
		}
		return m
	}
	for name, tc := range map[string]struct {
		call Call
		ok   bool
	}{
		"the most inputs":          {Call{Inputs: make([]Binding, callInputs)}, true},
		"one input more":           {Call{Inputs: make([]Binding, callInputs+1)}, false},
		"the most params":          {Call{Params: texts(EntriesBytes)}, true},
		"params of one entry more": {Call{Params: texts(EntriesBytes + ValueBytes)}, false},
		"params and long ports": {Call{Params: texts(EntriesBytes), Inputs: []Binding{
			{Port: strings.Repeat("a", NameBytes)}, {Port: strings.Repeat("b", NameBytes)}, {Port: strings.Repeat("c", NameBytes)},
			{Port: strings.Repeat("d", NameBytes)}, {Port: strings.Repeat("e", NameBytes)}, {Port: strings.Repeat("f", NameBytes)},
			{Port: strings.Repeat("g", NameBytes)}, {Port: strings.Repeat("h", NameBytes)},
		}}, false},
		"a port longer than a name": {Call{Inputs: []Binding{{Port: strings.Repeat("a", NameBytes+1)}}}, false},
		"a model with a line break": {Call{Model: "a\nb"}, false},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.ok, tc.call.Check() == "", tc.call.Check()) })
	}
}

func TestADescIsRefusedWithTheCodeOfWhatIsWrongWithIt(t *testing.T) {
	good := Desc{Tensor: tensor.ID{1}, Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{4}}, SizeBytes: 16, ChunkBytes: 8}
	for name, tc := range map[string]struct {
		change func(*Desc)
		want   Code
	}{
		"nothing":                 {func(*Desc) {}, OK},
		"the largest chunk":       {func(d *Desc) { d.ChunkBytes = 64 }, OK},
		"a chunk too large":       {func(d *Desc) { d.ChunkBytes = 65 }, InvalidArgument},
		"no chunk":                {func(d *Desc) { d.ChunkBytes = 0 }, InvalidArgument},
		"the largest tensor":      {func(d *Desc) { d.Shape, d.SizeBytes = tensor.Shape{25}, 100 }, OK},
		"a tensor too large":      {func(d *Desc) { d.Shape, d.SizeBytes = tensor.Shape{26}, 104 }, ResourceExhausted},
		"another size":            {func(d *Desc) { d.SizeBytes = 12 }, InvalidArgument},
		"a size beyond 63 bits":   {func(d *Desc) { d.Shape = tensor.Shape{1 << 40, 1 << 40} }, ResourceExhausted},
		"no data type":            {func(d *Desc) { d.DType = 0 }, InvalidArgument},
		"a name with a NUL":       {func(d *Desc) { d.Name = "a\x00" }, InvalidArgument},
		"metadata without UTF-8":  {func(d *Desc) { d.Metadata = map[string]string{"k": "\xff"} }, InvalidArgument},
		"a key longer than a key": {func(d *Desc) { d.Metadata = map[string]string{strings.Repeat("k", KeyBytes+1): ""} }, InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			d := good
			tc.change(&d)
			geo, err := d.Check(64, 100)
			if tc.want == OK {
				require.Nil(t, err)
				require.EqualValues(t, d.SizeBytes, geo.Size)
				return
			}
			require.NotNil(t, err)
			require.Equal(t, tc.want, err.Code, err.Text)
			require.True(t, strings.HasPrefix(err.Text, "tensor "+d.Tensor.String()))
		})
	}
}

func TestAnAcknowledgementSaysWhatIsWrongWithItsRanges(t *testing.T) {
	ascending := func(n int) (numbers []uint32) {
		for i := range n {
			numbers = append(numbers, uint32(2*i+1))
		}
		return numbers
	}
	for n, want := range map[int]string{0: "", 2: "", 3: "3 numbers", 63: "63 numbers", 64: "", 65: "more than 32 ranges", 66: "more than 32 ranges"} {
		a := Ack{Beyond: ascending(n)}
		problem := a.Check()
		require.Contains(t, problem, want, n)
		require.Equal(t, want == "", problem == "", n)
	}
}

func TestEachReasonHasTheCodeOfItsRow(t *testing.T) {
	for _, r := range reason.Table {
		require.Equal(t, string(r.Code), CodeOf(r.Reason).String(), r.Reason)
		e := Because(r.Reason, "a %s", "text")
		require.Equal(t, r.Reason, reason.Find(e.Reason, e.Code.String()).Reason)
		require.Equal(t, r.Reason == r.Code, e.Reason == "", "a code needs no reason")
	}
	for code := Cancelled; int(code) < len(names); code++ {
		require.Equal(t, code.String(), string(reason.Find("", code.String()).Reason), "each code has a row")
	}
}
