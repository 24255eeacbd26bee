package wire

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

var rewrite = flag.Bool("vectors", false, "rewrite testdata/vectors")

const vectorsDir = "../../testdata/vectors"

// vector is one golden frame. What it expects is "ok", "ok, other spelling"
// (our encoder writes the same content in other bytes), "malformed" or "over limit".
type vector struct {
	name, expect, why string
	wire              []byte
}

// The IDs of the vectors say what they name.
var (
	idTensor  = []byte("tensor-000000001")
	idOther   = []byte("tensor-000000002")
	idCall    = []byte("call-00000000001")
	idSession = []byte("session-00000001")
)

// vectors builds every case. The files are what other languages read.
func vectors() []vector {
	type (
		F = tensorferryv1.Frame
		C = tensorferryv1.Chunk
	)
	var all []vector
	raw := func(name, expect, why string, wire []byte) {
		all = append(all, vector{name, expect, why, wire})
	}
	msg := func(name, expect, why string, f *F) {
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(f)
		if err != nil {
			panic(err)
		}
		raw(name, expect, why, b)
	}
	payload := func(n int) []byte {
		return bytes.Repeat([]byte("0123456789abcdef"), n/16+1)[:n]
	}
	field := func(n protowire.Number, body ...[]byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, n, protowire.BytesType), bytes.Join(body, nil))
	}
	number := func(n protowire.Number, v uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, n, protowire.VarintType), v)
	}
	chunk := func(n int) *C {
		return &C{TensorId: idTensor, Index: 3, Checksum: 0x89abcdef, Data: payload(n)}
	}

	msg("empty", "ok", "a frame with nothing in it is a frame", &F{})
	msg("hello", "ok", "the first frame of each side", &F{Hello: &tensorferryv1.Hello{
		Version: 1, SessionId: idSession, MaxChunkBytes: 1 << 20, AllowanceBytes: 1 << 20,
		Checksum: tensorferryv1.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64,
	}})
	msg("hello-codecs", "ok", "a side that decodes lz4, and a codec of the future", &F{Hello: &tensorferryv1.Hello{
		Version: 1, SessionId: idSession, Checksum: tensorferryv1.Checksum_CHECKSUM_CRC32, Codecs: []tensorferryv1.Codec{tensorferryv1.Codec_CODEC_LZ4, 200},
	}})
	msg("hello-lanes", "ok", "a server that offers lanes", &F{Hello: &tensorferryv1.Hello{
		Version: 1, SessionId: idSession, Checksum: tensorferryv1.Checksum_CHECKSUM_CRC32, Lanes: 8, LaneToken: []byte("lane-token-0000000000000000000001"[:32]),
	}})
	msg("hello-lanes-at-once", "ok", "a server that offers several lanes at a time", &F{Hello: &tensorferryv1.Hello{
		Version: 1, SessionId: idSession, Checksum: tensorferryv1.Checksum_CHECKSUM_CRC32, Lanes: 256, LanesAtOnce: 64, LaneToken: []byte("lane-token-0000000000000000000001"[:32]),
	}})
	msg("hello-chunk-idle", "ok", "a server that says for how long it waits", &F{Hello: &tensorferryv1.Hello{
		Version: 1, SessionId: idSession, Checksum: tensorferryv1.Checksum_CHECKSUM_CRC32C, ChunkIdleMillis: 30_000,
	}})
	msg("hello-stores", "ok", "a server whose calls may be puts and gets", &F{Hello: &tensorferryv1.Hello{
		Version: 1, SessionId: idSession, Checksum: tensorferryv1.Checksum_CHECKSUM_CRC32C, Stores: true,
	}})
	msg("hello-sequences", "ok", "a server whose calls may be of sequences", &F{Hello: &tensorferryv1.Hello{
		Version: 1, SessionId: idSession, Checksum: tensorferryv1.Checksum_CHECKSUM_CRC32C, Sequences: true,
	}})
	msg("sequence", "ok", "a call that begins a sequence, a step of it, and its end", &F{Calls: []*tensorferryv1.Call{
		{Id: idCall, Model: "trunk", Params: map[string]string{"scale": "0.5"}, Sequence: &tensorferryv1.Sequence{Id: []byte("sequence-0000001"), MaxRows: 512}},
		{Id: []byte("call-00000000002"), Inputs: []*tensorferryv1.Input{{TensorId: idTensor}}, Sequence: &tensorferryv1.Sequence{Id: []byte("sequence-0000001")}},
		{Id: []byte("call-00000000003"), Sequence: &tensorferryv1.Sequence{Id: []byte("sequence-0000001"), End: true}},
	}})
	msg("done-rows", "ok", "a step of a sequence has ended", &F{Dones: []*tensorferryv1.Done{{CallId: idCall, Outputs: []*tensorferryv1.Output{{Port: "y", TensorId: idTensor}}, Rows: 17}}})
	msg("put", "ok", "a put of all or none, one of each by itself, and the end of both", &F{
		Calls: []*tensorferryv1.Call{{Id: idCall, Put: &tensorferryv1.Put{All: true}}, {Id: idOther, Put: &tensorferryv1.Put{}}},
		Ends:  []*tensorferryv1.PutEnd{{CallId: idCall, Tensors: 65536}, {CallId: idOther}},
	})
	msg("get", "ok", "a get of a glob, of a source and of what is missing of a tensor, which goes on", &F{Calls: []*tensorferryv1.Call{{
		Id: idCall, Get: &tensorferryv1.Get{More: true, Selections: []*tensorferryv1.Selection{
			{Name: "model/*"}, {Name: "normal", Source: true, Params: map[string]string{"seed": "1"}},
			{Name: "größer", Held: []*tensorferryv1.Range{{Length: 1 << 20}, {Offset: 1 << 40, Length: 1}}, HeldDigest: []byte("digest-000000001")},
		}},
	}}})
	msg("desc-held", "ok", "a tensor of a get, of which some chunks do not come", &F{Descs: []*tensorferryv1.TensorDesc{{
		TensorId: idTensor, Dtype: tensorferryv1.DataType_DATA_TYPE_UINT8, Shape: []int64{8}, SizeBytes: 8, ChunkBytes: 4, CallId: idCall, Name: "größer", Held: true,
	}}})
	msg("summary-call", "ok", "a tensor of a put is over", &F{Summaries: []*tensorferryv1.Summary{
		{TensorId: idTensor, Name: "model/weight", SizeBytes: 8, Digest: []byte("digest-000000001"), Durable: true, CallId: idCall},
	}})
	msg("summary-evicted", "ok", "a tensor for which the store has evicted others", &F{Summaries: []*tensorferryv1.Summary{
		{TensorId: idTensor, Name: "model/weight", SizeBytes: 8, Digest: []byte("digest-000000001"), CallId: idCall, Evicted: 2, EvictedBytes: 1 << 40},
	}})
	msg("hello-lane-token-short", "malformed", "a lane token is 32 bytes or none", &F{Hello: &tensorferryv1.Hello{Version: 1, SessionId: idSession, LaneToken: []byte("short")}})
	msg("summary", "ok", "two tensors of a pull are over: one whole, one refused", &F{Summaries: []*tensorferryv1.Summary{
		{TensorId: idTensor, Name: "model/weight", SizeBytes: 1 << 40, Digest: []byte("digest-000000001"), Durable: true},
		{TensorId: idOther, Name: "größer", Code: 8, Message: "the store is full", RetryAfterMillis: 1000},
	}})
	msg("summary-digest-short", "malformed", "a digest is 16 bytes or none", &F{Summaries: []*tensorferryv1.Summary{{TensorId: idTensor, Digest: []byte("short")}}})
	msg("chunk-lz4", "ok", "a chunk that was compressed", &F{Chunk: &C{TensorId: idTensor, Index: 3, Codec: tensorferryv1.Codec_CODEC_LZ4, Checksum: 0x89abcdef, Data: payload(100)}})
	msg("call", "ok", "a call with two inputs, parameters and a timeout", &F{Calls: []*tensorferryv1.Call{{
		Id: idCall, Model: "trunk", Params: map[string]string{"scale": "0.5", "": ""}, TimeoutMillis: 30000,
		Inputs: []*tensorferryv1.Input{{Port: "x", TensorId: idTensor}, {TensorId: idOther}},
	}}})
	msg("desc", "ok", "a tensor announced with everything a desc may say", &F{Descs: []*tensorferryv1.TensorDesc{{
		TensorId: idTensor, Dtype: tensorferryv1.DataType_DATA_TYPE_FLOAT32, Shape: []int64{1000, 28, 28}, SizeBytes: 3136000,
		ChunkBytes: 1 << 20, CallId: idCall, Port: "x", Name: "images", Metadata: map[string]string{"epoch": "1", "model": "größer"},
	}}})
	msg("desc-scalar", "ok", "rank 0: no shape at all, one element", &F{Descs: []*tensorferryv1.TensorDesc{{
		TensorId: idTensor, Dtype: tensorferryv1.DataType_DATA_TYPE_FLOAT64, SizeBytes: 8, ChunkBytes: 8, CallId: idCall,
	}}})
	msg("desc-unknown-dtype", "ok", "a data type of the future passes the codec; the machine refuses it", &F{Descs: []*tensorferryv1.TensorDesc{{
		TensorId: idTensor, Dtype: 200, Shape: []int64{-1}, SizeBytes: 1 << 63, ChunkBytes: 1, CallId: idCall,
	}}})
	msg("credit", "ok", "chunk limits raised, one to the largest number", &F{Credits: []*tensorferryv1.Credit{
		{TensorId: idTensor, ChunkLimit: 8}, {TensorId: idOther, ChunkLimit: 1<<32 - 1}, {TensorId: idOther},
	}})
	msg("ack", "ok", "one plain, one that asks for chunks again, one plain after it", &F{Acks: []*tensorferryv1.Ack{
		{TensorId: idTensor, ReceivedBelow: 7}, {TensorId: idOther, ReceivedBelow: 1, Resend: []uint32{1, 300, 70000}}, {TensorId: idTensor},
	}})
	msg("ack-beyond", "ok", "ranges that arrived beyond the first gap", &F{Acks: []*tensorferryv1.Ack{
		{TensorId: idTensor, ReceivedBelow: 7, ReceivedBeyond: []uint32{9, 10, 300, 70000}, Resend: []uint32{8}}, {TensorId: idOther, ReceivedBelow: 4},
	}})
	msg("cancel", "ok", "the client stops a call", &F{Cancels: []*tensorferryv1.Cancel{{CallId: idCall}}})
	msg("failure", "ok", "one tensor fails, the session lives", &F{Failures: []*tensorferryv1.Failure{{
		TensorId: idTensor, Code: 15, Message: "chunk 3 failed its checksum three times; send the tensor again",
	}}})
	msg("done", "ok", "a call ended, its outputs named, its times told", &F{Dones: []*tensorferryv1.Done{{
		CallId: idCall, Outputs: []*tensorferryv1.Output{{Port: "y", TensorId: idOther}},
		Timings: &tensorferryv1.Timings{ReceiveNanos: 1, QueueNanos: 2, H2DNanos: 3, ComputeNanos: 4, D2HNanos: 5, FirstResultNanos: 6, TotalNanos: 1 << 40},
	}}})
	msg("done-exhausted", "ok", "a call refused, with a time to wait", &F{Dones: []*tensorferryv1.Done{{
		CallId: idCall, Code: 8, Message: "memory budget of 1073741824 bytes is taken", RetryAfterMillis: 250,
	}}})
	msg("done-refused", "ok", "a call of which nothing was run", &F{Dones: []*tensorferryv1.Done{{
		CallId: idCall, Code: 14, Message: "server is draining; use another one, or try again later", RetryAfterMillis: 1000, Refused: true,
	}}})
	msg("done-reason", "ok", "a call that failed for a reason of docs/errors.md", &F{Dones: []*tensorferryv1.Done{{
		CallId: idCall, Code: 14, Message: "server is draining", RetryAfterMillis: 1000, Refused: true, Reason: "SERVER_DRAINING",
	}}})
	msg("failure-reason", "ok", "a tensor that failed for one", &F{Failures: []*tensorferryv1.Failure{{
		TensorId: idTensor, Code: 8, Message: "larger than the server takes", Reason: "TENSOR_TOO_LARGE",
	}}})
	msg("summary-reason", "ok", "a tensor of a put that failed for one", &F{Summaries: []*tensorferryv1.Summary{{
		TensorId: idTensor, Name: "model/weight", SizeBytes: 8, Code: 8, Message: "the store is full", RetryAfterMillis: 1000, CallId: idCall, Reason: "STORE_FULL",
	}}})
	msg("drain", "ok", "finish what is open, open nothing new", &F{Drain: &tensorferryv1.Drain{Reason: "the server restarts"}})
	for _, n := range []int{0, 1, 1023, 1024, 1025, 16383, 16384, 16385} {
		msg(fmt.Sprintf("chunk-%05d", n), "ok", fmt.Sprintf("a chunk of %d bytes: around no payload, gRPC's 1 KiB pooling threshold and HTTP/2's 16 KiB frames", n), &F{Chunk: chunk(n)})
	}
	msg("chunk-first", "ok", "index and checksum of zero are not written", &F{Chunk: &C{TensorId: idTensor, Data: payload(5)}})
	msg("chunk-last-index", "ok", "the largest index takes five bytes", &F{Chunk: &C{TensorId: idTensor, Index: 1<<32 - 1, Checksum: 1, Data: payload(5)}})
	msg("small-call", "ok", "call, desc and chunk ride in one frame", &F{
		Calls:   []*tensorferryv1.Call{{Id: idCall, Model: "echo", Inputs: []*tensorferryv1.Input{{TensorId: idTensor}}}},
		Descs:   []*tensorferryv1.TensorDesc{{TensorId: idTensor, Dtype: tensorferryv1.DataType_DATA_TYPE_UINT8, Shape: []int64{40}, SizeBytes: 40, ChunkBytes: 40, CallId: idCall}},
		Credits: []*tensorferryv1.Credit{{TensorId: idOther, ChunkLimit: 9}},
		Acks:    []*tensorferryv1.Ack{{TensorId: idOther, ReceivedBelow: 4}},
		Chunk:   chunk(40),
	})

	id := field(1, idTensor)
	raw("credit-number-first", "ok, other spelling", "fields of a part may come in any order",
		field(4, number(2, 5), id))
	raw("credit-limit-twice", "ok, other spelling", "of a field that comes twice the last one counts",
		field(4, id, number(2, 5), number(2, 6)))
	raw("credit-long-varint", "ok, other spelling", "a varint may have needless bytes, and a uint32 keeps its low 32 bits",
		field(4, id, []byte{0x10, 0x85, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01}))
	raw("ack-unpacked", "ok, other spelling", "a packed field may come unpacked",
		field(5, id, number(5, 1), number(5, 300)))
	raw("hello-twice", "ok, other spelling", "a message field that comes twice is merged",
		slicesConcat(field(1, number(1, 1)), field(1, field(2, idSession))))
	raw("chunk-twice", "ok, other spelling", "two chunk fields are merged into one chunk",
		slicesConcat(field(fieldChunk, id, field(15, payload(9))), field(fieldChunk, number(2, 7), field(15, payload(4)))))
	raw("chunk-not-last", "ok, other spelling", "the payload need be last neither in its chunk nor in the frame",
		slicesConcat(field(fieldChunk, field(15, payload(9)), id), field(4, id)))
	raw("unknown-fields", "ok, other spelling", "fields of a newer peer are skipped, in the frame and in a chunk",
		slicesConcat(number(40, 1), field(10, []byte("token")), field(fieldChunk, id, number(9, 2), field(15, payload(9)))))
	raw("unknown-group", "ok, other spelling", "even groups, which proto3 cannot declare, are skipped",
		slicesConcat(protowire.AppendTag(nil, 20, protowire.StartGroupType), number(1, 1), protowire.AppendTag(nil, 20, protowire.EndGroupType)))
	raw("credit-wrong-type", "ok, other spelling", "a known number with another wire type is an unknown field",
		slicesConcat(number(4, 5), field(4, id, field(2, []byte{5}))))

	raw("truncated", "malformed", "the frame ends within its chunk", field(fieldChunk, id, field(15, payload(30)))[:40])
	raw("length-past-end", "malformed", "a length that the message does not have", []byte{0x7a, 0xff, 0xff, 0xff, 0xff, 0x0f, 0x0a})
	raw("part-past-end", "malformed", "a field that is longer than the part it stands in",
		slicesConcat([]byte{0x22, 4, 0x0a, 16}, idTensor))
	raw("varint-endless", "malformed", "a varint of more than ten bytes", bytes.Repeat([]byte{0x80}, 11))
	raw("field-zero", "malformed", "there is no field 0", []byte{0x02, 0x00})
	raw("group-without-start", "malformed", "a group ends that never began", protowire.AppendTag(nil, 20, protowire.EndGroupType))
	raw("model-not-utf8", "malformed", "a string that is not UTF-8", field(2, field(1, idCall), field(2, []byte{0xff, 0xfe})))
	msg("id-short", "malformed", "an ID has 16 bytes: 15", &F{Chunk: &C{TensorId: idTensor[:15], Data: payload(4)}})
	msg("id-long", "malformed", "an ID has 16 bytes: 17", &F{Acks: []*tensorferryv1.Ack{{TensorId: append(idTensor[:16:16], 'x')}}})
	msg("id-missing", "malformed", "a part must say whose it is", &F{Credits: []*tensorferryv1.Credit{{ChunkLimit: 4}}})
	msg("id-zero", "malformed", "the zero ID names nothing", &F{Cancels: []*tensorferryv1.Cancel{{CallId: make([]byte, 16)}}})
	calls := new(F)
	for range MaxCalls + 1 {
		calls.Calls = append(calls.Calls, &tensorferryv1.Call{Id: idCall})
	}
	msg("calls-65", "over limit", "at most 64 calls a frame", calls)
	raw("credits-257", "over limit", "at most 256 parts of a kind, even empty ones", bytes.Repeat([]byte{0x22, 0}, MaxParts+1))
	call := &tensorferryv1.Call{Id: idCall}
	for range MaxCalls + 1 {
		call.Inputs = append(call.Inputs, &tensorferryv1.Input{TensorId: idTensor})
	}
	msg("inputs-65", "over limit", "at most 64 inputs a call", &F{Calls: []*tensorferryv1.Call{call}})
	return all
}

