package serve

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/builtin"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/cuda"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/engine/worker"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/examples/text"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/tensor"
)

// Shares of memory, and engines that are not devices.
const (
	// memoryShare: tensors of calls may use 1/memoryShare of the process's memory.
	memoryShare = 4
	// pinnedShare: page-locked memory may be 1/pinnedShare of it, but not more than
	// mostPinned unless --pinned says so: no other process can use it.
	pinnedShare = 16
	mostPinned  = 1 << 30
	// A client that is cut off has trainLease to come back. Every so many steps there is a checkpoint.
	trainLease      = 30 * time.Second
	checkpointEvery = 100
	AutoEngine      = "auto"
	CPUEngine       = "cpu"
)

var cudaEngine = regexp.MustCompile(`^cuda:(\d{1,3})$`)

func checkEngine(name string) error {
	if name != AutoEngine && name != CPUEngine && !cudaEngine.MatchString(name) {
		return fail.Usage("unknown engine %q; use auto, cpu or a device such as cuda:0", name)
	}
	return nil
}

// engineConfig says which models run, and where.
type engineConfig struct {
	engine, driver         string
	memory, pinned         int64
	workers                int
	models                 []string // [name=]folder[@engine]
	demo, slow, exitOnLoss bool

	python, pythonEnv              []string // name=module:function, name=value
	pythonProcesses, pythonThreads int
	train                          []string // names of Python models
	training                       training // of each, unless it says otherwise
	PythonFD                       string   // name=descriptor
}

// training is how clients train a Python model.
type training struct {
	train       bool
	checkpoints string        // a folder; empty is none
	every       int           // steps between two checkpoints
	lease       time.Duration // how long a client that is cut off keeps others from training
}

// engines has the places where models run: the host and the requested devices.
type engines struct {
	cfg    engineConfig
	log    *slog.Logger
	host   *cpu.Host
	cuda   map[int]*cuda.Host
	models *engine.Registry
	// ended is closed when the process of --python-fd has exited. It is nil without one.
	ended <-chan struct{}
	// lost receives when a device is lost for good. It is nil without --exit-on-device-loss.
	lost chan struct{}
}

type site struct {
	name     string
	builtins []engine.Model
	stack    func(*stack.Model) (engine.Model, error)
}

// newEngines returns engines and their models. The caller closes them.
func newEngines(cfg engineConfig, log *slog.Logger) (_ *engines, err error) {
	all := processMemory()
	cfg.memory = cmp.Or(cfg.memory, all/memoryShare)
	cfg.pinned = cmp.Or(cfg.pinned, min(all/pinnedShare, mostPinned))
	e := &engines{
		cfg: cfg, log: log, cuda: make(map[int]*cuda.Host), models: engine.NewRegistry(),
		host: cpu.NewHost(cpu.HostConfig{MemoryBytes: cfg.memory, Workers: cfg.workers}),
	}
	defer func() {
		if err != nil {
			e.Close()
		}
	}()
	if cfg.exitOnLoss {
		e.lost = make(chan struct{}, 1)
	}
	s, err := e.site(cfg.engine)
	if cfg.engine == AutoEngine && (err == nil || cfg.driver == "") {
		why := "it works"
		if err == nil {
			err = selfTest(s)
		}
		if err != nil {
			why = fail.Text(err)
			e.cfg.engine = CPUEngine
			s, err = e.site(CPUEngine)
		}
		log.Info("engine chosen", slog.String("engine", s.name), slog.String("why", why))
	}
	if err != nil {
		return nil, withHint(err, "--engine cpu needs no driver")
	}
	builtins := append(s.builtins, cpu.Builtins(e.host)...)
	if cfg.slow {
		builtins = append(builtins, cpu.Slow(e.host))
	}
	for _, m := range builtins {
		if bad := e.models.Add(m); !errors.Is(bad, engine.ErrExists) { // the device has it
			err = errors.Join(err, bad)
		}
	}
	for _, text := range cfg.models {
		err = errors.Join(err, e.load(text))
	}
	if cfg.demo { // the text is a sequence, which devices do not keep
		err = errors.Join(err, e.embedded(fashion.ModelFS(), e.cfg.engine), e.embedded(text.ModelFS(), CPUEngine))
	}
	for _, name := range cfg.train {
		if !slices.ContainsFunc(cfg.python, func(text string) bool { return strings.HasPrefix(text, name+"=") }) {
			err = errors.Join(err, fail.Usage("--train %q: no --python has this name", name))
		}
	}
	for _, text := range cfg.python {
		err = errors.Join(err, e.startPython(text))
	}
	if cfg.PythonFD != "" {
		err = errors.Join(err, e.attachPython(cfg.PythonFD))
	}
	return e, err
}

