// Package kinds has the ways of moving bytes that tensorferry is measured beside, as
// kinds of internal/bench, and tensorferry itself. Each is written as directly as it
// can be. It measures nothing, and whoever makes an end of a kind lends it the memory
// of its place.
package kinds

import (
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// All are the kinds of this package.
func All() []bench.Kind {
	return append(append(ourKinds(), rawKinds()...), rawStored, tarred, StockGRPC, StockSmall, StockTLS, copying)
}

// SumText names a checksum as kinds do; 0 is none.
func SumText(sum codec.Checksum) string {
	return map[codec.Checksum]string{0: "unchecked", codec.CRC32C: "CRC-32C", codec.CRC32: "CRC-32"}[sum]
}
