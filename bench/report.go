package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"

	"github.com/tensorferry/tensorferry/bench/measure"
)

// Report is everything that was measured, and where.
type Report struct {
	measure.Report
	Modules []string `json:"modules"` // of the peers, as in path@version
	Batches []Batch  `json:"flight_batches"`
}

// peerModules returns the modules that peers come from; none where the build does
// not say.
func peerModules() (all []string) {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "github.com/apache/arrow-go/v18" || m.Path == "google.golang.org/grpc" {
				all = append(all, m.Path+"@"+m.Version)
			}
		}
	}
	return all
}

// page is for people, as Markdown.
func (r *Report) page() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "<!-- written by: cd bench && go run . -out, or make bench-peers-results -->\n\n%s\n\n```\n", strings.Join(r.Modules, " · "))
	_ = r.WriteText(&b) // a buffer takes it
	fmt.Fprint(&b, "```\n")
	if len(r.Batches) > 0 {
		fmt.Fprint(&b, "\nArrow Flight is measured with the best of its batch sizes:\n\n| | | GB/s | |\n|---|---|--:|---|\n")
	}
	for _, x := range r.Batches {
		fmt.Fprintf(&b, "| %s | %s | %.2f | %s |\n", x.Op, x.Kind, x.Rate, map[bool]string{true: "best"}[x.Best])
	}
	return b.Bytes()
}

// write writes the page of r to out, and page and samples to files of a name in the
// folder unless that is empty.
func write(r *Report, out io.Writer, folder, name string) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	files := map[string][]byte{name + ".md": r.page(), name + ".json": append(text, '\n')}
	if _, err := out.Write(files[name+".md"]); err != nil || folder == "" {
		return err
	}
	err = os.MkdirAll(folder, 0o777)
	for name, data := range files {
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, name), data, 0o666)
		}
	}
	return err
}
