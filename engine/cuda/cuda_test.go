//go:build linux && cgo

package cuda_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/cuda"
	"github.com/tensorferry/tensorferry/engine/cuda/fakecuda"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

const mib = 1 << 20

// rig is a driver, a fake one unless cuda.RealDriver is set, and hosts on it.
type rig struct {
	t    testing.TB
	fake *fakecuda.Driver
	path string
	lost chan struct{} // closed when the host of the last config is
	log  bytes.Buffer
	mu   sync.Mutex // guards log
}

// Fake is the fake driver; with another one it skips the test.
func (r *rig) Fake() *fakecuda.Driver {
	r.t.Helper()
	if r.fake == nil {
		r.t.Skip("needs the fake driver")
	}
	return r.fake
}

func (r *rig) Control(commands string) {
	r.t.Helper()
	r.Fake().Control(commands)
}

func (r *rig) Live() fakecuda.Live { return r.Fake().Live() }

func (r *rig) Timeline() []fakecuda.Op { return r.Fake().Timeline() }

// driverOptions are those of every fake driver.
var driverOptions fakecuda.Options

// newRig resets the driver. At the end of the test nothing of it may be left.
func newRig(t testing.TB) *rig { return newRigOf(t, driverOptions) }

func newRigOf(t testing.TB, options fakecuda.Options) *rig {
	t.Helper()
	if path := os.Getenv(cuda.RealDriver); path != "" {
		testkit.Start(t)
		return &rig{t: t, path: path}
	}
	r := fakeRig(t, fakecuda.Build(t, options))
	testkit.Start(t)
	return r
}

// fakeRig is a rig on the fake driver at path, which may leave goroutines.
func fakeRig(t testing.TB, path string) *rig {
	t.Helper()
	r := &rig{t: t, fake: fakecuda.Open(t, path), path: path}
	t.Cleanup(func() {
		if t.Failed() {
			return // a failed test leaves more than that
		}
		defer func() {
			if t.Failed() {
				t.Logf("left on the driver: %+v", r.fake.Live())
			}
		}()
		testkit.Eventually(t, func() bool { return r.fake.Live() == fakecuda.Live{} }, "the driver to be empty")
		require.Empty(t, r.fake.Violations())
	})
	return r
}

func (r *rig) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.Write(p)
}

func (r *rig) logged() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.String()
}

func (r *rig) config(memory int64) cuda.Config {
	r.lost = make(chan struct{})
	lost := r.lost
	return cuda.Config{Library: r.path, PinnedBytes: memory, Lost: func() { close(lost) }, Log: slog.New(slog.NewTextHandler(r, nil))}
}

// open opens a host, which the end of the test closes.
func (r *rig) open(t testing.TB, c cuda.Config) *cuda.Host {
	t.Helper()
	h, err := cuda.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func (r *rig) host(memory int64) *cuda.Host {
	h, err := cuda.Open(r.config(memory))
	if err != nil {
		panic(err)
	}
	return h
}

func builtin(t testing.TB, all []engine.Model, name string) engine.Model {
	t.Helper()
	i := slices.IndexFunc(all, func(m engine.Model) bool { return m.Info().Name == name })
	if i < 0 {
		t.Fatalf("no model %q", name)
	}
	return all[i]
}

// floats are normally distributed.
func floats(seed uint64, shape ...int64) tensor.Tensor {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	r, data := rand.New(rand.NewPCG(seed, 0)), make([]byte, 4*n)
	for i := range n {
		binary.LittleEndian.PutUint32(data[4*i:], math.Float32bits(float32(r.NormFloat64())))
	}
	return tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: shape}, Data: data}
}

// onCPU computes with a model of the CPU engine.
func onCPU(t testing.TB, name string, params map[string]string) func([]tensor.Tensor) ([]tensor.Tensor, error) {
	h := cpu.NewHost(cpu.HostConfig{})
	t.Cleanup(h.Close)
	m := builtin(t, cpu.Builtins(h), name)
	return func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		return engine.Compute(context.Background(), m, params, in...)
	}
}

func TestTheBuiltInModelsPassTheSuiteAndEqualTheCPUs(t *testing.T) {
	r := newRig(t)
	for name, params := range map[string]map[string]string{
		"echo": nil, "relu": nil, "sink": nil, "affine": {"a": "-1.5", "b": "0.3"},
	} {
		t.Run(name, func(t *testing.T) {
			enginetest.Run(t, enginetest.Case{
				New: enginetest.On(r.host, func(h *cuda.Host) (engine.Model, error) {
					return builtin(t, cuda.Builtins(h), name), nil
				}),
				Inputs: []tensor.Tensor{floats(1, 3, 40, 25)},
				Empty:  []tensor.Tensor{{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{4, 0, 2}}, Data: []byte{}}},
				Scalar: []tensor.Tensor{floats(2)},
				Params: params, Want: onCPU(t, name, params),
			})
		})
	}
}