// startPython starts the workers of --python: name=module:function, which blocks of it, and how clients
// train it.
func (e *engines) startPython(text string) error {
	name, _, _ := strings.Cut(text, "=")
	t := e.cfg.training
	t.train = slices.Contains(e.cfg.train, name)
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.BoolVar(&t.train, "train", t.train, "")
	f.StringVar(&t.checkpoints, "checkpoint", t.checkpoints, "")
	settings.Count(f, &t.every, "checkpoint-every", t.every, "")
	settings.Duration(f, &t.lease, "lease", t.lease, 0, "")
	blocks := f.String("blocks", "", "")
	named, err := settings.Parts(text, f)
	if err != nil {
		return fail.Usage("--python %s: %w", text, err)
	}
	_, target, ok := strings.Cut(named, "=")
	if module, f, colon := strings.Cut(target, ":"); !ok || name == "" || !colon || module == "" || f == "" {
		return fail.Usage("--python %q: use name=module:function", text)
	}
	if first, end, _ := strings.Cut(*blocks, ":"); *blocks != "" && (first == "" || end == "") {
		return fail.Usage("--python %s: use blocks=FIRST:END, such as blocks=h.4:h.8 for h.4 to h.7", text)
	}
	for _, v := range e.cfg.pythonEnv {
		if i := strings.Index(v, "="); i < 1 {
			return fail.Usage("--python-env %q: use name=value", v)
		}
	}
	exe, err := exec.LookPath(cmp.Or(os.Getenv(settings.PythonEnv), "python3"))
	if err != nil {
		return fail.Hinted(fmt.Errorf("--python %s: %w", text, err), "install python3, or set "+settings.PythonEnv+" to an interpreter that has the tensorferry package")
	}
	command := []string{exe, "-m", "tensorferry.worker", "--fd", strconv.Itoa(worker.Descriptor)}
	// What is for models that train, each gets: it may declare that it does. No blocks are all of them.
	command = append(command, "--lease", strconv.FormatFloat(t.lease.Seconds(), 'f', -1, 64), "--checkpoint-every", strconv.Itoa(t.every), "--blocks", *blocks)
	if t.checkpoints != "" {
		command = append(command, "--checkpoint", filepath.Join(t.checkpoints, name))
	}
	if t.train {
		command = append(command, "--train")
	}
	return e.startWorker(worker.Config{
		Name: name, Command: append(command, target),
		Env: e.cfg.pythonEnv, Processes: e.cfg.pythonProcesses, Threads: e.cfg.pythonThreads,
	})
}

// attachPython serves the process of --python-fd: name=descriptor.
func (e *engines) attachPython(text string) error {
	name, number, _ := strings.Cut(text, "=")
	fd, err := strconv.Atoi(number)
	if name == "" || err != nil {
		return fail.Usage("--python-fd %q: use name=descriptor", text)
	}
	socket, err := link.FromFD(fd)
	if err != nil {
		return err
	}
	return e.startWorker(worker.Config{Name: name, Socket: socket})
}

// startWorker adds a model with its own processes. Inputs and results may each use half of --memory.
func (e *engines) startWorker(c worker.Config) error {
	c.Version, c.Log, c.MemoryBytes = Version, e.log, e.cfg.memory/2
	h, err := worker.Start(c)
	if err != nil {
		return err
	}
	if c.Socket != nil {
		e.ended = h.Ended()
	}
	for _, m := range append([]engine.Model{h.Model()}, h.Companions()...) {
		if err = e.register(m, "in --python name=module:function"); err != nil {
			h.Close()
			break
		}
	}
	return err
}

// Close closes the models and then the hosts that they run on.
func (e *engines) Close() {
	e.models.Close()
	for _, h := range e.cuda {
		h.Close()
	}
	e.host.Close()
}

