package kinds

import (
	"cmp"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// Suite is what make bench measures over each network with large tensors of so many bytes.
func Suite(networks []string, size int) (all []measure.Group) {
	for _, net := range networks {
		for _, g := range suite {
			all = append(all, measure.Group{Net: net, Size: cmp.Or(g.size, size), Ops: g.ops, Entrants: g.entrants})
		}
	}
	return all
}

// Rules are what is required of tensorferry on loopback with two cores.
func Rules() (all []measure.Rule) {
	rule := func(net string, op bench.Op, who, beside string, ratio, cost float64, times bool) {
		r := measure.Rule{Net: net, Work: op, Who: who, Beside: beside, Ratio: &measure.Required{Value: ratio, AtMost: times}}
		if cost > 0 {
			r.Cost = &measure.Required{Value: cost, AtMost: true}
		}
		all = append(all, r)
	}
	for _, sum := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
		for _, op := range []bench.Op{bench.Upload, bench.Echo} {
			rule("tcp", op, bench.OursWith(sum), "raw socket, "+bench.SumText(sum)+",", 0.95, 1.15, false)
			rule("unix", op, bench.OursWith(sum), "raw socket, "+bench.SumText(sum)+",", 0.90, 0, false)
		}
	}
	for _, op := range []bench.Op{bench.Upload, bench.Echo} {
		rule("tcp", op, TLS, "crypto/tls,", 0.90, 0, false)
		rule("unix", op, TLS, "crypto/tls,", 0.90, 0, false)
	}
	rule("tcp", bench.Upload, bench.OursWith(codec.CRC32C), bench.StockGRPC, 1.6, 0, false)
	rule("tcp", bench.Echo, bench.OursWith(codec.CRC32C), bench.StockGRPC, 1.2, 0, false)
	rule("tcp", bench.Call, bench.Tensorferry, bench.StockGRPC, 1.5, 0, true)
	rule("tcp", bench.Call, Steps, Plain, 1.4, 0, true)
	rule("tcp", measure.FirstResult, bench.Tensorferry, "", 0.05, 0, true)
	for _, net := range []string{"tcp", "unix"} {
		rule(net, measure.Pull, Folder, RawStored, 0.90, 0, false)
		rule(net, measure.PullToFile, Folder, RawStored, 0.90, 0, false)
		rule(net, measure.Push, InMemory, RawStored, 0.90, 0, false)
		rule(net, measure.Push, Folder, Copying, 0.90, 0, false)
	}
	return all
}

var suite = []struct {
	size     int // 0: that of the large tensors
	ops      []bench.Op
	entrants []measure.Entrant
}{
	{0, []bench.Op{bench.Upload, bench.Echo, bench.ReLU}, measure.Beside(bench.OursWith(codec.CRC32C), bench.RawName(codec.CRC32C, bench.ChunkBytes), bench.RawName(codec.CRC32C, bench.SmallPiece), bench.RawName(0, bench.ChunkBytes), bench.StockGRPC)},
	{0, []bench.Op{bench.Upload, bench.Echo}, measure.Beside(bench.OursWith(codec.CRC32), bench.RawName(codec.CRC32, bench.ChunkBytes), bench.RawName(codec.CRC32, bench.SmallPiece))},
	{bench.SmallBytes, []bench.Op{bench.Call}, measure.Beside(bench.Tensorferry, bench.StockGRPC, bench.RawName(codec.CRC32C, bench.ChunkBytes))},
	{8 << 10, []bench.Op{bench.Call}, measure.Beside(Steps, Plain, bench.StockGRPC, bench.Tensorferry)},
	{0, []bench.Op{bench.Upload, bench.Echo}, measure.Beside(TLS, RawTLS(bench.ChunkBytes), RawTLS(bench.SmallPiece), StockTLS, bench.Tensorferry)},
	{bench.SmallBytes, []bench.Op{bench.Call}, measure.Beside(TLS, StockTLS, bench.Tensorferry)},
	{0, []bench.Op{measure.FirstResult, measure.CallBeside}, measure.Beside(bench.Tensorferry)},
	{0, []bench.Op{measure.Pull, measure.PullToFile}, measure.Beside(Folder, RawStored)},
	{0, []bench.Op{measure.Push}, measure.Beside(Folder, Copying)},
	{0, []bench.Op{measure.Push}, measure.Beside(InMemory, RawStored)},
	{measure.Many << 10, many, measure.Beside(InMemory, Tar)},
	{measure.Many << 16, many, measure.Beside(InMemory, Tar)},
}

var many = []bench.Op{measure.PushMany, measure.PushSet, measure.PullMany}
