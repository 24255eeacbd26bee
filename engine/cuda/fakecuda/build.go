//go:build linux && cgo

package fakecuda

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/cpu"
)

// Sanitize builds the library with Address Sanitizer, which has to be in the process
// before it: by LD_PRELOAD, see Preload.
const Sanitize = "sanitize"

// Hide builds a library without one function, as older drivers are.
func Hide(function string) string { return "hide=" + function }

// Kernels takes the .cu files of a folder instead of those in engine/cuda/kernels.
func Kernels(folder string) string { return "kernels=" + folder }

// kept is how long a build stays that nobody uses.
const kept = 7 * 24 * time.Hour

var building sync.Mutex

// entries finds the kernels of a .cu file.
var entries = regexp.MustCompile(`__global__\s+void\s+(\w+)\s*\(`)

// Build returns the path of the library, built with g++ unless it was before: it is
// kept in the user's cache, under a hash of all that it is made of. Without g++ the
// test is skipped. It is safe for concurrent use.
func Build(t testing.TB, options ...string) (path string) {
	t.Helper()
	compiler := lookUp(t)
	building.Lock()
	defer building.Unlock()
	path, err := build(compiler, options)
	if err != nil {
		t.Fatalf("fakecuda: %v", err)
	}
	return path
}

// Preload returns the path of Address Sanitizer's library, for LD_PRELOAD. Without one
// the test is skipped.
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

func build(compiler string, options []string) (string, error) {
	root, err := module()
	if err != nil {
		return "", err
	}
	driver, kernels := filepath.Join(root, "engine/cuda/fakecuda/driver"), filepath.Join(root, "engine/cuda/kernels")
	flags := []string{"-std=c++17", "-O2", "-g1", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-unknown-pragmas"}
	if cpu.X86.HasFMA {
		flags = append(flags, "-mfma") // otherwise each __builtin_fmaf is a call; no other operation is fused
	}
	variant, symbols := "whole", "{ global: *; };"
	for _, o := range options {
		switch name, value, _ := strings.Cut(o, "="); name {
		case Sanitize:
			flags = append(flags, "-fsanitize=address")
		case "hide":
			variant, symbols = "without-"+value, "{ local: "+value+"; };"
		case "kernels":
			if kernels, err = filepath.Abs(value); err != nil {
				return "", err
			}
		default:
			return "", fmt.Errorf("unknown option %q", o)
		}
	}

	version, err := exec.Command(compiler, "--version").Output()
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	fmt.Fprintf(hash, "%s%q%s", version, flags, kernels)
	texts := make(map[string][]byte)
	for _, pattern := range []string{driver + "/*.*", kernels + "/*.cu", kernels + "/*.h"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		for _, path := range paths {
			if texts[path], err = os.ReadFile(path); err != nil {
				return "", err
			}
			fmt.Fprintf(hash, "%s %d\n%s", path, len(texts[path]), texts[path])
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	cache = filepath.Join(cache, "tensorferry")
	base := filepath.Join(cache, fmt.Sprintf("fakecuda-%x", hash.Sum(nil)[:8]))
	defer prune(cache, base, time.Now())

	objects, library := filepath.Join(base, "objects"), filepath.Join(base, variant)
	err = once(objects, func(dir string) error {
		args := append(slices.Clone(flags), "-c", "-I", driver)
		for path, text := range texts {
			switch filepath.Ext(path) {
			case ".cc":
				args = append(args, path)
			case ".cu":
				twin := filepath.Base(path) + ".cc"
				args = append(args, twin)
				if err := os.WriteFile(filepath.Join(dir, twin), source(path, text), 0o600); err != nil {
					return err
				}
			}
		}
		return run(dir, compiler, args)
	})
	if err != nil {
		return "", err
	}
	err = once(library, func(dir string) error {
		files, err := filepath.Glob(objects + "/*.o")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "symbols"), []byte(symbols), 0o600); err != nil {
			return err
		}
		args := append(slices.Clone(flags), "-shared", "-Wl,-soname,libcuda.so.1", "-Wl,--version-script=symbols", "-o", "libcuda.so.1")
		return run(dir, compiler, append(args, files...))
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

// source returns the C++ file that contains a .cu file and registers its kernels.
func source(path string, text []byte) []byte {
	b := fmt.Appendf(nil, "#include \"kernel.h\"\n#include \"shim.h\"\n#include %q\n", path)
	for _, match := range entries.FindAllSubmatch(text, -1) {
		b = fmt.Appendf(b, "KERNEL(%s)\n", match[1])
	}
	return b
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

func run(dir, name string, args []string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w\n%s", cmd, err, out)
	}
	return nil
}

// module returns the folder of go.mod, above the one a test runs in.
func module() (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no go.mod above the working directory")
		}
		dir = filepath.Dir(dir)
	}
	return "", err
}
