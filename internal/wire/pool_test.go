package wire

import (
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func (p *buffersOf) free() (warm, cold int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.warm), len(p.cold)
}

func (p *buffers) class(size int) *buffersOf {
	return p.of[slices.IndexFunc(p.of, func(of *buffersOf) bool { return of.size == size })]
}

func TestBuffersOfEachSizeComeFromThePool(t *testing.T) {
	testkit.Start(t)
	p := newBuffers(mem.NopBufferPool{})
	most := classes[len(classes)-1].size
	for _, n := range []int{1, SmallBytes, most + 1} {
		require.Len(t, *p.Get(n), n)
	}
	before := SmallBytes + 1
	kept := 0
	for _, of := range p.of {
		for _, n := range []int{before, of.size - 1, of.size} {
			b := p.Get(n)
			require.Len(t, *b, n)
			require.Equal(t, of.size, cap(*b))
			*b = (*b)[:n/2] // as gRPC does with padding
			p.Put(b)
		}
		before = of.size + 1
		warm, cold := of.free()
		require.Equal(t, min(1, of.kept), warm)
		require.Equal(t, max(leastBuffers, segmentBytes/of.size), warm+cold, "the same one thrice")
		kept += of.kept * of.size
	}
	require.LessOrEqual(t, kept, 16<<20)
}

func TestThePoolKeepsFewBuffersThatNobodyUses(t *testing.T) {
	testkit.Start(t)
	p := newBuffers(mem.NopBufferPool{})
	large := p.class(FrameBytes)
	kept := large.kept
	var all []*[]byte
	for i := range 3 * kept / 2 {
		b := p.Get(FrameBytes)
		(*b)[0] = byte(i) | 1
		all = append(all, b)
	}
	for _, b := range all {
		p.Put(b)
	}
	warm, cold := p.class(FrameBytes).free()
	require.Equal(t, kept, warm)
	require.GreaterOrEqual(t, cold, kept/2)
	if runtime.GOOS == "linux" { // a page that the system took back is zero again
		given := (*large.cold[len(large.cold)-1])[0]
		require.Zero(t, given)
	}
}

func TestBuffersThatAreForgottenComeBack(t *testing.T) {
	testkit.Start(t)
	p := newBuffers(mem.NopBufferPool{})
	for range 100 {
		mem.NewBuffer(p.Get(FrameBytes), p) // and never freed
	}
	kept := mem.NewBuffer(p.Get(FrameBytes), p)
	view := kept.Slice(1, 2000)
	kept.Free()
	warm, cold := p.class(FrameBytes).free()
	all := 101 + warm + cold
	testkit.Eventually(t, func() bool {
		runtime.GC()
		warm, cold := p.class(FrameBytes).free()
		return warm+cold == all-1
	}, "the forgotten buffers")
	require.Len(t, view.ReadOnlyData(), 1999)
	view.Free()
	warm, cold = p.class(FrameBytes).free()
	require.Equal(t, all, warm+cold)
}
