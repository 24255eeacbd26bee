package house

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What a page shows as Go is part of a file that is compiled.
func TestGoInThePagesIsCompiled(t *testing.T) {
	block := regexp.MustCompile("(?s)```go\n(.*?)```")
	var files []string
	for _, f := range source(t) {
		files = append(files, page(t, f.path))
	}
	shown := 0
	for path, text := range pages(t) {
	blocks:
		for _, m := range block.FindAllStringSubmatch(text, -1) {
			shown++
			for _, f := range files {
				if strings.Contains(f, m[1]) {
					continue blocks
				}
			}
			t.Errorf("%s shows Go that stands in no file:\n%s", path, m[1])
		}
	}
	if shown == 0 {
		t.Error("no page shows any Go: the form of the pages has changed")
	}
}

// The program that the page about clients shows in pieces is the one that make
// python-examples runs.
func TestThePageAboutClientsShowsTheWholeProgram(t *testing.T) {
	blank := regexp.MustCompile(`\n\n+`)
	var shown []string
	for _, m := range regexp.MustCompile("(?s)```python\n(.*?)```").FindAllStringSubmatch(page(t, "docs/clients.md"), -1) {
		shown = append(shown, m[1])
	}
	want := blank.ReplaceAllString(page(t, "examples/python/stock_grpcio.py"), "\n")
	if got := blank.ReplaceAllString(strings.Join(shown, ""), "\n"); got != want {
		t.Errorf("the Python of docs/clients.md is not examples/python/stock_grpcio.py, but\n%s", got)
	}
}

func TestThePageAboutTheWireShowsRealFrames(t *testing.T) {
	text := page(t, "docs/wire.md")
	joined := strings.ReplaceAll(text, "\n", "")
	id, _ := tensor.ParseID([]byte("tensor-000000001"))
	data := []byte{0, 0, 0x80, 0x3f, 0, 0, 0, 0x40} // float32: 1, 2
	sum := codec.CRC32C.Update(codec.CRC32C.Seed(id, 3), data)
	if want := fmt.Sprintf("0x%08x", sum); !strings.Contains(text, want) {
		t.Errorf("its checksum is %s", want)
	}
	var digest codec.Digester
	nothing := digest.Sum()
	if want := hex.EncodeToString(nothing[:]); !strings.Contains(text, want) {
		t.Errorf("the digest of no bytes is %s", want)
	}
	_, _ = digest.Write(data)
	of := digest.Sum()
	for what, f := range map[string]*pb.Frame{
		"chunk":   {Chunk: &pb.Chunk{TensorId: id[:], Index: 3, Checksum: sum, Data: data}},
		"summary": {Summaries: []*pb.Summary{{TensorId: id[:], Name: "bias", SizeBytes: 8, Digest: of[:], Durable: true}}},
	} {
		frame, err := proto.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		if want := hex.EncodeToString(frame); !strings.Contains(joined, want) {
			t.Errorf("the bytes of the %s are %s", what, want)
		}
	}
}

func TestEveryLimitAServerShowsIsExplained(t *testing.T) {
	text := page(t, "docs/limits.md")
	h := cpu.NewHost(cpu.HostConfig{Workers: 1})
	defer h.Close()
	s, err := server.New(server.Config{Models: engine.NewRegistry(), Pool: h.Pool(), Budget: h.Budget()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	info, err := s.GetServiceInfo(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, n := range info.GetLimits() {
		if name == "memory_bytes" || name == "receive_bytes" {
			n = 0 // a machine's own
		}
		row := fmt.Sprintf("| `%s` | %d |", name, n)
		if n == 0 {
			row = fmt.Sprintf("| `%s` | |", name)
		}
		if !strings.Contains(text, row) {
			t.Errorf("docs/limits.md has no row that begins with %s", row)
		}
	}
}
