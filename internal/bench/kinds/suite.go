package kinds

import (
	"cmp"
	"slices"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// Suite is what tensorferry bench measures over each network with large tensors of so
// many bytes. Without works, it is all of them.
func Suite(networks []string, size int, works ...string) (all []bench.Group) {
	for _, net := range networks {
		for _, g := range suite {
			n := cmp.Or(g.size, size)
			ops := slices.DeleteFunc(slices.Clone(g.ops), func(op bench.Op) bool {
				return len(works) > 0 && !slices.Contains(works, string(op))
			})
			if len(ops) > 0 {
				all = append(all, bench.Group{Net: net, Size: n, Ops: ops, Entrants: g.entrants})
			}
		}
	}
	return all
}

// Rules are what is required of tensorferry on loopback with two cores.
func Rules() (all []bench.Rule) {
	rule := func(net string, op bench.Op, who, beside string, ratio, cost float64, times bool) {
		r := bench.Rule{Net: net, Work: op, Who: who, Beside: beside, Ratio: &bench.Required{Value: ratio, AtMost: times}}
		if cost > 0 {
			r.Cost = &bench.Required{Value: cost, AtMost: true}
		}
		all = append(all, r)
	}
	for _, sum := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
		for _, op := range []bench.Op{bench.Upload, bench.Echo} {
			rule("tcp", op, OursWith(sum), "raw socket, "+SumText(sum)+",", 0.95, 1.15, false)
			rule("unix", op, OursWith(sum), "raw socket, "+SumText(sum)+",", 0.90, 0, false)
		}
	}
	for _, op := range []bench.Op{bench.Upload, bench.Echo} {
		rule("tcp", op, TLS, "crypto/tls,", 0.90, 0, false)
		rule("unix", op, TLS, "crypto/tls,", 0.90, 0, false)
	}
	rule("tcp", bench.Upload, OursWith(codec.CRC32C), StockGRPC.Name, 1.6, 0, false)
	rule("tcp", bench.Echo, OursWith(codec.CRC32C), StockGRPC.Name, 1.2, 0, false)
	rule("tcp", bench.Call, Tensorferry, StockGRPC.Name, 1.5, 0, true)
	rule("tcp", bench.FirstResult, Tensorferry, "", 0.05, 0, true)
	for _, net := range []string{"tcp", "unix"} {
		rule(net, bench.Pull, Folder, RawStored, 0.90, 0, false)
		rule(net, bench.PullToFile, Folder, RawStored, 0.90, 0, false)
		rule(net, bench.Push, InMemory, RawStored, 0.90, 0, false)
		rule(net, bench.Push, Folder, Copying, 0.90, 0, false)
	}
	return all
}

var suite = []struct {
	size     int // 0: that of the large tensors
	ops      []bench.Op
	entrants []bench.Entrant
}{
	{0, []bench.Op{bench.Upload, bench.Echo, bench.ReLU}, bench.Beside(OursWith(codec.CRC32C), RawName(codec.CRC32C, bench.ChunkBytes), RawName(codec.CRC32C, smallPiece), RawName(0, bench.ChunkBytes), StockGRPC.Name)},
	{0, []bench.Op{bench.Upload, bench.Echo}, bench.Beside(OursWith(codec.CRC32), RawName(codec.CRC32, bench.ChunkBytes), RawName(codec.CRC32, smallPiece))},
	{bench.SmallBytes, []bench.Op{bench.Call}, bench.Beside(Tensorferry, StockGRPC.Name, RawName(codec.CRC32C, bench.ChunkBytes))},
	{0, []bench.Op{bench.Upload, bench.Echo}, bench.Beside(TLS, RawTLS(bench.ChunkBytes), RawTLS(smallPiece), StockTLS.Name, Tensorferry)},
	{bench.SmallBytes, []bench.Op{bench.Call}, bench.Beside(TLS, StockTLS.Name, Tensorferry)},
	{0, []bench.Op{bench.FirstResult, bench.CallBeside}, bench.Beside(Tensorferry)},
	{0, []bench.Op{bench.Pull, bench.PullToFile}, bench.Beside(Folder, RawStored)},
	{0, []bench.Op{bench.Push}, bench.Beside(Folder, Copying)},
	{0, []bench.Op{bench.Push}, bench.Beside(InMemory, RawStored)},
	{bench.Many << 10, many, bench.Beside(InMemory, Tar)},
	{bench.Many << 16, many, bench.Beside(InMemory, Tar)},
}

var many = []bench.Op{bench.PushMany, bench.PushSet, bench.PullMany}
