package link

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var rewrite = flag.Bool("vectors", false, "rewrite testdata/vectors/link")

// MarshalJSON writes a range as vectors have it.
func (r Range) MarshalJSON() ([]byte, error) {
	return json.Marshal([]uint64{uint64(r.Memory), r.Off, r.Len})
}

// vectors has each kind of message at least once: name, message, its fields.
var vectors = []struct {
	name, why string
	m         Message
}{
	{"hello", "json is the rest of the message", &Hello{JSON: []byte(`{"link":1}`)}},
	{"hello-empty", "json may be empty", &Hello{}},
	{"memory", "the id is the memory's number", &Memory{Head{ID: 7}, 2 << 20}},
	{"forget", "no body", &Forget{Head{ID: 7}}},
	{"take", "", &Take{Head{ID: 1<<63 + 5}, 1 << 40, 10_000}},
	{"give", "", &Give{Head{ID: 9}, []Range{{7, 4096, 8192}, {1, 0, 1 << 33}}}},
	{"give-nothing", "", &Give{}},
	{"done", "", &Done{Head: Head{ID: 3}, Timings: [7]uint64{1, 2, 3, 4, 5, 6, 1 << 60}}},
	{"done-results", "of results that were not announced before", &Done{Head: Head{ID: 3}, Results: []Announced{{0, "y", 12, []int64{2, 3}, Whole, Range{8, 0, 24}}, {1, "größe", 1, []int64{}, Whole, Range{}}}}},
	{"done-failed", "", &Done{Head: Head{ID: 3}, Code: 5, JSON: []byte(`{"message":"no model \u00e4"}`)}},
	{"ask", "", &Ask{Head{ID: 2}, 30_000, []byte(`{"verb":"info","connection":1}`)}},
	{"call", "", &Call{
		Head: Head{Flags: Regions, ID: 4}, Connection: 1, Millis: 500, Model: "trunk",
		Params: [][2]string{{"a", "2"}, {"b", "größer"}},
		Inputs: []Input{
			{Port: "x", DType: 12, Shape: []int64{3, 0, 5}, Name: "n", Metadata: [][2]string{{"k", "v"}}, How: Whole, Range: Range{7, 4096, 60}},
			{Port: "", DType: 1, Shape: []int64{}},
		},
		Sinks: []Sink{{"y", Whole, Range{7, 0, 60}}, {"z", Pieces, Range{}}},
	}},
	{"call-bare", "", &Call{Head: Head{ID: 4}, Model: "m"}},
	{"data", "", &Data{Head{ID: 4}, 1, Range{7, 1 << 20, 1 << 20}}},
	{"cancel", "", &Cancel{Head{ID: 4}}},
	{"result", "", &Result{Head{ID: 4}, Announced{1, "y", 11, []int64{1 << 40}, Whole, Range{8, 0, 1 << 41}}}},
	{"region", "", &Region{Head{ID: 4}, 1, 1 << 20, 5, Range{}}},
	{"region-piece", "", &Region{Head{Flags: Piece, ID: 4}, 1, 1 << 20, 5, Range{8, 64, 5}}},
	{"ready", "", &Ready{JSON: []byte(`{"name":"m"}`)}},
	{"run", "", &Run{Head{ID: 11}, 2, 256, 128, 0, []Tensor{{12, []int64{128, 64}, Range{7, 0, 32768}}}, []byte(`{"params":{"a":"2"}}`)}},
	{"answer", "", &Answer{Head: Head{ID: 11}, Nanos: 1_000_000, Outputs: []Tensor{{12, []int64{128, 10}, Range{9, 0, 5120}}}}},
	{"answer-failed", "", &Answer{Head: Head{ID: 11}, Code: 3, JSON: []byte(`{"message":"no","public":true}`)}},
	{"answer-state", "of a sequence", &Answer{Head: Head{ID: 11}, Outputs: []Tensor{}, JSON: []byte(`{"state":1048576}`)}},
	{"end", "", &End{Head{ID: 2}}},
	{"gone", "", &Gone{Head{ID: 3}}},
	{"kept", "", &Kept{JSON: []byte(`{"kept":1048576,"most":524288,"gauges":{"graphs":2}}`)}},
}

const folder = "../../testdata/vectors/link"

// fields are what a vector file says of a message, in the words of docs/link.md.
func fields(t *testing.T, m Message) map[string]any {
	b, err := json.Marshal(m)
	require.NoError(t, err)
	var all map[string]any
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	require.NoError(t, d.Decode(&all))
	names := map[string]string{"Len": "length", "DType": "dtype", "JSON": "json", "ID": "id"}
	var lower func(any) any
	lower = func(v any) any {
		switch v := v.(type) {
		case map[string]any:
			out := map[string]any{}
			for k, e := range v {
				if n := names[k]; n != "" {
					k = n
				}
				out[strings.ToLower(k)] = lower(e)
			}
			return out
		case []any:
			for i := range v {
				v[i] = lower(v[i])
			}
			return v
		case nil:
			return []any{}
		}
		return v
	}
	out := lower(all).(map[string]any)
	if _, ok := out["json"]; ok {
		text := jsonOf(m)
		delete(out, "json")
		if len(text) > 0 {
			out["json"] = json.RawMessage(text)
		}
	}
	return out
}

func jsonOf(m Message) []byte {
	switch m := m.(type) {
	case *Hello:
		return m.JSON
	case *Done:
		return m.JSON
	case *Ask:
		return m.JSON
	case *Ready:
		return m.JSON
	case *Kept:
		return m.JSON
	case *Run:
		return m.JSON
	case *Answer:
		return m.JSON
	}
	return nil
}

func TestVectorsAreWhatIsSentAndRead(t *testing.T) {
	for _, v := range vectors {
		t.Run(v.name, func(t *testing.T) {
			packet, err := Append(nil, v.m)
			require.NoError(t, err)
			said, err := json.Marshal(fields(t, v.m))
			require.NoError(t, err)
			text := fmt.Sprintf("kind: %d\n", KindOf(v.m))
			if v.why != "" {
				text += "why: " + v.why + "\n"
			}
			text += fmt.Sprintf("json: %s\nhex: %s\n", said, hex.EncodeToString(packet))
			path := filepath.Join(folder, v.name+".txt")
			if *rewrite {
				require.NoError(t, os.MkdirAll(folder, 0o755))
				require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(want), text)
			m, err := Parse(packet)
			require.NoError(t, err)
			again, err := Append(nil, m)
			require.NoError(t, err)
			require.Equal(t, packet, again)
			for n := range packet { // cut short anywhere
				_, err := Parse(packet[:n])
				require.ErrorIs(t, err, ErrMessage)
			}
		})
	}
}

func TestEveryKindHasAVector(t *testing.T) {
	seen := map[uint8]bool{}
	for _, v := range vectors {
		seen[KindOf(v.m)] = true
	}
	for k, empty := range messages {
		if empty != nil {
			require.True(t, seen[uint8(k)], k)
			require.Equal(t, uint8(k), KindOf(empty))
		}
	}
}

// FuzzParse: whatever is accepted is written again as it was.
func FuzzParse(f *testing.F) {
	for _, v := range vectors {
		packet, err := Append(nil, v.m)
		require.NoError(f, err)
		f.Add(packet)
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		m, err := Parse(packet)
		if err != nil {
			require.ErrorIs(t, err, ErrMessage)
			return
		}
		again, err := Append(nil, m)
		if len(packet) > PacketBytes {
			require.ErrorIs(t, err, ErrMessage)
			return
		}
		require.NoError(t, err)
		require.Equal(t, packet, again)
	})
}
