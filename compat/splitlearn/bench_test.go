package splitlearn_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkCompute is a call of 30 KB, as a token of a small language model makes, and one of 16 MiB.
func BenchmarkCompute(b *testing.B) {
	f := serve(b, 1<<30, nil)
	for name, n := range map[string]int{"bytes=30000": 30_000, "bytes=16MiB": 16 * mib} {
		b.Run(name, func(b *testing.B) {
			req := compute(make([]byte, n), int32(n/4))
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for b.Loop() {
				_, err := f.Compute(b.Context(), req)
				require.NoError(b, err)
			}
		})
	}
}
