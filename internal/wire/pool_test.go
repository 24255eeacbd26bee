package wire

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"

	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

func (p *buffersOf) free() (warm, cold int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.warm), len(p.cold)
}

func TestBuffersOfTheLargestFrameComeFromThePool(t *testing.T) {
	testkit.Start(t)
	p := newBuffers(mem.NopBufferPool{})
	for _, n := range []int{1025, inbound.MediumBytes, inbound.MediumBytes + 1, inbound.FrameBytes, 1, 1024, inbound.FrameBytes + 1} {
		b := p.Get(n)
		require.Len(t, *b, n)
		*b = (*b)[:n/2] // as gRPC does with padding
		p.Put(b)
	}
	for _, of := range []*buffersOf{&p.medium, &p.large} {
		warm, cold := of.free()
		require.Equal(t, 1, warm, "the same one twice")
		require.Equal(t, segmentBytes/of.size-1, cold)
	}
}

func TestThePoolKeepsFewBuffersThatNobodyUses(t *testing.T) {
	testkit.Start(t)
	p := newBuffers(mem.NopBufferPool{})
	kept := p.large.kept
	var all []*[]byte
	for i := range 3 * kept / 2 {
		b := p.Get(inbound.FrameBytes)
		(*b)[0] = byte(i) | 1
		all = append(all, b)
	}
	for _, b := range all {
		p.Put(b)
	}
	warm, cold := p.large.free()
	require.Equal(t, kept, warm)
	require.GreaterOrEqual(t, cold, kept/2)
	if runtime.GOOS == "linux" { // a page that the system took back is zero again
		given := (*p.large.cold[len(p.large.cold)-1])[0]
		require.Zero(t, given)
	}
}

func TestBuffersThatAreForgottenComeBack(t *testing.T) {
	testkit.Start(t)
	p := newBuffers(mem.NopBufferPool{})
	for range 100 {
		mem.NewBuffer(p.Get(inbound.FrameBytes), p) // and never freed
	}
	kept := mem.NewBuffer(p.Get(inbound.FrameBytes), p)
	view := kept.Slice(1, 2000)
	kept.Free()
	warm, cold := p.large.free()
	all := 101 + warm + cold
	testkit.Eventually(t, func() bool {
		runtime.GC()
		warm, cold := p.large.free()
		return warm+cold == all-1
	}, "the forgotten buffers")
	require.Len(t, view.ReadOnlyData(), 1999)
	view.Free()
	warm, cold = p.large.free()
	require.Equal(t, all, warm+cold)
}