// site returns the place of a name; auto is the first device. It may be unavailable.
func (e *engines) site(name string) (site, error) {
	if name == CPUEngine {
		return site{CPUEngine, nil, func(m *stack.Model) (engine.Model, error) { return cpu.Stack(e.host, m) }}, nil
	}
	if name == AutoEngine {
		name = "cuda:0"
	}
	if err := checkEngine(name); err != nil {
		return site{}, err
	}
	n, _ := strconv.Atoi(cudaEngine.FindStringSubmatch(name)[1]) // it matches
	h := e.cuda[n]
	if h == nil {
		var err error
		if h, err = cuda.Open(cuda.Config{
			Library: e.cfg.driver, Device: n, PinnedBytes: e.cfg.pinned, Log: e.log,
			Spill: &blocks.Spill{Pool: e.host.Pool(), Budget: e.host.Budget()},
			Lost: func() {
				select {
				case e.lost <- struct{}{}:
				default: // nobody asked, or another was
				}
			},
		}); err != nil {
			return site{}, err
		}
		e.cuda[n] = h
	}
	return site{name, cuda.Builtins(h), func(m *stack.Model) (engine.Model, error) { return cuda.Stack(h, m) }}, nil
}

// selfTest tests that a device computes correctly.
func selfTest(s site) error {
	i := slices.IndexFunc(s.builtins, func(m engine.Model) bool { return m.Info().Name == builtin.ReLU.Name })
	x, err := tensor.Of([]float32{-1, 2}, 2)
	if err != nil {
		return err
	}
	y, err := engine.Compute(context.Background(), s.builtins[i], nil, x)
	if err != nil {
		return err
	}
	values, err := tensor.Slice[float32](y[0])
	if err == nil && !slices.Equal(values, []float32{0, 2}) {
		err = fmt.Errorf("%w: %s computes relu of -1 and 2 as %v", engine.ErrUnavailable, s.name, values)
	}
	return err
}

// load adds the model of --model: [name=]folder[@engine].
func (e *engines) load(text string) error {
	name, folder := files.NameOf(text)
	m, err := stack.Load(folder)
	where := e.cfg.engine
	if at := strings.LastIndex(folder, "@"); err != nil && at >= 0 && errors.Is(err, os.ErrNotExist) {
		where = folder[at+1:]
		m, err = stack.Load(folder[:at])
	}
	if err != nil {
		return fail.Mistake(files.HintMissing(text, folder, err))
	}
	return e.addStack(name, m, where)
}

// embedded adds the trunk of a network of the demo.
func (e *engines) embedded(models fs.FS, where string) error {
	m, err := stack.LoadFS(models, "trunk")
	if err != nil {
		return err
	}
	return e.addStack("", m, where)
}

// addStack adds a model to an engine; auto is the CPU if the device does not support the model.
func (e *engines) addStack(name string, m *stack.Model, where string) error {
	if name != "" {
		m.Name = name // also for the model's errors
	}
	var made engine.Model
	s, err := e.site(where)
	if err == nil {
		made, err = s.stack(m)
	}
	if where == AutoEngine && errors.Is(err, engine.ErrUnavailable) {
		e.log.Warn("model runs on the CPU", slog.String("model", m.Name), slog.String("why", fail.Text(err)))
		made, err = cpu.Stack(e.host, m)
	}
	if err != nil {
		return withHint(err, "--model FOLDER@cpu runs it on the CPU")
	}
	return e.register(made, "with --model name=folder")
}

// register adds a model that is ready. how says where to name it otherwise.
func (e *engines) register(m engine.Model, how string) error {
	err := e.models.Add(m)
	if errors.Is(err, engine.ErrExists) {
		return fail.Mistake(fail.Hinted(fmt.Errorf("a model %q already exists", m.Info().Name), "choose another name "+how))
	}
	return err
}

// withHint adds a hint to the error of a device that is unavailable.
func withHint(err error, hint string) error {
	if errors.Is(err, engine.ErrUnavailable) {
		return fail.Hinted(err, hint)
	}
	return err
}

// Available tests that an engine can be used, as far as its driver says; auto always can.
func Available(name, driver string) error {
	err := checkEngine(name)
	if err == nil && name != AutoEngine && name != CPUEngine {
		_, err = cuda.Devices(cuda.Config{Library: driver})
	}
	return withHint(err, "use --engine auto or cpu")
}