func TestReLUAndAffineEqualTheCPUsInEveryDataType(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	random := rand.New(rand.NewPCG(7, 7))
	for name, params := range map[string]map[string]string{"relu": nil, "affine": {"a": "3.25", "b": "-1e-3"}} {
		m, want := builtin(t, cuda.Builtins(h), name), onCPU(t, name, params)
		for _, d := range m.Info().Inputs[0].DTypes {
			for _, n := range []int{1, 3, 8, 1001} { // also such that end within a word
				x := tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: tensor.Shape{int64(n)}}, Data: make([]byte, n*d.Bits()/8)}
				for i := range x.Data {
					x.Data[i] = byte(random.Uint32())
				}
				got, err := engine.Compute(t.Context(), m, params, x)
				require.NoError(t, err)
				expected, err := want([]tensor.Tensor{x})
				require.NoError(t, err)
				if name == "affine" { // a NaN is any NaN
					got[0], expected[0] = quiet(got[0]), quiet(expected[0])
				}
				require.NoError(t, enginetest.Equal(got, expected), "%s of %v", name, x.Desc)
			}
		}
	}
}

// quiet makes every NaN the same.
func quiet(x tensor.Tensor) tensor.Tensor {
	size := x.DType.Bits() / 8
	infinity, top := map[tensor.DataType]uint64{
		tensor.Float16: 0x7c00, tensor.BFloat16: 0x7f80, tensor.Float32: 0x7f80_0000, tensor.Float64: 0x7ff0 << 48,
	}[x.DType], uint64(1)<<(8*size-1)
	for at := 0; at < len(x.Data); at += size {
		var word [8]byte
		copy(word[:], x.Data[at:at+size])
		if binary.LittleEndian.Uint64(word[:])&(top-1) > infinity {
			binary.LittleEndian.PutUint64(word[:], top-1)
			copy(x.Data[at:at+size], word[:])
		}
	}
	return x
}

// mlp is a stack model with a layer of every kind that a device has, and widths that
// are no multiple of a tile.
func mlp(t testing.TB) *stack.Model {
	t.Helper()
	factor := 0.5
	m, err := stack.New(stack.Spec{Name: "mlp", Version: "1", Layers: []stack.Layer{
		{Kind: "residual", Op: "start"},
		{Kind: "linear", Weight: "a", Bias: "b"}, {Kind: "gelu"},
		{Kind: "residual", Op: "start"}, {Kind: "silu"}, {Kind: "residual", Op: "add"},
		{Kind: "linear", Weight: "c"}, {Kind: "gelu", Approximate: "tanh"},
		{Kind: "residual", Op: "add"}, {Kind: "scale", Factor: &factor},
		{Kind: "linear", Weight: "d"}, {Kind: "relu"}, {Kind: "linear", Weight: "e"},
	}}, map[string]tensor.Tensor{
		"a": weight(3, 70, 50), "b": weight(4, 70), "c": weight(5, 50, 70), "d": weight(6, 33, 50), "e": weight(7, 65, 33),
	})
	require.NoError(t, err)
	return m
}

// weight is so small that x keeps its size.
func weight(seed uint64, shape ...int64) tensor.Tensor {
	w := floats(seed, shape...)
	for i := 0; i < len(w.Data); i += 4 {
		v := math.Float32frombits(binary.LittleEndian.Uint32(w.Data[i:]))
		binary.LittleEndian.PutUint32(w.Data[i:], math.Float32bits(v/8))
	}
	return w
}

func TestAStackModelPassesTheSuite(t *testing.T) {
	r, m := newRig(t), mlp(t)
	h := cpu.NewHost(cpu.HostConfig{})
	t.Cleanup(h.Close)
	oracle, err := cpu.Stack(h, m)
	require.NoError(t, err)
	enginetest.Run(t, enginetest.Case{
		New:    closing(t, enginetest.On(r.host, func(h *cuda.Host) (engine.Model, error) { return cuda.Stack(h, m) })),
		Inputs: []tensor.Tensor{floats(8, 3, 40, 50)},
		Empty:  []tensor.Tensor{{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{0, 50}}, Data: []byte{}}},
		Near:   5e-6, // the CPU sums in another order
		Want: func(in []tensor.Tensor) ([]tensor.Tensor, error) {
			return engine.Compute(context.Background(), oracle, nil, in...)
		},
	})
}

// closing closes the model of a subject before its host.
func closing(_ testing.TB, of func(testing.TB, int64) enginetest.Subject) func(testing.TB, int64) enginetest.Subject {
	return func(t testing.TB, memory int64) enginetest.Subject {
		s := of(t, memory)
		t.Cleanup(func() {
			if c, ok := engine.As[interface{ Close() error }](s.Model); ok {
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}
		})
		return s
	}
}

