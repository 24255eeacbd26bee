package bench

import (
	"slices"

	"github.com/tensorferry/tensorferry/codec"
)

// Beside are the first kind and those that it is compared with.
func Beside(kinds ...string) (all []Entrant) {
	for _, k := range kinds {
		all = append(all, Entrant{Kind: k})
	}
	return all
}

// Suite is what tensorferry bench measures over each network with large tensors of so
// many bytes: two processes first, and then one.
func Suite(networks []string, size int) (all []Group) {
	for _, processes := range []int{2, 1} {
		for _, net := range networks {
			for _, g := range suite {
				if processes == 1 && !g.together {
					continue
				}
				n := size
				if slices.Equal(g.ops, []Op{Call}) {
					n = SmallBytes
				}
				all = append(all, Group{Net: net, Processes: processes, Size: n, Ops: g.ops, Entrants: g.entrants})
			}
		}
	}
	return all
}

// instead has raw sockets do an upload beside a work that they do not have.
func instead(kind string) []Entrant {
	return []Entrant{{Kind: kind}, {Kind: RawName(codec.CRC32C, ChunkBytes), Op: Upload}}
}

var suite = []struct {
	ops      []Op
	together bool // in one process, too
	entrants []Entrant
}{
	{[]Op{Upload, Echo, ReLU}, true, Beside(OursWith(codec.CRC32C), RawName(codec.CRC32C, ChunkBytes), RawName(codec.CRC32C, smallPiece), RawName(0, ChunkBytes), StockGRPC.Name)},
	{[]Op{Upload, Echo}, false, Beside(OursWith(codec.CRC32), RawName(codec.CRC32, ChunkBytes), RawName(codec.CRC32, smallPiece))},
	{[]Op{Call}, true, Beside(Tensorferry, StockGRPC.Name, RawName(codec.CRC32C, ChunkBytes))},
	{[]Op{FirstResult, CallBeside}, false, Beside(Tensorferry)},
	{[]Op{Pull, PullToFile}, false, instead(Folder)},
	{[]Op{Push}, false, Beside(Folder, Copying)},
	{[]Op{Push}, false, instead(InMemory)},
}
