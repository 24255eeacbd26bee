//go:build linux && cgo

package cuda_test

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine/cuda/fakecuda"
)

var mutate = flag.Bool("mutants", false, "break the engine, and what is beside it, in one place at a time, and expect other tests to fail")

// mutants are what is broken: a text of a file, here or in a folder beside, whose tests are then
// to notice, and what stands in its place.
var mutants = []struct{ name, file, text, instead string }{
	{"kernels do not wait for their input", "driver.c", "TRY(StreamWaitEvent, v->compute, events[TF_IN_END], 0);", ""},
	{"the copy back does not wait for kernels", "driver.c", "TRY(StreamWaitEvent, v->d2h, events[TF_RUN_END], 0);", ""},
	{"the copy back is on another CUDA stream", "driver.c", "l->memory + b->out_at, b->out_bytes, v->d2h)", "l->memory + b->out_at, b->out_bytes, v->h2d)"},
	{"kernels are on the CUDA stream of copies", "driver.c", "0, v->compute, params, NULL)", "0, v->h2d, params, NULL)"},
	{"a failed submit does not wait for what is under way", "driver.c", "TRY(StreamSynchronize, v->d2h);\n\t}", "}"},
	{"input is freed before it is copied", "device.go", "v.wait(l, C.TF_IN_END)", "v.wait(l, C.TF_IN_BEGIN)"},
	{"results are given out before they are copied", "device.go", "v.wait(l, C.TF_OUT_END)", "v.wait(l, C.TF_RUN_END)"},
	{"a dead context is taken for a living one", "device.go", "v.dead = cause\n", ""},
	{"a block ends before a dead context is reset", "device.go", "if v.dead == nil {\n\t\t\tv.mu.Unlock()\n\t\t\tw.Done", "if true {\n\t\t\tv.mu.Unlock()\n\t\t\tw.Done"},
	{"a lost device does not say so", "device.go", "v.tell()", ""},
	{"a lost device is lost again and again", "device.go", "return resting && v.engine.State() != blocks.Lost", "return resting"},
	{"memory is unmapped while a dead context has it", "memory.go", "q.idle() && !q.locks {", "q.idle() {"},
	{"memory is not locked", "memory.go", "q.locks = more, true", "q.locks = more, false"},
	{"what is free is not joined", "memory.go", "q.free[i].n += q.free[i+1].n\n", ""},
	{"memory is handed out twice", "memory.go", "q.free[i].at += size\n", ""},
	{"the times of a call are forgotten", "device.go", "w.Done(err, p.times)", "w.Done(err, blocks.Times{})"},
	{"stages are mixed up", "device.go", "H2D: duration(ms[0]), Compute: duration(ms[1])", "H2D: duration(ms[1]), Compute: duration(ms[0])"},
	{"memory of lanes is not given up", "device.go", "l.c.bytes = 0\n\t\t\t\treturn true", "return false"},
	{"a hang is not told", "device.go", "v.engine.Hung(err)", ""},
	{"handlers of signals are left as they are", "driver.go", "n := C.tf_signals_restore()", "n := C.int(0)"},
	{"the last word is left out", "models.go", "uint64(bytes+7) / 8", "uint64(bytes) / 8"},
	{"a lane is one residual too small", "stack.go", "(2 + residuals) * size(rows)", "(1 + residuals) * size(rows)"},
	{"the activation of the next layer is lost", "stack.go", "a = activations[m.Steps[i].Activation]", "a = kernels.None"},
	{"each piece of a weight lands at its beginning", "stack.go", "w.at+C.CUdeviceptr(at)", "w.at"},
	{"a residual is added to another", "stack.go", "p.depth--\n", ""},
	{"a lane that grows keeps what it had", "driver.c", "TRY(MemFree, l->memory);\n\t}", "}"},
	{"a lane does not grow", "driver.c", "if (bytes <= l->bytes)", "if (l->bytes > 0)"},
	{"an upload is not waited for", "driver.c", "TRY(StreamSynchronize, v->h2d);\n\treturn", "return"},
	{"the result is taken from where the input was", "driver.c", "l->memory + b->out_at", "l->memory"},
	{"parameters are eight bytes each", "driver.c", "k->bytes + k->offsets[p]", "k->bytes + 8 * p"},
	{"all blocks use events without time", "driver.c", "l->events[l->timed = b->timed]", "l->events[l->timed = 0]"},
	{"a reset keeps the context", "driver.c", "(void)d->DevicePrimaryCtxReset(v->ordinal);", ""},
	{"a reset does not release", "driver.c", "(void)d->DevicePrimaryCtxRelease(v->ordinal);\n\tv->context = NULL;\n\tv->h2d", "v->context = NULL;\n\tv->h2d"},
	{"a CUDA stream is left", "driver.c", "(void)d->StreamDestroy(*streams[i]);", ";"},
	{"the module is left", "driver.c", "(void)d->ModuleUnload(v->module);", ";"},
	{"events of lanes are left", "driver.c", "(void)d->EventDestroy(l->events[timed][i]);", ";"},
	{"memory of lanes is left", "driver.c", "(void)d->MemFree(l->memory);\n\tmemset", "memset"},
	{"a child has what is locked", "driver.c", "(void)madvise(memory, bytes, MADV_DONTFORK);", ""},
	{"handlers that are Go's own are left out", "driver.c", "now.sa_handler != SIG_IGN && (now.sa_flags & SA_ONSTACK) == 0", "now.sa_handler != SIG_IGN && (now.sa_flags & SA_ONSTACK) != 0"},
	{"the device is always the first", "device.go", "C.CUdevice(c.Device)", "0"},
	{"the first device is described", "driver.go", "C.int(i), name", "C.int(0), name"},
	{"one device more than there is", "host.go", "c.Device >= n", "c.Device > n"},
	{"the library is looked for in one place", "driver.go", "library := range all {", "library := range all[:1] {"},
	{"open waits for ever", "driver.go", "time.After(openHangs * hang)", "time.After(openHangs * hangWait)"},
	{"what opens too late stays open", "driver.go", "undo(of)", "_ = undo"},
	{"an image is given up at once", "device.go", "|| !otherImage[r.code] {\n\t\t\tbreak", "|| r.code != 0 {\n\t\t\tbreak"},
	{"who asks waits while a reset hangs", "device.go", "v.engine.State() != blocks.Alive {", "v.engine.State() != blocks.Alive && v.died() == nil {"},
	{"who asks waits while blocks hang", "device.go", "v.engine.State() != blocks.Alive {", "v.died() != nil {"},
	{"a loss is told after the reset", "device.go", "v.tell()\n\tv.pinned.end(v.reset)", "v.pinned.end(v.reset)\n\tv.tell()"},
	{"a loss is told to nobody before the reset", "device.go", "v.engine.Hung(cause) // should", "// should"},
	{"a lost device keeps its lanes", "device.go", "*l.c = C.tf_lane{}", "_ = l"},
	{"a lost device keeps its weights", "device.go", "for w := range v.weights {\n\t\tw.at = 0", "for w := range v.weights {\n\t\t_ = w"},
	{"a dead device is back", "device.go", "case v.dead == nil && v.engine.Back():", "case v.engine.Back():"},
	{"a device is not back", "device.go", "v.dead == nil && v.engine.Back()", "false"},
	{"what is asked may hang", "device.go", "case v.asking || len(v.idle) < lanes:", "case len(v.idle) < lanes:"},
	{"a code that is not known is no death", "device.go", "if v.failed(C.tf_memory(v.c, &left, &total)) == nil {", "if v.failed(C.tf_memory(v.c, &left, &total)); true {"},
	{"any error is a death", "device.go", "if v.failed(C.tf_memory(v.c, &left, &total)) == nil {", "if v.failed(C.tf_memory(v.c, &left, &total)); false {"},
	{"a wait that fails is no death", "device.go", "v.die(l.dirty)", "v.check(l.dirty)"},
	{"a submit that cannot wait is no death", "device.go", " && r.call != \"cuStreamSynchronize\"", ""},
	{"input is never free", "device.go", "l.work.InputFree()", ""},
	{"what waits is not cancelled", "device.go", "v.queue.Take(run, &over)\n", ""},
	{"every block is timed", "device.go", "p.begun%timedEvery == 0", "true"},
	{"the copy back is not timed", "device.go", "D2H: duration(ms[2])", "D2H: duration(ms[1])"},
	{"a lane has no room for what is between two layers", "device.go", "bytes = max(bytes, p.memory(w.Rows))", ""},
	{"a closed device keeps weights", "device.go", "\t\tw.free(v)\n\t}\n\tv.pinned", "\t\t_ = w\n\t}\n\tv.pinned"},
	{"the first piece is not locked", "memory.go", "if err == nil && q.locks {\n\t\tp.lock(q)", "if err == nil && q.locks {"},
	{"more is locked than may be", "memory.go", "p.bytes+more <= p.most", "true"},
	{"what was locked is left locked", "memory.go", "_ = C.tf_unregister(dev, unsafe.Pointer(unsafe.SliceData(q.mem)))", "_ = dev"},
	{"what was not locked is unlocked", "memory.go", "if q.is {", "if true {"},
	{"ordinary memory is kept", "memory.go", "q.idle() && !q.locks {", "false {"},
	{"a caller waits for the driver to lock", "memory.go", "go p.lock(q)", "p.mu.Unlock()\n\t\tp.lock(q)\n\t\tp.mu.Lock()"},
	{"float64 is float32", "models.go", "if dtype != tensor.Float64 {", "if true {"},
	{"the stage of a weight is kept", "stack.go", "defer v.pinned.Free(stage)\n", ""},
	{"half a model stays on the device", "stack.go", "c.free(v)\n\t\t\treturn err", "return err"},
	{"the device does not know of weights", "stack.go", "v.weights[w] = struct{}{}\n", ""},
	{"ids are not checked", "device.go", "if p.check != nil {", "if false {"},
	{"a mask lies over its input", "device.go", "b.in[i].at = C.size_t(p.second(w.Rows))", "b.in[i].at = C.size_t(0)"},
	{"nothing is masked", "stack.go", "p.mask = at + kernels.Address(mask(rows))", "p.mask = 0"},
	{"results are left as float32", "stack.go", "p.convert(l, y.DType)\n", ""},
	{"no mean is subtracted", "stack.go", "k.Centered = 1", "k.Centered = 0"},
	{"ids have 32 bits", "stack.go", "k.Wide = 1", "k.Wide = 0"},
	{"each position is the first", "stack.go", "Of: kernels.N(p.positions * p.width)", "Of: kernels.N(p.width)"},
	{"later positions are seen", "stack.go", "k.Causal = 1", "k.Causal = 0"},
	{"weights of half types are widened", "stack.go", "if as == tensor.Float64 {", "if as != tensor.Float32 {"},
	{"pieces of half types are taken for wide ones", "stack.go", "at += n\n", "at += 4 * len(piece)\n"},
	{"a lane has no room for wide input", "stack.go", "in*int64(x.DType.Bits()/8)", "4*in"},
	{"nothing is aligned", "stack.go", "return (n + 255) &^ 255", "return n"},
	{"weights stay in the host until the model is closed", "stack.go", "w.data = nil\n", ""},
	{"steps stay in the host with their weights", "stack.go", "known.Steps = nil", "_ = known.Steps"},
	{"a lane has one place for each row", "stack.go", "laneMost/max(1, (2+residuals)*row)", "laneMost/max(1, row)"},
	{"a lane has two places for each row", "stack.go", "laneMost/max(1, (2+residuals)*row)", "laneMost/max(1, 2*row)"},
	{"a lost device has its queue filled", "device.go", "if v.closed || w.Context().Err() != nil {", "if v.closed {"},
	{"nothing bounds a wait for devices", "driver.go", "c.setDefaults()\n\treturn bounded(c.Hang,", "c.setDefaults()\n\treturn bounded(openHangs*hangWait,"},
	{"a lane that does not grow is no death", "device.go", "v.check(err)\n\t\treturn fmt.Errorf(\"%d bytes of device memory for a block", "return fmt.Errorf(\"%d bytes of device memory for a block"},
	{"a load waits for no lane", "device.go", "if len(v.idle) >= others {", "if len(v.idle) >= others || v.asking {"},
	{"waits for the device spin", "driver.c", "(void)d->DevicePrimaryCtxSetFlags(v->ordinal, CU_CTX_SCHED_BLOCKING_SYNC);", ""},
	{"CUDA streams wait for the default one", "driver.c", "&v->compute, CU_STREAM_NON_BLOCKING", "&v->compute, 0"},
	{"waits for events spin", "driver.c", "CU_EVENT_BLOCKING_SYNC | (timed", "(timed"},
	{"every event has a time", "driver.c", "(timed ? 0 : CU_EVENT_DISABLE_TIMING)", "0"},
	{"locked memory is of one context", "driver.c", "bytes, CU_MEMHOSTREGISTER_PORTABLE", "bytes, 0"},

	{"given results are as few as blocks of input", "../blocks/work.go", "\t\tr.plan.window()\n", ""},
	{"what a lost run was given is kept", "../blocks/work.go", "r.freeInput(w)\n\t\t\tw.letGo()", "r.freeInput(w)"},
	{"marks of released results stay", "../blocks/work.go", "r.done[r.low%int64(len(r.done))] = false\n", ""},
	{"blocks beyond the marks are not told apart", "../blocks/work.go", "r.done[w.index%int64(len(r.done))] = true", "r.done[min(w.index, int64(len(r.done))-1)] = true"},
	{"whole inputs in use are not charged", "../blocks/run.go", "used = r.plan.wholeBytes + r.plan.fixed", "used = r.plan.fixed"},
	{"the chunk that ends a block has no place", "../blocks/plan.go", "chunk = add(chunk, max(chunk, block))", "_ = chunk"},
	{"the chunk that ends a large block has no place", "../blocks/plan.go", "chunk = add(chunk, max(chunk, block))", "chunk = mul(chunk, 2)"},
	{"a device lost after the model is no failure", "../../python/src/tensorferry/_device.py", "copies nothing any more\n            block.fail(err)", "copies nothing any more\n            _ = err"},
}

