package kernels

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var rewrite = flag.Bool("rewrite", false, "write the PTX and the manifest")

const compiler = "clang-19"

var (
	sources = []string{"device.h", "floats.h", "kernels.cu"}
	// targets are the images: what runs them, and the PTX that clang shall write.
	targets = []struct{ target, isa string }{{"sm_75", "6.3"}, {"sm_80", "7.0"}}
)

func flags(target, isa string) []string {
	return []string{
		// Where clang finds a toolkit, it writes the newest ISA of that, whatever target-feature says.
		"-x", "cuda", "--cuda-device-only", "-nocudainc", "-nocudalib", "--cuda-path=/dev/null",
		"--cuda-gpu-arch=" + target, "-Xclang", "-target-feature", "-Xclang", "+ptx" + strings.ReplaceAll(isa, ".", ""),
		"-include", "device.h", "-ffp-contract=off", "-O3", "-S",
	}
}

func TestTheImagesAreWhatTheCompilerMakesOfTheSources(t *testing.T) {
	path, err := exec.LookPath(compiler)
	if err != nil && !*rewrite {
		t.Skipf("no %s here to compile the kernels again", compiler)
	}
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), path, "--version").Output()
	require.NoError(t, err)
	version, _, _ := strings.Cut(string(out), "\n")
	old := readManifest()
	if version != old.Compiler && !*rewrite {
		t.Skipf("the images were made with %q; here is %q", old.Compiler, version)
	}

	m := manifest{Compiler: version, Sources: sums(t)}
	made := map[string][]byte{}
	for _, want := range targets {
		ptx := filepath.Join(t.TempDir(), "ptx")
		args := flags(want.target, want.isa)
		if out, err := exec.CommandContext(t.Context(), path, append(args, "-o", ptx, "kernels.cu")...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		text, err := os.ReadFile(ptx)
		require.NoError(t, err)
		made[want.target+".ptx"] = text
		b := Image{Name: want.target, Target: want.target, ISA: want.isa, SHA256: sum(text), Flags: args, GPUs: []string{}}
		for _, o := range old.Images {
			if o.Name == b.Name && o.SHA256 == b.SHA256 {
				b.GPUs = o.GPUs // they ran these bytes
			}
		}
		m.Images = append(m.Images, b)
	}
	text, err := json.MarshalIndent(m, "", "\t")
	require.NoError(t, err)
	made["manifest.json"] = append(text, '\n')
	for name, text := range made {
		if *rewrite {
			require.NoError(t, os.WriteFile(name, text, 0o600))
		} else if !bytes.Equal(text, read(name)) {
			t.Errorf("%s is not what %s makes; `make kernels` writes it", name, version)
		}
	}
}

// sums returns the manifest's sums of the sources.
func sums(t *testing.T) map[string]string {
	found := map[string]string{}
	for _, name := range sources {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		found[name] = sum(text)
	}
	return found
}

func sum(text []byte) string {
	h := sha256.Sum256(text)
	return hex.EncodeToString(h[:])
}

func TestTheManifestHoldsTheSumsOfAllFiles(t *testing.T) {
	if *rewrite {
		t.Skip("the embedded files are the old ones")
	}
	m := readManifest()
	require.Equal(t, sums(t), m.Sources, "the sources have changed since the images were made: `make kernels`")
	for _, pattern := range []string{"*.cu", "*.h"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.Subset(t, sources, found)
	}
	for _, b := range m.Images {
		require.Equal(t, b.SHA256, sum(read(b.Name+".ptx")), b.Name)
		require.Equal(t, flags(b.Target, b.ISA), b.Flags, b.Name)
	}
	found, err := filepath.Glob("*.ptx")
	require.NoError(t, err)
	require.Len(t, found, len(m.Images))
}

func TestImagesComeInTheOrderALoaderTriesThem(t *testing.T) {
	image := func(target string, gpus ...string) Image { return Image{Name: target, Target: target, GPUs: gpus} }
	for name, tc := range map[string]struct {
		given []Image
		want  string
	}{
		"none has run":              {[]Image{image("sm_75"), image("sm_80")}, "sm_80 sm_75"},
		"the lower one has run":     {[]Image{image("sm_80"), image("sm_75", "T4")}, "sm_75 sm_80"},
		"both have run":             {[]Image{image("sm_75", "T4"), image("sm_80", "A10", "H200")}, "sm_80 sm_75"},
		"numbers of several digits": {[]Image{image("sm_90"), image("sm_100")}, "sm_100 sm_90"},
	} {
		t.Run(name, func(t *testing.T) {
			inOrder(tc.given)
			var got []string
			for _, i := range tc.given {
				got = append(got, i.Target)
			}
			require.Equal(t, tc.want, strings.Join(got, " "))
		})
	}
	images := Images()
	require.Len(t, images, len(targets))
	images[0].PTX[0]++
	require.NotEqual(t, images[0].PTX, Images()[0].PTX, "the caller's PTX is not a copy")
}

