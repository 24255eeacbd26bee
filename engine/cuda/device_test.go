//go:build linux && cgo

package cuda

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/builtin"
	"github.com/tensorferry/tensorferry/engine/cuda/fakecuda"
	"github.com/tensorferry/tensorferry/engine/cuda/kernels"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// RealDriver names the environment variable of a driver to test on a GPU, such as
// libcuda.so.1. What needs faults or looks into the driver is then skipped.
const RealDriver = "TENSORFERRY_TEST_DRIVER"

const mib = 1 << 20

// library is the driver to test, and how much less to do where it is the fake one.
func library(t testing.TB) (path string, less int64) {
	if path := os.Getenv(RealDriver); path != "" {
		return path, 1
	}
	return fakecuda.Build(t, fakecuda.Options{}), 16
}

func openDevice(t testing.TB, library string) *Host {
	h, err := Open(Config{Library: library, PinnedBytes: 1 << 30})
	require.NoError(t, err)
	t.Cleanup(h.Close)
	return h
}

// programmed is an echo with p in it, in blocks of so many bytes.
func programmed(t testing.TB, h *Host, bytes int64, p program) engine.Model {
	info := builtin.Echo
	info.BlockRows = bytes / 4
	m, err := h.engine.Model(blocks.Model{Info: info, Bind: func(c engine.Call) (blocks.Bound, error) {
		of := p
		return blocks.Bound{Outs: c.Descs(), Program: &of}, nil
	}})
	require.NoError(t, err)
	return m
}

// A context that a kernel has killed is the process's last: the test is a process of its own.
func TestAWildStoreLosesTheDeviceForGood(t *testing.T) {
	const childOf = "CUDA_TEST_CHILD"
	path := os.Getenv(childOf)
	if path == "" {
		path, _ = library(t)
		c := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v", "-test.timeout=2m")
		c.Env = append(os.Environ(), childOf+"="+path)
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return
	}
	var lost atomic.Int32
	h, err := Open(Config{Library: path, Lost: func() { lost.Add(1) }})
	require.NoError(t, err)
	defer h.Close()
	x, err := tensor.Of(make([]float32, 1024), 1024)
	require.NoError(t, err)
	var last *blocks.Work
	wild := program{check: func(w *blocks.Work) error { last = w; return nil }, launch: func(l *lane, _, _ int64, x kernels.Address) kernels.Address {
		add(l, kernels.StoreU64{Y: 1 << 46})
		return x
	}}
	_, err = engine.Compute(t.Context(), programmed(t, h, 4096, wild), nil, x)
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.ErrorContains(t, err, "CUDA_ERROR_ILLEGAL_ADDRESS")
	testkit.Eventually(t, func() bool { return lost.Load() == 1 }, "the device to be lost")
	require.NotNil(t, last, "the block was checked")
	h.device.Start(last) // on its way there when the device was lost, its memory may be another's
	require.Zero(t, h.device.queue.Len(), "blocks that wait for a device that is lost")
	_, err = engine.Compute(t.Context(), Builtins(h)[1], nil, x)
	require.ErrorContains(t, err, "restart the process")
	_, err = Open(Config{Library: path})
	require.ErrorContains(t, err, "cuDevicePrimaryCtxRetain: CUDA_ERROR_ILLEGAL_ADDRESS")
}

func TestFreedMemoryStaysMappedWhileAContextMayTouchIt(t *testing.T) {
	path, less := library(t)
	if less == 1 {
		t.Skip("needs the fake driver: it leaves a living context without its memory")
	}
	p := openDevice(t, path).device.pinned
	mem, err := p.Alloc(1 << 20)
	require.NoError(t, err)
	p.mu.Lock()
	q, err := p.grow(1 << 20) // which the driver may be about to lock
	locking := q.take(1 << 20)
	p.mu.Unlock()
	require.NoError(t, err)
	p.end(func() { // a context that ends slowly
		for _, m := range [][]byte{mem, locking} {
			p.Free(m)
			m[0] = 1 // or this crashes
		}
	})
	require.Empty(t, p.pieces)
}