func TestAStackModelComputesWhatTheCPUDoes(t *testing.T) {
	r, m := newRig(t), mlp(t)
	device, host := r.open(t, r.config(64*mib)), cpu.NewHost(cpu.HostConfig{})
	t.Cleanup(host.Close)
	x := floats(9, 1900, 50) // whose lane is hardly larger than it must be
	var results [2][]float32
	for i, stack := range []func() (engine.Model, error){
		func() (engine.Model, error) { return cuda.Stack(device, m) },
		func() (engine.Model, error) { return cpu.Stack(host, m) },
	} {
		made, err := stack()
		require.NoError(t, err)
		y, err := engine.Compute(t.Context(), made, nil, x)
		require.NoError(t, err)
		results[i], err = tensor.Slice[float32](y[0])
		require.NoError(t, err)
	}
	require.InDeltaSlice(t, results[1], results[0], 5e-6)
}

func TestAWeightOfSeveralPiecesLandsWhole(t *testing.T) {
	for d, rows := range map[tensor.DataType]int64{tensor.Float32: 40_000, tensor.Float16: 80_000, tensor.BFloat16: 80_000} { // 5.1 MB
		t.Run(d.String(), func(t *testing.T) {
			r := newRig(t)
			m, err := stack.New(stack.Spec{Name: "tall", Layers: []stack.Layer{{Kind: "linear", Weight: "w"}}}, map[string]tensor.Tensor{"w": as(d, weight(1, rows, 32))})
			require.NoError(t, err)
			device := r.open(t, r.config(64*mib))
			if r.fake != nil {
				r.Control("late 3000") // the next piece is written only when the last one is there
			}
			there, err := cuda.Stack(device, m)
			require.NoError(t, err)
			x := floats(2, 1, 32)
			got, err := engine.Compute(t.Context(), there, nil, x)
			require.NoError(t, err)
			want, err := engine.Compute(t.Context(), oracle(t, m), nil, x)
			require.NoError(t, err)
			requireNear(t, want[0], got[0], 5e-6)
		})
	}
}

// heap is what is in use after a collection.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // and what finalizers held
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestTheHostKeepsNoWeightsThatAreOnTheDevice(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	before := heap()
	made, err := func() (engine.Model, error) { // which forgets where the weights came from
		m, err := stack.New(stack.Spec{Name: "large", Layers: []stack.Layer{{Kind: "linear", Weight: "w"}}}, map[string]tensor.Tensor{"w": weight(1, 2048, 2048)})
		require.NoError(t, err)
		return cuda.Stack(h, m)
	}()
	require.NoError(t, err)
	require.Less(t, heap()-before, int64(8*mib), "half of the weights")
	_, err = engine.Compute(t.Context(), made, nil, floats(2, 1, 2048))
	require.NoError(t, err)
}

func TestALoadWaitsForTheMemoryOfABusyLane(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	m, err := stack.New(stack.Spec{Name: "large", Layers: []stack.Layer{{Kind: "linear", Weight: "w"}}}, map[string]tensor.Tensor{"w": weight(1, 3000, 3000)}) // 36 MB
	require.NoError(t, err)
	r.Control("delay d2h 500000")
	ended := soon(func() error {
		_, err := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "sink"), nil, floats(1, 36, mib/4))
		return err
	})
	testkit.Eventually(t, func() bool { return len(r.Timeline()) > 1 }, "the block on the device")
	_, err = cuda.Stack(h, m)
	require.NoError(t, err)
	require.NoError(t, ended(t))
}

func TestADeviceThatDiesForWantOfMemoryForABlockIsLost(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(16*mib))
	relu := builtin(t, cuda.Builtins(h), "relu")
	well := watch(t, relu)
	r.Control("fail cuMemAlloc_v2 700 times 1")
	_, err := engine.Compute(t.Context(), relu, nil, floats(1, 100))
	require.ErrorIs(t, err, engine.ErrUnavailable)
	requireLost(t, r, h, well, "CUDA_ERROR_ILLEGAL_ADDRESS")
}

func TestWhatIsMadeOnTheDeviceHasTheFlagsItNeeds(t *testing.T) {
	r := newRig(t)
	r.open(t, r.config(mib))
	require.Equal(t, []string{
		"cuDevicePrimaryCtxSetFlags_v2 4",    // waits sleep
		"cuEventCreate 1", "cuEventCreate 3", // so do these, with a time and without
		"cuMemHostRegister_v2 1", // for every context
		"cuStreamCreate 1",       // waits for no default stream
	}, r.Fake().Flags())
}