func slicesConcat(b ...[]byte) []byte { return bytes.Join(b, nil) }

// prototext varies its spaces on purpose, from build to build.
var spaces = regexp.MustCompile(`(?m)^(\s*\w+:) +`)

// text is the file of a vector.
func (v vector) text(t *testing.T) string {
	var b strings.Builder
	fmt.Fprintf(&b, "expect: %s\nwhy: %s\n---\n", v.expect, v.why)
	var pb tensorferryv1.Frame
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(v.wire, &pb); err == nil {
		text, err := prototext.MarshalOptions{Multiline: true, Indent: "  "}.Marshal(&pb)
		if err != nil {
			t.Fatal(err)
		}
		b.WriteString(spaces.ReplaceAllString(string(text), "$1 "))
	}
	b.WriteString("---\n")
	for h := hex.EncodeToString(v.wire); h != ""; {
		n := min(64, len(h))
		b.WriteString(h[:n] + "\n")
		h = h[n:]
	}
	return b.String()
}

// readVector parses a file, as any language would.
func readVector(t *testing.T, file string) (expect, text string, wire []byte) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; make vectors writes it", err)
	}
	parts := strings.Split(string(b), "---\n")
	if len(parts) != 3 {
		t.Fatalf("%s has %d sections, want header, text and bytes", file, len(parts))
	}
	for line := range strings.Lines(parts[0]) {
		if v, ok := strings.CutPrefix(line, "expect: "); ok {
			expect = strings.TrimSpace(v)
		}
	}
	wire, err = hex.DecodeString(strings.ReplaceAll(parts[2], "\n", ""))
	if err != nil {
		t.Fatal(err)
	}
	return expect, parts[1], wire
}