func TestTheDriverIsLookedForInTwoPlaces(t *testing.T) {
	path, _ := library(t)
	standard := libraries
	t.Cleanup(func() { libraries = standard })
	libraries = []string{"/no/such/library", path}
	_, _, _, err := openDriver(Config{Log: slog.Default()})
	require.NoError(t, err)
	libraries[1] = "/nor/such"
	_, _, _, err = openDriver(Config{Log: slog.Default()})
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.ErrorContains(t, err, "/no/such/library")
}

func TestNoMoreThanItsBoundIsLockedAndTheRestIsGivenBack(t *testing.T) {
	path, _ := library(t)
	h, err := Open(Config{Library: path, PinnedBytes: pieceBytes + 2*mib})
	require.NoError(t, err)
	t.Cleanup(h.Close)
	p := h.device.pinned
	require.True(t, p.pieces[0].is, "the first piece is locked when the device is open")
	var all [][]byte
	for range 3 {
		mem, err := p.Alloc(pieceBytes)
		require.NoError(t, err)
		all = append(all, mem)
	}
	locked := 0
	for _, q := range p.pieces {
		if q.locks {
			locked += len(q.mem)
		}
	}
	require.Equal(t, pieceBytes, locked)
	for _, mem := range all {
		p.Free(mem)
	}
	require.Len(t, p.pieces, 1)
}

func TestNoChildHasThePiecesOfADevice(t *testing.T) {
	path, _ := library(t)
	at := openDevice(t, path).device.pinned.pieces[0].base()
	maps, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	var begin, end uintptr
	for line := range strings.Lines(string(maps)) { // see proc_pid_smaps(5)
		_, _ = fmt.Sscanf(line, "%x-%x ", &begin, &end)
		if flags, is := strings.CutPrefix(line, "VmFlags:"); is && begin <= at && at < end {
			require.Contains(t, strings.Fields(flags), "dc", "MADV_DONTFORK")
			return
		}
	}
	require.NotContains(t, string(maps), "VmFlags:", "the mapping is not listed")
	t.Skip("/proc/self/smaps has no VmFlags here: the kernel is built without CONFIG_PROC_PAGE_MONITOR")
}

func TestTheStageOfWeightsIsGivenBack(t *testing.T) {
	path, _ := library(t)
	h := openDevice(t, path)
	w := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{8, 8}}, Data: make([]byte, 4*8*8)}
	m, err := stack.New(stack.Spec{Name: "m", Version: "1", Layers: []stack.Layer{{Kind: "linear", Weight: "w"}}}, map[string]tensor.Tensor{"w": w})
	require.NoError(t, err)
	_, err = Stack(h, m)
	require.NoError(t, err)
	for _, q := range h.device.pinned.pieces {
		require.True(t, q.idle(), "%v of %d", q.free, len(q.mem))
	}
}

// TestPiecesHandOutWhatIsFree takes and gives memory at random, beside a list of what is taken.
func TestPiecesHandOutWhatIsFree(t *testing.T) {
	path, _ := library(t)
	p := openDevice(t, path).device.pinned
	random := rand.New(rand.NewPCG(1, 1))
	type taken struct {
		mem  []byte
		mark byte
	}
	var all []taken
	check := func(i int) {
		for _, b := range []byte{all[i].mem[0], all[i].mem[len(all[i].mem)-1]} {
			require.Equal(t, all[i].mark, b, "somebody else has it, too")
		}
	}
	for range 4000 {
		if len(all) > 60 || len(all) > 0 && random.IntN(5) < 2 {
			i := random.IntN(len(all))
			check(i)
			p.Free(all[i].mem)
			all = slices.Delete(all, i, i+1)
			continue
		}
		n := 1 + random.IntN(1<<random.IntN(21))
		mem, err := p.Alloc(n)
		require.NoError(t, err)
		require.Len(t, mem, n)
		mark := byte(random.Uint32())
		for i := range mem { // all of it, or overlaps go unseen
			mem[i] = mark
		}
		all = append(all, taken{mem, mark})
	}
	for i := range all {
		check(i)
		p.Free(all[i].mem)
	}
	for _, q := range p.pieces {
		require.True(t, q.idle(), "%v of %d", q.free, len(q.mem))
	}
}