func TestCopiesAndKernelsOfDifferentBlocksOverlap(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	r.Control("delay copies 15000; delay kernels 15000")
	_, err := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "relu"), nil, floats(1, 12, mib/4))
	require.NoError(t, err)
	var h2d, compute, d2h []fakecuda.Op
	for _, op := range r.Timeline() {
		switch op.Kind {
		case "h2d":
			h2d = append(h2d, op)
		case "relu_words":
			compute = append(compute, op)
		case "d2h":
			d2h = append(d2h, op)
		}
	}
	require.Len(t, h2d, 12)
	require.Len(t, compute, 12)
	require.Len(t, d2h, 12)
	overlap := func(a, b fakecuda.Op) bool { return a.Begin < b.End && b.Begin < a.End }
	three := 0
	for i := range 12 {
		require.LessOrEqual(t, h2d[i].End, compute[i].Begin, "block %d is computed before it is there", i)
		require.LessOrEqual(t, compute[i].End, d2h[i].Begin, "block %d is copied back before it is computed", i)
		for _, in := range h2d[i+1:] {
			for _, out := range d2h[:i] {
				if overlap(in, compute[i]) && overlap(compute[i], out) && overlap(in, out) {
					three++
				}
			}
		}
	}
	require.Positive(t, three, "a later block's input, a block and an earlier one's result were never under way at once")
}

func TestStagesAreTimed(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	r.Control("delay h2d 50000; delay d2h 150000")
	s := cuda.Through(t, builtin(t, cuda.Builtins(h), "relu"), 3, mib/4) // three blocks, of which the first is timed
	require.EqualValues(t, 3, s.Blocks)
	require.GreaterOrEqual(t, s.H2D, 150*time.Millisecond)
	require.GreaterOrEqual(t, s.D2H, 450*time.Millisecond)
	require.Positive(t, s.Compute)
	require.Less(t, s.Compute, 450*time.Millisecond)
	records := 0
	for _, op := range r.Timeline() {
		if op.Kind == "record" {
			records++
		}
	}
	require.Equal(t, 6+3+3, records, "each event with a time costs a CUDA stream microseconds")
}

func TestADeviceIsTheOneThatWasAskedFor(t *testing.T) {
	r := newRig(t)
	r.Fake() // it has two
	c := r.config(16 * mib)
	c.Device = 1
	h := r.open(t, c)
	m, err := cuda.Stack(h, mlp(t))
	require.NoError(t, err)
	require.Equal(t, "cuda:1", m.Info().Device)
	_, err = engine.Compute(t.Context(), m, nil, floats(1, 9, 50))
	require.NoError(t, err)
	for _, op := range r.Timeline() {
		require.Equal(t, 1, op.Device, op.Kind)
	}
}

func TestALaneHasOneAllocation(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	sink := builtin(t, cuda.Builtins(h), "sink")
	for rows := range int64(4) { // one after the other, all on the lane that was idle last
		_, err := engine.Compute(t.Context(), sink, nil, floats(1, 4*rows+1, mib/4))
		require.NoError(t, err)
	}
	require.Equal(t, 1, r.Live().Allocations)
	require.EqualValues(t, 14*mib, r.Live().Bytes)
}

func TestInputIsFreeWhenItIsOnTheDevice(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	r.Control("hang cuMemcpyDtoHAsync_v2")
	relu := builtin(t, cuda.Builtins(h), "relu")
	x := engine.Input{Port: relu.Info().Inputs[0].Name, Desc: floats(1, 40, mib/4).Desc, ChunkBytes: mib}
	run, err := relu.Open(t.Context(), engine.Call{Inputs: []engine.Input{x}})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for range 16 + 1 { // a run has 16 blocks of input, of which none is back
		k, err := run.Borrow(ctx)
		require.NoError(t, err)
		run.Filled(k)
	}
	r.Control("unhang")
	require.NoError(t, run.Close())
}

func TestARunThatWaitsBehindAHangCloses(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib)) // which does not say so for 30 s
	relu := builtin(t, cuda.Builtins(h), "relu")
	r.Control("hang cuLaunchKernel")
	begin := func(rows int64) engine.Run {
		x := engine.Input{Port: relu.Info().Inputs[0].Name, Desc: floats(1, rows, mib/4).Desc, ChunkBytes: mib}
		run, err := relu.Open(t.Context(), engine.Call{Inputs: []engine.Input{x}})
		require.NoError(t, err)
		for range rows {
			k, err := run.Borrow(t.Context())
			require.NoError(t, err)
			run.Filled(k)
		}
		return run
	}
	first := begin(8) // it has all lanes
	testkit.Eventually(t, func() bool {
		copied := 0
		for _, op := range r.Timeline() {
			if op.Kind == "h2d" {
				copied++
			}
		}
		return copied == 8
	}, "the first run's input on the device")
	require.NoError(t, begin(3).Close())
	r.Control("unhang")
	require.NoError(t, first.Close())
}

