//go:build linux && cgo

package fakecuda

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/cpu"
)

// Options are how a library differs from the usual one.
type Options struct {
	Sanitize bool   // it has Address Sanitizer, which must be in the process before it: see Preload
	Hide     string // a function that it has not, as older drivers
	Kernels  string // a folder, whose .cu files it has instead of those in engine/cuda/kernels
}

// kept is how long a build stays that nobody uses.
const kept = 7 * 24 * time.Hour

// entries finds the kernels of a .cu file.
var entries = regexp.MustCompile(`__global__\s+void\s+(\w+)\s*\(`)

// Build returns the path of the library, built with g++ unless it was before: it is
// kept in the user's cache, under a hash of all that it is made of. Without g++ the
// test is skipped. It is safe for concurrent use.
func Build(t testing.TB, o Options) (path string) {
	t.Helper()
	compiler := lookUp(t)
	path, err := build(compiler, o)
	require.NoError(t, err, "fakecuda")
	return path
}

// Preload returns Address Sanitizer's path, for LD_PRELOAD, or skips the test.
func Preload(t testing.TB) string {
	t.Helper()
	out, err := exec.Command(lookUp(t), "-print-file-name=libasan.so").Output()
	path := strings.TrimSpace(string(out))
	if err != nil || !filepath.IsAbs(path) {
		t.Skip("g++ has no Address Sanitizer here")
	}
	return path
}

func lookUp(t testing.TB) string {
	t.Helper()
	path, err := exec.LookPath("g++")
	if err != nil {
		t.Skip("the fake CUDA driver is built with g++, which is not installed")
	}
	return path
}

// build makes the library of objects, of which each is compiled once for all Options that it
// is the same for: compiling takes seconds, linking does not.
func build(compiler string, o Options) (string, error) {
	_, self, _, _ := runtime.Caller(0)
	driver := filepath.Join(filepath.Dir(self), "driver")
	kernels, err := filepath.Abs(cmp.Or(o.Kernels, filepath.Join(driver, "../../kernels")))
	if err != nil {
		return "", err
	}
	flags := []string{"-std=c++17", "-O2", "-g1", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-unknown-pragmas"}
	flags = append(flags, "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error") // a GPU does not forgive it: a kernel that does is SIGILL, without a library for that
	if cpu.X86.HasFMA {
		flags = append(flags, "-mfma") // otherwise each __builtin_fmaf is a call; no other operation is fused
	}
	if o.Sanitize {
		flags = append(flags, "-fsanitize=address")
	}
	version, err := exec.Command(compiler, "--version").Output()
	if err != nil {
		return "", err
	}
	headers, err := read(driver + "/*.h")
	if err != nil {
		return "", err
	}
	included, err := read(kernels + "/*.h")
	if err != nil {
		return "", err
	}
	sources, err := read(driver+"/*.cc", kernels+"/*.cu")
	if err != nil {
		return "", err
	}

	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	cache = filepath.Join(cache, "tensorferry")
	unlock, err := lock(cache)
	if err != nil {
		return "", err
	}
	defer unlock()
	paths := slices.Sorted(maps.Keys(sources))
	objects, errs := make([]string, len(paths)), make([]error, len(paths))
	var all sync.WaitGroup
	for i, path := range paths {
		all.Go(func() {
			text, beside := sources[path], fmt.Sprintf("%s%s", version, headers)
			if filepath.Ext(path) == ".cu" { // is included, and its kernels are registered
				beside += fmt.Sprintf("%s%s", included, text)
				twin := fmt.Appendf(nil, "#include \"kernel.h\"\n#include \"shim.h\"\n#include %q\n", path)
				for _, match := range entries.FindAllSubmatch(text, -1) {
					twin = fmt.Appendf(twin, "KERNEL(%s)\n", match[1])
				}
				text = twin
			}
			args := append(slices.Clone(flags), "-I", driver, "-c", "source.cc", "-o", "object.o")
			objects[i], errs[i] = made(cache, compiler, args, beside, "object.o", map[string][]byte{"source.cc": text})
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return "", err
	}
	symbols := []byte("{ global: *; };")
	if o.Hide != "" {
		symbols = fmt.Appendf(nil, "{ local: %s; };", o.Hide)
	}
	args := append(slices.Clone(flags), "-shared", "-Wl,-soname,libcuda.so.1", "-Wl,--version-script=symbols", "-o", "libcuda.so.1")
	return made(cache, compiler, append(args, objects...), string(version), "libcuda.so.1", map[string][]byte{"symbols": symbols})
}

// read reads the files that patterns match.
func read(patterns ...string) (map[string][]byte, error) {
	files := make(map[string][]byte)
	for _, pattern := range patterns {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			if files[path], err = os.ReadFile(path); err != nil {
				return nil, err
			}
		}
	}
	return files, nil
}

// made returns the path of a file that the compiler makes in a folder of others, from the cache
// if it was made before. Beside is what else it depends on.
func made(cache, compiler string, args []string, beside, name string, files map[string][]byte) (string, error) {
	hash := sha256.Sum256(fmt.Appendf(nil, "%q%q%q", args, files, beside))
	dir := filepath.Join(cache, fmt.Sprintf("fakecuda-%x", hash[:8]))
	defer prune(cache, dir, time.Now())
	return filepath.Join(dir, name), once(dir, func(dir string) error {
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
				return err
			}
		}
		cmd := exec.Command(compiler, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", cmd, err, out)
		}
		return nil
	})
}

// lock keeps others from building, in this process and in others, until unlock.
func lock(cache string) (unlock func(), err error) {
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(cache, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, err
	}
	return func() { _ = f.Close() }, nil // which ends the lock
}

// prune removes the builds that nobody has used for a while, but not the one in use.
// Each has ten megabytes, and every change of a source makes another.
func prune(cache, use string, now time.Time) {
	_ = os.Chtimes(use, now, now) // at worst it is built again
	all, _ := filepath.Glob(cache + "/fakecuda-*")
	for _, dir := range all {
		if info, err := os.Stat(dir); err == nil && now.Sub(info.ModTime()) > kept {
			_ = os.RemoveAll(dir) // somebody else's
		}
	}
}

// once makes a folder under another name first, so that one whose making was interrupted is
// not taken for whole.
func once(dir string, fill func(string) error) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }() // gone when all went well
	if err := fill(tmp); err != nil {
		return err
	}
	return os.Rename(tmp, dir)
}