// BenchmarkPipeline moves tensors through a device and touches no byte on the host: what the
// path through it can do without a network. It reports the mean time of a block in each
// stage, and how many stages are at work at a time: 1 if nothing overlaps, 3 if everything.
func BenchmarkPipeline(b *testing.B) {
	path, less := library(b)
	h := openDevice(b, path)
	for _, kib := range []int64{64, 256, 1024, 4096} {
		b.Run(fmt.Sprintf("model=echo/block=%dKiB", kib), func(b *testing.B) {
			pump(b, programmed(b, h, kib<<10, program{}), 1<<26/less, 1)
		})
	}
	b.Run("model=relu/block=1024KiB", func(b *testing.B) { pump(b, Builtins(h)[1], 1<<26/less, 1) })
	for _, d := range [][2]int64{{768, 3072}, {4096, 4096}} {
		in, wide := d[0]/less, d[1]/less
		weight := func(rows, cols int64) tensor.Tensor {
			return tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{rows, cols}}, Data: make([]byte, 4*rows*cols)}
		}
		s, err := stack.New(
			stack.Spec{Name: "mlp", Version: "1", Layers: []stack.Layer{{Kind: "linear", Weight: "a"}, {Kind: "gelu"}, {Kind: "linear", Weight: "b"}}},
			map[string]tensor.Tensor{"a": weight(wide, in), "b": weight(in, wide)},
		)
		require.NoError(b, err)
		m, err := Stack(h, s)
		require.NoError(b, err)
		b.Run(fmt.Sprintf("model=mlp/width=%d-%d", in, wide), func(b *testing.B) { pump(b, m, 1<<14/less, in) })
	}
}

// Through moves a float32 tensor of these rows and columns, of any bytes, through a model of
// one input, and returns what the run measured.
func Through(t testing.TB, m engine.Model, rows, cols int64) engine.Stats {
	x := engine.Input{Port: m.Info().Inputs[0].Name, Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{rows, cols}}, ChunkBytes: engine.ChunkBytes}
	r, err := m.Open(t.Context(), engine.Call{Inputs: []engine.Input{x}})
	require.NoError(t, err)
	go func() { // ends with the input
		for {
			k, err := r.Borrow(t.Context())
			if err != nil {
				return
			}
			r.Filled(k)
		}
	}()
	for {
		o, err := r.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		o.Release()
	}
	require.NoError(t, r.Close())
	return r.Stats()
}

func pump(b *testing.B, m engine.Model, rows, cols int64) {
	var sum engine.Stats
	for b.SetBytes(4 * rows * cols); b.Loop(); {
		s := Through(b, m, rows, cols)
		sum.H2D, sum.Compute, sum.D2H, sum.Blocks = sum.H2D+s.H2D, sum.Compute+s.Compute, sum.D2H+s.D2H, sum.Blocks+s.Blocks
	}
	n := float64(sum.Blocks) * 1e3
	b.ReportMetric(float64(sum.H2D)/n, "h2d-us")
	b.ReportMetric(float64(sum.Compute)/n, "compute-us")
	b.ReportMetric(float64(sum.D2H)/n, "d2h-us")
	b.ReportMetric(float64(sum.H2D+sum.Compute+sum.D2H)/float64(b.Elapsed()), "overlap")
}

func BenchmarkCompute(b *testing.B) {
	path, _ := library(b)
	echo := Builtins(openDevice(b, path))[0]
	x, err := tensor.Of(make([]float32, 1024), 1024)
	require.NoError(b, err)
	b.Run("bytes=4096/goroutines=1", func(b *testing.B) {
		for b.Loop() {
			_, err := engine.Compute(b.Context(), echo, nil, x)
			require.NoError(b, err)
		}
	})
	b.Run("bytes=4096/goroutines=many", func(b *testing.B) {
		b.SetParallelism(4)
		b.RunParallel(func(p *testing.PB) {
			for p.Next() {
				if _, err := engine.Compute(b.Context(), echo, nil, x); err != nil {
					b.Error(err)
				}
			}
		})
	})
}