func TestADeviceThatHungAndDiedIsNotSaidToBeBack(t *testing.T) {
	r := newRig(t)
	c := r.config(16 * mib)
	c.Hang = 500 * time.Millisecond
	h := r.open(t, c)
	relu := builtin(t, cuda.Builtins(h), "relu")
	well := watch(t, relu)
	r.Control("hang cuLaunchKernel; async fail cuLaunchKernel 700 times 1")
	ended := soon(func() error {
		_, err := engine.Compute(t.Context(), relu, nil, floats(1, 100))
		return err
	})
	testkit.Eventually(t, func() bool { return well.last() != nil }, "the device to be said to hang")
	r.Control("unhang")
	require.ErrorIs(t, ended(t), engine.ErrUnavailable)
	requireGone(t, r)
	require.Equal(t, 1, well.changes(), "%v", well.told)
}

func TestPageLockedMemoryStaysWithinItsBound(t *testing.T) {
	r := newRig(t)
	const most = 24 * mib
	h := r.open(t, r.config(most))
	relu := builtin(t, cuda.Builtins(h), "relu")
	done := make(chan struct{})
	var peak int64
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for {
			slabs, live := h.Pool().Live()
			kept := h.Pool().Kept()
			if again, _ := h.Pool().Live(); again == slabs { // otherwise one may count twice
				peak = max(peak, live+kept)
			}
			if peak > most {
				return
			}
			select {
			case <-done:
				return
			case <-time.After(100 * time.Microsecond):
			}
		}
	}()
	var all sync.WaitGroup
	for i := range uint64(8) {
		all.Go(func() {
			x := floats(i, 20+int64(i), 1000, 25)
			if _, err := engine.Compute(t.Context(), relu, nil, x); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	close(done)
	<-watched
	require.LessOrEqual(t, peak, int64(most))
	require.Positive(t, peak)
}

func TestATensorLargerThanTheDevicesMemoryFlowsThrough(t *testing.T) {
	r := newRig(t)
	r.Control("memory 16777216")
	h := r.open(t, r.config(32*mib))
	x := floats(1, 24, mib/4)
	y, err := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "echo"), nil, x)
	require.NoError(t, err)
	require.NoError(t, enginetest.Equal(y, []tensor.Tensor{x}))
	// One that is needed whole is refused, with what is missing.
	_, err = engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "sink"), nil, x)
	require.ErrorContains(t, err, "device memory")
	_, err = engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "echo"), nil, x)
	require.NoError(t, err, "the device goes on")
}

func TestWithoutADriverADeviceOrASymbolOpenSaysWhich(t *testing.T) {
	testkit.Start(t)
	_, err := cuda.Open(cuda.Config{Library: "/no/such/libcuda.so.1"})
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.ErrorContains(t, err, "no NVIDIA driver: /no/such/libcuda.so.1")

	for commands, want := range map[string]string{
		"fail cuInit 100":                           "cuInit: CUDA_ERROR_NO_DEVICE",
		"devices 0":                                 "no device",
		"fail cuDevicePrimaryCtxRetain 2":           "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY",
		"fail cuStreamCreate 2 after 1":             "cuStreamCreate",
		"fail cuEventCreate 2 after 7":              "cuEventCreate",
		"fail cuModuleLoadDataEx 218":               "image sm_75",
		"fail cuModuleGetFunction 500 after 3":      "kernel",
		"fail cuModuleLoadDataEx 999":               "cuModuleLoadDataEx",
		"fail cuDeviceGetAttribute 1; driver 11040": "device cuda:0",
	} {
		t.Run(commands, func(t *testing.T) {
			r := newRig(t)
			r.Control(commands)
			_, err := cuda.Open(r.config(mib))
			require.ErrorIs(t, err, engine.ErrUnavailable)
			require.ErrorContains(t, err, want)
		})
	}
	t.Run("another device", func(t *testing.T) {
		r := newRig(t)
		r.Fake()
		c := r.config(mib)
		c.Device = 2
		_, err := cuda.Open(c)
		require.ErrorContains(t, err, "no device cuda:2; the driver has 2")
	})
	t.Run("a symbol", func(t *testing.T) {
		options := driverOptions
		options.Hide = "cuMemHostRegister_v2"
		r := newRigOf(t, options)
		r.Fake()
		_, err := cuda.Open(r.config(mib))
		require.ErrorIs(t, err, engine.ErrUnavailable)
		require.ErrorContains(t, err, "has no cuMemHostRegister_v2")
	})
}

func TestAnOlderImageIsTakenWhereANewerOneDoesNotDo(t *testing.T) {
	for _, code := range []string{"200", "209", "218", "222"} {
		t.Run(code, func(t *testing.T) {
			r := newRig(t)
			r.Control("fail cuModuleLoadDataEx " + code + " times 1")
			h := r.open(t, r.config(16*mib))
			_, err := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "relu"), nil, floats(1, 100))
			require.NoError(t, err)
		})
	}
}