// testsOf are the tests of a file's package, with the file broken.
func testsOf(t *testing.T, dir, file string, text []byte) *exec.Cmd {
	broken, overlay := filepath.Join(dir, filepath.Base(file)), filepath.Join(dir, "overlay.json")
	require.NoError(t, os.WriteFile(broken, text, 0o600))
	whole, err := filepath.Abs(file)
	require.NoError(t, err)
	list, err := json.Marshal(map[string]any{"Replace": map[string]string{whole: broken}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(overlay, list, 0o600))
	binary, tested := filepath.Join(dir, "broken.test"), filepath.Dir(whole)
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-o", binary, "-overlay", overlay, ".")
	build.Dir = tested
	out, err := build.CombinedOutput()
	require.NoError(t, err, "it does not build: %s", out)
	cmd := exec.CommandContext(t.Context(), binary, "-test.skip", slow, "-test.failfast", "-test.timeout", "2m")
	cmd.Dir = tested
	return cmd
}

// testsOfPython are the tests of a module of the same name, with that broken.
func testsOfPython(t *testing.T, dir, file string, text []byte) *exec.Cmd {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	source := filepath.Dir(filepath.Dir(file))
	require.NoError(t, os.CopyFS(dir, os.DirFS(source)))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tensorferry", filepath.Base(file)), text, 0o600))
	cmd := exec.CommandContext(t.Context(), python, "-m", "unittest", "-f", "test"+strings.TrimSuffix(filepath.Base(file), ".py"))
	cmd.Dir, cmd.Env = filepath.Join(source, "..", "tests"), append(os.Environ(), "PYTHONPATH="+dir)
	return cmd
}

// slow are the tests that they are not held to.
const slow = "TheSuite"

func TestEveryMutantIsKilled(t *testing.T) {
	if !*mutate {
		t.Skip("takes minutes; make cuda-mutants runs it")
	}
	fakecuda.Build(t, fakecuda.Options{})
	var killed atomic.Int32
	t.Cleanup(func() { fmt.Printf("killed %d of %d\n", killed.Load(), len(mutants)) })
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel() // some are killed by a wait in vain
			dir := t.TempDir()
			text, err := os.ReadFile(m.file)
			require.NoError(t, err)
			require.Equal(t, 1, strings.Count(string(text), m.text), "the text to break")
			broken := []byte(strings.Replace(string(text), m.text, m.instead, 1))
			tests := testsOf
			if filepath.Ext(m.file) == ".py" {
				tests = testsOfPython
			}
			out, err := tests(t, dir, m.file, broken).CombinedOutput()
			require.True(t, err != nil && !strings.Contains(string(out), "test timed out"), "survived, or hung a test")
			killed.Add(1)
			by, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
			fmt.Printf("killed: %s, by %.80s\n", m.name, cmp.Or(strings.TrimPrefix(by, "--- FAIL: "), "a crash"))
		})
	}
}
