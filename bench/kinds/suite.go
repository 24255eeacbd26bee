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

// Calls is what make bench-calls measures over each network, of a size: calls and steps as README
// shows them beside what one writes without us, and calls into given memory beside a stock client
// that does that, too, and checks it.
func Calls(networks []string, size int) (all []measure.Group) {
	for _, net := range networks {
		add := func(op bench.Op, kinds ...string) {
			all = append(all, measure.Group{Net: net, Size: size, Ops: []bench.Op{op}, Entrants: measure.Beside(kinds...)})
		}
		add(bench.Call, Compute, Plain, Unary, bench.RawName(codec.CRC32C, bench.ChunkBytes))
		add(measure.AtOnce, Compute, Plain, Unary)
		add(bench.Call, Steps, Plain)
		add(bench.Call, Compute+OverTLS, Plain+OverTLS, Unary+OverTLS)
		add(bench.Call, bench.Tensorferry, bench.StockGRPC)
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
	for _, net := range []string{"tcp", "unix"} {
		rule(net, bench.Call, bench.Tensorferry, bench.StockGRPC, 1.05, 0, true)
		rule(net, bench.Call, Steps, Plain, 1.1, 0, true)
		rule(net, bench.Call, Compute+OverTLS, Plain+OverTLS, 1.05, 0, true)
		for size, most := range map[int]float64{512: 1, 8 << 10: 1, bench.SmallBytes: 1.2} {
			rule(net, bench.Call, Compute, Plain, most, 0, true)
			all[len(all)-1].Bytes = size
		}
	}
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
	{bench.SmallBytes, []bench.Op{bench.Call}, measure.Beside(Compute, Plain, Unary, bench.RawName(codec.CRC32C, bench.ChunkBytes))},
	{0, []bench.Op{bench.Upload, bench.Echo}, measure.Beside(TLS, RawTLS(bench.ChunkBytes), RawTLS(bench.SmallPiece), StockTLS, bench.Tensorferry)},
	{bench.SmallBytes, []bench.Op{bench.Call}, measure.Beside(Compute+OverTLS, Plain+OverTLS, Compute)},
	{0, []bench.Op{measure.FirstResult, measure.CallBeside}, measure.Beside(bench.Tensorferry)},
	{0, []bench.Op{measure.Pull, measure.PullToFile}, measure.Beside(Folder, RawStored)},
	{0, []bench.Op{measure.Push}, measure.Beside(Folder, Copying)},
	{0, []bench.Op{measure.Push}, measure.Beside(InMemory, RawStored)},
	{measure.Many << 10, many, measure.Beside(InMemory, Tar)},
	{measure.Many << 16, many, measure.Beside(InMemory, Tar)},
}

var many = []bench.Op{measure.PushMany, measure.PushSet, measure.PullMany}