func TestRefusedRegistrationMeansOrdinaryMemoryAndAWarning(t *testing.T) {
	r := newRig(t)
	r.Control("refuse-registration")
	h := r.open(t, r.config(64*mib))
	x := floats(1, 8, mib/4)
	for range 2 {
		y, err := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "echo"), nil, x)
		require.NoError(t, err)
		require.NoError(t, enginetest.Equal(y, []tensor.Tensor{x}))
	}
	require.Equal(t, 1, strings.Count(r.logged(), "locks no memory"))
	require.Zero(t, r.Live().Registered)
}

func TestADriverThatLocksSlowlyHoldsUpNobody(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	require.Equal(t, 1, r.Live().Registered, "the first piece")
	r.Control("hang cuMemHostRegister_v2")
	x := floats(1, 24, mib/4) // more than that piece
	require.NoError(t, soon(func() error {
		_, err := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "sink"), nil, x)
		return err
	})(t))
	require.Equal(t, 1, r.Live().Registered)
	r.Control("unhang")
	testkit.Eventually(t, func() bool { return r.Live().Registered > 1 }, "the other pieces")
}

func TestHandlersOfSignalsAreRestored(t *testing.T) {
	r := newRig(t)
	r.Control("sigaction")
	c := r.config(mib)
	c.Log = slog.New(slog.NewTextHandler(r, &slog.HandlerOptions{Level: slog.LevelDebug}))
	r.open(t, c)
	require.Equal(t, 2, strings.Count(r.logged(), "handlers of signals restored"), "after the driver's start, and after the image's")
}

// health watches how a model is.
type health struct {
	mu   sync.Mutex
	told []error
}

func watch(t testing.TB, m engine.Model) *health {
	t.Helper()
	w, ok := engine.As[engine.HealthWatcher](m)
	require.True(t, ok)
	h := new(health)
	stop := w.WatchHealth(func(err error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.told = append(h.told, err)
	})
	t.Cleanup(stop)
	return h
}

func (h *health) last() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.told[len(h.told)-1]
}

func (h *health) changes() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.told) - 1
}

func TestAFaultEndsEveryCallWithItsCauseAndLeavesNothing(t *testing.T) {
	type fault struct {
		commands string
		want     string // in each error
		sticky   bool
	}
	faults := map[string]fault{
		"no device memory":           {"fail cuMemAlloc_v2 2 times 3", "CUDA_ERROR_OUT_OF_MEMORY", false},
		"a copy in is refused":       {"fail cuMemcpyHtoDAsync_v2 1 after 5 times 2", "cuMemcpyHtoDAsync", false},
		"a launch is refused":        {"fail cuLaunchKernel 701 after 3 times 2", "cuLaunchKernel", false},
		"a copy back is refused":     {"fail cuMemcpyDtoHAsync_v2 1 after 2 times 1", "cuMemcpyDtoHAsync", false},
		"an event is refused":        {"fail cuEventRecord 1 after 9 times 2", "cuEventRecord", false},
		"a launch kills the context": {"fail cuLaunchKernel 719 after 4 times 1", "CUDA_ERROR_LAUNCH_FAILED", true},
		"a kernel fails":             {"async fail cuLaunchKernel 700 after 4 times 1", "CUDA_ERROR_ILLEGAL_ADDRESS", true},
		"a copy in fails":            {"async fail cuMemcpyHtoDAsync_v2 719 after 4 times 1", "CUDA_ERROR_LAUNCH_FAILED", true},
		"a copy back fails":          {"async fail cuMemcpyDtoHAsync_v2 714 after 2 times 1", "714", true},
		"memory is broken":           {"sticky 214", "CUDA_ERROR_ECC_UNCORRECTABLE", true},
		"nobody knows":               {"fail cuEventSynchronize 999 after 3 times 1", "CUDA_ERROR_UNKNOWN", true},
		"a time is not told":         {"fail cuEventElapsedTime 700 after 2 times 1", "CUDA_ERROR_ILLEGAL_ADDRESS", true},
		"a wait fails":               {"fail cuEventSynchronize 1 after 3 times 1", "CUDA_ERROR_INVALID_VALUE", true},
	}
	for name, f := range faults {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			h := r.open(t, r.config(64*mib))
			m, err := cuda.Stack(h, mlp(t))
			require.NoError(t, err)
			relu := builtin(t, cuda.Builtins(h), "relu")
			well := watch(t, relu)
			x, z := floats(1, 5, mib/4), floats(2, 1000, 50)
			want, err := engine.Compute(t.Context(), m, nil, z)
			require.NoError(t, err)
			r.Control(f.commands)
			var all sync.WaitGroup
			var mu sync.Mutex
			failed := 0
			for i := range 6 {
				all.Go(func() {
					model, in := relu, x
					if i%2 == 1 {
						model, in = m, z
					}
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					_, err := engine.Compute(ctx, model, nil, in)
					if err == nil {
						return
					}
					mu.Lock()
					defer mu.Unlock()
					failed++
					if !strings.Contains(err.Error(), f.want) {
						t.Errorf("the error is %v, without %q", err, f.want)
					}
					if errors.Is(err, engine.ErrUnavailable) != f.sticky {
						t.Errorf("unavailable: %v", err)
					}
				})
			}
			all.Wait()
			require.Positive(t, failed)
			got, err := engine.Compute(t.Context(), m, nil, z)
			if f.sticky {
				requireLost(t, r, h, well, f.want)
			} else { // the device, and the weights on it, are as before
				require.Zero(t, well.changes(), "%v", well.told)
				require.NoError(t, err)
				require.NoError(t, enginetest.Equal(got, want))
			}
			used, _, _ := h.Budget().Used()
			slabs, _ := h.Pool().Live()
			require.Zero(t, used)
			require.Zero(t, slabs)
		})
	}
}