var (
	ptxComment   = regexp.MustCompile(`//.*`)
	ptxDirective = regexp.MustCompile(`(?m)^\.(version|target) (\S+)`)
	ptxEntry     = regexp.MustCompile(`\.entry\s+(\w+)\(([^)]*)\)`)
	ptxParam     = regexp.MustCompile(`\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+[^,]*)?\w+`)
	ptxFunc      = regexp.MustCompile(`\.func\s+(?:\([^)]*\)\s*)?(\w+)`)
	ptxCall      = regexp.MustCompile(`call(?:\.uni)?\s+(?:\(\w+\),\s*)?(\w+)`)
	// A product and a sum without a rounding mode may be fused when a driver compiles
	// them; .approx and .ftz say what they do.
	ptxLoose = regexp.MustCompile(`\b(?:add|sub|mul|mad|div|sqrt|rcp)\.f(?:32|64)\b|\.(?:approx|ftz|full)\b|\.extern\b`)

	cuEntry = regexp.MustCompile(`extern "C" (?:__launch_bounds__\([^)]*\) )?__global__ void (\w+)\(([^)]*)\)`)
	cuParam = regexp.MustCompile(`^(?:const )?(\w+ \*?)(?:__restrict__ )?(\w+)$`)
)

// param is one of a kernel, as PTX and a launch struct have it.
type param struct {
	kind         string // of PTX
	offset, size uintptr
}

// params returns the parameters of all entries of a PTX text, with natural alignment.
func params(t *testing.T, text string) map[string][]param {
	found := map[string][]param{}
	for _, entry := range ptxEntry.FindAllStringSubmatch(text, -1) {
		var end uintptr
		list := []param{}
		for _, p := range ptxParam.FindAllStringSubmatch(entry[2], -1) {
			kind := strings.Replace(p[1], "b", "u", 1)
			size, ok := map[string]uintptr{"u32": 4, "u64": 8, "f32": 4, "f64": 8}[kind]
			require.True(t, ok, "parameter %q of %s", p[0], entry[1])
			offset := (end + size - 1) / size * size
			list, end = append(list, param{kind, offset, size}), offset+size
		}
		found[entry[1]] = list
	}
	return found
}

func TestLaunchesHaveTheParametersOfTheirEntries(t *testing.T) {
	want := map[string][]param{}
	for entry, l := range All() {
		s := reflect.TypeOf(l)
		for f := range s.Fields() {
			kind, ok := map[reflect.Kind]string{
				reflect.Uint32: "u32", reflect.Uint64: "u64", reflect.Float32: "f32", reflect.Float64: "f64",
			}[f.Type.Kind()]
			require.True(t, ok, "%v.%s is a %v", s, f.Name, f.Type)
			want[entry] = append(want[entry], param{kind, f.Offset, f.Type.Size()})
		}
	}
	require.Len(t, want, len(All()))
	for _, i := range Images() {
		require.Equal(t, want, params(t, string(i.PTX)), i.Name)
	}
}

// PTX has no names of parameters; the source has.
func TestLaunchesNameTheirFieldsAsTheSourceDoes(t *testing.T) {
	text, err := os.ReadFile("kernels.cu")
	require.NoError(t, err)
	entries := map[string]string{}
	for _, e := range cuEntry.FindAllStringSubmatch(string(text), -1) {
		entries[e[1]] = strings.Join(strings.Fields(e[2]), " ")
	}
	require.Len(t, entries, len(All()))
	for entry, l := range All() {
		s := reflect.TypeOf(l)
		list := strings.Split(entries[entry], ", ")
		require.Len(t, list, s.NumField(), entry)
		for i, text := range list {
			f, p := s.Field(i), cuParam.FindStringSubmatch(text)
			if p == nil || !strings.EqualFold(f.Name, p[2]) {
				t.Errorf("%s: parameter %d is %q; the field is %s", entry, i, text, f.Name)
			} else if pointer := strings.HasSuffix(p[1], "*"); pointer != (f.Type == reflect.TypeFor[Address]()) {
				t.Errorf("%s: parameter %q is the field %s, a %v", entry, text, f.Name, f.Type)
			}
		}
	}
}

