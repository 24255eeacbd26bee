package wire

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func (p *buffers) free() (warm, cold int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.warm), len(p.cold)
}

func TestBuffersOfTheLargestFrameComeFromThePool(t *testing.T) {
	testkit.Start(t)
	p := &buffers{rest: mem.NopBufferPool{}}
	const segment = segmentBytes / frameBytes
	for _, n := range []int{1025, 4096, frameBytes} {
		b := p.Get(n)
		require.Len(t, *b, n)
		*b = (*b)[:n/2] // as gRPC does with padding
		p.Put(b)
		warm, cold := p.free()
		require.Equal(t, 1, warm)
		require.Equal(t, segment-1, cold)
	}
	for _, n := range []int{1, 1024, frameBytes + 1} {
		b := p.Get(n)
		require.Len(t, *b, n)
		p.Put(b)
		warm, cold := p.free()
		require.Equal(t, segment, warm+cold, "another size is another pool's")
	}
}

func TestThePoolKeepsFewBuffersThatNobodyUses(t *testing.T) {
	testkit.Start(t)
	p := &buffers{rest: mem.NopBufferPool{}}
	var all []*[]byte
	for i := range 3 * keptBuffers / 2 {
		b := p.Get(frameBytes)
		(*b)[0] = byte(i) | 1
		all = append(all, b)
	}
	for _, b := range all {
		p.Put(b)
	}
	warm, cold := p.free()
	require.Equal(t, keptBuffers, warm)
	require.GreaterOrEqual(t, cold, keptBuffers/2)
	if runtime.GOOS == "linux" { // a page that the system took back is zero again
		p.mu.Lock()
		given := (*p.cold[len(p.cold)-1])[0]
		p.mu.Unlock()
		require.Zero(t, given)
	}
}

func TestBuffersThatAreForgottenComeBack(t *testing.T) {
	testkit.Start(t)
	p := &buffers{rest: mem.NopBufferPool{}}
	for range 100 {
		mem.NewBuffer(p.Get(frameBytes), p) // and never freed
	}
	kept := mem.NewBuffer(p.Get(frameBytes), p)
	view := kept.Slice(1, 2000)
	kept.Free()
	warm, cold := p.free()
	all := 101 + warm + cold
	testkit.Eventually(t, func() bool {
		runtime.GC()
		warm, cold := p.free()
		return warm+cold == all-1
	}, "the forgotten buffers")
	require.Len(t, view.ReadOnlyData(), 1999)
	view.Free()
	warm, cold = p.free()
	require.Equal(t, all, warm+cold)
}