// requireGone waits until a host hears that it is lost.
func requireGone(t testing.TB, r *rig) {
	t.Helper()
	testkit.Eventually(t, func() bool {
		select {
		case <-r.lost:
			return true
		default:
			return false
		}
	}, "the device to be lost")
}

// requireLost checks that h is lost for good, and says why and what to do.
func requireLost(t testing.TB, r *rig, h *cuda.Host, well *health, why string) {
	t.Helper()
	requireGone(t, r)
	require.Equal(t, 1, well.changes(), "%v", well.told)
	_, computes := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "relu"), nil, floats(1, 100))
	_, loads := cuda.Stack(h, mlp(t))
	for _, err := range []error{well.last(), computes, loads} {
		require.ErrorIs(t, err, engine.ErrUnavailable)
		require.ErrorContains(t, err, why)
	}
	require.ErrorContains(t, well.last(), "restart the process")
	testkit.Eventually(t, func() bool { return r.Live() == fakecuda.Live{} }, "the reset")
}

func TestABlockThatFailsEndsWhenNothingTouchesItsMemory(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(16*mib))
	r.Control("late 20000; fail cuEventRecord 1 after 5 times 1") // that behind the copy back
	_, err := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "relu"), nil, floats(1, 100))
	require.ErrorContains(t, err, "cuEventRecord")
	var done []string
	for _, op := range r.Timeline() {
		done = append(done, op.Kind)
	}
	require.Subset(t, done, []string{"h2d", "relu_words", "d2h"})
}

func TestManySessionsAndCancelsLeaveNothing(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(32*mib))
	r.Control("late 200")
	relu := builtin(t, cuda.Builtins(h), "relu")
	want := onCPU(t, "relu", nil)
	var all sync.WaitGroup
	for i := range uint64(8) {
		all.Go(func() {
			random := rand.New(rand.NewPCG(i, 1))
			for range 12 {
				x := floats(i, 1+random.Int64N(9), 1+random.Int64N(mib/4))
				ctx, cancel := context.WithCancel(t.Context())
				if random.IntN(2) == 0 {
					time.AfterFunc(time.Duration(random.IntN(5000))*time.Microsecond, cancel)
				}
				got, err := engine.Compute(ctx, relu, nil, x)
				if err == nil {
					var expected []tensor.Tensor
					expected, err = want([]tensor.Tensor{x})
					err = errors.Join(err, enginetest.Equal(got, expected))
				}
				if err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	all.Wait()
	used, _, _ := h.Budget().Used()
	slabs, _ := h.Pool().Live()
	require.Zero(t, used)
	require.Zero(t, slabs)
}

func TestAModelTellsWhatItTakesOnTheDevice(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(16*mib))
	before := r.Live().Allocations
	m, err := cuda.Stack(h, mlp(t))
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint(4*(70*50+70+50*70+50+33*50+33+65*33+65)), m.Info().About["device_bytes"])
	require.Equal(t, "cuda:0", m.Info().Device)
	require.Equal(t, before+8, r.Live().Allocations)
	c, ok := engine.As[interface{ Close() error }](m)
	require.True(t, ok)
	require.NoError(t, c.Close())
	require.Equal(t, before, r.Live().Allocations)
	r.Control("fail cuMemAlloc_v2 2 after 3")
	_, err = cuda.Stack(h, mlp(t))
	require.ErrorContains(t, err, "device memory for weights")
	require.Equal(t, before, r.Live().Allocations)
}

func TestTheDriverDescribesItsDevices(t *testing.T) {
	r := newRig(t)
	r.Fake()
	all, err := cuda.Devices(cuda.Config{Library: r.path})
	require.NoError(t, err)
	require.Equal(t, []cuda.Device{
		{Name: "Fake GPU 0", Memory: 64 * mib, Major: 8, Driver: 12040}, {Name: "Fake GPU 1", Memory: 64 * mib, Major: 8, Driver: 12040},
	}, all)
}

func closeModel(t testing.TB, m engine.Model) {
	t.Helper()
	c, ok := engine.As[interface{ Close() error }](m)
	require.True(t, ok)
	require.NoError(t, c.Close())
}

func TestAModelOfALostDeviceCloses(t *testing.T) {
	for name, tc := range map[string]struct{ commands, why string }{
		"whole":              {"async fail cuLaunchKernel 700 times 1", "CUDA_ERROR_ILLEGAL_ADDRESS"},
		"half loaded":        {"fail cuStreamSynchronize 700 after 1 times 1", "CUDA_ERROR_ILLEGAL_ADDRESS"},
		"of an unknown code": {"sticky 911", "911"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			h := r.open(t, r.config(16*mib))
			relu := builtin(t, cuda.Builtins(h), "relu")
			well := watch(t, relu)
			var err error
			if name == "whole" {
				m, bad := cuda.Stack(h, mlp(t))
				require.NoError(t, bad)
				defer closeModel(t, m)
				r.Control(tc.commands)
				_, err = engine.Compute(t.Context(), relu, nil, floats(1, 100))
			} else {
				r.Control(tc.commands)
				_, err = cuda.Stack(h, mlp(t))
			}
			require.ErrorIs(t, err, engine.ErrUnavailable)
			requireLost(t, r, h, well, tc.why)
		})
	}
}