func TestImagesNeedNothingAndRoundAsIEEE754Says(t *testing.T) {
	for _, i := range Images() {
		t.Run(i.Name, func(t *testing.T) {
			text := ptxComment.ReplaceAllString(string(i.PTX), "")
			var said []string
			for _, d := range ptxDirective.FindAllStringSubmatch(text, -1) {
				said = append(said, d[2])
			}
			require.Equal(t, []string{i.ISA, i.Target}, said)
			require.Empty(t, ptxLoose.FindAllString(text, -1))
			has := map[string]bool{}
			for _, f := range ptxFunc.FindAllStringSubmatch(text, -1) {
				has[f[1]] = true
			}
			calls := ptxCall.FindAllStringSubmatch(text, -1)
			require.Len(t, calls, strings.Count(text, "call."), "a call in a form that this test does not read")
			for _, c := range calls {
				require.True(t, has[c[1]], "%s is called and not in the image", c[1])
			}
		})
	}
}

func TestPTXThatRoundsLooselyIsFound(t *testing.T) {
	for text, loose := range map[string]bool{
		"div.approx.f32 %f1":    true,
		"div.full.f32 %f1":      true,
		"mul.f32 %f1":           true,
		"add.f64 %fd1":          true,
		"add.rn.ftz.f32 %f1":    true,
		"ex2.approx.ftz.f32 %f": true,
		".extern .func f":       true,
		"div.rn.f32 %f1":        false,
		"fma.rn.f32 %f1":        false,
		"add.s64 %rd1":          false,
		"mul.wide.u32 %rd1":     false,
	} {
		if ptxLoose.MatchString(text) != loose {
			t.Errorf("%q: wanted %v", text, loose)
		}
	}
}

func TestGridsCoverAndKeepToTheirLimits(t *testing.T) {
	for name, tc := range map[string]struct {
		launch Launch
		want   [3]uint32
	}{
		"no element":                    {ScaleF32{}, [3]uint32{1, 1, 1}},
		"one element":                   {ScaleF32{N: 1}, [3]uint32{1, 1, 1}},
		"a block":                       {AddF32{N: 256}, [3]uint32{1, 1, 1}},
		"a block and one":               {ReLUWords{Words: 257}, [3]uint32{2, 1, 1}},
		"the most elements":             {CopyF32{N: 1<<64 - 1}, [3]uint32{4096, 1, 1}},
		"a number":                      {StoreU64{}, [3]uint32{1, 1, 1}},
		"no row":                        {LinearF32{Out: 65}, [3]uint32{2, 1, 1}},
		"a tile":                        {LinearF32{Rows: 64, Out: 64}, [3]uint32{1, 1, 1}},
		"a row and an output more":      {LinearF32{Rows: 65, Out: 65}, [3]uint32{2, 2, 1}},
		"the most rows and all outputs": {LinearF32{Rows: 1<<64 - 1, Out: 1<<32 - 1}, [3]uint32{1 << 26, 65535, 1}},
		"rows of a warp each":           {NormF32{Rows: 9, Width: 4096}, [3]uint32{2, 1, 1}},
		"wide rows":                     {SoftmaxF32{Rows: 9, Width: 4097}, [3]uint32{9, 1, 1}},
		"no item":                       {AttentionF32{Positions: 65, Heads: 3}, [3]uint32{1, 1, 1}},
		"tiles of heads of items":       {AttentionF32{Items: 5, Positions: 65, Heads: 3}, [3]uint32{30, 1, 1}},
		"the most items of all":         {AttentionF32{Items: 1<<64 - 1, Positions: 1<<32 - 1, Heads: 1<<32 - 1}, [3]uint32{1<<16 - 1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			grid, block := tc.launch.Grid()
			require.Equal(t, tc.want, grid)
			if _, one := tc.launch.(StoreU64); !one {
				require.Equal(t, [3]uint32{256, 1, 1}, block)
			}
		})
	}
}

// NVIDIA's assembler is the part of a driver that decides whether an image is one.
func TestNVIDIAsAssemblerTakesTheImages(t *testing.T) {
	ptxas, err := exec.LookPath("ptxas")
	if err != nil {
		t.Skip("ptxas is not installed; PyPI's nvidia-cuda-nvcc-cu12 has it")
	}
	for _, image := range Images() {
		for _, target := range []string{image.Target, "sm_90"} { // the least GPU, and a later one
			file := filepath.Join(t.TempDir(), image.Name+".ptx")
			require.NoError(t, os.WriteFile(file, image.PTX, 0o600))
			out, err := exec.CommandContext(t.Context(), ptxas, "-arch", target, "-v", "-o", os.DevNull, file).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Equal(t, len(All()), strings.Count(string(out), "Compiling entry function"), "%s", out)
			require.NotRegexp(t, `[1-9]\d* bytes spill`, string(out))
		}
	}
}
