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
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine/cuda/fakecuda"
)

var mutate = flag.Bool("mutants", false, "break the engine in one place at a time, and expect other tests to fail")

// mutants are what is broken: a text of a file, and what stands in its place.
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
	{"a lost device is lost again and again", "device.go", "v.lost = true\n", ""},
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
	{"the activation of the next layer is lost", "stack.go", "c.linear(s, a)", "c.linear(s, kernels.None)"},
	{"each piece of a weight lands at its beginning", "stack.go", "w.at+C.CUdeviceptr(at)", "w.at"},
	{"a residual is added to another", "stack.go", "p.depth--\n", ""},
}

// suite are the tests that kill them; those that take longest are not among them.
const suite = "FailsTwice|NeedsLittle|LostDevice|Stages|FreedMemory|Pieces|Locks|SeveralPieces|Closes|IdleLanes|ReLUAndAffine|BlockThatFails|StackModelComputes|Overlap|Fault|Hangs|Handlers|ManySessions|Registration|TellsWhat"

func TestEveryMutantIsKilled(t *testing.T) {
	if !*mutate {
		t.Skip("takes minutes; make cuda-mutants runs it")
	}
	fakecuda.Build(t, fakecuda.Options{})
	killed := 0
	for _, m := range mutants {
		dir := t.TempDir()
		text, err := os.ReadFile(m.file)
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(string(text), m.text), "%s: the text to break", m.name)
		broken, overlay := filepath.Join(dir, m.file), filepath.Join(dir, "overlay.json")
		require.NoError(t, os.WriteFile(broken, []byte(strings.Replace(string(text), m.text, m.instead, 1)), 0o600))
		whole, err := filepath.Abs(m.file)
		require.NoError(t, err)
		list, err := json.Marshal(map[string]any{"Replace": map[string]string{whole: broken}})
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(overlay, list, 0o600))
		binary := filepath.Join(dir, "cuda.test")
		out, err := exec.Command("go", "test", "-c", "-vet=off", "-o", binary, "-overlay", overlay, ".").CombinedOutput()
		require.NoError(t, err, "%s does not build: %s", m.name, out)
		out, err = exec.Command(binary, "-test.run", suite, "-test.failfast", "-test.timeout", "2m").CombinedOutput()
		if err == nil || strings.Contains(string(out), "test timed out") {
			t.Errorf("survived, or hung a test: %s", m.name)
			continue
		}
		killed++
		by, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
		fmt.Printf("killed: %s, by %.80s\n", m.name, cmp.Or(strings.TrimPrefix(by, "--- FAIL: "), "a crash"))
	}
	fmt.Printf("killed %d of %d\n", killed, len(mutants))
}