func TestAContextThatDiesWhileItsHostClosesEndsItsRuns(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(16*mib))
	r.Control("hang cuLaunchKernel; async fail cuLaunchKernel 700 times 1")
	ended := make(chan error, 1)
	go func() {
		_, err := engine.Compute(t.Context(), builtin(t, cuda.Builtins(h), "relu"), nil, floats(1, 100))
		ended <- err
	}()
	testkit.Eventually(t, func() bool { return len(r.Timeline()) > 1 }, "the input on the device")
	closed := make(chan struct{})
	go func() {
		h.Close()
		close(closed)
	}()
	testkit.Eventually(t, func() bool { // the host is closed for new models
		_, err := cuda.Stack(h, mlp(t))
		return errors.Is(err, engine.ErrClosed)
	}, "the host to close")
	r.Control("unhang")
	<-closed
	err := <-ended
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.NotErrorIs(t, err, engine.ErrLost)
	slabs, _ := h.Pool().Live()
	require.Zero(t, slabs)
}

func TestMemoryOfIdleLanesIsTakenWhenThereIsNoOther(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	sink, echo := builtin(t, cuda.Builtins(h), "sink"), builtin(t, cuda.Builtins(h), "echo")
	big := floats(1, 36, mib/4)
	for range 4 { // each on the lane that was idle last
		_, err := engine.Compute(t.Context(), sink, nil, big)
		require.NoError(t, err)
		r.Control("delay copies 2000")
		_, err = engine.Compute(t.Context(), echo, nil, floats(2, 16, mib/4))
		require.NoError(t, err)
	}
	m, err := stack.New(stack.Spec{Name: "large", Layers: []stack.Layer{{Kind: "linear", Weight: "w"}}}, map[string]tensor.Tensor{"w": weight(1, 3000, 3000)})
	require.NoError(t, err)
	_, err = cuda.Stack(h, m)
	require.NoError(t, err)
}

func TestASubmitThatFailsTwiceKeepsItsMemoryUntilTheContextIsReset(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(16*mib))
	relu := builtin(t, cuda.Builtins(h), "relu")
	r.Control("late 50000; fail cuEventRecord 1 after 5 times 1; fail cuStreamSynchronize 304 times 1")
	_, err := engine.Compute(t.Context(), relu, nil, floats(1, 100))
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.ErrorContains(t, err, "cuStreamSynchronize")
}

func TestAWideModelNeedsLittleOfTheDevice(t *testing.T) {
	r := newRig(t)
	h := r.open(t, r.config(64*mib))
	m, err := stack.New(stack.Spec{Name: "wide", Layers: []stack.Layer{
		{Kind: "linear", Weight: "a"}, {Kind: "residual", Op: "start"}, {Kind: "relu"}, {Kind: "residual", Op: "add"}, {Kind: "linear", Weight: "b"},
	}}, map[string]tensor.Tensor{"a": weight(1, 1024, 2), "b": weight(2, 2, 1024)})
	require.NoError(t, err)
	made, err := cuda.Stack(h, m)
	require.NoError(t, err)
	before := r.Live()
	_, err = engine.Compute(t.Context(), made, nil, floats(3, 2100, 2)) // whose first layer makes 8.6 MB of it, and three places has a block
	require.NoError(t, err)
	after := r.Live()
	require.Positive(t, after.Allocations-before.Allocations)
	require.Less(t, (after.Bytes-before.Bytes)/int64(after.Allocations-before.Allocations), int64(10*mib), "of a lane")
}
