//go:build linux && cgo

package fakecuda

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
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

var building sync.Mutex

// entries finds the kernels of a .cu file.
var entries = regexp.MustCompile(`__global__\s+void\s+(\w+)\s*\(`)

// Build returns the path of the library, built with g++ unless it was before: it is
// kept in the user's cache, under a hash of all that it is made of. Without g++ the
// test is skipped. It is safe for concurrent use.
func Build(t testing.TB, o Options) (path string) {
	t.Helper()
	compiler := lookUp(t)
	building.Lock()
	defer building.Unlock()
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

func build(compiler string, o Options) (string, error) {
	_, self, _, _ := runtime.Caller(0)
	driver := filepath.Join(filepath.Dir(self), "driver")
	kernels, err := filepath.Abs(cmp.Or(o.Kernels, filepath.Join(driver, "../../kernels")))
	if err != nil {
		return "", err
	}
	args := []string{"-std=c++17", "-O2", "-g1", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-unknown-pragmas"}
	args = append(args, "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error") // a GPU does not forgive it: a kernel that does is SIGILL, without a library for that
	if cpu.X86.HasFMA {
		args = append(args, "-mfma") // otherwise each __builtin_fmaf is a call; no other operation is fused
	}
	if o.Sanitize {
		args = append(args, "-fsanitize=address")
	}
	args = append(args, "-I", driver, "-shared", "-Wl,-soname,libcuda.so.1", "-Wl,--version-script=symbols", "-o", "libcuda.so.1")
	files := map[string][]byte{"symbols": []byte("{ global: *; };")}
	if o.Hide != "" {
		files["symbols"] = fmt.Appendf(nil, "{ local: %s; };", o.Hide)
	}

	version, err := exec.Command(compiler, "--version").Output()
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	fmt.Fprintf(hash, "%s%q%s%s", version, args, files, kernels)
	for _, pattern := range []string{driver + "/*.*", kernels + "/*.cu", kernels + "/*.h"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(hash, "%s %d\n%s", path, len(text), text)
			switch filepath.Ext(path) {
			case ".cc":
				args = append(args, path)
			case ".cu":
				twin := filepath.Base(path) + ".cc" // contains the .cu file and registers its kernels
				files[twin] = fmt.Appendf(nil, "#include \"kernel.h\"\n#include \"shim.h\"\n#include %q\n", path)
				for _, match := range entries.FindAllSubmatch(text, -1) {
					files[twin] = fmt.Appendf(files[twin], "KERNEL(%s)\n", match[1])
				}
				args = append(args, twin)
			}
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	cache = filepath.Join(cache, "tensorferry")
	library := filepath.Join(cache, fmt.Sprintf("fakecuda-%x", hash.Sum(nil)[:8]))
	defer prune(cache, library, time.Now())
	err = once(library, func(dir string) error {
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
	return filepath.Join(library, "libcuda.so.1"), err
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

// once makes a folder under another name first, so that whoever sees it sees all of
// it. Two processes may do so at a time; one of the results stays.
func once(dir string, fill func(string) error) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }() // gone when all went well
	if err := fill(tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, dir); err != nil {
		_, err = os.Stat(dir)
		return err
	}
	return nil
}