func TestVectorsAreTheFilesThatOtherLanguagesRead(t *testing.T) {
	testkit.Start(t)
	files := make(map[string]bool)
	for _, v := range vectors() {
		file := filepath.Join(vectorsDir, v.name+".txt")
		if files[file] {
			t.Fatalf("two vectors are called %s", v.name)
		}
		files[file] = true
		text := v.text(t)
		if *rewrite {
			if err := os.MkdirAll(vectorsDir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		b, err := os.ReadFile(file)
		if err != nil || string(b) != text {
			t.Errorf("%s is not what the code makes (%v); if that is meant, run make vectors", file, err)
		}
	}
	found, err := filepath.Glob(filepath.Join(vectorsDir, "*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range found {
		if !files[file] {
			t.Errorf("%s belongs to no vector", file)
		}
	}
}

func TestVectorsReadTheSameOnEveryPath(t *testing.T) {
	testkit.Start(t)
	found, err := filepath.Glob(filepath.Join(vectorsDir, "*.txt"))
	if err != nil || len(found) == 0 {
		t.Fatalf("no vectors: %v", err)
	}
	for _, file := range found {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			expect, text, wire := readVector(t, file)
			want := model(t, wire)
			whole := decode(t, wire)
			if got := kind(whole.err); got != strings.TrimSuffix(expect, ", other spelling") {
				t.Fatalf("expected %s, got %s (%v)", expect, got, whole.err)
			}
			if whole.err != nil {
				t.Log(whole.err)
			}
			for _, cuts := range [][]byte{nil, {1}, {0, 1}, {2}, {255}} {
				if d := diff(decode(t, wire, cuts...), want); d != "" {
					t.Fatalf("views of %v bytes: %s", cuts, d)
				}
			}
			for at := range wire {
				if len(wire) > 512 && at > 64 && at < len(wire)-2 {
					continue // within the payload every split is alike
				}
				l := &ledger{t: t}
				data := append(l.split(wire[:at]), l.split(wire[at:])...)
				var m Message
				m.unmarshal(data)
				data.Free()
				if d := diff(snapshot(&m), want); d != "" {
					t.Fatalf("split at %d: %s", at, d)
				}
				if m.Free(); l.in != l.made {
					t.Fatalf("split at %d: %d of %d buffers released", at, l.in, l.made)
				}
			}
			var pb, fromText tensorferryv1.Frame
			if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(wire, &pb); err == nil {
				if err := prototext.Unmarshal([]byte(text), &fromText); err != nil || !proto.Equal(&pb, &fromText) {
					t.Fatalf("text and bytes differ (%v)", err)
				}
			}
			if want.err != nil {
				return
			}
			f := want.frame
			if len(want.payload) > 0 {
				f.Chunk.Data = [][]byte{want.payload}
			}
			again := encode(t, &f)
			if expect == "ok" && !bytes.Equal(again, wire) {
				t.Fatalf("encoded again it is\n%x, not\n%x", again, wire)
			}
			if d := diff(decode(t, again), want); d != "" {
				t.Fatalf("encoded again: %s", d)
			}
		})
	}
}
