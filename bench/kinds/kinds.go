// Package kinds has the ways of moving bytes that tensorferry is measured beside, as
// kinds of internal/bench, and tensorferry itself. Each is written as directly as it
// can be. It measures nothing, and whoever makes an end of a kind lends it the memory
// of its place.
package kinds

import (
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// All are the kinds of this package, and those of internal/bench.
func All() []bench.Kind {
	stock := bench.Stock(bench.StockGRPC, bench.ChunkBytes)
	all := append(append(ourKinds(), newer...), rawStored, tarred, copying, stock, encrypted(StockTLS, stock), bench.Stock(StockSmall, 1<<10))
	for _, k := range []bench.Kind{plain(Plain, streams), plain(Unary, unary)} {
		all = append(all, k, encrypted(k.Name+OverTLS, k))
	}
	for _, size := range []int{bench.ChunkBytes, bench.SmallPiece} {
		for _, sum := range []codec.Checksum{0, codec.CRC32C, codec.CRC32} {
			all = append(all, bench.Raw(sum, size))
		}
		all = append(all, encrypted(RawTLS(size), bench.Raw(codec.CRC32C, size)))
	}
	return all
}

// newer are kinds of what older commits do not have: that of steps.go, where it is.
var newer []bench.Kind

// Steps names tensorferry whose calls are steps of a sequence, as README shows them.
const Steps = bench.Tensorferry + ", steps"

// StockTLS names stock gRPC that is encrypted, and StockSmall that with messages of 1 KiB:
// many small tensors, which have no names.
const (
	StockTLS   = bench.StockGRPC + OverTLS
	StockSmall = bench.StockGRPC + ", 1 KiB"
)

// RawTLS names a kind of raw socket that is encrypted, with CRC-32C, as tensorferry is
// beside it.
func RawTLS(size int) string { return "crypto/tls, " + bench.ByteText(size) }
