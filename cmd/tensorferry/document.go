package main

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

const (
	// listedDocument is the largest document, in bytes, that ls shows. Those of model files
	// for inference are smaller.
	listedDocument = 64 << 10
	// listedDocuments is how many documents ls requests at most.
	listedDocuments = 100
	// listedText is how many characters of a document ls shows.
	listedText = 60
)

// isDocument reports whether a tensor may be the document of a model file: its metadata
// and index.
func isDocument(s client.Stored) bool {
	return path.Base(s.Name) == tensorfile.MetadataName && s.DType == tensor.Uint8 && len(s.Shape) == 1
}

// pullDocument pulls the document of a model file.
func pullDocument(ctx context.Context, cl *client.Client, s client.Stored) (tensorfile.Document, []client.Summary, error) {
	const hint = "pull the other tensors without it, or remove it"
	if !isDocument(s) {
		return tensorfile.Document{}, nil, hinted{fmt.Errorf("%q is %v, not the metadata of a model file", s.Name, s.Desc), hint}
	}
	got, err := cl.Pull(ctx, client.PullRequest{Select: selectionsOf([]client.Stored{s})})
	if err != nil {
		return tensorfile.Document{}, nil, err
	}
	d, err := tensorfile.ParseDocument(got[0].Data)
	if err != nil {
		return d, nil, hinted{fmt.Errorf("%q is not the metadata of a model file: %w", s.Name, err), hint}
	}
	return d, got, nil
}

// documentsOf pulls the small documents in a list and returns them by name. It leaves out
// those that cannot be pulled or parsed, which are then shown as tensors.
func documentsOf(ctx context.Context, cl *client.Client, list []client.Stored) map[string]tensorfile.Document {
	var short []client.Stored
	for _, s := range list {
		if isDocument(s) && s.Bytes <= listedDocument && len(short) < listedDocuments {
			short = append(short, s)
		}
	}
	if len(short) == 0 {
		return nil
	}
	got, _ := cl.Pull(ctx, client.PullRequest{Select: selectionsOf(short)}) // each has its own error
	documents := make(map[string]tensorfile.Document, len(got))
	for _, g := range got {
		if d, err := tensorfile.ParseDocument(g.Data); g.Err == nil && err == nil {
			documents[g.Name] = d
		}
	}
	return documents
}

// documentText returns a document as one line of text.
func documentText(d tensorfile.Document) string {
	var all []string
	if d.Index != "" {
		all = append(all, fmt.Sprintf("%s of %d files", d.Index, len(d.Shards)))
	}
	metadata := d.Common()
	for _, k := range slices.Sorted(maps.Keys(metadata)) {
		all = append(all, k+"="+metadata[k])
	}
	return plain(strings.Join(all, " "))
}

// clipped shortens a text to fit in a table.
func clipped(text string) string {
	if r := []rune(text); len(r) > listedText {
		return string(r[:listedText-1]) + "…"
	}
	return text
}
